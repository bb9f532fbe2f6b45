"""Pictures for people: input images, thumbnails, and the confusion matrix."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from deploy.inference_python import preprocess
from ppfleet.evaluation.confusion import Seen

Image = np.ndarray[Any, Any]
_MOST = 1200  # pixels of a side
_NAMED = 40  # up to so many classes names fit beside the matrix
_COUNTED = 2000  # up to so many classes it is drawn at all


def inputs(images: Any, how: dict[str, Any], count: int = 8) -> Image:
    """The first images of a batch side by side, without normalisation."""
    planes = np.asarray(images[:count].astype("float32"))
    mean, std = (np.array(how[name], np.float32).reshape(1, 3, 1, 1) for name in ("mean", "std"))
    pixels = np.clip((planes * std + mean) * 255, 0, 255).round().astype(np.uint8)
    return np.ascontiguousarray(np.concatenate(list(pixels.transpose(0, 2, 3, 1)), axis=1))


def thumbnail(path: str, side: int = 112) -> bytes:
    """An image as a small JPEG with its longer side `side` pixels long; empty if it cannot be read."""
    try:
        image = preprocess.read(path)
        scale = side / max(image.shape[:2])
        size = [max(1, round(length * scale)) for length in image.shape[1::-1]]
        if scale > 1:  # enlarge a small image so that its pixels are visible
            image = cv2.resize(image, size, interpolation=cv2.INTER_NEAREST)
        else:
            image = preprocess.resize(image, *size)
    except (preprocess.BadImage, cv2.error):
        return b""
    return bytes(cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 85])[1])


def confusion(seen: Seen) -> Image | None:
    """The matrix, each row shaded by the share of its class, with names and counts if there are few classes. None if it
    would be too large."""
    size, classes = len(seen.classes), seen.classes
    if size > _COUNTED:
        return None
    counts = seen.matrix()
    cell = max(1, min(48, _MOST // size))
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    shade = cv2.resize(shares.astype(np.float32), (size * cell,) * 2, interpolation=cv2.INTER_NEAREST)[..., None]
    image = np.round(255 - shade * (255 - np.array([8, 48, 107], np.float32))).astype(np.uint8)
    if size > _NAMED or cell < 24:
        return np.ascontiguousarray(image)
    margin = 20 + 8 * max(len(name[:16]) for name in classes)
    image = cv2.copyMakeBorder(image, margin, 4, margin, 4, cv2.BORDER_CONSTANT, value=(255, 255, 255))
    for row in range(size):
        for column in range(size):
            if counts[row, column]:
                ink = (255, 255, 255) if shares[row, column] > 0.5 else (0, 0, 0)
                _write(image, str(counts[row, column]), margin + column * cell, margin + (row + 1) * cell, ink)
        _write(image, classes[row][:16], 0, margin + (row + 1) * cell, (0, 0, 0))
    names = np.full((image.shape[1], margin, 3), 255, np.uint8)  # of the columns; rotated below
    for column in range(size):
        _write(names, classes[column][:16], 0, margin + (column + 1) * cell - cell // 4, (0, 0, 0))
    image[:margin] = np.rot90(names)
    return image


def _write(image: Image, text: str, left: int, bottom: int, ink: tuple[int, int, int]) -> None:
    cv2.putText(image, text, (left + 4, bottom - 8), cv2.FONT_HERSHEY_SIMPLEX, 0.4, ink, 1, cv2.LINE_AA)
