"""The part of the doctor that needs all hosts: who reaches whom at which port, what differs, how fast, how far apart.

Every host answers at its own ports while the others try them; each tells the first host what it found, and the first
tells all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import threading
import time
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from ppfleet import limits
from ppfleet.cluster import hosts
from ppfleet.cluster.link import Link, Lost, Peers, connect
from ppfleet.cluster.rendezvous import Meeting
from ppfleet.commands.doctor import checks
from ppfleet.commands.doctor.checks import ERROR, OK, WARNING, Finding
from ppfleet.errors import CommError

_PROBE = 4 << 20  # bytes sent to measure the bandwidth
_ROUNDS = 20


class Examination:
    def __init__(self, nodes: list[str], host: str, o: Namespace) -> None:
        self.nodes, self.host, self.o = nodes, host, o
        self.ports = list(range(o.start_port, o.start_port + o.processes))
        node = nodes.index(host)
        digest = "doctor " + ",".join(nodes)
        self.meeting = Meeting(nodes, node, o.start_port - 1, digest, o.wait, _say, "list of hosts")

    def run(self, local: list[Finding]) -> list[Finding]:
        """All hosts' findings: those they made by themselves, about each other, and what differs."""
        token = self.meeting.start(lambda token: None)
        doors = [_Door(self.host, port, token) for port in self.ports]
        try:
            self.meeting.gather("doors", self.nodes)  # all are listening now
            mine = self._look(token, local)
            self.meeting.gather("looked", self.nodes)  # nobody tries a door any more
            return self._share(mine)
        finally:
            for door in doors:
                door.close()
            self.meeting.close()

    def _look(self, token: str, local: list[Finding]) -> dict[str, Any]:
        """This host's facts, and what it saw of itself and of the others."""
        found = list(local)
        for name in self.nodes:
            if name == self.host:
                continue
            blocked = [port for port in self.ports if not _knock(name, port, token)]
            if blocked:
                text = f"{name} does not answer at {', '.join(map(str, blocked))}"
                fix = f"open ports {self.ports[0]} to {self.ports[-1]} between the machines, in both directions"
                found.append(Finding(ERROR, "reachable", self.host, text, fix))
                continue
            found.append(Finding(OK, "reachable", self.host, f"{name} answers at {self.ports[0]} to {self.ports[-1]}"))
            if name == self.nodes[0] or self.host == self.nodes[0]:
                found += _measure(self.host, name, self.ports[0], token)
        return {"facts": checks.facts(self.o), "findings": [asdict(finding) for finding in found]}

    def _share(self, mine: dict[str, Any]) -> list[Finding]:
        """All hosts' findings on every host; the first one adds what differs between them."""
        everybodys = self.meeting.exchange(json.dumps(mine))
        reports = {name: json.loads(text) for name, text in zip(self.nodes, everybodys)}
        found = [Finding(**finding) for report in reports.values() for finding in report["findings"]]
        return [*found, *compare({name: report["facts"] for name, report in reports.items()})]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare(facts: dict[str, dict[str, str]]) -> list[Finding]:
    """What is not the same everywhere, with a word on what to do about it."""
    fixes = {
        "code": "bring all machines to the same commit",
        "data": "copy the data set to all machines",
        "config": "copy the file to all machines",
        "cards": "give --gpus that every machine has",
        "processes": "give the same --gpus or --nproc_per_node everywhere",
    }
    found = []
    for name in next(iter(facts.values())):
        values = {host: each.get(name, "") for host, each in facts.items()}
        if len(set(values.values())) > 1:
            shown = "; ".join(f"{host}: {value or 'nothing'}" for host, value in values.items())
            found.append(
                Finding(ERROR, name, "", f"not the same: {shown}", fixes.get(name, "install the same version"))
            )
        elif any(values.values()):
            found.append(Finding(OK, name, "", f"the same everywhere: {next(iter(values.values()))}"))
    return found


class _Door:
    """Answers at one port, to those who know the token: the time, and that a bounded number of bytes has come."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.token = token
        self.peers = Peers(self._greet, 1)
        try:
            self.peers.listen(next(iter(hosts.resolve(host)), host), port)
        except OSError as failure:
            raise CommError(f"cannot listen at {host} port {port}: {failure.strerror}") from None
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _greet(self, peer: Link, hello: dict[str, Any]) -> int | None:
        return next(self._numbers) if hello.get("hello") == self.token else None

    def _serve(self) -> None:
        while not self._closed:
            for number, _ in self.peers.hear(0.2):
                link = self.peers.take(number)  # a slow one must not hold the others up
                threading.Thread(target=_serve, args=(link,), daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._thread.join(10)
        self.peers.close()


def _serve(link: Link) -> None:
    """Answer each message with the time, until the other end closes the connection."""
    with contextlib.suppress(Lost, OSError, ValueError), contextlib.closing(link):
        link.send(time=time.time())
        while messages := link.receive(10.0):
            link.send(time=time.time())
            if "take" in messages[0]:
                count = min(int(messages[0]["take"]), _PROBE)
                while count > 0 and (piece := link.peer.recv(min(count, 65536))):
                    count -= len(piece)
                link.send(done=True)


def _open(host: str, port: int, token: str) -> Link:
    link = connect(host, port, {"hello": token})
    _answer(link)
    return link


def _answer(link: Link) -> dict[str, Any]:
    deadline = time.monotonic() + limits.DOCTOR_CONNECT
    while time.monotonic() < deadline:
        if messages := link.receive(limits.DOCTOR_CONNECT):
            return messages[0]
    raise OSError("no answer")


def _knock(host: str, port: int, token: str) -> bool:
    """Whether the doctor's own door answers there, and not somebody else's."""
    with contextlib.suppress(OSError, Lost):
        _open(host, port, token).close()
        return True
    return False


def _measure(here: str, host: str, port: int, token: str) -> list[Finding]:
    """Latency, clock difference and bandwidth to a host, in a moment."""
    try:
        with contextlib.closing(_open(host, port, token)) as link:
            trips, skews = [], []
            for _ in range(_ROUNDS):
                began = time.time()
                link.send(ask="time")
                theirs = float(_answer(link)["time"])
                ended = time.time()
                trips.append(ended - began)
                skews.append(theirs - (began + ended) / 2)
            link.send(take=_PROBE)
            _answer(link)  # from here on it reads bytes
            began = time.perf_counter()
            link.peer.settimeout(10)
            link.peer.sendall(bytes(_PROBE))
            _answer(link)
            taken = time.perf_counter() - began
    except (OSError, Lost) as failure:
        return [Finding(WARNING, "speed", here, f"to {host}: {failure}", "look at the network between them")]
    skew = statistics.median(skews)
    speed = f"{_PROBE / taken / 1e6:.0f} MB/s, {statistics.median(trips) * 1e3:.2f} ms there and back"
    found = [Finding(OK, "speed", here, f"to {host}: {speed}")]
    if abs(skew) > limits.DOCTOR_SKEW:
        fix = "set the clocks by NTP: logs of several machines are compared by their times"
        found.append(Finding(WARNING, "clock", here, f"{host} is {skew:+.1f} s off", fix))
    else:
        found.append(Finding(OK, "clock", here, f"{host} within {abs(skew):.3f} s"))
    return found
