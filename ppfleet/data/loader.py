"""Batches in the sampler's order: per-sample randomness, threads or worker processes, masks, a check of shared memory.

Every sample is drawn with `random`, `numpy.random` and Paddle's generator freshly seeded from (seed, epoch, index), so
augmentation does not depend on the number of workers or ranks, nor on where a run was interrupted.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable

import numpy as np
import paddle
from paddle.io import DataLoader, Dataset, IterableDataset
from paddle.io.dataloader.collate import default_collate_fn

from ppfleet import log
from ppfleet.data import threads
from ppfleet.data.digest import digest
from ppfleet.data.sampler import WHOLE_STREAM, Batch, Plan, check_ends, mix
from ppfleet.distributed import devices
from ppfleet.errors import DataError, FleetError, pack, unpack

Collate = Callable[[Sequence[Any]], Any]
_PREFETCH = 2  # batches that Paddle's DataLoader keeps ready for each worker
_PR_SET_PDEATHSIG = 1
_FAILED = "ppfleet: drawing this batch failed"
TRAINING, EVALUATION = "training", "evaluation"  # what all ranks make a pass for


def seed_everything(number: int) -> None:
    """Seed what data sets and augmentation draw from: `random`, `numpy.random` and Paddle's generator."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    for generator in devices.current().generators():
        generator.manual_seed(number >> 33)


