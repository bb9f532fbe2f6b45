"""The part of the doctor that needs all hosts: who reaches whom at which port, what differs, how fast, how far apart.

Every host answers at its own ports while the others try them; each tells the first host what it found, and the first
tells all.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ppfleet import limits
from ppfleet.cluster import hosts
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
    """Answers at one port, to those who know the token: an echo, a sink for a bounded number of bytes, the time."""

    def __init__(self, host: str, port: int, token: str) -> None:
        address = next(iter(hosts.resolve(host)), host)
        self.token = token
        self.listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind((address, port))
        except OSError as failure:
            raise CommError(f"cannot listen at {host} port {port}: {failure.strerror}") from None
        self.listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                line, _ = self.listener.accept()
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with suppress(OSError, ValueError), line:
            line.settimeout(10)
            stream = line.makefile("rwb")
            if stream.readline(64).decode().strip() != self.token:
                return
            while command := stream.readline(64).decode().split():
                if command[0] == "time":
                    stream.write(f"{time.time()!r}\n".encode())
                elif command[0] == "take":
                    left = min(int(command[1]), _PROBE)
                    while left > 0 and (piece := stream.read(min(left, 65536))):
                        left -= len(piece)
                    stream.write(b"done\n")
                else:
                    stream.write(b"here\n")
                stream.flush()

    def close(self) -> None:
        self.listener.close()


def _open(host: str, port: int, token: str) -> socket.socket:
    line = socket.create_connection((host.strip("[]"), port), timeout=limits.DOCTOR_CONNECT)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(token.encode() + b"\n")
    return line


def _knock(host: str, port: int, token: str) -> bool:
    """Whether the doctor's own door answers there, and not somebody else's."""
    with suppress(OSError), _open(host, port, token) as line:
        line.sendall(b"echo\n")
        return line.recv(64) == b"here\n"
    return False


def _measure(here: str, host: str, port: int, token: str) -> list[Finding]:
    """Latency, clock difference and bandwidth to a host, in a moment."""
    try:
        with _open(host, port, token) as line:
            stream = line.makefile("rwb")
            trips, skews = [], []
            for _ in range(_ROUNDS):
                began = time.time()
                stream.write(b"time\n")
                stream.flush()
                theirs = float(stream.readline(64))
                ended = time.time()
                trips.append(ended - began)
                skews.append(theirs - (began + ended) / 2)
            began = time.perf_counter()
            stream.write(f"take {_PROBE}\n".encode() + bytes(_PROBE))
            stream.flush()
            done = stream.readline(64) == b"done\n"
            taken = time.perf_counter() - began
    except (OSError, ValueError) as failure:
        return [Finding(WARNING, "speed", here, f"to {host}: {failure}", "look at the network between them")]
    if not done:
        return [Finding(WARNING, "speed", here, f"to {host}: the connection broke", "look at the network between them")]
    skew = statistics.median(skews)
    speed = f"{_PROBE / taken / 1e6:.0f} MB/s, {statistics.median(trips) * 1e3:.2f} ms there and back"
    found = [Finding(OK, "speed", here, f"to {host}: {speed}")]
    if abs(skew) > limits.DOCTOR_SKEW:
        fix = "set the clocks by NTP: logs of several machines are compared by their times"
        found.append(Finding(WARNING, "clock", here, f"{host} is {skew:+.1f} s off", fix))
    else:
        found.append(Finding(OK, "clock", here, f"{host} within {abs(skew):.3f} s"))
    return found
