"""Pictures for a person: what the network is shown, and which classes it takes for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import paddle

Image = np.ndarray[Any, Any]
_MOST = 1200  # pixels of a side
_NAMED = 40  # classes up to which names fit beside the matrix
_COUNTED = 2000  # classes up to which there is a matrix at all


def inputs(images: Any, how: dict[str, Any], count: int = 8) -> Image:
    """The first images of a batch side by side, as they were before normalisation."""
    planes = np.asarray(images[:count].astype("float32"))
    mean, std = (np.array(how[name], np.float32).reshape(1, 3, 1, 1) for name in ("mean", "std"))
    pixels = np.clip((planes * std + mean) * 255, 0, 255).round().astype(np.uint8)
    return np.ascontiguousarray(np.concatenate(list(pixels.transpose(0, 2, 3, 1)), axis=1))


class Confusion:
    """Counts which class was taken for which during `job.evaluate(..., top1=Confusion(val, classes))`."""

    def __init__(self, loader: Any, classes: Sequence[str]) -> None:
        self._loader, self._classes = loader, classes
        self._seen: list[tuple[Any, Any, int]] = []

    def __call__(self, scores: Any, labels: Any) -> Any:
        guesses = paddle.topk(scores, 1, axis=-1)[1].reshape([-1])
        # A copy: a tensor from a loader's worker holds on to a file in /dev/shm.
        self._seen.append((labels.clone(), guesses, int(self._loader.mask.sum())))
        return (guesses == labels.reshape([-1])).astype("float32")

    def matrix(self, comm: Any) -> Image | None:
        """Of all ranks: row = the true class, column = the guess. None where it would be too large."""
        if len(self._classes) > _COUNTED:
            return None
        counts = np.zeros((len(self._classes),) * 2, np.int64)
        for labels, guesses, real in self._seen:
            np.add.at(counts, (np.asarray(labels).reshape(-1)[:real], np.asarray(guesses)[:real]), 1)
        return np.asarray(comm.all_reduce(paddle.to_tensor(counts), "confusion matrix"))

    def picture(self, counts: Image) -> Image:
        """Each row in shades of blue, by the share of its class; few classes with names and figures."""
        size = len(counts)
        cell = max(1, min(48, _MOST // size))
        shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
        shade = cv2.resize(shares.astype(np.float32), (size * cell,) * 2, interpolation=cv2.INTER_NEAREST)[..., None]
        image = np.round(255 - shade * (255 - np.array([8, 48, 107], np.float32))).astype(np.uint8)
        if size > _NAMED or cell < 24:
            return np.ascontiguousarray(image)
        margin = 20 + 8 * max(len(name[:16]) for name in self._classes)
        image = cv2.copyMakeBorder(image, margin, 4, margin, 4, cv2.BORDER_CONSTANT, value=(255, 255, 255))
        for row in range(size):
            for column in range(size):
                if counts[row, column]:
                    ink = (255, 255, 255) if shares[row, column] > 0.5 else (0, 0, 0)
                    _write(image, str(counts[row, column]), margin + column * cell, margin + (row + 1) * cell, ink)
            _write(image, self._classes[row][:16], 0, margin + (row + 1) * cell, (0, 0, 0))
        names = np.full((image.shape[1], margin, 3), 255, np.uint8)  # of the columns, upright once it is turned
        for column in range(size):
            _write(names, self._classes[column][:16], 0, margin + (column + 1) * cell - cell // 4, (0, 0, 0))
        image[:margin] = np.rot90(names)
        return image


def _write(image: Image, text: str, left: int, bottom: int, ink: tuple[int, int, int]) -> None:
    cv2.putText(image, text, (left + 4, bottom - 8), cv2.FONT_HERSHEY_SIMPLEX, 0.4, ink, 1, cv2.LINE_AA)
