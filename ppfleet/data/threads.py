"""Data sets that threads draw from, each sample directly into its row of the batch: nothing is pickled or copied.

The batch's array becomes the tensor, without a copy on a CPU.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, Union

import numpy as np
from paddle.io import Dataset

from ppfleet.data.sampler import mix
from ppfleet.data.transfer import Array, over

Chance = Union[random.Random, ModuleType]  # a generator of the sample's own, or the module `random`
Key = tuple[int, int]  # epoch and index
_AHEAD = 2  # batches that are drawn while the loop has one


class ThreadedDataset(Dataset):
    """A data set that `job.loader(..., workers=N)` reads with N threads instead of processes.

    A subclass has `fields`, `__len__` and `draw_into`, which must depend on its arguments only: random numbers come
    from `chance` (the generators of NumPy and Paddle are shared by the threads and cannot be seeded for each sample),
    and only `sample` is changed. Threads help where most time is spent outside of Python: reading files, in OpenCV, in
    NumPy. A subclass with its own `__getitem__` is read like any other data set.

        class Squares(ppfleet.ThreadedDataset):
            fields = [((1,), "float32")]

            def __len__(self):
                return 100

            def draw_into(self, sample, index, chance):
                sample[0][:] = index**2 + chance.random()
    """

    fields: Sequence[tuple[tuple[int, ...], Any]]  # shape and dtype of each part of a sample

    def draw_into(self, sample: Sequence[Array], index: int, chance: Chance) -> None:
        """Write every element of each array of `sample`; they are not initialised."""
        raise NotImplementedError(f"{type(self).__name__} has no draw_into")

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample = [np.empty(shape, dtype) for shape, dtype in self.fields]
        self.draw_into(sample, index, random)
        return tuple(part[()] for part in sample)  # an array without dimensions becomes a number


def fits(dataset: Any) -> bool:
    return isinstance(dataset, ThreadedDataset) and type(dataset).__getitem__ is ThreadedDataset.__getitem__


def read(dataset: ThreadedDataset, batches: Iterable[Sequence[Key]], seed: int, threads: int) -> Iterator[Any]:
    """The batches in order, drawn by `threads` threads, or by the caller if 0: the same bytes either way."""
    stop = threading.Event()
    if not threads:
        for keys in batches:
            batch = _Batch(dataset, keys, seed)
            batch.draw(range(len(keys)), stop)
            yield batch.tensors()
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ppfleet-loader")
    pending: deque[tuple[_Batch, list[Future[None]]]] = deque()
    try:
        for keys in batches:
            batch = _Batch(dataset, keys, seed)
            shares = [range(first, len(keys), threads) for first in range(threads)]
            pending.append((batch, [pool.submit(batch.draw, rows, stop) for rows in shares]))
            if len(pending) > _AHEAD:
                yield _done(*pending.popleft())
        while pending:
            yield _done(*pending.popleft())
    finally:
        # No thread outlives the pass, however it ends: each finishes its current sample.
        stop.set()
        pool.shutdown(cancel_futures=True)


class _Batch:
    """A batch while its rows are drawn."""

    def __init__(self, dataset: ThreadedDataset, keys: Sequence[Key], seed: int) -> None:
        self._dataset, self._keys, self._seed = dataset, keys, seed
        self._arrays = [np.empty((len(keys), *shape), dtype) for shape, dtype in dataset.fields]
        self._failures: list[tuple[int, Exception]] = []

    def draw(self, rows: Iterable[int], stop: threading.Event) -> None:
        for row in rows:
            if stop.is_set():
                return
            epoch, index = self._keys[row]
            sample = [array[row, ...] for array in self._arrays]
            try:
                self._dataset.draw_into(sample, index, random.Random(mix(self._seed, epoch, index)))
            except Exception as failure:  # noqa: BLE001 - anything the data set raises belongs to this batch
                self._failures.append((row, failure))
                return

    def tensors(self) -> list[Any]:
        if self._failures:  # of several, the first one, as without threads
            raise min(self._failures, key=lambda failed: failed[0])[1]
        return [over(array) for array in self._arrays]


def _done(batch: _Batch, shares: Sequence[Future[None]]) -> list[Any]:
    for share in shares:
        share.result()
    return batch.tensors()
