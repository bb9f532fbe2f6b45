"""Worker processes that draw and collate batches, through Paddle's DataLoader.

What Paddle leaves out is here: failures arrive with their message, workers die with the training process, their death
is raised where the loader is and nowhere else, and a /dev/shm that is too small is avoided instead of crashing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import paddle
from paddle.io import DataLoader, Dataset

from ppfleet import log
from ppfleet.data.sampler import Plan, mix
from ppfleet.data.seeding import seed_everything
from ppfleet.distributed import devices
from ppfleet.errors import DataError, FleetError, pack, unpack

Collate = Callable[[Sequence[Any]], Any]
Key = tuple[int, int]  # epoch and index of a sample
_PREFETCH = 2  # batches that Paddle's DataLoader keeps ready for each worker
_PR_SET_PDEATHSIG = 1
_FAILED = "ppfleet: drawing this batch failed"


class BatchKeys:
    """The batches of an epoch as lists of keys, created on demand: Paddle's batch sampler."""

    def __init__(self, plan: Plan, epoch: int, position: int) -> None:
        self._plan, self._epoch, self._position = plan, epoch, position

    def __len__(self) -> int:
        return self._plan.steps(self._position)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in self._plan.batches(self._epoch, self._position):
            yield [(self._epoch, index) for index in batch.indices]


class BatchDrawer(Dataset):
    """Draws the samples of a batch, each with freshly seeded generators, and collates them.

    To Paddle's workers it is a data set whose samples are the keys themselves, so that everything that can fail happens
    in `or_report`.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: Key) -> Key:
        return key

    def __call__(self, keys: Sequence[Key]) -> Any:
        with devices.on_host():
            return self._collate([self.sample(key) for key in keys])

    def sample(self, key: Key) -> Any:
        epoch, index = key
        seed_everything(mix(self._seed, epoch, index))
        return self._dataset[index]

    def or_report(self, keys: Sequence[Key]) -> Any:
        """A failure is returned as data: raised here, it would arrive as "Blocking queue is killed"."""
        try:
            return self(keys)
        except FleetError as failure:
            return [np.zeros(1), _FAILED, json.dumps(pack(failure))]
        except Exception as failure:  # noqa: BLE001 - a data set may raise anything
            text = f"the data set failed: {type(failure).__name__}: {failure}\n{traceback.format_exc().strip()}"
            return [np.zeros(1), _FAILED, json.dumps(pack(DataError(text)))]

    @staticmethod
    def checked(data: Any) -> Any:
        if isinstance(data, (list, tuple)) and len(data) == 3 and isinstance(data[1], str) and data[1] == _FAILED:
            raise unpack(json.loads(data[2]))
        return data


def read(drawer: BatchDrawer, keys: BatchKeys, workers: int, shared_memory: bool) -> Iterator[Any]:
    """The batches in order, drawn by `workers` processes."""
    loader = DataLoader(
        drawer,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=drawer.or_report,
        use_shared_memory=shared_memory,
        places=paddle.CPUPlace(),
        worker_init_fn=_begin,
        prefetch_factor=_PREFETCH,
    )
    batches = None
    try:
        batches = iter(loader)
        _deaths.watch()
        for data in batches:
            yield BatchDrawer.checked(data)
            _deaths.check()
    except SystemError as failure:
        raise DataError(
            "a loader worker died; if nothing above says why, it was probably killed for lack of memory: use fewer "
            f"workers or a smaller batch ({' '.join(str(failure).split())[:300]})",
            code="worker_died",
        ) from None
    finally:
        # A pass that ends early or fails would otherwise keep its workers for as long as this process lives.
        if batches is not None:
            batches._try_shutdown_all(timeout=1)


def fit_shared_memory(drawer: BatchDrawer, batch_size: int, workers: int, local_size: int) -> bool:
    """Whether /dev/shm has room for the batches in flight of all ranks on this host; a full one kills a worker."""
    needed = _sample_bytes(drawer) * batch_size * (_PREFETCH + 1) * workers * local_size
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0  # noqa: PTH112
    if needed > free:
        log.say(
            f"/dev/shm has {free >> 20} MB free, {workers} loader workers need about {needed >> 20} MB: using pipes "
            f"instead, which is slower. In a container, raise --shm-size"
        )
    return needed <= free


def _sample_bytes(drawer: BatchDrawer) -> int:
    """The size of the first sample, drawn in a child process: a data set that opens its file at the first access must
    do so in each worker, not here, where all of them would inherit one file position."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            paddle.set_device(devices.CPU.name)  # a forked process cannot use its parent's card
            os.write(writer, str(_nbytes(drawer.sample((0, 0)))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        size = answer.read()
    os.waitpid(child, 0)
    return int(size or 0)  # a sample that cannot be drawn is reported by a worker


def _nbytes(sample: Any) -> int:
    if isinstance(sample, dict):
        return sum(_nbytes(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(_nbytes(value) for value in sample)
    if isinstance(sample, paddle.Tensor):
        return int(sample.size) * 8
    return int(getattr(sample, "nbytes", 64))


class _Deaths:
    """Keeps a worker's death until the loader asks. Paddle's SIGCHLD handler, one for the process, would raise it
    wherever the training loop happens to be: in a step, in a save."""

    def __init__(self) -> None:
        self._failure: SystemError | None = None
        self._paddles_handler: Any = None

    def watch(self) -> None:
        self._failure = None
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._handle:
            self._paddles_handler = handler
            signal.signal(signal.SIGCHLD, self._handle)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _handle(self, number: int, frame: Any) -> None:
        try:
            self._paddles_handler(number, frame)
        except SystemError as failure:
            self._failure = failure


_deaths = _Deaths()


def _begin(worker: int) -> None:
    """Ask Linux to kill this worker when the training process dies, also by SIGKILL, so that no orphans remain. It gets
    its own process group: a signal to the launcher's group is for the training process, which still needs data."""
    parent = os.getppid()
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    paddle.set_device(devices.CPU.name)
