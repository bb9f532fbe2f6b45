"""Batches of an `IterableDataset`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

from ppfleet.data.digest import digest
from ppfleet.data.loader import TRAINING, Loader
from ppfleet.data.sampler import WHOLE_STREAM, Batch, Plan, check_ends, mix
from ppfleet.data.seeding import keep_generators, seed_everything
from ppfleet.data.workers import Collate
from ppfleet.distributed import devices
from ppfleet.errors import DataError

ENDLESS = 1 << 62  # samples of a plan whose length is not known


class StreamLoader(Loader):
    """A `Loader` for streams: every rank reads the whole stream and keeps its slice of each global batch.

    All ranks therefore see the same end, and equal step counts need no communication. The stream must yield the same
    samples in the same order on every rank: `job.steps` and `job.evaluate` compare the first global batch of each pass
    and the number of samples between ranks. It must draw random numbers from `random`, `numpy.random` or Paddle's
    generator, which are seeded for each sample.
    """

    def __init__(
        self, dataset: Any, plan: Plan, collate: Collate | None, on_device: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(dataset, plan, collate=collate, on_device=on_device)
        self._stream = dataset

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    @property
    def steps_left(self) -> int | None:
        return None

    def _on_host(self, epoch: int, start: int, together: str) -> Iterator[tuple[Any, Batch]]:
        gather = self.gather if together else None
        with keep_generators():
            seed_everything(mix(self.plan.seed, epoch))  # a stream may draw its whole order when it is opened
            samples, position, full, compared = iter(self._stream), 0, True, False
        while full:
            with keep_generators():
                with devices.on_host():
                    group, position = self._group(samples, epoch, position, start)
                if gather is not None and not compared:
                    self._compare(gather, group, position)
                    compared = True
                full = len(group) == self.plan.global_batch
                if not full and not (group and self.plan.tail == "pad"):
                    break
                with devices.on_host():
                    pair = self._batch(group, position)
            yield pair
        if gather is not None and together == TRAINING:
            # Not in an evaluation, which a rank may leave early after SIGTERM; there the counts come with the sums.
            check_ends(gather(position, "end of the stream (number of samples)"))

    def _compare(self, gather: Callable[[Any, str], list[Any]], group: list[Any], position: int) -> None:
        """Raise if a rank has another first global batch, as one that reads only its part of the stream does."""
        gathered = gather([len(group), digest(group)], "check of the stream's first samples")
        if len({text for _, text in gathered}) > 1:
            shown = ", ".join(f"{text[:8]} ({count} samples) on rank {r}" for r, (count, text) in enumerate(gathered))
            raise DataError(
                f"the stream {type(self._stream).__name__} yields different samples on different ranks: the global "
                f"batch up to sample {position} has digest {shown}. {WHOLE_STREAM}"
            )

    def _group(self, samples: Iterator[Any], epoch: int, position: int, start: int) -> tuple[list[Any], int]:
        """The samples of the next global batch, fewer at the end of the stream, and the position after them."""
        group: list[Any] = []
        while len(group) < self.plan.global_batch:
            seed_everything(mix(self.plan.seed, epoch, position))
            try:
                sample = next(samples)
            except StopIteration:
                break
            position += 1
            if position > start:  # a stream can only be read from its beginning, also after a resume
                group.append(sample)
        return group, position

    def _batch(self, group: list[Any], position: int) -> tuple[Any, Batch]:
        start = self.plan.rank * self.plan.batch_size
        mine = [group[index % len(group)] for index in range(start, start + self.plan.batch_size)]
        real = min(max(len(group) - start, 0), self.plan.batch_size)
        return self._tensors(self._collate(mine)), Batch((), real, len(group), position)
