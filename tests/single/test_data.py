"""Image folders and list files: what is found, what is refused, and what a broken image does."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.harness import run, run_raising


def picture(path, value=128):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cv2.imencode(path.suffix, np.full((12, 10, 3), value, np.uint8))[1].tobytes())


@pytest.fixture
def folder(tmp_path):
    """Two classes with images, one without; other files beside them."""
    root = tmp_path / "data"
    for number in range(10):
        picture(root / f"train/{'cat' if number % 2 else 'dog'}/{number}.png")
    picture(root / "val/dog/b.JPEG")
    picture(root / "val/cat/a.jpg")
    (root / "train/bee").mkdir()
    (root / "train/cat/notes.txt").write_text("not an image")
    (root / "train/cat/.hidden.png").write_text("not an image")
    (root / "train/readme.md").write_text("not a class")
    return root


def found(root, only_val=False, classes=None):
    from models.mobilenet_v3_small import data

    files = data.find(root, only_val, classes)
    names = {
        split: [[str(Path(path).relative_to(root)), label] for path, label in getattr(files, split)]
        for split in ("train", "val")
    }
    return {"classes": files.classes, "fingerprint": files.fingerprint, **names}


def test_an_image_folder(tmp_path, folder):
    (value,) = run(found, 1, tmp_path / "out", str(folder))
    assert value["classes"] == ["bee", "cat", "dog"]  # an empty class keeps its number
    assert value["val"] == [["val/cat/a.jpg", 1], ["val/dog/b.JPEG", 2]]
    assert len(value["train"]) == 10 and value["train"][0] == ["train/cat/1.png", 1]
    (folder / "train/cat/1.png").rename(folder / "train/cat/11.png")
    (other,) = run(found, 1, tmp_path / "out", str(folder))
    assert other["fingerprint"] != value["fingerprint"]


def test_list_files(tmp_path, folder):
    (folder / "train_list.txt").write_text("train/cat/1.png 1\n\ntrain/with blank/2.png 0\n", encoding="utf-8-sig")
    (folder / "val_list.txt").write_text("val/cat/a.jpg 1\r\n")
    (value,) = run(found, 1, tmp_path / "out", str(folder))
    assert value["classes"] == ["0", "1"] and value["train"] == [["train/cat/1.png", 1], ["train/with blank/2.png", 0]]
    assert value["val"] == [["val/cat/a.jpg", 1]]
    first = value["fingerprint"]
    (folder / "train_list.txt").write_text("train/cat/1.png 0\ntrain/with blank/2.png 0\n")
    (value,) = run(found, 1, tmp_path / "out", str(folder))
    second = value["fingerprint"]
    (folder / "label_list.txt").write_text("0 tench, Tinca tinca\n1 goldfish\n2 shark\n")
    (value,) = run(found, 1, tmp_path / "out", str(folder))
    assert len({first, second, value["fingerprint"]}) == 3  # labels and names count
    assert value["classes"] == ["tench, Tinca tinca", "goldfish", "shark"]
    ((_, message),) = run_raising(found, 1, tmp_path / "out", str(folder), True, ["goldfish", "shark"])
    assert "label_list.txt names different classes than the weights were trained on" in message


def test_evaluation_needs_no_training_set(tmp_path, folder):
    import shutil

    (value,) = run(found, 1, tmp_path / "out", str(folder), True, ["dog", "cat"])
    assert value["train"] == [] and value["val"] == [["val/cat/a.jpg", 1], ["val/dog/b.JPEG", 0]]
    shutil.rmtree(folder / "train")
    (value,) = run(found, 1, tmp_path / "out", str(folder), True)
    assert value["classes"] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("nothing there", "no data set found at"),
        ("empty", "has no train/ (it contains nothing)"),
        ("images at the top", "has no train/ (it contains 1.png, 2.png)"),
        ("no val", "has no val/ (it contains train)"),
        ("no images", "no images found in"),
        ("other classes", "has 2 class(es) that are not in the training set (ant, cow), none in common"),
        ("one class more", "has 1 class(es) that are not in the training set (ant), 2 in common"),
        ("list of nonsense", "train_list.txt:2: 'a.png two' is not `path label`"),
        ("negative label", "train_list.txt:1: 'a.png -1' is not `path label`"),
        ("odd digit", "train_list.txt:1: 'a.png ²' is not `path label`"),
        ("one list", "has no train_list.txt"),
        ("label too large", "label 5 is used, but there are 3 classes"),
        ("names out of order", "label_list.txt: expected `number name` on each line"),
    ],
)
def test_a_wrong_layout_is_told_with_the_right_one(tmp_path, folder, wrong, said):
    root = folder
    if wrong == "nothing there":
        root = folder / "elsewhere"
    elif wrong in ("empty", "images at the top"):
        root = tmp_path / "other"
        root.mkdir()
        for name in ("1.png", "2.png") if wrong != "empty" else ():
            picture(root / name)
    elif wrong == "no val":
        (folder / "val").rename(tmp_path / "val")
    elif wrong == "no images":
        for path in [*folder.glob("val/*/*")]:
            path.unlink()
    elif wrong == "other classes":
        (folder / "val/dog").rename(folder / "val/ant")
        (folder / "val/cat").rename(folder / "val/cow")
    elif wrong == "one class more":
        picture(folder / "val/ant/1.png")
    else:
        lines = {
            "list of nonsense": "a.png 1\na.png two\n",
            "negative label": "a.png -1\n",
            "odd digit": "a.png ²\n",
        }.get(wrong)
        (folder / "val_list.txt").write_text("val/cat/a.jpg 1\n")
        if wrong in ("label too large", "names out of order"):
            lines = "train/cat/1.png 5\n"
            (folder / "label_list.txt").write_text("0 a\n1 b\n2 c\n" if wrong == "label too large" else "1 a\n0 b\n")
        if lines:
            (folder / "train_list.txt").write_text(lines)
    ((kind, message),) = run_raising(found, 1, tmp_path / "out", str(root))
    assert kind == "DataError" and said in message
    if "label" not in said:
        assert f"{root}/train/<class>/*.jpg" in message and "lite_data.py" in message


def labels_of(directory, root, workers, skip):
    import ppfleet
    from deploy.inference_python import preprocess
    from models.mobilenet_v3_small import data

    job = ppfleet.Job(directory, device="cpu")
    files = data.find(root)
    if skip:
        files = data.without_unreadable(files, job, root)
    images = data.Images(files.train, preprocess.settings(32), crop=0.5, steps=["flip"])
    return [batch[1].tolist() for batch in job.loader(images, 2, workers=workers)], len(files.train), len(files.val)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named(tmp_path, folder, workers):
    (folder / "train/cat/3.png").write_text("not an image")
    ((kind, message),) = run_raising(labels_of, 1, tmp_path / "out", str(tmp_path / "run"), str(folder), workers, False)
    assert kind == "DataError" and message.startswith(f"{folder}/train/cat/3.png: not an image") and "\n" not in message
    assert "--skip-bad-images" in message


def test_unreadable_images_are_counted_and_left_out_on_all_ranks(tmp_path, folder):
    for name in ("train/cat/3.png", "train/dog/8.png", "val/cat/a.jpg"):
        (folder / name).write_text("not an image")
    values = run(labels_of, 2, tmp_path / "out", str(tmp_path / "run"), str(folder), 0, True)
    assert [counts for _, *counts in values] == [[8, 1], [8, 1]]
    said = (tmp_path / "run/logs/rank0.log").read_text()
    assert "3 of 12 images cannot be read and are left out" in said and f"{folder}/train/dog/8.png" in said
    for path in (folder / "val").glob("*/*"):
        path.write_text("not an image")
    for kind, message in run_raising(labels_of, 2, tmp_path / "out", str(tmp_path / "run"), str(folder), 0, True):
        assert kind == "DataError" and f"no images found in the val set of {folder}" in message


def drawn(root, steps):
    """Hashes of what a training and an evaluation pass give: with threads, and with each sample on its own."""
    import hashlib
    import random

    from deploy.inference_python import preprocess
    from models.mobilenet_v3_small import data
    from ppfleet.data.create import make_loader
    from ppfleet.data.sampler import mix

    files, how = data.find(root), preprocess.settings(32)
    plan = {"batch_size": 3, "rank": 0, "size": 1, "seed": 3, "shuffle": True, "tail": "pad"}
    seen = []
    for images in (data.Images(files.train, how, 0.3, steps), data.Images(files.train, how)):
        for threads in (0, 1, 2, 5):
            loader = make_loader(images, plan, threads)
            batches = [pictures.numpy().tobytes() + labels.numpy().tobytes() for pictures, labels in loader]
            seen.append(hashlib.sha256(b"".join(batches)).hexdigest())
        batches = []
        for batch in loader.plan.batches(0):
            samples = []
            for index in batch.indices:
                random.seed(mix(3, 0, index))
                samples.append(images[index])
            batches += [np.stack(part).tobytes() for part in zip(*samples)]
        seen.append(hashlib.sha256(b"".join(batches)).hexdigest())
    return seen


@pytest.mark.parametrize("steps", [[], ["flip"], ["flip", "jitter", "rand"]])
def test_threads_give_the_bytes_that_one_by_one_gives(tmp_path, folder, steps):
    for number, path in enumerate(sorted(folder.glob("train/*/*.png"))):
        size = 20 + 7 * number, 90 - 5 * number
        noise = np.random.RandomState(number).randint(0, 256, (6, 5, 3)).astype(np.uint8)
        path.unlink()
        path.with_suffix(".jpg").write_bytes(cv2.imencode(".jpg", cv2.resize(noise, size))[1].tobytes())
    (seen,) = run(drawn, 1, tmp_path / "out", str(folder), steps)
    assert len(set(seen[:5])) == len(set(seen[5:])) == 1 and seen[0] != seen[5]


def test_names_that_are_no_text(tmp_path, folder):
    import os

    odd = os.fsencode(folder) + b"/train/cat/caf\xe9.png"
    with open(odd, "wb") as stream:  # noqa: PTH123
        stream.write((folder / "train/cat/1.png").read_bytes())
    ((batches, count, _),) = run(labels_of, 1, tmp_path / "out", str(tmp_path / "run"), str(folder), 0, True)
    assert count == 11 and len(batches) == 6
    with open(odd, "wb") as stream:  # noqa: PTH123
        stream.write(b"not an image")
    ((_, count, _),) = run(labels_of, 1, tmp_path / "out", str(tmp_path / "run"), str(folder), 0, True)
    assert count == 10 and "caf\\udce9.png" in (tmp_path / "run/logs/rank0.log").read_text()


def test_lite_data_is_the_same_each_time(tmp_path):
    import subprocess
    import sys

    from tests.harness import ROOT

    def write(where):
        command = [sys.executable, str(ROOT / "tools/lite_data.py"), str(where)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)

    def contents(where):
        return {str(p.relative_to(where)): p.read_bytes() for p in where.rglob("*") if p.is_file()}

    assert write(tmp_path / "a").returncode == write(tmp_path / "b").returncode == 0
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    assert (
        sum(name.startswith("train/") for name in first) == 1437
        and sum(name.startswith("val/") for name in first) == 360
    )
    next((tmp_path / "a/val/3").iterdir()).unlink()
    assert write(tmp_path / "a").returncode == 0 and contents(tmp_path / "a") == first
    (tmp_path / "a/val/mine.png").touch()
    refused = write(tmp_path / "a")
    assert refused.returncode == 1 and "also holds val/mine.png, which would be lost" in refused.stderr
    assert contents(tmp_path / "a").keys() == {*first, "val/mine.png"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    refused = write(tmp_path / "mine")
    assert refused.returncode == 1 and "was not made by this command" in refused.stderr
    assert list((tmp_path / "mine").iterdir()) == [tmp_path / "mine/file"]


def both_ways(root):
    """Images as float32 from the host, and as pixels that are normalised afterwards."""
    from deploy.inference_python import preprocess
    from models.mobilenet_v3_small import data
    from ppfleet.data.create import make_loader

    for number in range(6):  # noise, so that each pixel counts
        path = Path(root) / f"{number}.png"
        path.write_bytes(cv2.imencode(".png", np.random.RandomState(number).randint(0, 256, (40, 50, 3), np.uint8))[1])
    samples = [(str(Path(root) / f"{number}.png"), number) for number in range(6)]
    plan = {"batch_size": 3, "rank": 0, "size": 1, "seed": 1, "shuffle": True, "tail": "drop"}
    same = []
    for options in ((0, ()), (0.5, ["flip"])):
        passes = []
        for pixels in (False, True):
            images = data.Images(samples, preprocess.settings(32), *options, pixels=pixels)
            loader = make_loader(images, plan, on_device=images.normalised)
            passes.append([(batch.numpy(), labels.tolist()) for batch, labels in loader])
        for (one, label), (other, other_label) in zip(*passes):
            same.append(one.tobytes() == other.tobytes() and label == other_label and other.dtype == np.float32)
    return same


def test_pixels_that_are_normalised_on_the_device_give_the_same_bits(tmp_path):
    (tmp_path / "images").mkdir()
    assert run(both_ways, 1, tmp_path, str(tmp_path / "images")) == [[True] * 4]
