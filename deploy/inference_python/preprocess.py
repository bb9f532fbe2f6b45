"""From an image file to the network's input: the same code in evaluation and in deployment, so the same numbers.

Needs NumPy and OpenCV only. How an image is prepared is a plain dictionary that training stores with the weights and
export with the static model: {"resize_short": 256, "crop": 224, "mean": [...], "std": [...]}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_LONGEST = 16  # times the short side
_PNG = b"\x89PNG"
_RGB = getattr(cv2, "IMREAD_COLOR_RGB", None)  # decodes in this order; OpenCV 4.11 and later
Image = np.ndarray[Any, Any]


class BadImage(Exception):
    """A file that is not a readable image; the message begins with its path."""


def settings(image_size: int) -> dict[str, Any]:
    """The usual preprocessing of ImageNet, scaled to the image size."""
    return {
        "resize_short": round(image_size * 256 / 224),
        "crop": image_size,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }


def read(path: str | Path) -> Image:
    """An image as 8-bit RGB: gray becomes RGB, alpha is dropped, 16 bits are reduced to the upper 8."""
    return decode(load(path), path)


def load(path: str | Path) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - one read, without buffering
            data = file.read()
    except OSError as failure:
        raise BadImage(f"{path}: {failure.strerror or failure}") from None
    if not data:
        raise BadImage(f"{path}: the file is empty")
    return data


def decode(data: bytes | bytearray, path: str | Path) -> Image:
    """`path` is for the error message."""
    # From memory OpenCV refuses a truncated JPEG; from a file it would fill the rest with grey. It also refuses a
    # truncated PNG, but prints to stderr.
    whole = not data.startswith(_PNG) or b"IEND" in data
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), _RGB or cv2.IMREAD_COLOR) if whole else None
    except cv2.error as failure:
        raise BadImage(f"{path}: OpenCV cannot decode it ({failure.err})") from None
    if image is None:
        raise BadImage(f"{path}: not an image, or damaged; replace or remove it")
    return image if _RGB else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def resize(image: Image, width: int, height: int) -> Image:
    """Resize; first halve by averaging as often as possible, because interpolation alone would skip pixels."""
    while image.shape[0] >= 2 * height and image.shape[1] >= 2 * width:
        half = image.shape[0] // 2, image.shape[1] // 2
        even = image[: 2 * half[0], : 2 * half[1]]  # OpenCV is ten times as fast for even sizes
        image = cv2.resize(even, half[::-1], interpolation=cv2.INTER_AREA)
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)


def resize_and_crop(image: Image, resize_short: int, crop: int) -> Image:
    """Resize the short side to `resize_short`, then crop the center, `crop` x `crop`."""
    height, width = image.shape[:2]
    if max(height, width) > _LONGEST * min(height, width):  # only the center is used; the whole may exceed the memory
        most = _LONGEST * min(height, width)
        top, left = max(0, (height - most) // 2), max(0, (width - most) // 2)
        image = image[top : top + most, left : left + most]
        height, width = image.shape[:2]
    scale = resize_short / min(height, width)
    size = max(crop, round(width * scale)), max(crop, round(height * scale))
    image = resize(image, *size)
    top, left = (size[1] - crop) // 2, (size[0] - crop) // 2
    return image[top : top + crop, left : left + crop]


def normalise(image: Image, mean: Iterable[float], std: Iterable[float], out: Image | None = None) -> Image:
    """8-bit RGB, height x width x 3, to float32, 3 x height x width: in `out`, or in a new array."""
    planes = np.empty((3, *image.shape[:2]), np.float32) if out is None else out
    for plane, colour, centre, spread in zip(planes, cv2.split(image), mean, std):
        plane[...] = colour  # plane by plane: each stays in the processor's cache
        plane *= np.float32(1 / (255 * spread))
        plane -= np.float32(centre / spread)
    return planes


def pixels(path: str | Path, how: Mapping[str, Any]) -> Image:
    """An image of 8 bits in the network's size."""
    image = read(path)
    try:
        return resize_and_crop(image, how["resize_short"], how["crop"])
    except cv2.error as failure:
        raise BadImage(f"{path}: {image.shape[1]}x{image.shape[0]} pixels cannot be resized ({failure.err})") from None


def prepare(path: str | Path, how: Mapping[str, Any], out: Image | None = None) -> Image:
    """The network's input for one file, the same in evaluation and deployment: in `out`, or in a new array."""
    return normalise(pixels(path, how), how["mean"], how["std"], out)
