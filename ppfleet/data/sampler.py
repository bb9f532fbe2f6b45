"""Which sample goes to which rank at which step: a pure function of (seed, epoch, position).

`position` counts the samples of this epoch that the whole job has consumed. It means the same on any number of
ranks, so a job may stop on four ranks and continue on two: no sample is repeated, none is missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppfleet.errors import DataError

TAILS = ("drop", "pad")
_MASK64 = (1 << 64) - 1
WHOLE_STREAM = (
    "Every rank must read the whole stream in the same order; ppfleet takes each rank's slice of every global batch. "
    "Remove any split by rank (get_rank, PADDLE_TRAINER_ID) from the data set, and draw random numbers only from "
    "random, numpy.random or Paddle's generator, which are seeded alike on all ranks"
)


def mix(*numbers: int) -> int:
    """One 64-bit number that depends on all of `numbers` and their order (splitmix64's finaliser, chained).

    Not a library's generator, so that the order survives an upgrade of NumPy.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def permutation(length: int, key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers below `length` in an order decided by `key`: sorted by a hash of each."""
    hashed = np.arange(length, dtype=np.uint64) + np.uint64(key)
    with np.errstate(over="ignore"):
        hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashed ^= hashed >> np.uint64(31)
    return np.argsort(hashed, kind="stable")


def check_ends(positions: Sequence[int]) -> None:
    """Raise, on every rank alike, unless all ranks have read the same number of samples."""
    if len(set(positions)) > 1:
        shown = ", ".join(f"{position} on rank {rank}" for rank, position in enumerate(positions))
        raise DataError(f"the stream has different numbers of samples on different ranks: {shown}. {WHOLE_STREAM}")


@dataclass(frozen=True)
class Batch:
    """One rank's part of one global batch."""

    indices: tuple[int, ...]
    real: int  # the first `real` of the indices count; the rest are padding
    total_real: int  # real samples of the global batch, over all ranks
    position: int  # of the epoch, once the global batch is done


@dataclass(frozen=True)
class Plan:
    """The order of a data set of `length` samples, divided among `size` ranks with `batch_size` samples per step."""

    length: int
    batch_size: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    shuffle: bool = False
    tail: str = "pad"

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise DataError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r}")
        if self.batch_size < 1:
            raise DataError(f"batch_size must be >= 1, got {self.batch_size}")
        if self.length < 1:
            raise DataError("the data set is empty")
        if self.tail == "drop" and self.length < self.global_batch:
            raise DataError(
                f"{self.length} samples do not fill one global batch of {self.global_batch} "
                f"({self.size} ranks x {self.batch_size}), so tail='drop' would leave none: "
                f"use a smaller batch_size, or tail='pad'"
            )

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.size

    def steps(self, position: int = 0) -> int:
        """Steps from `position` to the end of the epoch: the same on every rank."""
        left = max(0, self.length - position)
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        return permutation(self.length, mix(self.seed, epoch))

    def batches(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        """This rank's batches of one epoch, from `position` on."""
        order = self.order(epoch)
        for _ in range(self.steps(position)):
            yield self._cut(order, position)
            position += self.global_batch

    def _cut(self, order: np.ndarray[Any, np.dtype[np.int64]], position: int) -> Batch:
        start = position + self.rank * self.batch_size
        places = np.arange(start, start + self.batch_size)
        end = min(self.length, position + self.global_batch)
        return Batch(
            indices=tuple(int(i) for i in order[places % self.length]),
            real=int(np.clip(self.length - start, 0, self.batch_size)),
            total_real=end - position,
            position=end,
        )
