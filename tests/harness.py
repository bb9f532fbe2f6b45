"""Runs a function of a test module as one or several real ranks: real processes, real sockets, gloo.

    values = run(my_function, 4, "an argument")       # what each rank returned, or raised

The function gets plain JSON arguments and returns plain JSON data. It runs in processes of its own, so a test
module may be imported without Paddle. Importing Paddle takes two seconds of CPU time, more than most tests need for
the rest: the ranks of a job are forked from processes (`tests/fork_server.py`, one for each rank number) that have
imported it before, except on Paddle 2.6 and where a test sets a variable that is read by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import pty
import runpy
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import psutil
import pytest

from tests import fork_server, simcard

ROOT = Path(__file__).resolve().parent.parent
DEVICE = os.environ.get("PPFLEET_TEST_DEVICE", "cpu")  # of the jobs in tests; "sim": simulated cards (make test-sim)


on_cpus = pytest.mark.skipif(DEVICE != "cpu", reason="about CPUs: gloo, shared memory or CPU operators")
on_cards = pytest.mark.skipif(DEVICE == "cpu", reason="about cards: make test-sim runs it on simulated ones")


@dataclass
class Rank:
    """One rank's end: `value` if its function returned, `error` (class name, message) if it raised."""

    code: int
    output: str
    value: Any = None
    error: tuple[str, str] | None = None


@dataclass
class Running:
    """A job that was started: its processes can be killed, its end waited for."""

    processes: list[subprocess.Popen[bytes] | fork_server.Forked]
    directory: Path
    function: str
    logs: list[Any] = field(default_factory=list)

    def wait(self, timeout: float = 120) -> list[Rank]:
        timeout *= 1 if DEVICE == "cpu" else 2  # threads play the cards, on the same cores
        deadline = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            shown = "\n".join(f"--- rank {r}\n{self.output(r)[-3000:]}" for r in range(len(self.processes)))
            raise AssertionError(f"{self.function} did not end within {timeout} s\n{shown}") from None
        finally:
            self.kill()
        return [self._end(rank) for rank in range(len(self.processes))]

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.poll() is None:
                process.send_signal(number)
                process.wait(30)

    def output(self, rank: int) -> str:
        return (self.directory / f"rank{rank}.out").read_text(errors="replace")

    def _end(self, rank: int) -> Rank:
        path = self.directory / f"rank{rank}.json"
        told = json.loads(path.read_text()) if path.exists() else {}
        error = tuple(told["error"]) if "error" in told else None
        return Rank(self.processes[rank].returncode, self.output(rank), told.get("value"), error)


def start(
    function: Callable[..., Any], ranks: int, directory: Path, *arguments: Any, env: dict[str, str] | None = None
) -> Running:
    """Start `function(*arguments)` on that many ranks; `directory` takes their outputs."""
    fresh = not all(name.startswith(("PADDLE_", "PPFLEET_")) for name in env or ())
    directory.mkdir(parents=True, exist_ok=True)
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(ranks)]
    running = Running([], directory, function.__name__)
    for rank in range(ranks):
        for old in (directory / f"rank{rank}.json", directory / f"rank{rank}.out"):
            old.unlink(missing_ok=True)
        words = [function.__module__, function.__name__, str(directory / f"rank{rank}.json"), json.dumps(arguments)]
        variables, output = environment(rank, endpoints, env), directory / f"rank{rank}.out"
        running.processes.append(fork_server.start(rank, words, variables, output, fresh))
    return running


