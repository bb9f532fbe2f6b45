"""The judge: a process of rank 0's host that hears all ranks, decides that the job must end, and says why.

A rank whose Python is blocked by one call, as by a read from a device that waits for another rank, can neither beat nor
hear. So the judge is not a thread of a rank. It also ends ranks of its host that cannot do so themselves.
Pure: plain sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleet import limits
from ppfleet.cluster.link import Link, Lost, Peers
from ppfleet.watchdog import render
from ppfleet.watchdog.diagnosis import Beat, Limits, diagnose
from ppfleet.watchdog.events import LOST, Code, Event, Operation
from ppfleet.watchdog.process import how_it_ended, oom_kills, process_state, this_host

if TYPE_CHECKING:
    from ppfleet.distributed.world import World


def start(world: World, rules: Limits, token: str, process: dict[str, Any]) -> int:
    """Rank 0 starts it: the port where all ranks will find it. `process` is rank 0's."""
    host = world.master.rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=world.size + 64) as listener:
        judge = subprocess.Popen(
            [sys.executable, "-m", "ppfleet.watchdog.judge", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            cwd=Path(__file__).parents[2],  # where this very package is
        )
        hosts = [world.host_of(rank) for rank in range(world.size)]
        known = {"hosts": hosts, "rules": asdict(rules), "token": token, "process": process}
        with contextlib.suppress(OSError), judge.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(json.dumps(known).encode())  # not as an argument, which everybody on this machine can read
        judge.returncode = 0  # it outlives this process on purpose: no ResourceWarning
        return int(listener.getsockname()[1])


class Judge:
    """What is known of all ranks. `hosts` are their addresses, `peers` accepts their connections."""

    def __init__(self, hosts: list[str], rules: Limits, token: str, process: dict[str, Any]) -> None:
        self.hosts, self.rules, self.token = hosts, rules, token
        self.processes: dict[int, dict[str, Any]] = {0: process}
        self.verdict: Event | None = None
        self.departed: dict[int, Event] = {}  # ranks that ended in order
        self.joined: set[int] = set()
        self.peers = Peers(self.greet, len(hosts), unreachable=limits.UNREACHABLE)
        self._came = float("inf")  # when the first rank joined: the others have met it, and come at once
        self._beats = {rank: Beat(rank, time.monotonic(), warm=False) for rank in range(len(hosts))}
        self._suspect: tuple[Any, float] = (None, 0.0)  # what the next beats must confirm, and since when
        self._oom_kills = oom_kills()
        self._end_others = float("inf")  # when ranks that have not ended after the verdict are killed

    def greet(self, peer: Link, hello: dict[str, Any]) -> int | None:
        """Only a process that knows the token belongs to the job."""
        rank, process = hello.get("rank"), hello.get("process")
        if hello.get("hello") != self.token or not isinstance(rank, int) or not isinstance(process, dict):
            return None
        if not 0 <= rank < len(self.hosts) or rank in self.joined or not isinstance(process.get("pid"), int):
            return None
        self._came = min(self._came, time.monotonic())
        self.joined.add(rank)
        self.processes[rank] = process
        self._beats[rank] = Beat(rank, time.monotonic(), warm=False)
        peer.send(process=self.processes[0])
        for event in self.departed.values():
            peer.send(departed=event.to_json())
        if self.verdict is not None:
            peer.send(verdict=self.verdict.to_json())
        return rank

    def run(self) -> None:
        beat = 0.0
        while not self._done():
            self.hear(0.25)
            now = time.monotonic()
            if now - beat >= limits.BEAT:
                beat = now
                self._oom_kills = oom_kills()
                self.peers.send(beat={})
            self.look(now)

    def _done(self) -> bool:
        """All ranks that came are gone, and nobody else comes: some may have connected before this process started."""
        if self.peers.links:
            return False
        if not self.joined:  # the ranks did not meet
            return process_state(self.processes[0]["pid"])[0] == "gone"
        return len(self.joined) == len(self.hosts) or time.monotonic() - self._came > limits.UNREACHABLE

    def hear(self, seconds: float) -> None:
        try:
            for rank, message in self.peers.hear(seconds):
                self.handle(rank, message)
        except Lost as lost:
            self.lost(lost.number, lost.unreachable)

    def handle(self, rank: int, message: dict[str, Any]) -> None:
        if "beat" in message:
            self._beats[rank] = Beat.from_json(message["beat"], rank=rank, heard=time.monotonic())
        if "departed" in message:
            self.departed[rank] = Event.from_json(message["departed"])
            self.peers.send(but=rank, departed=message["departed"])
        if "verdict" in message:
            self.verdict = self.verdict or Event.from_json(message["verdict"])
            self.peers.send(but=rank, verdict=message["verdict"])
        if "stop" in message:
            self.peers.send(but=rank, stop=message["stop"])

    def lost(self, rank: int, unreachable: bool) -> None:
        """A connection ended, and the rank had not said that it would exit."""
        if rank in self.departed:
            return
        process, last = self.processes.get(rank, {}), self._beats[rank]
        code, fields = (Code.HOST, {}) if unreachable else how_it_ended(process, self._oom_kills)
        event = Event(code, rank, self.hosts[rank], fields={**fields, **process})
        if code == Code.EXIT and not fields["exit_code"]:  # in order, but by os._exit
            ended = Event(Code.ENDED, rank, event.host, Operation(last.operations, step=last.step))
            self.handle(rank, {"departed": ended.to_json()})
        else:
            self.announce(event)

    def look(self, now: float) -> None:
        """What is due without any message."""
        if self.verdict is not None:
            if now > self._end_others:
                self._end_silent(now)
            return
        unseen = set(range(len(self.hosts))) - self.joined
        if unseen and now - self._came > limits.UNREACHABLE:
            rank = min(unseen)
            self.announce(Event(Code.KILLED, rank, self.hosts[rank], fields={"early": True}))
            return
        present = [self.seen(rank, beat, now) for rank, beat in self._beats.items() if rank not in self.departed]
        event = diagnose(present, now, self.rules)
        if event is not None and (len(event.waiting) < 2 or self._confirmed(present, now)):
            self.announce(event)

    def _confirmed(self, beats: list[Beat], now: float) -> bool:
        """Whether later beats say the same: a rank may just have been delayed."""
        waiting = [(beat.rank, beat.operations) for beat in beats if beat.waits]
        if waiting != self._suspect[0]:
            self._suspect = (waiting, now)
        return now - self._suspect[1] > limits.BEAT_NEW

    def seen(self, rank: int, beat: Beat, now: float) -> Beat:
        """The beat, and whether the process is stopped if it is silent and on this host."""
        process = self.processes.get(rank, {})
        silent = now - beat.heard > limits.BEAT_FRESH and process.get("boot") == this_host()
        stopped = process["pid"] if silent and process_state(process["pid"])[0] == "stopped" else 0
        return replace(beat, host=self.hosts[rank], stopped=stopped)

    def announce(self, event: Event) -> None:
        """Tell all ranks why the job ends. The first cause counts: what follows is a consequence."""
        if self.verdict is None:
            self.verdict = event
            self._end_others = time.monotonic() + limits.RAISE + limits.END_SILENT
            self.peers.send(verdict=event.to_json())

    def _end_silent(self, now: float) -> None:
        """Kill ranks of this host that do not hear the verdict: stopped, or Python is blocked in one call."""
        self._end_others = float("inf")
        if self.verdict is None or self.verdict.code in LOST:
            return
        for rank in list(self.peers.links):
            process, quiet = self.processes[rank], now - self._beats[rank].heard
            if quiet > limits.BEAT_LOST and process.get("boot") == this_host():
                name = render.name(rank, self.hosts[rank])
                print(f"[ppfleet] {render.text(self.verdict)}; {name} does not answer and is killed", file=sys.stderr)
                with contextlib.suppress(OSError):
                    os.kill(process["pid"], signal.SIGKILL)


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the ranks, after which this ends as well
        signal.signal(number, signal.SIG_IGN)
    known = json.load(sys.stdin)
    judge = Judge(known["hosts"], Limits(**known["rules"]), known["token"], known["process"])
    judge.peers.accept_from(socket.socket(fileno=descriptor))
    judge.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
