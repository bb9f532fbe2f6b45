"""From a file to the network's input, and the changes that training makes to an image. No Paddle."""

import random

import cv2
import numpy as np
import pytest

from deploy.inference_python import preprocess
from models.mobilenet_v3_small import augment

HOW = preprocess.settings(32)


def written(path, image, kind=".png"):
    path = path.with_suffix(kind)
    path.write_bytes(cv2.imencode(kind, image)[1].tobytes())
    return path


def noise(*shape, dtype=np.uint8):
    return np.random.RandomState(0).randint(0, np.iinfo(dtype).max + 1, shape).astype(dtype)


def test_colour_is_read_as_rgb(tmp_path):
    bgr = noise(9, 7, 3)
    assert (preprocess.read(written(tmp_path / "a", bgr)) == bgr[..., ::-1]).all()


def test_grey_alpha_and_16_bits_become_rgb_of_8_bits(tmp_path):
    grey, alpha, deep = noise(9, 7), noise(9, 7, 4), noise(9, 7, dtype=np.uint16)
    assert (preprocess.read(written(tmp_path / "g", grey)) == grey[..., None]).all()
    assert (preprocess.read(written(tmp_path / "a", alpha)) == alpha[..., 2::-1]).all()
    assert (preprocess.read(written(tmp_path / "d", deep)) == (deep >> 8)[..., None]).all()


@pytest.mark.parametrize("kind", [".jpg", ".png"])
@pytest.mark.parametrize("left", [0.02, 0.5, 0.99])
def test_a_truncated_image_is_refused_by_name(tmp_path, capfd, kind, left):
    path = written(tmp_path / "half", noise(64, 64, 3), kind)
    path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    with pytest.raises(preprocess.BadImage, match=f"^{path}: "):
        preprocess.prepare(path, HOW)
    assert capfd.readouterr().err == ""  # OpenCV says nothing of its own


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\xff\xd8\xff\xe0"])
def test_what_is_no_image_is_refused_by_name(tmp_path, content):
    path = tmp_path / "text.jpg"
    path.write_bytes(content)
    with pytest.raises(preprocess.BadImage, match=f"^{path}: "):
        preprocess.prepare(path, HOW)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(preprocess.BadImage, match="gone.jpg: No such file"):
        preprocess.read(tmp_path / "gone.jpg")


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (300, 20), (32, 32), (500, 375)])
def test_any_shape_gives_the_networks_input(tmp_path, shape):
    planes = preprocess.prepare(written(tmp_path / "a", noise(*shape, 3)), HOW)
    assert planes.shape == (3, 32, 32) and planes.dtype == np.float32 and planes.flags.c_contiguous


def test_a_very_long_image_costs_no_more_than_its_middle():
    image = np.zeros((1, 60000, 3), np.uint8)
    image[:, 29990:30010] = 255
    assert (preprocess.resize_and_crop(image, 256, 224)[:, 112:120] == 255).all()
    assert (preprocess.resize_and_crop(image.transpose(1, 0, 2), 256, 224) == 255).any()


def test_bytes_after_the_end_of_a_png_do_no_harm(tmp_path):
    path = written(tmp_path / "a", noise(9, 7, 3))
    path.write_bytes(path.read_bytes() + bytes(1000))
    assert preprocess.read(path).shape == (9, 7, 3)


def test_the_short_side_is_resized_then_the_centre_is_cut():
    image = np.zeros((100, 300, 3), np.uint8)
    image[:, 100:200] = 255  # the middle third of a long image is all that is left
    assert (preprocess.resize_and_crop(image, 36, 32) == 255).all()
    assert (preprocess.resize_and_crop(image.transpose(1, 0, 2), 36, 32) == 255).all()
    two = np.array([[[0] * 3, [255] * 3]] * 2, np.uint8)
    assert len(np.unique(preprocess.resize_and_crop(two, 36, 32))) > 10  # in between it is blended
    shifted = np.roll(image, 60, axis=1)
    assert 0.3 < (preprocess.resize_and_crop(shifted, 36, 32) == 255).mean() < 0.6


@pytest.mark.parametrize("shape", [(128, 128), (129, 135), (301, 256), (130, 700)])
def test_no_pixel_is_skipped_in_a_small_picture_of_a_large_one(shape):
    image = np.zeros((*shape, 3), np.uint8)
    image[:, ::4] = image[:, 1::4] = 255  # lines, of which a small picture must show the mean
    seen = preprocess.resize_and_crop(image, 32, 32)
    assert seen.shape == (32, 32, 3) and seen.min() > 100 and seen.max() < 155


