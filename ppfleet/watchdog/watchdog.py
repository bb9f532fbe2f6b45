"""The watchdog: a thread of each rank that tells the judge where the rank is, hears its verdict, and ends the rank.

Most blocking calls of Paddle release the interpreter, so a thread runs where a signal handler would not. Where one does
not, this thread is silent, and the judge, a process of its own (judge.py), notices that.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Protocol

from ppfleet import log
from ppfleet.cluster.link import Lost
from ppfleet.errors import PREEMPTED, STALLED, CommError, Preempted, Stalled
from ppfleet.limits import BEAT, END_FROZEN, RAISE, SAVE_AFTER_SIGTERM
from ppfleet.watchdog import events, judge, recorder, render
from ppfleet.watchdog.diagnosis import Beat, Limits, diagnose
from ppfleet.watchdog.events import LOST, Code, Event, Kind, Mark, Operation
from ppfleet.watchdog.hub import Hub
from ppfleet.watchdog.process import (
    Health,
    how_it_ended,
    is_gone,
    launcher,
    this_host,
    user_line,
    user_place,
)
from ppfleet.watchdog.recorder import Flight

if TYPE_CHECKING:
    from ppfleet.distributed.world import World


class Training(Protocol):
    """What SIGTERM depends on: will there be a step boundary, and are there steps that no checkpoint has?"""

    running: bool
    in_epochs: bool
    unsaved: bool


class Watchdog:
    """What this rank knows about the others, and they about it."""

    def __init__(self, world: World, flight: Flight, limits: Limits | None = None) -> None:
        self.world, self.flight, self.limits = world, flight, limits or Limits()
        self.verdict: Event | None = None  # why this job must end
        self.departed: dict[int, Event] = {}  # ranks that ended in order: after which operation, and why
        self._departed_at: dict[int, float] = {}  # … and when that was heard
        self.stop_requested = False  # some rank got SIGTERM: all should save and end
        self._stop_announced = False  # … and all know
        self.training: Training | None = None  # as it is now
        self.stacks: Path | None = None  # where to write the stacks of all threads
        self._raised = False  # the main thread knows the verdict
        self._deadline = self._save_deadline = float("inf")
        self._own_end: Event | None = None  # how this rank ends in order
        self._closed = threading.Event()  # … and the others know
        self._pid, self._launcher = os.getpid(), launcher()
        self._trainer = threading.get_ident()
        self._hub = Hub(world, {"pid": self._pid, "boot": this_host(), "ring": str(flight.path or "")})
        self._first: dict[str, Any] = {}  # rank 0's process and host
        self._heard = 0.0  # when the judge was last heard
        self._health = Health()
        self._thread = threading.Thread(target=self._run, name="ppfleet watchdog", daemon=True)
        atexit.register(self._at_exit)  # from now on: a rank may fail before there is anything to watch
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception

    # What the main thread calls

    def listen(self, token: str) -> int:
        """Rank 0, before the handshake: start the judge; the port where all ranks will find it."""
        return judge.start(self.world, self.limits, token, self._hub.process)

    def start(self, token: str = "", port: int = 0) -> None:
        """After the handshake: connect to the judge, and watch."""
        self._heard = time.monotonic()
        if not self.world.alone:
            self._hub.join(token, port)
        self._thread.start()
        this = weakref.ref(self)  # what is registered there is never released
        os.register_at_fork(after_in_child=lambda: watchdog._forget() if (watchdog := this()) else None)

    def take_sigterm(self) -> None:
        """From now on SIGTERM means: save at the next step boundary and exit. A handler of the script stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        own = signal.getsignal(signal.SIGTERM)
        if callable(own) and getattr(own, "__func__", None) is not Watchdog._on_sigterm:
            signal.signal(signal.SIGTERM, own)  # importing Paddle replaced it
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if (before := signal.set_wakeup_fd(self._hub.wakeup_fd, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.stop_requested = True
        self._hub.wake()
        if self.verdict or any(event.code == Code.EXCEPTION for event in self.departed.values()):
            raise Stalled("SIGTERM after the job had failed")
        if not self._in_loop and not self._unsaved:
            self.preempted("SIGTERM outside of the training loop: nothing to save")

    @property
    def _in_loop(self) -> bool:
        return self.training is not None and (self.training.running or self.training.in_epochs)

    @property
    def _unsaved(self) -> bool:
        return self.training is not None and self.training.unsaved

    def preempted(self, text: str) -> NoReturn:
        """Exit after SIGTERM; ranks that wait for this one do the same."""
        event = self._own(Code.PREEMPTED, text=text)
        self.flight.record(replace(event, code=Code.TERMINATED) if self._unsaved else event)
        self.close(event)
        raise Preempted(text, 128 + signal.SIGTERM if self._unsaved else PREEMPTED)

    def check(self, what: str, operation: int = 0, missing: Collection[int] = ()) -> None:
        """Raise if there is a verdict, or if a rank that this operation needs has exited: before it began the
        operation, or in the middle of it (`missing`)."""
        if self.verdict is not None:
            self._raised = True
            text = f"{what} failed on {self.world.name()}: {render.text(self.verdict)}"
            if self.verdict.code in LOST:
                raise CommError(text, code="peer_lost", ranks=[self.verdict.rank], operation=operation)
            raise Stalled(text, operation=operation)
        for rank, event in list(self.departed.items()):
            if event.operation.number < operation or rank in missing or self._left_undone(rank, event):
                self._raised = True
                text = f"{what} cannot continue: {self.world.name(rank)} exited before it ({render.reason(event)})"
                if event.code == Code.PREEMPTED:
                    self.preempted(text)
                raise CommError(text, code="peer_lost", ranks=[rank], operation=operation)

    def _left_undone(self, rank: int, event: Event) -> bool:
        """Whether an operation that a rank had begun will never be done: its device may have failed before it. What the
        device still can do, it does soon after the exception."""
        late = time.monotonic() - self._departed_at.get(rank, float("inf")) > RAISE
        return self.limits.asynchronous and event.code == Code.EXCEPTION and late

    def settled(self, seconds: float, operation: int) -> bool:
        """Whether it becomes known within that time why an operation failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.verdict or any(event.operation.number < operation for event in list(self.departed.values())):
                return True
            time.sleep(0.02)
        return False

    def close(self, event: Event | None = None) -> None:
        """Tell the others how this rank ends, and stop watching."""
        if self._own_end is None:
            self._own_end = event or self._own(Code.ENDED)
            self._hub.wake()
            if self._thread.is_alive():
                self._closed.wait(2.0)

    def stop(self) -> None:
        """The end of a job of one rank: the process may start another job."""
        self.flight.record(self._own(Code.ENDED))
        self.close()
        if self._thread.is_alive():
            self._thread.join(2.0)
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            atexit.unregister(self._at_exit)
            if sys.excepthook == self._on_exception:
                sys.excepthook = self._hook
            self._hub.end()

    def _on_exception(self, kind: Any, value: BaseException, trace: Any) -> None:
        """An exception ends the script: tell the others now. Before atexit calls its handlers, Python and Paddle may
        wait for threads, or for a device that waits for the others."""
        if os.getpid() == self._pid and threading.get_ident() == self._trainer:
            self._tell_exception(value)
        self._hook(kind, value, trace)

    def _tell_exception(self, cause: BaseException) -> None:
        event = events.exception(cause, self.world.rank, self.world.host, user_line(cause.__traceback__))
        event = replace(event, operation=self._own(Code.EXCEPTION).operation)
        self.flight.record(event)
        self.close(event)

    def _at_exit(self) -> None:
        """Record how this rank ended, and tell the others."""
        if os.getpid() != self._pid:
            return  # a forked child
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # at exit, Python would restore the default: death
        cause = getattr(sys, "last_value", None)
        if cause is not None:
            self._tell_exception(cause)
        self.flight.record(self._own(Code.ENDED))
        self.close()
        stalled = self.verdict is not None and self.verdict.code not in LOST
        if self.limits.asynchronous and self._raised and (stalled or isinstance(cause, CommError)):
            # At its own end, Paddle would wait for a device that waits for a rank which is gone.
            self._exit(STALLED if stalled else 1)

    def _own(self, code: Code, **fields: Any) -> Event:
        """About this rank, after its newest operation."""
        after = Operation(self.flight.operations, step=self.flight.step)
        return Event(code, self.world.rank, self.world.host, after, fields=fields)

    def _forget(self) -> None:
        """In a forked child, such as a loader worker: its parent's connections and signals are not its own."""
        with contextlib.suppress(Exception):
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._hub.close()

    # The thread

    def _run(self) -> None:
        beat, said = 0.0, False
        while not self._closed.is_set():
            try:
                self._hear()
                now = time.monotonic()
                if now - beat >= BEAT:
                    beat = now
                    self.flight.pulse(self._health.pulse())
                    self._tell()
                    self._arm()
                self._look(now)
            except Exception:  # noqa: BLE001 - without its watchdog, this rank would look dead to the others
                if not said and not sys.is_finalizing():
                    said = True
                    _say(f"watchdog error on {self.world.name()}, continuing: {traceback.format_exc()}")
                time.sleep(0.25)
            if self._own_end is not None:
                self._hub.send(departed=_shortened(self._own_end))
                faulthandler.cancel_dump_traceback_later()
                self._closed.set()

    def _arm(self) -> None:
        """Let a thread of C's end this process if this one has not come here again by then: Python is blocked in one
        call, and the judge, which is on another host, cannot kill it."""
        if self.world.host_of(0) != self.world.host:
            longest = max(self.limits.silent, 0.0 if self.flight.spent.steps else self.limits.first)
            faulthandler.dump_traceback_later(longest + END_FROZEN, exit=True)

    def _look(self, now: float) -> None:
        """What is due without any message."""
        if self.verdict is None and self._own_end is None:
            if self._launcher is not None and is_gone(self._launcher):
                self._announce(self._own(Code.ORPHAN, launcher=self._launcher.pid))
            elif self.world.alone:
                if (event := diagnose([self._beat()], now, self.limits)) is not None:
                    self._accept(event)
            else:
                self._check_judge(now)
        if self.verdict is not None and not self._raised and now > self._deadline and self._must_exit(self.verdict):
            self._exit()
        if now > self._save_deadline and not any(entry.kind == Kind.SAVE for entry in list(self.flight.open)):
            self._save_deadline = float("inf")
            _say(f"no step boundary within {SAVE_AFTER_SIGTERM:.0f} s of SIGTERM: Paddle's launcher kills after 30 s")

    def _check_judge(self, now: float) -> None:
        """The judge checks the ranks; whether it is alive, they check."""
        quiet = now - self._heard
        waits = [entry.kind for entry in list(self.flight.open) if entry.waits]
        limits, warm = self.limits, self.flight.spent.steps > 0
        stall = limits.stall if warm else max(limits.stall, limits.first)
        if quiet > (stall if Kind.COLLECTIVE in waits else limits.silent if waits else limits.long) + 1:
            self._accept(Event(Code.STALL, 0, self.world.host_of(0), seconds=quiet, fields={"silent": True}))

    def _must_exit(self, verdict: Event) -> bool:
        """When a peer was lost, a rank that does not wait for it may finish, or get to the next `check`."""
        inside = self.flight.open[-1:]
        stuck = bool(inside and inside[0].waits and time.monotonic() - inside[0].began > RAISE)
        return stuck or verdict.code not in LOST

    def _announce(self, event: Event) -> None:
        """Send a verdict to all ranks, and accept it here."""
        self._hub.send(verdict=_shortened(event))
        self._accept(event)

    def _accept(self, event: Event) -> None:
        if self.verdict is not None or self._own_end is not None:
            return
        self._deadline = time.monotonic() + RAISE
        self.flight.record(event)
        stacks = self.stacks if event.code not in LOST else None
        if stacks is not None:  # before the main thread can see the verdict and raise
            with contextlib.suppress(OSError), stacks.open("w") as out:
                faulthandler.dump_traceback(out, all_threads=True)
        self.verdict = event
        _say(render.text(event))
        if stacks is not None and event.rank in (-1, self.world.rank):
            _say(f"the Python stacks of {self.world.name()} are in {stacks}")

    def _exit(self, code: int = STALLED) -> None:
        _in_thread(sys.stdout.flush)
        _in_thread(sys.stderr.flush)
        os._exit(code)

    # Messages out

    def _tell(self) -> None:
        self._hub.send(beat=asdict(self._beat()))

    def _beat(self) -> Beat:
        now, flight = time.monotonic(), self.flight
        opened, idle = list(flight.open), now - flight.progress
        at, busy = "", 1.0
        if idle > 2 * BEAT:
            at, busy = user_place(self._trainer), self._health.busy(flight.progress)
        inside = opened[-1].as_operation(at) if opened else Operation(at=at)
        waits = bool(opened and opened[-1].waits)
        return Beat(
            self.world.rank, now, self.world.host, flight.operations, inside, waits, idle=idle, step=flight.step,
            in_step=any(entry.kind == Kind.STEP for entry in opened), age=now - opened[-1].began if opened else 0.0,
            recent=tuple(flight.recent) if waits else (), busy=busy, warm=flight.spent.steps > 0,
        )  # fmt: skip

    # Messages in

    def _hear(self) -> None:
        try:
            for message in self._hub.hear(0.25):
                if "signals" not in message:
                    self._handle(message)
                elif signal.SIGTERM in message["signals"] or self.stop_requested:
                    self._request_stop(f"{self.world.name()} got SIGTERM")
        except Lost as lost:
            self._lost(lost.unreachable)

    def _handle(self, message: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        if isinstance(process := message.get("process"), dict):
            self._first = process
        if "departed" in message:
            event = Event.from_json(message["departed"])
            self._departed_at[event.rank] = time.monotonic()
            self.departed[event.rank] = event
        if "verdict" in message:
            self._accept(self._seen_here(Event.from_json(message["verdict"])))
        if "stop" in message:
            self._request_stop(message["stop"])

    def _request_stop(self, why: str) -> None:
        """All ranks save at the next step boundary; announced once."""
        if self._stop_announced:
            return
        self.stop_requested = self._stop_announced = True
        self._save_deadline = time.monotonic() + SAVE_AFTER_SIGTERM
        self.flight.mark(Mark.SIGTERM, why)
        self._hub.send(stop=why)
        if self._in_loop and self.verdict is None:
            _say(f"{why}: all ranks save at the next step boundary and exit with code {PREEMPTED}")

    def _lost(self, unreachable: bool) -> None:
        """The judge is gone without a verdict: with its host, with rank 0, or alone."""
        if self._own_end is not None:
            return
        code, fields = (Code.HOST, {}) if unreachable else how_it_ended(self._first, self._health.oom_kills)
        alive = not unreachable and self._first.get("boot") == this_host() and not fields
        event = Event(code, 0, self.world.host_of(0), fields={**fields, **self._first, "judge": alive})
        self._accept(self._seen_here(event))

    def _seen_here(self, event: Event) -> Event:
        """With where a lost rank was and how it ended, if it was on this host; else with the step at which it is missed
        here."""
        if event.code in LOST:
            inside = Operation(step=self.flight.step)
            if event.fields.get("boot") == this_host():
                with contextlib.suppress(OSError, ValueError):
                    inside = recorder.read(Path(event.fields.get("ring", ""))).position()
            event = replace(event, operation=inside)
        if event.code == Code.KILLED and "signal" not in event.fields:
            code, fields = how_it_ended(event.fields, self._health.oom_kills)
            return replace(event, code=code, fields={**event.fields, **fields})
        return event


def _shortened(event: Event) -> dict[str, Any]:
    """For the other ranks: only the beginning of a long text."""
    fields = {**event.fields, "text": str(event.fields["text"])[:500]} if "text" in event.fields else event.fields
    return replace(event, fields=fields).to_json()


def _in_thread(work: Callable[[], object]) -> None:
    """Do it in another thread and do not wait long: nobody may be reading our output."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(1.0)


def _say(text: str) -> None:
    _in_thread(lambda: log.say(text))
