"""From a file to the network's input, and the changes that training makes to an image. No Paddle."""

import random

import cv2
import numpy as np
import pytest

from deploy.inference_python import preprocess
from models.mobilenet_v3_small import augment
from models.mobilenet_v3_small.partial_jpeg import PartialImage

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


@pytest.fixture
def decoded(monkeypatch):
    """The shapes of all images that are decoded."""
    shapes, decode = [], preprocess.decode

    def noted(*arguments):
        image = decode(*arguments)
        shapes.append(image.shape)
        return image

    monkeypatch.setattr(preprocess, "decode", noted)
    return shapes


def jpeg(path, image, *settings):
    path.write_bytes(cv2.imencode(".jpg", image, settings)[1].tobytes())
    return str(path)


@pytest.mark.parametrize("colours", ["411", "420", "422", "440", "444", "grey"])
def test_a_jpeg_is_decoded_down_to_the_crop_and_to_the_same_pixels(tmp_path, decoded, capfd, colours):
    image, settings = noise(83, 61, 3), ()
    if colours == "grey":
        image = image[..., 0]
    else:
        settings = cv2.IMWRITE_JPEG_SAMPLING_FACTOR, getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{colours}")
    path = jpeg(tmp_path / "a.jpg", image, *settings)
    whole = preprocess.read(path)
    for bottom in range(1, 84):
        unread = PartialImage(path)
        assert unread.shape == (83, 61)
        assert (unread[bottom // 2 : bottom, 5:50] == whole[bottom // 2 : bottom, 5:50]).all()
        assert decoded.pop() == (bottom + 2 if bottom <= 83 - 16 - 2 else 83, 61, 3)
    assert capfd.readouterr().err == ""


def on_its_side(path):
    """Give a JPEG the mark by which cameras say that it is to be turned by a quarter."""
    entry = b"\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00\x00\x00"
    mark = b"Exif\0\0II*\0\x08\x00\x00\x00\x01\x00" + entry + bytes(4)
    data = path.read_bytes()
    path.write_bytes(data[:2] + b"\xff\xe1" + (len(mark) + 2).to_bytes(2, "big") + mark + data[2:])


@pytest.mark.parametrize("kind", ["png", "progressive", "restarts", "on its side", "bytes after it", "narrow"])
def test_what_cannot_be_left_early_is_decoded_as_a_whole(tmp_path, decoded, capfd, kind):
    path = tmp_path / "a"
    settings = {
        "progressive": (cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "restarts": (cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
    }
    if kind == "png":
        path = written(path, noise(80, 60, 3))
    else:  # the narrow one is blank below: its last rows take fewer bytes than the decoder looks ahead
        blank = np.zeros((80, 8), np.uint8)
        jpeg(path, blank if kind == "narrow" else noise(80, 60, 3), *settings.get(kind, ()))
    if kind == "on its side":
        on_its_side(path)
    if kind == "bytes after it":
        path.write_bytes(path.read_bytes() + b"more")
    whole = preprocess.read(path)
    unread, bottom = PartialImage(str(path)), 40 if kind != "narrow" else 62
    assert unread.shape == whole.shape[:2] == ((60, 80) if kind == "on its side" else (80, whole.shape[1]))
    assert (unread[3:bottom, 1:7] == whole[3:bottom, 1:7]).all()
    assert decoded == [whole.shape] * 2
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("left", [0.02, 0.5, 0.99])
def test_a_truncated_jpeg_is_refused_however_little_of_it_is_needed(tmp_path, left):
    path = tmp_path / "half.jpg"
    jpeg(path, noise(64, 64, 3))
    path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    with pytest.raises(preprocess.BadImage, match=f"^{path}: "):
        PartialImage(str(path))[0:1, 0:1]


def test_a_training_sample_is_the_same_from_a_file_and_from_its_pixels(tmp_path, decoded):
    path = jpeg(tmp_path / "a.jpg", noise(120, 160, 3))
    whole = preprocess.read(path)
    for seed in range(20):
        drawn = [
            augment.augment(image, 32, 0.1, ["flip"], random.Random(seed)) for image in (PartialImage(path), whole)
        ]
        assert (drawn[0] == drawn[1]).all()
    assert len(decoded) == 21 and min(decoded)[0] < 80


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
