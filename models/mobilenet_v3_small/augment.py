"""Augmentation for training: crop, flip, colour jitter, RandAugment. OpenCV on 8-bit RGB.

Random numbers come from a generator that the loader seeds for each sample: the result is the same on any number of
ranks and threads, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

import cv2
import numpy as np

from deploy.inference_python.preprocess import Image, resize

if TYPE_CHECKING:
    from models.mobilenet_v3_small.partial_jpeg import PartialImage
    from ppfleet.data.threads import Chance

STEPS = ("flip", "jitter", "rand")  # the choices of --augment, in the order in which they are applied
_GREY = (124, 116, 104)  # ImageNet's mean colour fills the corners of a rotated image


def augment(image: Image | PartialImage, size: int, smallest: float, steps: Sequence[str], chance: Chance) -> Image:
    """A random crop (at least the share `smallest` of the area) resized to `size` x `size`, then the steps."""
    part = random_crop(image, size, smallest, chance)
    if "flip" in steps and chance.random() < 0.5:
        part = cv2.flip(part, 1)
    if "jitter" in steps:
        part = jitter(part, chance)
    if "rand" in steps:
        part = rand_augment(part, chance)
    return part


def random_crop(image: Image | PartialImage, size: int, smallest: float, chance: Chance) -> Image:
    height, width = image.shape[:2]
    for _ in range(10):
        area = chance.uniform(smallest, 1) * height * width
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:  # a very long image: the largest part with an acceptable aspect ratio
        w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    top, left = chance.randint(0, height - h), chance.randint(0, width - w)
    return resize(image[top : top + h, left : left + w], size, size)


def jitter(image: Image, chance: Chance, strength: float = 0.4) -> Image:
    """Brightness, contrast and saturation, each by a factor of 1 +- strength, in random order."""
    changes = [brightness, contrast, saturation]
    chance.shuffle(changes)
    for change in changes:
        image = change(image, chance.uniform(1 - strength, 1 + strength))
    return image


def rand_augment(image: Image, chance: Chance, count: int = 2, magnitude: float = 0.9) -> Image:
    """`count` random changes, each at `magnitude` of its range (arXiv 1909.13719), in a random direction."""
    for change, largest in chance.choices(_CHANGES, k=count):
        image = change(image, magnitude * largest * chance.choice((-1, 1)))
    return image


def brightness(image: Image, factor: float) -> Image:
    return cv2.convertScaleAbs(image, alpha=factor)


def contrast(image: Image, factor: float) -> Image:
    mean = float(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean())
    return _by_table(image, (np.arange(256) - mean) * factor + mean)


def saturation(image: Image, factor: float) -> Image:
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(image, factor, grey, 1 - factor, 0)


def sharpness(image: Image, factor: float) -> Image:
    return cv2.addWeighted(image, factor, cv2.blur(image, (3, 3)), 1 - factor, 0)


def posterise(image: Image, amount: float) -> Image:
    return image & np.uint8(256 - (1 << round(abs(amount))))


def solarise(image: Image, amount: float) -> Image:
    return np.where(image < 256 - abs(amount), image, 255 - image)


def autocontrast(image: Image, amount: float) -> Image:
    low, high = float(image.min()), float(image.max())
    return _by_table(image, (np.arange(256) - low) * 255 / max(1.0, high - low))


def equalise(image: Image, amount: float) -> Image:
    return cv2.merge([cv2.equalizeHist(channel) for channel in cv2.split(image)])


def rotate(image: Image, degrees: float) -> Image:
    centre = (image.shape[1] / 2, image.shape[0] / 2)
    return _affine(image, cv2.getRotationMatrix2D(centre, degrees, 1.0))


def _shear(x: float, y: float) -> Callable[[Image, float], Image]:
    return lambda image, amount: _affine(image, np.array([[1, x * amount, 0], [y * amount, 1, 0]], np.float64))


def _shift(x: float, y: float) -> Callable[[Image, float], Image]:
    return lambda image, share: _affine(
        image, np.array([[1, 0, x * share * image.shape[1]], [0, 1, y * share * image.shape[0]]], np.float64)
    )


def _affine(image: Image, matrix: Image) -> Image:
    size = (image.shape[1], image.shape[0])
    return cv2.warpAffine(image, matrix, size, flags=cv2.INTER_LINEAR, borderValue=_GREY)


def _by_table(image: Image, values: Image) -> Image:
    return cv2.LUT(image, np.clip(values, 0, 255).astype(np.uint8))


def _around_one(change: Callable[[Image, float], Image]) -> Callable[[Image, float], Image]:
    return lambda image, amount: change(image, 1 + amount)


# Each change and the far end of its range.
_CHANGES: list[tuple[Callable[[Image, float], Image], float]] = [
    (lambda image, amount: image, 0),
    (autocontrast, 1),
    (equalise, 1),
    (rotate, 30),
    (posterise, 4),
    (solarise, 256),
    (_around_one(brightness), 0.9),
    (_around_one(contrast), 0.9),
    (_around_one(saturation), 0.9),
    (_around_one(sharpness), 0.9),
    (_shear(1, 0), 0.3),
    (_shear(0, 1), 0.3),
    (_shift(1, 0), 0.45),
    (_shift(0, 1), 0.45),
]
