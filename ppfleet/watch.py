"""The watch: a thread of each rank that notices death and standstill, tells the others who it was, and ends the job.

Every rank stays connected to rank 0's watch and tells it once a second what it is in (`Beat`); rank 0 judges (`judge`).
A process that dies closes its connection, so its end is known at once; a host that vanishes is noticed by TCP itself
within seconds; a rank that stands still is the one who has not come where the others wait. Blocking calls of Paddle
free the interpreter, so a thread runs where a signal handler would not.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ppfleet import log
from ppfleet.errors import PREEMPTED, STALLED, CommError, Preempted, Stalled
from ppfleet.flight import Flight, Pulse
from ppfleet.judge import BLOCKED, LONG, Beat, Limits, judge, place
from ppfleet.meet import Link
from ppfleet.process import launcher, oom_kills, process_state, this_host, user_line, user_place
from ppfleet.world import World

_EVERY = 1.0  # seconds between two beats
_UNREACHABLE = 7.0  # seconds without an answer from a host's kernel
_GRACE = 2.0  # seconds for the main thread to raise, before the watch ends the process
_TO_SAVE = 26.0  # seconds from SIGTERM to the end: Paddle's launcher kills after 30


@dataclass(frozen=True)
class Doom:
    """Why this job cannot go on."""

    kind: str  # lost, stall, mismatch, orphan
    text: str
    culprit: int = -1
    facts: dict[str, Any] = field(default_factory=dict)


class Watch:
    """What this rank knows of the others, and they of it. Everything but `check` and `settled` runs in its thread."""

    def __init__(self, world: World, flight: Flight, limits: Limits | None = None) -> None:
        self.world, self.flight, self.limits = world, flight, limits or Limits()
        self.doom: Doom | None = None
        self.left: dict[int, dict[str, Any]] = {}  # ranks that ended in order: when, and why
        self.wanted = False  # whether somebody got SIGTERM and all should save and end
        self.in_loop = False  # whether there will be a step boundary
        self.stacks: Path | None = None  # where to write the stacks of all threads
        self._taken = False  # whether the main thread has been told
        self._deadline = self._term_deadline = float("inf")
        self._bye: dict[str, Any] | None = None
        self._said_bye = threading.Event()
        self._links: dict[int, Link] = {}
        self._strangers: list[Link] = []
        self._beats: dict[int, Beat] = {}
        self._who: dict[int, dict[str, Any]] = {}  # process and host of each rank, on rank 0
        self._listener: socket.socket | None = None
        self._select = selectors.DefaultSelector()
        self._process = psutil.Process()
        self._oom = oom_kills()
        self._idle_cpu: tuple[float, float, float] = (0.0, 0.0, 0.0)  # progress, time, CPU seconds at the first look
        self._main = threading.main_thread().ident or 0
        self.launcher = launcher()
        self._thread = threading.Thread(target=self._run, name="ppfleet watch", daemon=True)
        atexit.register(self._leave)  # from now on: a rank may fail before there is anything to watch
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._select.register(self._wake, selectors.EVENT_READ, None)

    # What the main thread calls

    def listen(self) -> int:
        """Rank 0, before the roll call: the port at which the others will find its watch."""
        host = self.world.master.rpartition(":")[0].strip("[]")
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=self.world.size
        )
        return int(self._listener.getsockname()[1])

    def start(self, run: str = "", port: int = 0) -> None:
        """After the roll call: connect to rank 0's watch, and watch."""
        self._beats = {rank: Beat(rank, time.monotonic()) for rank in range(self.world.size)}
        self._who[self.world.rank] = {"pid": os.getpid(), "boot": this_host()}
        if self._listener is not None:
            self._select.register(self._listener, selectors.EVENT_READ, self._listener)
        elif not self.world.alone:
            self._join(run, port)
        self._run_token = run
        self._thread.start()
        os.register_at_fork(after_in_child=self._forget)

    def take_sigterm(self) -> None:
        """From now on SIGTERM means: save at the next step boundary, and end. A handler of the script's own stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        if callable(own := signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, own)  # Paddle, when it was imported, took it away
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if (before := signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.wanted = True
        self._wake_up()
        if self.doom or any(each["kind"] == "exception" for each in self.left.values()):
            raise Stalled("SIGTERM after the job had failed")
        if not self.in_loop:
            self.flight.words("terminated", "SIGTERM where there was nothing to save")
            raise Preempted("SIGTERM outside of the training loop: nothing to save")

    def check(self, what: str, operation: int = 0) -> None:
        """Raise if the job is doomed, or if a rank has left that this operation would wait for."""
        if self.doom is not None:
            self._taken = True
            text = f"{what} failed on {self.world.name()}: {self.doom.text}"
            raise (CommError if self.doom.kind == "lost" else Stalled)(text)
        for rank, gone in self.left.items():
            if gone["operation"] < operation:
                self._taken = True
                raise CommError(
                    f"{what} cannot go on: {self.world.name(rank)} left before it came there ({gone['why'][:500]})"
                )

    def settled(self, seconds: float, operation: int) -> bool:
        """Whether the watch learns within that time why an operation failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.doom or any(gone["operation"] < operation for gone in self.left.values()):
                return True
            time.sleep(0.02)
        return False

    def _leave(self) -> None:
        """At exit: last words, and a goodbye to those who may wait for this rank."""
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(
                    signal.SIGTERM, signal.SIG_IGN
                )  # Python would make it deadly again: this is the end anyway
        cause = getattr(sys, "last_value", None)
        kind, why, where = "ended", "it ended", ""
        if cause is not None:
            kind, why, where = "exception", f"{type(cause).__name__}: {cause}", user_line(cause.__traceback__)
            self.flight.words(kind, str(cause), type=type(cause).__name__, where=where)
        self.flight.words(kind, "")
        self._bye = {"kind": kind, "why": why, "operation": self.flight.operations}
        self._wake_up()
        if self._thread.is_alive():
            self._said_bye.wait(2.0)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._waker, b"\0")

    def _forget(self) -> None:
        """In a forked child (a loader worker): its parent's connections and signals are not its own."""
        with contextlib.suppress(Exception):
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for link in [*self._links.values(), *self._strangers]:
                link.close()
            if self._listener is not None:
                self._listener.close()

    # The thread

    def _run(self) -> None:
        beat = 0.0
        try:
            while True:
                self._hear(0.25)
                now = time.monotonic()
                if now - beat >= _EVERY:
                    beat = now
                    self._pulse()
                    self._tell()
                self._look(now)
                if self._bye is not None and not self._said_bye.is_set():
                    self._send_all(left={**self._bye, "rank": self.world.rank})
                    self._said_bye.set()
        except Exception:  # noqa: BLE001 - a watch that dies must say so; the training goes on
            if not sys.is_finalizing():
                log.say(
                    f"the watch of {self.world.name()} failed, the job goes on without it: {traceback.format_exc()}"
                )

    def _look(self, now: float) -> None:
        """What may have to be done without anybody saying anything."""
        if self.launcher and os.getppid() != self.launcher and self.doom is None:
            text = f"{self.world.name()} is an orphan: its launcher (process {self.launcher}) is gone"
            self._pronounce(Doom("orphan", text, self.world.rank))
        if self.world.first and self.doom is None and self._bye is None:
            present = [beat for rank, beat in self._beats.items() if rank not in self.left]
            if verdict := judge(present, now, self.limits, self.world.name):
                self._pronounce(self._with_state(Doom(verdict.kind, verdict.text, verdict.culprit)))
        elif not self.world.first and self.doom is None and 0 not in self.left:
            self._judge_first(now)
        if self.doom is not None and not self._taken and now > self._deadline and self._must_go():
            self._end(STALLED)
        if self.wanted and now > self._term_deadline:
            log.say(f"no step boundary within {_TO_SAVE:.0f} s of SIGTERM: ending without a new checkpoint")
            self.flight.words("terminated", "SIGTERM, and no step boundary in time")
            self._end(128 + signal.SIGTERM)

    def _judge_first(self, now: float) -> None:
        """Rank 0 judges the others; whether it is alive itself, the others must see."""
        first = self._beats[0]
        quiet = now - first.heard
        if quiet > (self.limits.long if first.long else self.limits.stall) + 1:
            text = f"{self.world.name(0)} has not answered for {quiet:.0f} s ({BLOCKED})"
            self._doomed(self._with_state(Doom("stall", text, 0)))

    def _must_go(self) -> bool:
        """Where a peer was lost, whoever does not wait for it may come to its own end, or to the next `check`."""
        if self.doom is not None and self.doom.kind == "lost":
            inside = self.flight.open[-1:]
            return bool(inside and inside[0].waits and time.time() - inside[0].entered > _GRACE)
        return True

    def _pronounce(self, doom: Doom) -> None:
        """Tell everybody (through rank 0), and act on it here."""
        self._send_all(doom=asdict(doom))
        self._doomed(doom)

    def _doomed(self, doom: Doom) -> None:
        if self.doom is not None or self._bye is not None:
            return
        self._deadline = time.monotonic() + _GRACE
        self.flight.words(doom.kind, doom.text, culprit=doom.culprit, **doom.facts)
        self.doom = doom
        log.say(doom.text)
        if doom.kind != "lost" and self.stacks is not None:
            with contextlib.suppress(OSError), self.stacks.open("w") as out:
                faulthandler.dump_traceback(out, all_threads=True)
            if doom.culprit in (-1, self.world.rank):
                log.say(f"the Python stacks of {self.world.name()} are in {self.stacks}")

    def _end(self, code: int) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    # What it says

    def _pulse(self) -> None:
        used = sum(self._process.cpu_times()[:2])
        pulse = Pulse(
            time.time(), used, self._process.memory_info().rss, psutil.virtual_memory().available, oom_kills()
        )
        self.flight.pulse(pulse)
        self._oom = pulse.oom_kills

    def _tell(self) -> None:
        beat = self._beat()
        self._beats[self.world.rank] = beat
        if self.world.first:
            self._send_all(beat={"rank": 0, "long": beat.long})
        elif 0 in self._links:
            self._links[0].send(beat=asdict(beat))

    def _beat(self) -> Beat:
        now, flight = time.time(), self.flight
        inside = list(flight.open)
        entry = inside[-1] if inside else None
        idle = max(0.0, now - flight.progress)
        return Beat(
            self.world.rank,
            time.monotonic(),
            flight.operations,
            entry.kind if entry else "",
            entry.what if entry else "",
            entry.detail if entry else "",
            entry.where if entry else "",
            bool(entry and entry.waits),
            max(0.0, now - entry.entered) if entry else 0.0,
            idle,
            user_place(self._main) if idle > 2 * _EVERY else "",
            flight.step,
            any(each.kind in LONG for each in inside),
            self._busy(idle),
        )

    def _busy(self, idle: float) -> float:
        """The share of a core that this process and its workers have used since they were first seen idle."""
        if idle < 10:
            return 1.0
        used = 0.0
        for each in [self._process, *self._process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used += sum(each.cpu_times()[:2])
        now = time.monotonic()
        if self._idle_cpu[0] != self.flight.progress:
            self._idle_cpu = (self.flight.progress, now, used)
            return 1.0
        return (used - self._idle_cpu[2]) / max(1e-3, now - self._idle_cpu[1])

    def _send_all(self, **message: Any) -> None:
        for link in list(self._links.values()):
            link.send(**message)

    # What it hears

    def _join(self, run: str, port: int) -> None:
        host = self.world.master.rpartition(":")[0].strip("[]")
        try:
            link = Link(socket.create_connection((host, port), timeout=10), _UNREACHABLE)
        except OSError as failure:
            raise CommError(
                f"the watch of rank 0 at {host}:{port} did not answer {self.world.name()} ({failure})"
            ) from None
        link.send(hello=run, rank=self.world.rank, **self._who[self.world.rank])
        self._links[0] = link
        self._select.register(link, selectors.EVENT_READ, link)

    def _hear(self, seconds: float) -> None:
        for key, _ in self._select.select(seconds):
            if key.data is None:
                self._signalled()
            elif key.data is self._listener and self._listener is not None:
                self._strangers.append(Link(self._listener.accept()[0], _UNREACHABLE))
                self._select.register(self._strangers[-1], selectors.EVENT_READ, self._strangers[-1])
            else:
                self._hear_link(key.data)

    def _signalled(self) -> None:
        with contextlib.suppress(OSError):
            got = os.read(self._wake, 4096)
            if signal.SIGTERM in got or (self.wanted and self._term_deadline == float("inf")):
                self._want(f"SIGTERM came to {self.world.name()}")

    def _want(self, why: str) -> None:
        """All ranks save at the next step boundary; said once."""
        if self._term_deadline == float("inf"):
            self.wanted = True
            self._term_deadline = time.monotonic() + _TO_SAVE
            self.flight.mark("SIGTERM", why)
            self._send_all(wanted=why)
            if self.in_loop and self.doom is None:
                log.say(f"{why}: all ranks save at the next step boundary and end with exit code {PREEMPTED}")

    def _hear_link(self, link: Link) -> None:
        rank = next((number for number, other in self._links.items() if other is link), -1)
        try:
            for message in link.receive():
                rank = self._take(link, rank, message)
        except EOFError as end:
            self._select.unregister(link)
            link.close()
            if link in self._strangers:
                self._strangers.remove(link)
            if rank >= 0:
                del self._links[rank]
                self._lost(rank, bool(end.args))

    def _take(self, link: Link, rank: int, message: dict[str, Any]) -> int:
        if rank < 0:  # it has to say who it is
            rank = message.get("rank", -1)
            if message.get("hello") != self._run_token or not isinstance(rank, int) or not 0 < rank < self.world.size:
                raise EOFError
            self._strangers.remove(link)
            self._links[rank], self._who[rank] = link, {"pid": message["pid"], "boot": message["boot"]}
            self._beats[rank] = Beat(rank, time.monotonic())
            link.send(who={str(each): facts for each, facts in self._who.items()})
            return rank
        for each, facts in message.get("who", {}).items():
            self._who[int(each)] = facts
        if "beat" in message:
            told = {**message["beat"], "heard": time.monotonic()}
            self._beats[told["rank"]] = Beat(**told)
        if "left" in message:
            self.left[message["left"]["rank"]] = message["left"]
            self._relay(rank, message)
        if "doom" in message:
            self._relay(rank, message)
            self._doomed(self._seen_here(Doom(**message["doom"])))
        if "wanted" in message:
            self._want(message["wanted"])
        return rank

    def _relay(self, source: int, message: dict[str, Any]) -> None:
        for rank, link in list(self._links.items()) if self.world.first else ():
            if rank != source:
                link.send(**message)

    def _lost(self, rank: int, unreachable: bool) -> None:
        """A connection ended without a goodbye."""
        if rank in self.left or self._bye is not None:
            return
        who = self._who.get(rank, {})
        last = self._beats.get(rank)
        where = f", last seen at step {last.step} in {place(last)}" if last and (last.at or last.where) else ""
        name = self.world.name(rank)
        if unreachable:
            text = f"the host of {name} does not answer any more"
            facts: dict[str, Any] = {"how": "unreachable"}
        else:
            facts = self._post_mortem(who)
            if facts.get("how") == "exit" and facts["code"] == 0:
                self.left[rank] = {"kind": "ended", "why": "it ended", "operation": last.operation if last else 0}
                self._relay(rank, {"left": {**self.left[rank], "rank": rank}})
                return
            text = f"{name} {_death(facts)}{where}"
        doom = Doom("lost", text, rank, {**facts, **who})
        if self.world.first:
            self._pronounce(doom)
        else:
            self._doomed(doom)

    def _seen_here(self, doom: Doom) -> Doom:
        """A lost rank may be of this host: then how it ended can be seen here."""
        if doom.kind == "lost" and doom.facts.get("how") == "silent":
            facts = self._post_mortem(doom.facts)
            if facts["how"] != "silent":
                text = f"{self.world.name(doom.culprit)} {_death(facts)}"
                return Doom("lost", text, doom.culprit, {**doom.facts, **facts})
        return doom

    def _post_mortem(self, who: dict[str, Any]) -> dict[str, Any]:
        """How a process of this host ended: Linux keeps that until its parent has asked."""
        before = self._oom
        for _ in range(20) if who.get("boot") == this_host() else ():
            status, code = process_state(who["pid"])
            if status in ("Z", "X"):
                if code & 0x7F:
                    oom = code & 0x7F == signal.SIGKILL and oom_kills() > before
                    return {"how": "killed", "signal": code & 0x7F, **({"oom": True} if oom else {})}
                return {"how": "exit", "code": code >> 8}
            if not status:
                break
            time.sleep(0.02)
        return {"how": "silent"}

    def _with_state(self, doom: Doom) -> Doom:
        """Whether a rank of this host that does not answer is stopped."""
        who = self._who.get(doom.culprit, {})
        if who.get("boot") == this_host() and process_state(who["pid"])[0] in ("T", "t"):
            text = doom.text.replace(BLOCKED, f"its process {who['pid']} is stopped by SIGSTOP")
            return Doom(doom.kind, text, doom.culprit, {"how": "stopped"})
        return doom


def _death(facts: dict[str, Any]) -> str:
    if facts["how"] == "killed":
        number = facts["signal"]
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        return f"was killed by {name}" + (", by Linux for want of memory" if facts.get("oom") else "")
    if facts["how"] == "exit":
        return f"ended with exit code {facts['code']} and without a word"
    return "ended without a word (killed?)"
