"""The watchdog: a thread of each rank that notices death and stalls, tells the others who it was, and ends the job.

Every rank tells rank 0 once a second what it is in (`Beat`), and rank 0 asks `diagnose`. Blocking calls of Paddle free
the interpreter, so a thread runs where a signal handler would not.
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
from typing import TYPE_CHECKING, Any, Callable, NoReturn

from ppfleet import log
from ppfleet.cluster.link import Lost
from ppfleet.errors import PREEMPTED, STALLED, CommError, Preempted, Stalled
from ppfleet.limits import BEAT, RAISE, SAVE_AFTER_SIGTERM, UNREACHABLE
from ppfleet.watchdog import events, render
from ppfleet.watchdog.diagnosis import Beat, Limits, diagnose
from ppfleet.watchdog.events import LOST, Code, Event, Kind, Mark, Operation
from ppfleet.watchdog.hub import Hub
from ppfleet.watchdog.process import (
    Health,
    how_it_ended,
    is_gone,
    launcher,
    process_state,
    this_host,
    user_line,
    user_place,
)
from ppfleet.watchdog.recorder import Flight

if TYPE_CHECKING:
    from ppfleet.distributed.world import World


class Watch:
    """What this rank knows of the others, and they of it."""

    def __init__(self, world: World, flight: Flight, limits: Limits | None = None) -> None:
        self.world, self.flight, self.limits = world, flight, limits or Limits()
        self.doom: Event | None = None  # why this job cannot go on
        self.left: dict[int, Event] = {}  # ranks that ended in order: after which operation, and why
        self.wanted = False  # whether somebody got SIGTERM and all should save and end
        self._told = False  # and whether everybody knows
        self.in_loop = False  # whether there will be a step boundary
        self.stacks: Path | None = None  # where to write the stacks of all threads
        self._taken = False  # whether the main thread has been told
        self._deadline = self._to_save = float("inf")
        self._bye: Event | None = None
        self._said_bye = threading.Event()
        self.unsaved = False  # whether there are steps that no checkpoint has
        self._pid, self._launcher = os.getpid(), launcher()
        self._trainer = threading.get_ident()
        self._suspect: tuple[Any, float] = (None, 0.0)  # what the next beats must confirm, and since when
        self._hub = Hub(world, {"pid": self._pid, "boot": this_host()})
        self._beats = {rank: Beat(rank) for rank in range(world.size)}
        self._health = Health()
        self._began = 0.0
        self._thread = threading.Thread(target=self._run, name="ppfleet watch", daemon=True)
        atexit.register(self._leave)  # from now on: a rank may fail before there is anything to watch

    # What the main thread calls

    def listen(self) -> int:
        """Rank 0, before the roll call: the port at which the others will find its watch."""
        return self._hub.listen()

    def start(self, token: str = "", port: int = 0) -> None:
        """After the roll call: connect to rank 0's watch, and watch."""
        self._began = time.monotonic()
        self._beats = {rank: Beat(rank, self._began) for rank in self._beats}
        self._hub.join(token, port)
        self._thread.start()
        this = weakref.ref(self)  # what is registered there stays for ever
        os.register_at_fork(after_in_child=lambda: watch._forget() if (watch := this()) else None)

    def take_sigterm(self) -> None:
        """From now on SIGTERM means: save at the next step boundary, and end. A handler of the script's own stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        own = signal.getsignal(signal.SIGTERM)
        if callable(own) and getattr(own, "__func__", None) is not Watch._on_sigterm:
            signal.signal(signal.SIGTERM, own)  # Paddle, when it was imported, took it away
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if (before := signal.set_wakeup_fd(self._hub.wakeup_fd, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.wanted = True
        self._hub.wake()
        if self.doom or any(gone.code == Code.EXCEPTION for gone in self.left.values()):
            raise Stalled("SIGTERM after the job had failed")
        if not self.in_loop and not self.unsaved:
            self.preempted("SIGTERM outside of the training loop: nothing to save")

    def preempted(self, text: str) -> NoReturn:
        """The end after SIGTERM; whoever waits for this rank ends likewise."""
        event = self._own(Code.PREEMPTED, text=text)
        self.flight.record(replace(event, code=Code.TERMINATED) if self.unsaved else event)
        self.close(event)
        raise Preempted(text, 128 + signal.SIGTERM if self.unsaved else PREEMPTED)

    def check(self, what: str, operation: int = 0, missing: Collection[int] = ()) -> None:
        """Raise if the job is doomed, or if a rank has left that this operation would wait for: because it did not come
        there, or because it came and is `missing` in the middle of it."""
        if self.doom is not None:
            self._taken = True
            text = f"{what} failed on {self.world.name()}: {render.text(self.doom)}"
            if self.doom.code in LOST:
                raise CommError(text, code="peer_lost", ranks=[self.doom.rank], operation=operation)
            raise Stalled(text, operation=operation)
        for rank, gone in list(self.left.items()):
            if gone.operation.number < operation or rank in missing:
                self._taken = True
                text = f"{what} cannot go on: {self.world.name(rank)} left before it ({render.reason(gone)})"
                if gone.code == Code.PREEMPTED:
                    self.preempted(text)
                raise CommError(text, code="peer_lost", ranks=[rank], operation=operation)

    def settled(self, seconds: float, operation: int) -> bool:
        """Whether the watch learns within that time why an operation failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.doom or any(gone.operation.number < operation for gone in list(self.left.values())):
                return True
            time.sleep(0.02)
        return False

    def close(self, event: Event | None = None) -> None:
        """Say goodbye to those who may wait for this rank, and watch no more."""
        if self._bye is None:
            self._bye = event or self._own(Code.ENDED)
            self._hub.wake()
            if self._thread.is_alive():
                self._said_bye.wait(2.0)

    def stop(self) -> None:
        """A job that is alone is over, and the process may go on to another."""
        self.flight.record(self._own(Code.ENDED))
        self.close()
        if self._thread.is_alive():
            self._thread.join(2.0)
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            atexit.unregister(self._leave)
            self._hub.end()

    def _leave(self) -> None:
        """At exit: last words."""
        if os.getpid() != self._pid:
            return  # a child that was forked
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as it ends, Python would make it deadly again
        cause = getattr(sys, "last_value", None)
        if cause is not None:
            event = events.exception(cause, self.world.rank, self.world.host, user_line(cause.__traceback__))
            event = replace(event, operation=self._own(Code.EXCEPTION).operation)
            self.flight.record(event)
            self.close(event)
        self.flight.record(self._own(Code.ENDED))
        self.close()

    def _own(self, code: Code, **fields: Any) -> Event:
        """About this rank itself, after its newest operation."""
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
        while not self._said_bye.is_set():
            try:
                self._hear()
                now = time.monotonic()
                if now - beat >= BEAT:
                    beat = now
                    self.flight.pulse(self._health.pulse())
                    self._tell()
                self._look(now)
            except Exception:  # noqa: BLE001 - a watch that ended would look like a dead rank to the others
                if not said and not sys.is_finalizing():
                    said = True
                    _say(f"watchdog error on {self.world.name()}, continuing: {traceback.format_exc()}")
                time.sleep(0.25)
            if self._bye is not None:
                self._hub.send(left=_sent(self._bye))
                self._said_bye.set()

    def _look(self, now: float) -> None:
        """What may have to be done without anybody saying anything."""
        if self.doom is None and self._bye is None:
            if self._launcher is not None and is_gone(self._launcher):
                self._pronounce(self._own(Code.ORPHAN, launcher=self._launcher.pid))
            elif self.world.first:
                self._judge_others(now)
            elif 0 not in self.left:
                self._judge_first(now)
        if self.doom is not None and not self._taken and now > self._deadline and self._must_go():
            self._end()
        if now > self._to_save and not any(entry.kind == Kind.SAVE for entry in list(self.flight.open)):
            self._to_save = float("inf")
            _say(f"no step boundary within {SAVE_AFTER_SIGTERM:.0f} s of SIGTERM: Paddle's launcher kills after 30 s")

    def _judge_others(self, now: float) -> None:
        unseen = set(range(self.world.size)) - set(self._hub.processes)
        if unseen and now - self._began > UNREACHABLE:
            rank = min(unseen)
            self._pronounce(Event(Code.KILLED, rank, self.world.host_of(rank), fields={"early": True}))
            return
        present = [self._seen(rank, beat, now) for rank, beat in self._beats.items() if rank not in self.left]
        event = diagnose(present, now, self.limits)
        if event is not None and (len(event.waiting) < 2 or self._confirmed(present, now)):
            self._pronounce(event)

    def _confirmed(self, beats: list[Beat], now: float) -> bool:
        """Whether beats that came after the suspicion say the same: a rank may just have been held up for a while."""
        waiting = [(beat.rank, beat.operations) for beat in beats if beat.waits]
        if waiting != self._suspect[0]:
            self._suspect = (waiting, now)
        return now - self._suspect[1] > 1.5 * BEAT

    def _judge_first(self, now: float) -> None:
        """Rank 0 judges the others; whether it is alive itself, the others must see."""
        quiet = now - self._beats[0].heard
        waits = [entry.kind for entry in list(self.flight.open) if entry.waits]
        limits = self.limits
        if quiet > (limits.stall if Kind.COLLECTIVE in waits else limits.silent if waits else limits.long) + 1:
            self._doomed(self._seen(0, self._beats[0], now).event(Code.STALL, now))

    def _seen(self, rank: int, beat: Beat, now: float) -> Beat:
        """With what can be seen of a rank that does not answer, if it is of this host: whether it is stopped."""
        who = self._hub.processes.get(rank, {})
        silent = now - beat.heard > 3 * BEAT and who.get("boot") == this_host()
        stopped = who["pid"] if silent and process_state(who["pid"])[0] == "stopped" else 0
        return replace(beat, host=self.world.host_of(rank), stopped=stopped)

    def _must_go(self) -> bool:
        """Where a peer was lost, whoever does not wait for it may come to its own end, or to the next `check`."""
        if self.doom is not None and self.doom.code in LOST:
            inside = self.flight.open[-1:]
            return bool(inside and inside[0].waits and time.monotonic() - inside[0].began > RAISE)
        return True

    def _pronounce(self, event: Event) -> None:
        """Tell everybody (through rank 0), and act on it here."""
        self._hub.send(doom=_sent(event))
        self._doomed(event)

    def _doomed(self, event: Event) -> None:
        if self.doom is not None or self._bye is not None:
            return
        self._deadline = time.monotonic() + RAISE
        self.flight.record(event)
        stacks = self.stacks if event.code not in LOST else None
        if stacks is not None:  # before the main thread can know, and raise
            with contextlib.suppress(OSError), stacks.open("w") as out:
                faulthandler.dump_traceback(out, all_threads=True)
        self.doom = event
        _say(render.text(event))
        if stacks is not None and event.rank in (-1, self.world.rank):
            _say(f"the Python stacks of {self.world.name()} are in {stacks}")

    def _end(self) -> None:
        _aside(sys.stdout.flush)
        _aside(sys.stderr.flush)
        os._exit(STALLED)

    # What it says

    def _tell(self) -> None:
        beat = self._beats[self.world.rank] = self._beat()
        self._hub.send(beat={} if self.world.first else asdict(beat))

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
            recent=tuple(flight.recent) if waits else (), busy=busy,
        )  # fmt: skip

    # What it hears

    def _hear(self) -> None:
        try:
            for rank, message in self._hub.hear(0.25):
                if rank >= 0:
                    self._take(rank, message)
                elif signal.SIGTERM in message["signals"] or self.wanted:
                    self._want(f"SIGTERM came to {self.world.name()}")
        except Lost as lost:
            self._lost(lost.number, lost.unreachable)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if isinstance(process := message.get("process"), dict):
            self._hub.processes[rank] = process
            self._beats[rank] = Beat(rank, time.monotonic())
        if "beat" in message:
            told = message["beat"] or asdict(Beat(rank))
            self._beats[rank] = Beat.from_json(told, rank=rank, heard=time.monotonic())
        if "left" in message:
            left = Event.from_json(message["left"])
            self.left[left.rank] = left
            self._relay(rank, message)
        if "doom" in message:
            self._relay(rank, message)
            self._doomed(self._seen_here(Event.from_json(message["doom"])))
        if "wanted" in message:
            self._want(message["wanted"])

    def _relay(self, source: int, message: dict[str, Any]) -> None:
        if self.world.first:
            self._hub.send(but=source, **message)

    def _want(self, why: str) -> None:
        """All ranks save at the next step boundary; said once."""
        if self._told:
            return
        self.wanted = self._told = True
        self._to_save = time.monotonic() + SAVE_AFTER_SIGTERM
        self.flight.mark(Mark.SIGTERM, why)
        self._hub.send(wanted=why)
        if self.in_loop and self.doom is None:
            _say(f"{why}: all ranks save at the next step boundary and end with exit code {PREEMPTED}")

    def _lost(self, rank: int, unreachable: bool) -> None:
        """A connection ended without a goodbye."""
        if rank in self.left or self._bye is not None:
            return
        who, last = self._hub.processes.get(rank, {}), self._beats[rank]
        code, fields = (Code.HOST, {}) if unreachable else how_it_ended(who, self._health.oom_kills)
        inside = replace(last.inside, step=last.step)
        event = Event(code, rank, self.world.host_of(rank), inside, fields={**fields, **who})
        if code == Code.EXIT and not fields["exit_code"]:  # in order, but without goodbye: os._exit
            ended = Event(Code.ENDED, rank, event.host, Operation(last.operations, step=last.step))
            self._take(rank, {"left": ended.to_json()})
        elif self.world.first:
            self._pronounce(event)
        else:
            self._doomed(event)

    def _seen_here(self, event: Event) -> Event:
        """A lost rank may be of this host: then how it ended can be seen here."""
        if event.code == Code.KILLED and "signal" not in event.fields:
            code, fields = how_it_ended(event.fields, self._health.oom_kills)
            return replace(event, code=code, fields={**event.fields, **fields})
        return event


def _sent(event: Event) -> dict[str, Any]:
    """For the other ranks: of a long message, its beginning."""
    fields = {**event.fields, "text": str(event.fields["text"])[:500]} if "text" in event.fields else event.fields
    return replace(event, fields=fields).to_json()


def _aside(work: Callable[[], object]) -> None:
    """Do it in another thread, and do not wait long: whoever should read our output may not."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(1.0)


def _say(text: str) -> None:
    _aside(lambda: log.say(text))
