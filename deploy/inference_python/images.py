"""Finds the images, prepares them in threads (OpenCV releases the GIL), and runs the network on batches."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import cv2
import numpy as np
from backends import UserError
from preprocess import EXTENSIONS, BadImage, prepare

Array = np.ndarray[Any, Any]
Answer = tuple[list[Path], Array, list[str], float, float]  # paths, their scores, errors, seconds of both stages
Outcome = tuple[Optional[str], float]  # of one image: the error, the seconds


def find_images(pattern: str) -> list[Path]:
    """A file, all images below a folder, or the matches of a glob pattern; sorted by name."""
    path = Path(pattern)
    try:
        if path.is_file():
            return [path]
        folder = path.is_dir()
        matches = below(path) if folder else glob.glob(pattern, recursive=True)  # noqa: PTH207 - takes absolute patterns
        found = sorted(Path(match) for match in matches if Path(match).is_file())
    except OSError as failure:
        raise UserError(f"cannot read {str(failure.filename or pattern)[:200]}: {failure.strerror}") from None
    if not found:
        problem = "contains no images" if folder else "does not exist, and matches no file as a pattern"
        raise UserError(f"--img-path={pattern} {problem} ({' '.join(EXTENSIONS)})")
    return found


def below(folder: Path) -> Iterator[str]:
    """All images in a folder and its subfolders, following links but no cycles."""

    def refuse(failure: OSError) -> None:
        raise failure

    seen = set()
    for where, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        if os.path.realpath(where) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(where))
        folders[:] = [name for name in folders if not name.startswith(".")]  # as evaluation does
        shown = (name for name in names if not name.startswith("."))
        yield from (f"{where}/{name}" for name in shown if name.lower().endswith(EXTENSIONS))


def keep_memory() -> None:
    """Make glibc reuse the memory of one image for the next, instead of returning it to the system."""
    trim_threshold, mmap_threshold = -1, -3  # as in malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(trim_threshold, 256 << 20)
        ctypes.CDLL(None).mallopt(mmap_threshold, 32 << 20)


def answered(
    paths: Sequence[Path], size: int, how: dict[str, Any], workers: int, network: Callable[[Array], Array], streams: int
) -> Iterator[Answer]:
    """The network's outputs for batches of `size` images, without unreadable ones; in order.

    With workers the next images are prepared meanwhile, and up to `streams` batches are in the network at a time.
    """
    groups = [paths[start : start + size] for start in range(0, len(paths), size)]
    streams = streams if workers else 1
    ahead = -(-2 * workers // size) if workers else 0  # batches, so that every worker has two images
    ahead += streams if streams > 1 else 0
    arrays = [np.empty((min(size, len(paths)), 3, how["crop"], how["crop"]), np.float32) for _ in range(ahead + 1)]
    pool = ThreadPoolExecutor(workers, "prepare") if workers else None
    askers = ThreadPoolExecutor(streams, "network") if streams > 1 else None
    keep_memory()
    if workers:
        cv2.setNumThreads(1)  # each worker handles its own image

    def fill(path: Path, row: Array) -> Outcome:
        began, error = time.perf_counter(), None
        try:
            prepare(path, how, row)
        except BadImage as bad:
            error = str(bad)
        return error, time.perf_counter() - began

    def ask(number: int, rows: Sequence[Callable[[], Outcome]]) -> Answer:
        done, group = [get() for get in rows], groups[number]
        good = [index for index, (error, _) in enumerate(done) if error is None]
        images = arrays[number % len(arrays)][: len(group)]
        if len(good) < len(group):
            images = images[good]
        began = time.perf_counter()
        scores = network(images) if good else np.empty((0, 0), np.float32)
        took = time.perf_counter() - began
        errors = [error for error, _ in done if error is not None]
        return [group[index] for index in good], scores, errors, sum(seconds for _, seconds in done), took

    def begin(number: int) -> Callable[[], Answer]:
        work = [partial(fill, path, row) for path, row in zip(groups[number], arrays[number % len(arrays)])]
        rows = [pool.submit(one).result for one in work] if pool else work
        return askers.submit(ask, number, rows).result if askers else partial(ask, number, rows)

    try:
        begun = deque(begin(number) for number in range(min(ahead, len(groups))))
        for number in range(len(groups)):
            if number + ahead < len(groups):
                begun.append(begin(number + ahead))
            yield begun.popleft()()
    finally:
        for threads in (pool, askers):  # in this order: a batch whose images were cancelled then stops waiting
            if threads:
                threads.shutdown(cancel_futures=True)