def test_a_crop_skips_no_pixel():
    image = np.zeros((256, 256, 3), np.uint8)
    image[:, ::4] = image[:, 1::4] = 255
    seen = [augment.random_crop(image, 32, 0.5, random.Random(seed)) for seed in range(10)]
    assert np.min(seen) > 64 and np.max(seen) < 191


def test_normalisation_is_the_textbooks():
    image = noise(8, 8, 3)
    mean, std = np.array(HOW["mean"]), np.array(HOW["std"])
    expected = ((image / 255 - mean) / std).transpose(2, 0, 1)
    assert np.abs(preprocess.normalise(image, mean, std) - expected).max() < 1e-6


def test_settings_are_imagenets_in_proportion():
    assert preprocess.settings(224) == {
        "resize_short": 256,
        "crop": 224,
        "mean": [0.485, 0.456, 0.406],  # of red, green and blue
        "std": [0.229, 0.224, 0.225],
    }
    assert (preprocess.settings(64)["resize_short"], preprocess.settings(64)["crop"]) == (73, 64)


def drawn(seed, steps, image):
    return augment.augment(image, 32, 0.3, steps, random.Random(seed))


@pytest.mark.parametrize("steps", [(), ("flip",), ("jitter",), ("rand",), ("flip", "jitter", "rand")])
def test_augmentation_follows_from_the_seed_alone(steps):
    image = cv2.resize(noise(6, 6, 3), (60, 40))
    pictures = [drawn(seed, steps, image) for seed in range(20)]
    assert all(p.shape == (32, 32, 3) and p.dtype == np.uint8 for p in pictures)
    np.random.seed(1)  # the generators of the process have no part in it
    random.seed(1)
    assert all((p == drawn(seed, steps, image)).all() for seed, p in enumerate(pictures))
    assert len({p.tobytes() for p in pictures}) == 20


@pytest.mark.parametrize("step", ["jitter", "rand"])
def test_a_step_that_is_listed_is_taken(step):
    image = cv2.resize(noise(6, 6, 3), (60, 40))
    assert sum(bool((drawn(s, [step], image) != drawn(s, [], image)).any()) for s in range(20)) > 10


def test_rand_augment_goes_both_ways(monkeypatch):
    amounts = []

    def note(image, amount):
        amounts.append(amount)
        return image

    monkeypatch.setattr(augment, "_CHANGES", [(note, 10)])
    for seed in range(20):
        augment.rand_augment(noise(6, 6, 3), random.Random(seed))
    assert set(amounts) == {-9.0, 9.0} and len(amounts) == 40


def test_each_change_of_rand_augment_changes_the_image_and_keeps_its_shape():
    image = cv2.resize(noise(6, 6, 3), (40, 40)) // 2 + 30
    for number, (change, largest) in enumerate(augment._CHANGES):
        for amount in (-0.9 * largest, 0.9 * largest):
            after = change(image, amount)
            assert after.shape == image.shape and after.dtype == np.uint8
            assert (number == 0) == bool((after == image).all()), (number, amount)


def test_colour_changes_are_what_their_names_say():
    image = cv2.resize(noise(6, 6, 3), (40, 40)) // 2 + 30
    assert augment.brightness(image, 1.5).mean() > 1.4 * image.mean()
    assert augment.contrast(image, 0.0).std() < 1 < image.std()
    grey = augment.saturation(image, 0.0)
    assert (grey[..., 0] == grey[..., 1]).all() and (grey[..., 1] == grey[..., 2]).all()
    assert (augment.brightness(image, 1.0) == image).all() and (augment.contrast(image, 1.0) == image).all()


def test_a_crop_keeps_at_least_the_share_that_was_asked_for():
    ramp = np.arange(100, dtype=np.uint8)[None, :, None].repeat(100, 0).repeat(3, 2)  # the value is the column
    widths, lefts, tops = [], set(), set()
    for seed in range(200):
        part = augment.random_crop(ramp, 100, 0.5, random.Random(seed))
        widths.append(int(part.max()) - int(part.min()) + 1)
        lefts.add(int(part.min()))
        tops.add(int(augment.random_crop(ramp.transpose(1, 0, 2), 100, 0.5, random.Random(seed)).min()))
    assert len(lefts) > 20 and len(tops) > 20
    # Half the area at a shape of 3:4 is 61 columns wide.
    assert min(widths) >= 60 and max(widths) == 100 and len(set(widths)) > 20


def test_half_of_the_images_are_flipped():
    ramp = np.arange(100, dtype=np.uint8)[None, :, None].repeat(100, 0).repeat(3, 2)
    flipped = 0
    for seed in range(200):
        part = augment.augment(ramp, 32, 0.9, ["flip"], random.Random(seed))
        flipped += int(part[0, 0, 0]) > int(part[0, -1, 0])
    assert 70 < flipped < 130
