"""Starts the processes of a check, waits for all of them, and leaves none behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleet import foreign, limits
from ppfleet.cluster import process_tree
from ppfleet.cluster.ports import port_holder
from ppfleet.commands.check_cards import probe
from ppfleet.commands.check_cards.facts import ROOT
from ppfleet.commands.launch.flags import OVERRIDES
from ppfleet.commands.why import cause
from ppfleet.distributed.devices import Device
from ppfleet.errors import FleetError

_PR_SET_PDEATHSIG = 1
_PORTS = range(21000, 29000)  # below those that Linux gives to outgoing connections
# The same bits twice, where the device can: without TF32, and with deterministic algorithms of cuDNN.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "FLAGS_cudnn_deterministic": "1"}


@dataclass(frozen=True)
class Run:
    """A job that has ended. `told[rank]` is what the rank wrote; {} if it ended before that."""

    codes: tuple[int, ...]
    told: tuple[dict[str, Any], ...]
    seconds: float
    ended: float  # when the last rank ended, by the clock
    directory: Path  # of the output of each rank

    @property
    def log(self) -> Path:
        """The output that says most: that of the first rank which failed by itself, otherwise of the first."""
        failed = [rank for rank, told in enumerate(self.told) if "error" in told]
        failed += [rank for rank, code in enumerate(self.codes) if code]
        return self.directory / f"rank{failed[0] if failed else 0}.log"

    def fault(self) -> float:
        """When the fault that the job was to survive or to end with happened; 0 if it did not."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return float(json.loads((self.directory / "fault.json").read_text())["time"])
        return 0.0


class RunFailed(FleetError):
    """A job of a check did not do what it should: the reason in a sentence, and where its output is."""

    code = "run_failed"

    def __init__(self, text: str, log: Path) -> None:
        super().__init__(text)
        self.log = log


def succeed(run: Run, directory: Path) -> Run:
    """The run, if all its ranks ended well; otherwise the reason is raised. `directory` is the run directory."""
    if any(run.codes) or not all(run.told) or any("error" in told for told in run.told):
        raise RunFailed(reason(run, directory), run.log)
    return run


def reason(run: Run, directory: Path) -> str:
    """Why a run failed: by its flight records, by what a rank wrote, or by its last words."""
    answer = cause.answer([directory])
    if answer is not None and answer.ranks:
        return answer.sentence
    for rank, told in enumerate(run.told):
        if "error" in told:
            return f"rank {rank}: {told['error']}: {_first_line(told['text'])}"
    codes = ", ".join(map(str, run.codes))
    last = foreign.telling_line(_text(run.log)[-20000:], last=True)[:300]
    return f"exit codes {codes}" + (f": {last}" if last else "")


def _first_line(words: str) -> str:
    return (words.strip().splitlines() or [""])[0][:300]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def start(
    row: Device,
    ranks: int,
    task: Mapping[str, Any],
    directory: Path,
    limit: float,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Run a task on that many cards of this machine, each rank with what Paddle's launcher would set for it."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(ranks)]
    words = [json.dumps({**task, "device": row.name, "out": str(directory)})]
    commands = [
        ([sys.executable, probe.__file__, *words], environment(row, rank, endpoints, env)) for rank in range(ranks)
    ]
    return _wait(commands, directory, limit)


def start_launcher(
    arguments: Sequence[str], ranks: range, task: Mapping[str, Any], directory: Path, limit: float
) -> Run:
    """Run a task under a launcher: `arguments` begin with its module. `ranks` are those of this machine."""
    command = [sys.executable, "-m", *arguments, probe.__file__, json.dumps({**task, "out": str(directory)})]
    guard = [sys.executable, process_tree.__file__, str(os.getpid()), str(limits.LAUNCH_GRACE), *command]
    run = _wait([(guard, _plain(EXACT))], directory, limit)
    return Run(run.codes, tuple(_told(directory, rank) for rank in ranks), run.seconds, run.ended, directory)


def ask(task: Mapping[str, Any], directory: Path, limit: float) -> dict[str, Any]:
    """What a single process finds that loads Paddle, without a card of its own."""
    command = [sys.executable, probe.__file__, json.dumps({**task, "out": str(directory)})]
    run = _wait([(command, _plain({}))], directory, limit)
    if any(run.codes) or "error" in run.told[0]:
        raise RunFailed(reason(run, directory), run.log)
    return run.told[0]


def environment(row: Device, rank: int, endpoints: list[str], extra: Mapping[str, str] | None) -> dict[str, str]:
    env = _plain({**EXACT, **(extra or {})})
    env[row.selected_variable] = str(rank)
    if len(endpoints) > 1:
        env.update(row.environment())
        env.update(
            PADDLE_TRAINER_ID=str(rank),
            PADDLE_TRAINERS_NUM=str(len(endpoints)),
            PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
            PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        )
    return env


def _plain(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without another launcher's variables, with a Python that finds this ppfleet."""
    env = {name: value for name, value in os.environ.items() if name not in OVERRIDES}
    package = str(ROOT)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    env.update({"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", **extra})
    return {name: value for name, value in env.items() if value or name not in extra}


def _wait(commands: list[tuple[list[str], dict[str, str]]], directory: Path, limit: float) -> Run:
    directory.mkdir(parents=True, exist_ok=True)
    for old in (*directory.glob("rank*.json"), directory / "fault.json"):
        old.unlink(missing_ok=True)
    began = time.monotonic()
    with _processes(commands, directory) as processes:
        while any(process.poll() is None for process in processes):
            if time.monotonic() - began > limit:
                raise RunFailed(f"the job did not end within {limit:.0f} s", directory / "rank0.log")
            time.sleep(0.05)
        ended = time.time()
    codes = tuple(process.returncode for process in processes)
    told = tuple(_told(directory, rank) for rank in range(len(commands)))
    return Run(codes, told, time.monotonic() - began, ended, directory)


def _told(directory: Path, rank: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        told: dict[str, Any] = json.loads((directory / f"rank{rank}.json").read_text(encoding="utf-8"))
        return told
    return {}


@contextlib.contextmanager
def _processes(
    commands: list[tuple[list[str], dict[str, str]]], directory: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Those that still run at the end of the block are killed. They also end when this process dies."""
    libc = ctypes.CDLL(None)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, (command, env) in enumerate(commands):
            with (directory / f"rank{rank}.log").open("ab") as out:
                processes.append(
                    subprocess.Popen(  # noqa: PLW1509 - this process has one thread
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        env=env,
                        start_new_session=True,  # Ctrl-C reaches this process alone
                        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + (limits.LAUNCH_GRACE if sys.exc_info()[0] is None else 5.0)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; each call starts elsewhere, so that no closing connection is met."""
    found: list[int] = []
    first = (os.getpid() * 31 + time.monotonic_ns() // 1000) % len(_PORTS)
    for step in range(len(_PORTS)):
        port = _PORTS[(first + step) % len(_PORTS)]
        if not port_holder("127.0.0.1", port):
            found.append(port)
        if len(found) == count:
            return found
    raise FleetError(f"no {count} free ports between {_PORTS[0]} and {_PORTS[-1]}")