def run(
    function: Callable[..., Any],
    ranks: int,
    directory: Path,
    *arguments: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run to the end and return what each rank returned; a rank that raised or died fails the test."""
    ends = start(function, ranks, directory, *arguments, env=env).wait(timeout)
    for number, rank in enumerate(ends):
        assert rank.code == 0 and rank.error is None, (
            f"rank {number} of {function.__name__}: {rank.error or rank.code}\n{rank.output[-3000:]}"
        )
    return [rank.value for rank in ends]


def run_raising(
    function: Callable[..., Any], ranks: int, directory: Path, *arguments: Any, timeout: float = 120
) -> list[tuple[str, str]]:
    """Run to the end and return what each rank raised; a rank that returned, or died otherwise, fails the test."""
    ends = start(function, ranks, directory, *arguments).wait(timeout)
    for number, rank in enumerate(ends):
        assert rank.error is not None, (
            f"rank {number} of {function.__name__} raised nothing (code {rank.code})\n{rank.output[-3000:]}"
        )
    return [rank.error for rank in ends if rank.error is not None]


def environment(rank: int, endpoints: list[str], extra: dict[str, str] | None = None) -> dict[str, str]:
    """What Paddle's launcher would set for this rank; a job of one gets nothing at all."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_"))}
    # One thread, however many ranks: tests compare bits.
    env.update(
        OMP_NUM_THREADS="1", PPFLEET_THREADS="1", GLOG_minloglevel="2", PYTHONWARNINGS="ignore", GLOO_SOCKET_IFNAME="lo"
    )
    if len(endpoints) > 1:
        env.update(
            PADDLE_TRAINER_ID=str(rank),
            PADDLE_TRAINERS_NUM=str(len(endpoints)),
            PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
            PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        )
    if DEVICE == "sim":
        env.update({**simcard.environment(8), **simcard.rank_environment(rank)})
    return {**env, **(extra or {})}


def wait_for(
    condition: Callable[[], Any], seconds: float, what: str, details: Callable[[], object] = lambda: ""
) -> Any:
    """Poll until the condition is true, and return its value; fail with what was awaited, and with details if given.

    A condition that cannot become true any longer may raise AssertionError itself.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}\n{details()}".rstrip())
        time.sleep(0.05)
    return value


def wait_for_the_end_of(processes: Iterable[psutil.Process], seconds: float = 60) -> None:
    """Zombies count as ended: their parents may be busy."""

    def alive() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    wait_for(lambda: not alive(), seconds, "the processes end", alive)


def watch(command: list[str], directory: Path) -> tuple[int, str]:
    """Run a command before a terminal of 150 columns, as a person would; its exit code and what the terminal got."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    process = subprocess.Popen(command, cwd=directory, env=environment(0, []), stdout=side, stderr=side)
    os.close(side)
    shown = b""
    with contextlib.suppress(OSError):  # the other side was closed
        while piece := os.read(main, 65536):
            shown += piece
    os.close(main)
    return process.wait(60), shown.decode(errors="replace")


def free_ports(count: int) -> list[int]:
    """Ports below the range from which the kernel picks outgoing ones, so that nobody else comes by one of them; each
    of pytest's parallel workers has a range of its own."""
    found: list[int] = []
    lowest = 10000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4 * 5000
    offset = os.getpid() * 37 + free_ports.calls * 16  # type: ignore[attr-defined]
    free_ports.calls += 1  # type: ignore[attr-defined]
    while len(found) < count:
        offset += 1
        port = lowest + offset % 5000
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found


free_ports.calls = 0  # type: ignore[attr-defined]


def _main(module: str, name: str, path: str, arguments: str) -> int:
    function = getattr(importlib.import_module(module), name)
    try:
        told = {"value": function(*json.loads(arguments))}
    except Exception as failure:  # noqa: BLE001 - whatever the function raised is what the test asks about
        sys.last_value = failure
        sys.excepthook(type(failure), failure, failure.__traceback__)  # as an exception that ends a script
        told = {"error": [type(failure).__name__, str(failure)]}
    Path(path).write_text(json.dumps(told))
    return 1 if "error" in told else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        sys.argv[1:] = fork_server.serve()  # returns in a forked rank
    if sys.argv[1].endswith(".py"):  # a script: its uncaught exceptions are Python's to handle
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.exit(_main(*sys.argv[1:]))
