"""Talking to the other ranks; the identity when alone.

Three ways are used. Tensors go through collectives (gloo on CPU, NCCL on cards). Waiting for a rank that may take long
goes through rank 0's TCP store: gloo gives up after 30 s, the store waits as long as needed, can be interrupted, and
fails as soon as rank 0 dies. Gradients of ranks that share a host go through its memory.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, TypeVar

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleet import errors, foreign, log
from ppfleet.distributed import devices, handshake, store, wire
from ppfleet.distributed.consistency import differences
from ppfleet.distributed.devices import Device
from ppfleet.distributed.shared_memory import Shared, share
from ppfleet.distributed.world import World
from ppfleet.errors import CommError, MismatchError, WorldError
from ppfleet.limits import JOIN, JOIN_CARDS, JOIN_MARGIN, LEARN_CAUSE, SAY_WAITING
from ppfleet.watchdog.diagnosis import Limits
from ppfleet.watchdog.process import is_orphan
from ppfleet.watchdog.recorder import Entry, Flight
from ppfleet.watchdog.watchdog import Watchdog

T = TypeVar("T")
_INLINE = 1 << 16  # bytes of a gathered value that go through the store, which refuses more than about 12 MB
_RESULT = 1 << 12  # the same of a result of rank 0, which stays in the store
_PIECE = 1 << 26  # bytes of a larger value in one collective: far from gloo's time limit
_PLAIN, _LARGE, _FAULT = "value", "length", "fault"  # what follows in the store; the last: why it cannot be sent


class Comm:
    """The collectives of one job. `Comm(World(), CPU)` is a job of one, in which every call is the identity."""

    def __init__(
        self, world: World, device: Device, flight: Flight | None = None, limits: Limits | None = None
    ) -> None:
        self.world = world
        self.device = device
        self.flight = flight or Flight()
        self.watchdog = Watchdog(world, self.flight, replace(limits or Limits(), asynchronous=device.is_accelerator))
        self._compared: set[tuple[str, str]] = set()
        self._store: Any = None
        self._event: Any = None  # of `read`
        self._exchanges = 0  # made so far, the same on all ranks
        if world.alone:
            return
        if dist.is_initialized():
            raise CommError(
                "init_parallel_env was already called: `ppfleet.Job` does that itself, once in a process; "
                "remove the other call, or the other Job"
            )
        os.environ.update(device.environment())
        if is_orphan():
            raise WorldError(
                f"{world.name()} was started by Paddle's launcher, which is gone: nobody would end this job"
            )
        store.check_master(world)
        # The token tells this start of the job from others whose records lie in the same directory.
        token, seconds = secrets.token_hex(6), store.join_timeout(JOIN_CARDS if device.is_accelerator else JOIN)
        news: dict[str, Any] = {"run": token, "watchdog": self.watchdog.listen(token)} if world.first else {}
        facts = {**handshake.facts(paddle.__version__), **device.versions()}
        news = handshake.call(world, facts, seconds, news, device.hardware())
        self.flight.describe(run=news["run"])
        self.watchdog.start(news["run"], news["watchdog"])
        with self.flight.during("start", "init_parallel_env", waits=True):
            store.await_master(world, seconds)
            # Paddle blocks Python in there, and with it the watchdog: if a rank dies now, this ends the wait.
            faulthandler.dump_traceback_later(seconds + JOIN_MARGIN, exit=True)
            with store.signals_blocked():  # threads that start in there inherit it: a signal would fail the store's
                dist.init_parallel_env()
            faulthandler.cancel_dump_traceback_later()
        self._store = store.Store(world)

    # Tensors

    def all_reduce(self, tensor: Any, what: str = "all-reduce", checked: bool = True, enqueue: bool = False) -> Any:
        """The sum over ranks, in place. There is no mean: divide by a count that was summed as well.

        `checked`: compare new shapes over the store first, as gloo would abort on ranks that bring different ones.
        `enqueue`: on an accelerator, do not wait for the result.
        """
        if self.world.alone:
            return tensor
        dtype = str(tensor.dtype).rpartition(".")[2]
        if dtype in self.device.cannot_sum:
            raise CommError(f"{what}: {self.device.backend} cannot sum {dtype}; cast to float32 or int64 first")
        with self._together(what, tensor, checked) as entry:
            self._run(lambda sync: dist.all_reduce(tensor, sync_op=sync), entry, enqueue)
        return tensor

    def all_gather(self, tensor: Any, what: str = "all-gather", checked: bool = True, group: Any = None) -> Any:
        """The tensors of all ranks, stacked. On an accelerator with the default group, do not wait for the result."""
        found = paddle.empty([self.world.size, *tensor.shape], dtype=tensor.dtype)
        if self.world.alone:
            return tensor.unsqueeze(0)
        with self._together(what, tensor, checked) as entry:
            self._run(lambda sync: dist.stream.all_gather(found, tensor, group, sync_op=sync), entry, group is None)
        return found

    def _run(self, start: Callable[[bool], Any], entry: Entry, enqueue: bool) -> None:
        """Run a collective. An accelerator computes it some time later: unless it is only enqueued, poll until then.
        Paddle's own wait cannot be interrupted, and does not end when a rank is lost."""
        blocking = enqueue or not self.device.is_accelerator
        task = start(blocking)
        if not blocking:
            self._await(task.is_completed, entry)

    def _await(self, done: Callable[[], bool], entry: Entry) -> None:
        polls = 0
        while not done():
            self.watchdog.check(entry.what, entry.operation)
            polls += 1
            time.sleep(0.0 if polls < 50 else 0.0002)

    def read(self, tensor: Any, what: str) -> np.ndarray[Any, Any]:
        """The values of a tensor that may depend on a collective which was enqueued: waits for the others."""
        if self.device.is_accelerator and not self.world.alone:
            with self._operation("collective", what) as entry, self._translated(what, entry.operation, True):
                self._event = self._event or devices.kept(paddle.device.Event())
                self._event.record()
                self._await(self._event.query, entry)
        return np.asarray(tensor.numpy())

    def share(self, length: int, dtype: str) -> Shared | None:
        """Memory for sums over all ranks, where they are on one host; if it cannot be had there, that is said."""
        if self.world.local_size < self.world.size:
            return None
        memory, why = share(self.world.rank, self.world.size, length, dtype, self.gather)
        if memory is None:
            log.info(f"gradients go through gloo, not through shared memory: {why}")
        return memory

    def all_reduce_shared(self, memory: Shared, means: int, what: str) -> None:
        """The sum over ranks of what they put into `memory.mine`; of the first `means` elements, the mean."""
        with self._operation("collective", what, f"[{memory.mine.size}] {memory.mine.dtype}") as entry:

            def check() -> None:
                departed = set(self.watchdog.departed)  # first: a rank that arrives and then exits is not missing
                self.watchdog.check(what, entry.operation, departed.intersection(memory.late()))

            memory.all_reduce(means, check)

    def broadcast(self, tensor: Any, what: str = "broadcast") -> Any:
        """Rank 0's values, in place."""
        if not self.world.alone:
            with self._together(what, tensor) as entry:
                self._run(lambda sync: dist.broadcast(tensor, src=0, sync_op=sync), entry, enqueue=False)
        return tensor

    @contextmanager
    def _together(self, what: str, tensor: Any, checked: bool = True) -> Iterator[Entry]:
        """A collective: in the flight record, of the same shape on all ranks, its failure a sentence."""
        detail = f"{list(tensor.shape)} {str(tensor.dtype).rpartition('.')[2]}"
        with self._operation("collective", what, detail) as entry:
            if checked and (what, detail) not in self._compared:
                brought = self._exchanged(entry, f"{what} {detail}")
                if len(set(brought)) > 1:
                    shown = "; ".join(f"{each} on {self.world.name(rank)}" for rank, each in enumerate(brought))
                    raise MismatchError(f"the ranks pass different tensors to operation #{entry.operation}: {shown}")
                self._compared.add((what, detail))  # on all ranks alike; one that brings another later waits here alone
            with self._translated(what, entry.operation, of_device=self.device.is_accelerator):
                yield entry

    def broadcast_bytes(self, data: bytes | None, what: str = "broadcast") -> bytes:
        """Rank 0's bytes on every rank, in pieces that stay far from gloo's time limit."""
        if self.world.alone:
            return data or b""
        with self._operation("meeting", what) as entry:
            length = self._exchanged(entry, len(data or b""))[0]
            return self._sent(entry, 0, data or b"", length)

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Paddle may wait for other ranks in there, such as in the backward pass of DataParallel on cards: for the
        watchdog, a collective."""
        with self._operation("collective", what):
            yield

    def mean(self, total: float, count: float, what: str = "mean") -> float:
        """The mean over all ranks' samples, from this rank's sum and count."""
        sums = self.all_reduce(paddle.to_tensor([total, count], dtype="float64"), what).tolist()
        return float(sums[0] / sums[1]) if sums[1] else float("nan")

    # Waiting

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """The value of each rank, in the order of ranks. Waits for late ranks.

        Plain JSON data of any size: numbers, strings, None, lists, dicts with string keys; a tuple arrives as a list.
        Anything else is a CommError on every rank, also in a job of one.
        """
        if self.world.alone:
            return [wire.decode(self._encoded(value, what))]
        with self._operation("meeting", what) as entry:
            return self._exchanged(entry, value)

    def _encoded(self, value: Any, what: str) -> bytes:
        try:
            return wire.encode(value)
        except wire.NotPlain as fault:
            raise CommError(self._refusal(what, self.world.rank, str(fault))) from None

    def _refusal(self, what: str, rank: int, fault: str) -> str:
        return f"{what}: the value of {self.world.name(rank)} cannot be sent to other ranks: {fault}"

    def _exchanged(self, entry: Entry, value: Any) -> list[Any]:
        key, what, data = f"{_key(entry)}/values", entry.what, b""
        # The store cannot delete a key nor shrink a value, so keys are used again. Two take turns: every rank has read
        # the last but one when it has come to the last.
        self._exchanges += 1
        slot = f"ppfleet/values/{self._exchanges % 2}"
        try:
            data = wire.encode(value)
            form, content = (_PLAIN, data) if len(data) <= _INLINE else (_LARGE, str(len(data)).encode())
        except wire.NotPlain as fault:
            form, content = _FAULT, str(fault).encode()  # the others must know: they wait
        message = wire.encode([form, what]) + b"\n" + content
        with self._translated(what, entry.operation):
            self._store.set(f"{slot}/{self.world.rank}", message)
            self._store.add(key, 1)
        self._poll(entry, key, self.world.size)
        with self._translated(what, entry.operation):
            messages = [self._store.get(f"{slot}/{rank}").partition(b"\n") for rank in range(self.world.size)]
        heads = [wire.decode(head) for head, _, _ in messages]
        self._check_names(entry, {rank: name for rank, (_, name) in enumerate(heads)})
        for rank, ((form, _), (_, _, content)) in enumerate(zip(heads, messages)):
            if form == _FAULT:
                raise CommError(self._refusal(what, rank, content.decode()))
        return [
            wire.decode(self._sent(entry, rank, data, int(content)) if form == _LARGE else content)
            for rank, ((form, _), (_, _, content)) in enumerate(zip(heads, messages))
        ]

    def _check_names(self, entry: Entry, names: dict[int, str]) -> None:
        """These ranks met at a number: in the same operation?"""
        if len(set(names.values())) > 1:
            shown = "; ".join(f"{name} on {self.world.name(rank)}" for rank, name in names.items())
            raise MismatchError(
                f"the ranks diverged: operation #{entry.operation} is {shown}; every rank must make the same calls in "
                f"the same order"
            )

    def _sent(self, entry: Entry, source: int, data: bytes, length: int) -> bytes:
        """The bytes of rank `source` on every rank, all of which are here: by collectives, in pieces."""
        parts = []
        for start in range(0, length, _PIECE):
            stop = min(length, start + _PIECE)
            mine = source == self.world.rank
            tensor = _as_tensor(data[start:stop]) if mine else paddle.empty([stop - start], dtype="uint8")
            with self._translated(entry.what, entry.operation):
                self._run(lambda sync: dist.broadcast(tensor, src=source, sync_op=sync), entry, enqueue=False)  # noqa: B023 - called at once
            parts.append(b"" if mine else tensor.numpy().tobytes())
        return data if source == self.world.rank else b"".join(parts)

    def check_same(self, what: str, mine: dict[str, Any]) -> None:
        """Raise on every rank, listing what differs on which rank, unless all are equal (plain JSON data)."""
        text = json.dumps(mine, sort_keys=True)
        digests = self.gather(hashlib.sha256(text.encode()).hexdigest(), f"check of {what}")
        if len(set(digests)) > 1:
            shown = differences(self.gather(mine, f"check of {what}"), self.world.name)
            raise MismatchError(f"the ranks have different {what}:\n{shown}")

    def barrier(self, what: str = "barrier") -> None:
        """Wait until every rank is here, however long that takes; after a while say which one is not."""
        self.gather(None, what)

    def on_first(self, work: Callable[[], T], what: str) -> T:
        """Run `work` on rank 0 only and give every rank its result (plain JSON data, as for `gather`).

        The others wait on the store. If `work` raises, every rank raises: rank 0 the exception itself, the others
        one of the same family that says it came from rank 0.
        """
        if self.world.alone:
            with self.flight.during("work", what):
                return wire.decode(self._encoded(work(), what))  # type: ignore[no-any-return]
        if self.world.first:
            with self._operation("work", what) as entry, self._published(entry) as outcome:
                outcome["result"] = work()
        else:
            outcome = self._awaited(what)
        if outcome.get("large"):
            return self.gather(outcome.get("result"), what)[0]  # type: ignore[no-any-return]
        return outcome.get("result")  # type: ignore[return-value]

    @contextmanager
    def first(self, what: str) -> Iterator[None]:
        """Rank 0 goes through the block first, then the others: `with job.comm.first("unpack the data"): ...`"""
        if self.world.alone:
            yield
            return
        if self.world.first:
            with self._operation("work", what) as entry, self._published(entry):
                yield
            return
        self._awaited(what)
        with self.flight.during("work", what):
            yield

    def _awaited(self, what: str) -> dict[str, Any]:
        """What rank 0 published."""
        with self._operation("meeting", what) as entry:
            self._poll(entry, f"{_key(entry)}/outcome", 1)
            return self._outcome(entry)

    @contextmanager
    def _published(self, entry: Entry) -> Iterator[dict[str, Any]]:
        """Tell the others the result that the block puts into the dictionary, or that it is too large for the store,
        or what the block raised. The result becomes what the others read."""
        outcome: dict[str, Any] = {}
        message, key = b"", f"{_key(entry)}/outcome"
        try:
            yield outcome
            message = self._encoded(outcome.get("result"), entry.what)
            outcome.update(result=wire.decode(message), large=len(message) > _RESULT)
            message = wire.encode({"name": entry.what, **({"large": True} if outcome["large"] else outcome)})
        except BaseException as failure:
            message = wire.encode({"name": entry.what, "error": errors.pack(failure)})
            raise
        finally:
            # Also when interrupted: the others wait for it.
            self._store.set(f"{key}/value", message)
            self._store.add(key, 1)

    def _outcome(self, entry: Entry) -> dict[str, Any]:
        with self._translated(entry.what, entry.operation):
            outcome: dict[str, Any] = wire.decode(self._store.get(f"{_key(entry)}/outcome/value"))
        self._check_names(entry, {0: outcome["name"], self.world.rank: entry.what})
        if "error" in outcome:
            raise errors.unpack(outcome["error"], f"{entry.what} failed on {self.world.name(0)}: ", origin=0)
        return outcome

    @contextmanager
    def _operation(self, kind: str, what: str, detail: str = "") -> Iterator[Entry]:
        """Something that all ranks do together: numbered, in the flight record, refused once there is a verdict."""
        self.watchdog.check(what)
        entry = self.flight.enter(kind, what, detail, waits=kind != "work", numbered=True)
        try:
            yield entry
        finally:
            self.flight.leave(entry)

    def _poll(self, entry: Entry, key: str, goal: int) -> None:
        # Polling, as Store.wait blocks in C++: Ctrl-C has no effect there, and it cannot say for whom it waits.
        began, said, pause, what = time.monotonic(), False, 0.0005, entry.what
        while True:
            with self._translated(what, entry.operation):
                if self._store.add(key, 0) >= goal:
                    return
            self.watchdog.check(what, entry.operation)
            if not said and time.monotonic() - began > SAY_WAITING:
                said = True
                log.say(f"{self.world.name()} has waited {SAY_WAITING:.0f} s in {what} for {self._missing(key, goal)}")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _missing(self, key: str, goal: int) -> str:
        if goal == 1:
            return self.world.name(0)
        # The store can count but not be asked whether a key is there, so those who wait sign in a second list.
        self._store.add(f"{key}/waiting/{self.world.rank}", 1)
        time.sleep(1)
        late = [r for r in range(self.world.size) if not self._store.add(f"{key}/waiting/{r}", 0)]
        return ", ".join(self.world.name(r) for r in late) or "no rank any longer"

    @contextmanager
    def _translated(self, what: str, operation: int, of_device: bool = False) -> Iterator[None]:
        """The watchdog soon knows which rank died, and how; gloo and the store only that one did. Where no rank did,
        `of_device` tells that the failure is this rank's own device's, and is raised as it is."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as failure:
            if self.watchdog.settled(LEARN_CAUSE, operation):
                self.watchdog.check(what, operation)
            if of_device:
                raise
            text = foreign.telling_line(str(failure))[:300]
            raise CommError(
                f"{what} failed on {self.world.name()}: another rank died or exited ({text}); see its own log",
                code="peer_lost",
                operation=operation,
            ) from failure


def _key(entry: Entry) -> str:
    return f"ppfleet/{entry.operation}"


def _as_tensor(data: bytes) -> Any:
    return paddle.to_tensor(np.frombuffer(data, dtype=np.uint8).copy())