@contextmanager
def _own_numbers() -> Iterator[None]:
    """Draw samples in here: Paddle's generator, which dropout draws from as well, is left as it was."""
    states = [(generator, generator.get_state()) for generator in devices.current().generators()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


class Loader:
    """Iterable of this rank's batches.

    `job.steps(loader)` takes the order of the job's epoch, from where a checkpoint was left; `job.evaluate` that of
    epoch 0. A pass by hand, `for batch in loader`, takes the order of the epoch that `job.epochs` is in, and each
    further pass in the same epoch a new one. So what an epoch sees is the same after a resume at its start.

    While a batch is in the loop's hands, `position` is the sample after its global batch, `mask` says which of this
    rank's samples are real, and `weights` (float32) makes `(losses * weights).mean()`, averaged over ranks, the mean
    over the real samples of the global batch; `losses` must have the shape [batch_size].
    """

    def __init__(self, dataset: Any, plan: Plan, workers: int, collate: Collate | None, local_size: int) -> None:
        self.plan = plan
        # The job's epoch for a pass by hand, and whether it is made inside of job.epochs.
        self.epoch_of_job: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self.start = 0
        self._epoch = 0
        self._told = False  # whether the epoch of the next pass was set
        self._together = ""  # what all ranks make the next pass for, if they do
        self.gather: Callable[[Any, str], list[Any]] | None = None  # from all ranks, where there are several
        self._by_hand = ((0, False), 0)  # how many passes were made by hand in the newest of these
        self.position = 0
        self.real = 0  # samples of the global batch in hand
        self.mask = np.ones(plan.batch_size, dtype=bool)
        self.weights = paddle.ones([plan.batch_size])
        self._dataset = dataset
        self._samples = _Seeded(dataset, plan.seed)
        self._workers = workers
        self._in_place = collate is None and threads.fits(dataset)
        self._collate = collate or default_collate_fn
        # Paddle's own collation makes new arrays; of a user's we do not know who else holds them.
        self._tensor = paddle.to_tensor if collate else threads.tensor_over
        self._local_size = local_size
        self._shared_memory: bool | None = None

    @property
    def epoch(self) -> int:
        """The epoch whose order the pass at hand has. Set it to choose that of the next pass."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch, self._told = number, True

    def begin(self, epoch: int, start: int, purpose: str) -> None:
        """The next pass is made by all ranks together, from sample `start` of `epoch`, to train or to evaluate."""
        self.epoch, self.start, self._together = epoch, start, purpose

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return self.plan.steps()

    @property
    def steps_left(self) -> int | None:
        return self.plan.steps(self.start)

    def __iter__(self) -> Iterator[Any]:
        # Taken now: a pass over a data set starts at its beginning unless the job says otherwise.
        start, self.start = self.start, 0
        if not self._told:
            self._epoch = self._next_by_hand()
        self._told, together, self._together = False, self._together, ""
        return self._batches(self._epoch, start, together)

    def _next_by_hand(self) -> int:
        """The job's epoch for its first pass by hand, then numbers that no epoch has."""
        where = self.epoch_of_job()
        done = self._by_hand[1] if self._by_hand[0] == where else 0
        self._by_hand = (where, done + 1)
        return where[0] + (done << 32)

    def _batches(self, epoch: int, start: int, together: str) -> Iterator[Any]:
        keys = _Keys(self.plan, epoch, start)
        # The reader is asked first, so that it comes to its own end: Paddle's ends its workers there.
        for data, batch in zip(self._read(keys), self.plan.batches(epoch, start)):
            self._expose(batch)
            yield data

    def _read(self, keys: _Keys) -> Iterator[Any]:
        if self._in_place:
            yield from threads.read(self._dataset, keys, self.plan.seed, self._workers)
            return
        draw = _Draw(self._samples, self._collate)
        if not self._workers or not len(keys):
            # Not Paddle's own path for zero workers: that reads ahead in a thread, and the global generators with it.
            for key in keys:
                with _own_numbers():
                    data = to_tensors(draw(key), self._tensor)
                yield data
            return
        loader = DataLoader(
            draw,
            batch_sampler=keys,
            num_workers=self._workers,
            collate_fn=draw.or_report,
            use_shared_memory=self._enough_shared_memory(),
            worker_init_fn=_die_with_parent,
            prefetch_factor=_PREFETCH,
        )
        batches = None
        try:
            batches = iter(loader)
            _deaths.watch()
            for data in batches:
                yield _Draw.checked(data)
                _deaths.check()
        except SystemError as failure:
            raise DataError(
                "a loader worker died; if it says nothing above, for want of memory: take fewer workers, or a smaller "
                f"batch ({' '.join(str(failure).split())[:300]})",
                code="worker_died",
            ) from None
        finally:
            # A pass that is left early, or fails, would otherwise keep its workers for as long as this process lives.
            if batches is not None:
                batches._try_shutdown_all(timeout=1)

    def _expose(self, batch: Batch) -> None:
        self.position = batch.position
        if batch.total_real == self.real == self.plan.global_batch:
            return  # as it was: nearly every batch
        self.real = batch.total_real
        self.mask = np.arange(self.plan.batch_size) < batch.real
        scale = self.plan.global_batch / batch.total_real
        self.weights = paddle.to_tensor(self.mask.astype(np.float32) * np.float32(scale))

    def _enough_shared_memory(self) -> bool:
        """Whether /dev/shm holds what all ranks of this host have in flight; a full one ends a worker with SIGBUS."""
        if self._shared_memory is None:
            batch = _sample_bytes(self._samples) * self.plan.batch_size
            needed = batch * (_PREFETCH + 1) * self._workers * self._local_size
            free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0  # noqa: PTH112
            self._shared_memory = needed <= free
            if not self._shared_memory:
                log.say(
                    f"/dev/shm has {free >> 20} MB free, {self._workers} loader workers need about {needed >> 20} MB: "
                    f"batches go through pipes instead, which is slower. In a container: --shm-size"
                )
        return self._shared_memory


class StreamLoader(Loader):
    """The same for an `IterableDataset`: every rank reads the whole stream and keeps its slice of each global batch.

    So all ranks see the same end, and equal step counts need no communication. `job.steps` and `job.evaluate` compare
    the first global batch of each pass and the number of samples between ranks. The stream must give the same
    samples in the same order on every rank; its randomness must come from `random`, `numpy.random` or Paddle's
    generator, which are seeded for each sample.
    """

    def __init__(self, dataset: Any, plan: Plan, collate: Collate | None) -> None:
        super().__init__(dataset, plan, workers=0, collate=collate, local_size=1)
        self._stream = dataset

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    @property
    def steps_left(self) -> int | None:
        return None

    def _batches(self, epoch: int, start: int, together: str) -> Iterator[Any]:
        gather = self.gather if together else None
        with _own_numbers():
            seed_everything(mix(self.plan.seed, epoch))  # a stream may draw its whole order when it is opened
            samples, position, full, compared = iter(self._stream), 0, True, False
        while full:
            with _own_numbers():
                group, position = self._group(samples, epoch, position, start)
                if gather is not None and not compared:
                    self._compare(gather, group, position)
                    compared = True
                full = len(group) == self.plan.global_batch
                if not full and not (group and self.plan.tail == "pad"):
                    break
                data = self._batch(group, position)
            yield data
        if gather is not None and together == TRAINING:
            # Not in an evaluation, which a rank may leave when it is asked to end. It compares with its sums.
            check_ends(gather(position, "end of the stream (how many samples it had)"))

    def _compare(self, gather: Callable[[Any, str], list[Any]], group: list[Any], position: int) -> None:
        """Do all ranks have the same first global batch? One that reads a part of the stream has not."""
        everybodys = gather([len(group), digest(group)], "check of the stream's first samples")
        if len({text for _, text in everybodys}) > 1:
            shown = ", ".join(f"{text[:8]} ({count} samples) on rank {r}" for r, (count, text) in enumerate(everybodys))
            raise DataError(
                f"the stream {type(self._stream).__name__} gives different samples on different ranks: the global "
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
            if position > start:  # a stream can only be read from its start, also after a resume
                group.append(sample)
        return group, position

    def _batch(self, group: list[Any], position: int) -> Any:
        start = self.plan.rank * self.plan.batch_size
        mine = [group[place % len(group)] for place in range(start, start + self.plan.batch_size)]
        real = min(max(len(group) - start, 0), self.plan.batch_size)
        self._expose(Batch((), real, len(group), position))
        return to_tensors(self._collate(mine), self._tensor)


def make_loader(
    dataset: Any, plan: dict[str, Any], workers: int = 0, collate: Collate | None = None, local_size: int = 1
) -> Loader:
    """The loader that fits the data set; a DataError says what to change where none does."""
    if workers < 0:
        raise DataError(f"workers={workers}: take 0 to load in the loop itself, or the number of threads or processes")
    if isinstance(dataset, IterableDataset):
        if workers or plan["shuffle"]:
            raise DataError(
                "an IterableDataset is read in its own order by one process (shuffle=False, workers=0): every worker "
                "would read the whole stream again. For both, give a map-style Dataset (__getitem__, __len__)"
            )
        return StreamLoader(dataset, Plan(length=1 << 62, **plan), collate)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"{type(dataset).__name__} is no data set: it needs __getitem__ and __len__, or to be an IterableDataset"
        )
    return Loader(dataset, Plan(length=len(dataset), **plan), workers, collate, local_size)


class _Keys:
    """The batches of an epoch as lists of (epoch, index), made as they are asked for: Paddle's batch sampler."""

    def __init__(self, plan: Plan, epoch: int, position: int) -> None:
        self._plan, self._epoch, self._position = plan, epoch, position

    def __len__(self) -> int:
        return self._plan.steps(self._position)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self._plan.batches(self._epoch, self._position):
            yield [(self._epoch, index) for index in batch.indices]


class _Seeded(Dataset):
    """A data set whose keys are (epoch, index), each sample drawn with generators of its own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_everything(mix(self._seed, epoch, index))
        return self._dataset[index]


class _Draw(Dataset):
    """Draws and collates the samples of a batch. For Paddle's workers it is a data set whose samples are the keys
    themselves, so that everything that can fail happens in `or_report`."""

    def __init__(self, samples: _Seeded, collate: Collate) -> None:
        self._samples, self._collate = samples, collate

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        return key

    def __call__(self, keys: Sequence[tuple[int, int]]) -> Any:
        return self._collate([self._samples[key] for key in keys])

    def or_report(self, keys: Sequence[tuple[int, int]]) -> Any:
        """A failure goes back as data: raised here, it would reach the loop as "Blocking queue is killed"."""
        try:
            return self(keys)
        except FleetError as failure:
            return [np.zeros(1), _FAILED, json.dumps(pack(failure))]
        except Exception as failure:  # noqa: BLE001 - whatever the data set raises
            text = f"the data set failed: {type(failure).__name__}: {failure}\n{traceback.format_exc().strip()}"
            return [np.zeros(1), _FAILED, json.dumps(pack(DataError(text)))]

    @staticmethod
    def checked(data: Any) -> Any:
        if isinstance(data, (list, tuple)) and len(data) == 3 and isinstance(data[1], str) and data[1] == _FAILED:
            raise unpack(json.loads(data[2]))
        return data


class _Deaths:
    """Keeps a worker's death until the loader asks. Paddle's handler of SIGCHLD, which is one for the process, raises
    it wherever the training loop happens to be: in a step, in a save."""

    def __init__(self) -> None:
        self._failure: SystemError | None = None
        self._paddles: Any = None

    def watch(self) -> None:
        self._failure = None
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._handle:
            self._paddles = handler
            signal.signal(signal.SIGCHLD, self._handle)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _handle(self, number: int, frame: Any) -> None:
        try:
            self._paddles(number, frame)
        except SystemError as failure:
            self._failure = failure


_deaths = _Deaths()


def to_tensors(data: Any, tensor: Callable[[Any], Any]) -> Any:
    """The arrays of a collated batch as tensors on the current device; other leaves as they are."""
    if isinstance(data, np.ndarray):
        return tensor(data)
    if isinstance(data, dict):
        return {name: to_tensors(value, tensor) for name, value in data.items()}
    if isinstance(data, (list, tuple)) and not all(isinstance(item, (str, bytes)) for item in data):
        return [to_tensors(item, tensor) for item in data]
    return data


def _sample_bytes(samples: _Seeded) -> int:
    """The size of the first sample, drawn in a child: a data set that opens its file at the first use must do so in
    each worker, not here, where they would all inherit one file position."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(_nbytes(samples[(0, 0)])).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        size = answer.read()
    os.waitpid(child, 0)
    return int(size or 0)  # a sample that cannot be drawn is a worker's to report


def _nbytes(sample: Any) -> int:
    if isinstance(sample, dict):
        return sum(_nbytes(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(_nbytes(value) for value in sample)
    if isinstance(sample, paddle.Tensor):
        return int(sample.size) * 8
    return int(getattr(sample, "nbytes", 64))


def _die_with_parent(worker: int) -> None:
    """Ask Linux to end this worker when the training process dies, also by SIGKILL: no orphans. In a process group of
    its own: what a launcher or Ctrl-C sends to the whole group is for the training process, which still needs data."""
    parent = os.getppid()
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
