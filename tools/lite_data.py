"""Write scikit-learn's 1797 handwritten digits as an image folder, in the layout of TIPC's lite data. No network.

lite_data/train/<digit>/…png   1437 images      lite_data/val/<digit>/…png   360      lite_data/test/…png   10
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for ppfleet, where it is not installed
from ppfleet import cli
from ppfleet.errors import DataError

MARK = ".handwritten-digits"  # this tool made the directory and may replace it


def write(root: Path) -> None:
    """Every fifth digit for validation, the others for training, the first of each kind for inference."""
    if root.exists() and not (root / MARK).exists() and (not root.is_dir() or any(root.iterdir())):
        raise DataError(f"{root} exists and was not made by this command: choose another directory")
    root = root.absolute()
    fresh = root.with_name(f"{root.name}.unfinished")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install scikit-learn") from None
    digits = load_digits()
    seen: set[int] = set()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target)):
        image = (pixels * 255 / 16).round().astype(np.uint8)
        places = [f"{'val' if number % 5 == 0 else 'train'}/{label}/{number:04d}.png"]
        if number % 5 == 0 and label not in seen:
            seen.add(int(label))
            places.append(f"test/{label}.png")
        for place in places:
            (fresh / place).parent.mkdir(parents=True, exist_ok=True)
            (fresh / place).write_bytes(cv2.imencode(".png", image)[1].tobytes())
    (fresh / MARK).touch()
    there, made = contents(root), contents(fresh)
    foreign = sorted(set(there) - set(made))
    if foreign or there == made:  # if equal, leave it alone: a job may be reading it
        shutil.rmtree(fresh)
    if foreign:
        raise DataError(f"{root} also holds {foreign[0]}, which would be lost: move it, or choose another directory")
    if there == made:
        return
    shutil.rmtree(root, ignore_errors=True)
    fresh.rename(root)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("directory", nargs="?", default="lite_data", type=Path, help="where to write it")
    root = parser.parse_args().directory
    try:
        write(root)
    except OSError as failure:
        raise DataError(f"cannot write {failure.filename or root}: {failure.strerror}") from None
    count = {split: sum(1 for _ in (root / split).rglob("*.png")) for split in ("train", "val", "test")}
    print(f"{root}: handwritten digits, {', '.join(f'{n} images in {split}/' for split, n in count.items())}")


if __name__ == "__main__":
    cli.run(main)
