"""JPEG files to measure with, and a training sample as a careful user draws it with OpenCV; no framework here."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ppfleet.data.sampler import mix

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALLEST = 0.08  # least share of an image that a crop keeps


def make(directory: Path, count: int) -> list[str]:
    """`count` JPEG files of 500 x 375 and about 100 KB, detailed like photographs: noise at all scales."""
    draw = np.random.RandomState(0)
    paths = []
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = np.full((375, 500, 3), 128, np.float32)
        for cells in (3, 6, 12, 24, 48, 96, 192, 384):
            noise = draw.standard_normal((cells, cells, 3)).astype(np.float32)
            image += 60 * (3 / cells) ** 0.5 * cv2.resize(noise, (500, 375), interpolation=cv2.INTER_CUBIC)
        paths.append(str(directory / f"{number}.jpg"))
        cv2.imwrite(paths[-1], np.clip(image, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 96])
    return paths


def find(directory: str) -> list[str]:
    return sorted(str(path) for path in Path(directory).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


class Pictures:
    """RandomResizedCrop, flip, normalise: float32, 3 x size x size, and a label. Long, so that epochs hardly matter.

    With `seeded`, each sample is what ppfleet draws for it in its first epoch: to compare, not to measure.
    """

    def __init__(self, paths: list[str], size: int, length: int, seeded: bool = False) -> None:
        cv2.setNumThreads(0)  # one thread a worker; OpenCV's own do not survive a fork either
        self.paths, self.size, self.length, self.seeded = paths, size, length, seeded
        self.scale = [np.float32(1 / (255 * std)) for std in STD]
        self.shift = [np.float32(mean / std) for mean, std in zip(MEAN, STD)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self.seeded:
            random.seed(mix(0, 0, index))
        data = np.fromfile(self.paths[index % len(self.paths)], np.uint8)  # cv2.imread takes longer
        image = cv2.imdecode(data, cv2.IMREAD_COLOR)
        left, top, width, height = self.crop(*image.shape[:2])
        image = image[top : top + height, left : left + width]
        while min(image.shape[:2]) >= 2 * self.size:  # by averages: linear interpolation would skip pixels
            rows, columns = image.shape[0] // 2, image.shape[1] // 2
            image = cv2.resize(image[: 2 * rows, : 2 * columns], (columns, rows), interpolation=cv2.INTER_AREA)
        image = cv2.resize(image, (self.size, self.size))
        if random.random() < 0.5:
            image = cv2.flip(image, 1)
        planes = np.empty((3, self.size, self.size), np.float32)
        for plane, colour, scale, shift in zip(planes, cv2.split(image)[::-1], self.scale, self.shift):
            plane[...] = colour  # which OpenCV has in the order blue, green, red
            plane *= scale
            plane -= shift
        return planes, np.int64(index % 1000)

    def crop(self, height: int, width: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = random.uniform(SMALLEST, 1) * height * width
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        top = random.randint(0, height - h)
        return random.randint(0, width - w), top, w, h
