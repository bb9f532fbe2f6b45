"""Image folders and list files as data sets: which files there are, of which classes, and one sample of them."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import paddle
from tqdm import tqdm

from deploy.inference_python import preprocess
from models.mobilenet_v3_small.augment import augment
from models.mobilenet_v3_small.partial_jpeg import PartialImage
from ppfleet import log
from ppfleet.cpu.pixels import ToPlanes
from ppfleet.data.threads import Chance, ThreadedDataset
from ppfleet.data.transfer import Array
from ppfleet.errors import DataError

Sample = tuple[str, int]  # path and label
_SHOWN = 50  # bad images that are named one by one

LAYOUT = """expected one of:
  {0}/train/<class>/*.jpg    and  {0}/val/<class>/*.jpg    (a class may be empty)
  {0}/train_list.txt         and  {0}/val_list.txt         (lines `path label`, paths from {0})
`python tools/lite_data.py {0}` creates a small one of handwritten digits"""


@dataclass(frozen=True)
class Files:
    """The contents of a data directory. `train` is empty if only `val` was requested."""

    classes: list[str]
    train: list[Sample]
    val: list[Sample]

    @property
    def fingerprint(self) -> str:
        """A hash of all names and labels, to compare hosts."""
        names = "\n".join(f"{Path(path).name} {label}" for path, label in [*self.train, *self.val])
        return hashlib.sha256("\n".join([*self.classes, names]).encode(errors="surrogateescape")).hexdigest()[:16]


def find(root: str | Path, only_val: bool = False, classes: list[str] | None = None) -> Files:
    """The samples below `root`; `classes` are those of a trained model, otherwise they come from the data."""
    try:
        files = _find(Path(root), only_val, classes)
    except OSError as failure:
        raise DataError(f"cannot read {failure.filename or root}: {failure.strerror}") from None
    return _not_empty(files, root, only_val)


def _not_empty(files: Files, root: str | Path, only_val: bool = False) -> Files:
    for split in ("val",) if only_val else ("train", "val"):
        if not getattr(files, split):
            raise DataError(f"no images found in the {split} set of {root}; {LAYOUT.format(root)}")
    return files


def _find(root: Path, only_val: bool, classes: list[str] | None) -> Files:
    if not root.is_dir():
        raise DataError(f"no data set found at {root}; {LAYOUT.format(root)}")
    by_list = (root / "val_list.txt").is_file()
    needed = ["val"] if only_val else ["train", "val"]
    for split in needed:
        if not (root / f"{split}_list.txt").is_file() if by_list else not (root / split).is_dir():
            found = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
            raise DataError(
                f"{root} has no {split}{'_list.txt' if by_list else '/'} (it contains {found}); {LAYOUT.format(root)}"
            )
    return (_from_lists if by_list else _from_folders)(root, needed, classes)


def _from_folders(root: Path, needed: list[str], classes: list[str] | None) -> Files:
    present = {split: _folders(root / split) for split in ("train", "val")}
    classes = classes or present["train"] or present["val"]
    label = {name: number for number, name in enumerate(classes)}
    for split in needed:
        unknown = [name for name in present[split] if name not in label]
        if unknown:
            common = len(present[split]) - len(unknown)
            raise DataError(
                f"{root}/{split} has {len(unknown)} class(es) that are not in the training set "
                f"({', '.join(unknown[:5])}), {common or 'none'} in common; {LAYOUT.format(root)}"
            )
    samples = {
        split: [(path, label[name]) for name in present[split] for path in _images(root / split / name)]
        for split in needed
    }
    return Files(classes, samples.get("train", []), samples["val"])


def _from_lists(root: Path, needed: list[str], classes: list[str] | None) -> Files:
    samples = {split: _listed(root, root / f"{split}_list.txt") for split in needed}
    used = 1 + max((label for split in needed for _, label in samples[split]), default=-1)
    named = _class_names(root / "label_list.txt")
    if classes and named and classes != named:
        raise DataError(f"{root}/label_list.txt names different classes than the weights were trained on")
    classes = classes or named or [str(number) for number in range(used)]
    if used > len(classes):
        raise DataError(f"{root}: label {used - 1} is used, but there are {len(classes)} classes (labels start at 0)")
    return Files(classes, samples.get("train", []), samples["val"])


def _folders(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(directory: Path) -> list[str]:
    names = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    return [str(directory / name) for name in names if name.lower().endswith(preprocess.EXTENSIONS)]


def _listed(root: Path, path: Path) -> list[Sample]:
    samples = []
    for number, line in enumerate(_lines(path), 1):
        name, _, label = line.strip().rpartition(" ")
        if not line.strip():
            continue
        if not name or not (label.isascii() and label.isdecimal()):
            raise DataError(f"{path}:{number}: {line.strip()[:80]!r} is not `path label` with a label >= 0")
        samples.append((str(root / name.strip()), int(label)))
    return samples


def _class_names(path: Path) -> list[str] | None:
    """`label_list.txt` in the form of PaddleClas: `number name`, one line per class."""
    if not path.is_file():
        return None
    names = [line.strip().partition(" ") for line in _lines(path) if line.strip()]
    if [number for number, _, _ in names] != [str(number) for number in range(len(names))]:
        raise DataError(f"{path}: expected `number name` on each line, with numbers 0, 1, 2 …")
    return [name.strip() or number for number, _, name in names]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()  # some editors write a byte order mark
    except UnicodeDecodeError as failure:
        raise DataError(f"cannot read {path}: {failure}") from None


class Images(ThreadedDataset):
    """`(image, label)`: preprocessed as in evaluation and deployment, or augmented for training."""

    def __init__(
        self,
        samples: Sequence[Sample],
        how: dict[str, Any],
        crop: float = 0,
        steps: Sequence[str] = (),
        pixels: bool = False,
    ) -> None:
        """`how` is preprocess.settings(...). With `crop`, the smallest share of an area, it is a training set.
        `pixels`: images of 8 bits, a quarter of the size; `normalised` makes them what the network expects, on a card.
        """
        cv2.setNumThreads(0)  # the loader has threads; OpenCV's own do not survive a fork
        self.samples, self.how, self.crop, self.steps = samples, how, crop, steps
        self.pixels, size = pixels, how["crop"]
        self.fields = [((size, size, 3), np.uint8) if pixels else ((3, size, size), np.float32), ((), np.int64)]
        self._to_planes = ToPlanes(how["mean"], how["std"])

    def __len__(self) -> int:
        return len(self.samples)

    def draw_into(self, sample: Sequence[Array], index: int, chance: Chance) -> None:
        out, target = sample
        path, target[...] = self.samples[index]
        try:
            if self.crop:
                image = augment(PartialImage(path), self.how["crop"], self.crop, self.steps, chance)
            else:
                image = preprocess.pixels(path, self.how)
            if self.pixels:
                out[...] = image
            elif not self._to_planes(image, out):
                preprocess.normalise(image, self.how["mean"], self.how["std"], out)
        except preprocess.BadImage as failure:
            raise DataError(f"{failure} (use --skip-bad-images to leave such images out)") from None

    def normalised(self, batch: Any) -> Any:
        """`job.loader(images, ..., on_device=images.normalised)`: the same bits as preprocess.normalise."""
        if not self.pixels:
            return batch
        images, labels = batch
        scale, shift = self._scale_and_shift
        return [(images.astype("float32") * scale - shift).transpose([0, 3, 1, 2]), labels]

    @functools.cached_property
    def _scale_and_shift(self) -> list[Any]:
        scale = [1 / (255 * spread) for spread in self.how["std"]]
        shift = [centre / spread for centre, spread in zip(self.how["mean"], self.how["std"])]
        return [paddle.to_tensor(each, dtype="float32") for each in (scale, shift)]


def without_unreadable(files: Files, job: Any, root: str) -> Files:
    """`files` without the images that cannot be decoded. All are tried, each rank taking its share."""
    everything = [path for path, _ in [*files.train, *files.val]]
    threads = max(1, (os.cpu_count() or 1) // job.world.local_size)  # OpenCV decodes without the GIL
    places = range(job.world.rank, len(everything), job.world.size)
    found = []  # by place in the list: paths may differ from host to host
    with ThreadPoolExecutor(threads) as pool:
        bar = tqdm(desc="checking images", total=len(places), disable=not job.world.first)
        for start in range(0, len(places), 1000):
            part = places[start : start + 1000]
            complaints = pool.map(_complaint, [everything[place] for place in part])
            found += [[place, why] for place, why in zip(part, complaints) if why]
            bar.update(len(part))
        bar.close()
    bad = {int(place): why for part in job.comm.gather(found, "bad images") for place, why in part}
    shown = "".join(f"\n  {why}" for why in sorted(bad.values())[:_SHOWN])
    more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    log.info(f"{len(bad)} of {len(everything)} images cannot be read and are left out{shown}{more}")
    count = len(files.train)
    train = [sample for place, sample in enumerate(files.train) if place not in bad]
    val = [sample for place, sample in enumerate(files.val) if count + place not in bad]
    return _not_empty(Files(files.classes, train, val), root, only_val=not files.train)


def _complaint(path: str) -> str | None:
    try:
        preprocess.read(path)
    except preprocess.BadImage as failure:
        return str(failure)
    return None
