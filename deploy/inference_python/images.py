"""Which images are meant, and batches of them, prepared ahead of the network by threads (OpenCV lets them run)."""

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

Batch = tuple[list[Path], Any, list[str], float]  # paths, their input, complaints about others, seconds it took
Outcome = tuple[Optional[str], float]  # of one image: the complaint, the seconds


def find_images(pattern: str) -> list[Path]:
    """A file, all images below a folder, or what a glob pattern matches; in the order of their names."""
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
        what = "holds no images" if folder else "does not exist, and matches no file as a pattern"
        raise UserError(f"--img-path={pattern} {what} ({' '.join(EXTENSIONS)})")
    return found


def below(folder: Path) -> Iterator[str]:
    """All images in a folder and its subfolders, also behind links; a link back up is not followed twice."""

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
    """Have glibc reuse the memory of one image for the next, instead of giving it back and asking for it anew."""
    trim_threshold, mmap_threshold = -1, -3  # as in malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(trim_threshold, 256 << 20)
        ctypes.CDLL(None).mallopt(mmap_threshold, 32 << 20)


def batches(paths: Sequence[Path], size: int, how: dict[str, Any], workers: int) -> Iterator[Batch]:
    """`size` images at a time, those that can be read. With workers the next ones are prepared while the caller works.

    A batch's array is filled anew as soon as the following batch is asked for.
    """
    groups = [paths[start : start + size] for start in range(0, len(paths), size)]
    ahead = -(-2 * workers // size) if workers else 0  # batches, so that every worker has an image and a next one
    arrays = [np.empty((min(size, len(paths)), 3, how["crop"], how["crop"]), np.float32) for _ in range(ahead + 1)]
    pool = ThreadPoolExecutor(workers) if workers else None
    keep_memory()
    if workers:
        cv2.setNumThreads(1)  # each worker decodes and resizes an image of its own

    def fill(path: Path, row: np.ndarray[Any, Any]) -> Outcome:
        began, complaint = time.perf_counter(), None
        try:
            prepare(path, how, row)
        except BadImage as bad:
            complaint = str(bad)
        return complaint, time.perf_counter() - began

    def begin(number: int) -> list[Callable[[], Outcome]]:
        work = [partial(fill, path, row) for path, row in zip(groups[number], arrays[number % len(arrays)])]
        return [pool.submit(one).result for one in work] if pool else list(work)

    try:
        begun = deque(begin(number) for number in range(min(ahead, len(groups))))
        for number, group in enumerate(groups):
            if number + ahead < len(groups):
                begun.append(begin(number + ahead))
            done = [get() for get in begun.popleft()]
            good = [index for index, (complaint, _) in enumerate(done) if complaint is None]
            images = arrays[number % len(arrays)][: len(group)]
            if len(good) < len(group):
                images = images[good]
            complaints = [complaint for complaint, _ in done if complaint is not None]
            yield [group[index] for index in good], images, complaints, sum(seconds for _, seconds in done)
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
