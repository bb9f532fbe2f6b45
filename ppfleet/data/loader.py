"""Batches in the sampler's order: per-sample randomness, threads or worker processes, masks for padding.

Every sample is drawn with `random`, `numpy.random` and Paddle's generator freshly seeded from (seed, epoch, index), so
augmentation depends neither on the number of workers or ranks nor on where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import paddle
from paddle.io.dataloader.collate import default_collate_fn

from ppfleet.data import threads, transfer, workers
from ppfleet.data.sampler import Batch, Plan
from ppfleet.data.seeding import keep_generators
from ppfleet.data.workers import BatchDrawer, BatchKeys, Collate

TRAINING, EVALUATION = "training", "evaluation"  # what all ranks make a pass for


class Loader:
    """Iterable of this rank's batches, returned by `job.loader`.

    `job.steps(loader)` iterates in the order of the job's epoch, from where a checkpoint left off; `job.evaluate` in
    that of epoch 0. A plain `for batch in loader` takes the order of the epoch that `job.epochs` is in, and each
    further pass in that epoch another one, so that a resume at an epoch's start repeats what that epoch saw.

    While the loop has a batch, `position` is the sample after its global batch, `mask` says which of this rank's
    samples are real, and `weights` (float32) makes `(losses * weights).mean()`, averaged over ranks, the mean over the
    real samples of the global batch; `losses` must have the shape [batch_size].
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        workers: int = 0,
        collate: Collate | None = None,
        on_device: Callable[[Any], Any] | None = None,
        local_size: int = 1,
    ) -> None:
        self.plan = plan
        # The epoch for a plain pass, and whether it is made within job.epochs.
        self.epoch_of_job: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self.start = 0
        self._epoch = 0
        self._epoch_is_set = False  # for the next pass
        self._together = ""  # what all ranks make the next pass for; "" for a plain one
        self.gather: Callable[[Any, str], list[Any]] | None = None  # from all ranks, where there are several
        self._plain_passes = ((0, False), 0)  # how many were made in which epoch of the job
        self.position = 0
        self.real = 0  # real samples of the current global batch
        self.mask = np.ones(plan.batch_size, dtype=bool)
        self.weights = paddle.ones([plan.batch_size])
        self._dataset = dataset
        self._workers = workers
        self._in_threads = collate is None and threads.fits(dataset)
        self._collate = collate or default_collate_fn
        # Paddle's own collate function makes new arrays; a user's may return memory that is used elsewhere.
        self._tensor = transfer.copy_of if collate else transfer.over
        self._on_device = on_device
        self._drawer = BatchDrawer(dataset, plan.seed, self._collate)
        self._local_size = local_size
        self._shared_memory: bool | None = None

    @property
    def epoch(self) -> int:
        """The epoch whose order the current pass has. Set it to choose the order of the next pass."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch, self._epoch_is_set = number, True

    def begin(self, epoch: int, start: int, purpose: str) -> None:
        """All ranks make the next pass together, from sample `start` of `epoch`, for training or evaluation."""
        self.epoch, self.start, self._together = epoch, start, purpose

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return self.plan.steps()

    @property
    def steps_left(self) -> int | None:
        return self.plan.steps(self.start)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0  # a pass starts at the beginning unless the job says otherwise
        if not self._epoch_is_set:
            self._epoch = self._epoch_of_plain_pass()
        self._epoch_is_set, together, self._together = False, self._together, ""
        return self._batches(self._epoch, start, together)

    def _epoch_of_plain_pass(self) -> int:
        """The job's epoch for its first plain pass, then numbers that no epoch has."""
        current = self.epoch_of_job()
        done = self._plain_passes[1] if self._plain_passes[0] == current else 0
        self._plain_passes = (current, done + 1)
        return current[0] + (done << 32)

    def _batches(self, epoch: int, start: int, together: str) -> Iterator[Any]:
        for data, batch in transfer.on_device(self._on_host(epoch, start, together)):
            self._expose(batch)
            yield data if self._on_device is None else self._on_device(data)

    def _on_host(self, epoch: int, start: int, together: str) -> Iterator[tuple[Any, Batch]]:
        """The batches in the host's memory, and what the plan says of each."""
        keys = BatchKeys(self.plan, epoch, start)
        # The reader comes first in zip, so that it reaches its own end, where Paddle stops its workers.
        return zip(self._read(keys), self.plan.batches(epoch, start))

    def _read(self, keys: BatchKeys) -> Iterator[Any]:
        if self._in_threads:
            yield from threads.read(self._dataset, keys, self.plan.seed, self._workers)
        elif self._workers and len(keys):
            if self._shared_memory is None:
                self._shared_memory = workers.fit_shared_memory(
                    self._drawer, self.plan.batch_size, self._workers, self._local_size
                )
            yield from workers.read(self._drawer, keys, self._workers, self._shared_memory)
        else:
            # Not by Paddle's DataLoader: without workers it reads ahead in a thread, which shares the generators.
            for key in keys:
                with keep_generators():
                    data = self._tensors(self._drawer(key))
                yield data

    def _tensors(self, data: Any) -> Any:
        """The arrays of a collated batch as tensors."""
        return transfer.map_leaves(lambda leaf: self._tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, data)

    def _expose(self, batch: Batch) -> None:
        self.position = batch.position
        if batch.total_real == self.real == self.plan.global_batch:
            return  # unchanged, as for nearly every batch
        self.real = batch.total_real
        self.mask = np.arange(self.plan.batch_size) < batch.real
        scale = self.plan.global_batch / batch.total_real
        self.weights = paddle.to_tensor(self.mask.astype(np.float32) * np.float32(scale))
