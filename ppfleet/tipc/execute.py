"""Runs one command in its own process tree, with a log, live output and a time limit, and checks what it produced."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ppfleet import foreign, limits
from ppfleet.cluster import process_tree
from ppfleet.tipc import figures
from ppfleet.tipc.command import Command

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
_TAIL = 65536  # bytes at the end of a log that the report uses
Snapshot = dict[Path, tuple[int, int, int]]


@dataclass
class Result:
    command: Command
    status: str
    reason: str = ""
    seconds: float = 0.0
    code: int | None = None  # exit code; None: not started
    figures: dict[str, Any] = field(default_factory=dict)
    tail: str = ""  # the end of its log


def execute(command: Command, makes: bool = True) -> Result:
    """Run a command to its end. `makes`: whether the files that it writes must be on this machine afterwards."""
    log = Path(command.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    before = [_matching(directory, patterns) for directory, patterns in command.makes]
    clock = time.monotonic()
    code, timed_out = _run(command, log)
    result = Result(command, OK, seconds=time.monotonic() - clock, code=code)
    if code or timed_out:
        _add_worker_logs(command, log)
    result.tail = tail(log)
    values = figures.read(command.shows, log) if command.shows else None
    result.reason = _failure(command, code, timed_out, result.tail)
    if not result.reason and makes:
        result.reason = _made_nothing(command, before)
    if not result.reason and command.shows and values is None:
        result.reason = f"exit code 0, but {figures.MISSING[command.shows]}"
    result.status, result.figures = FAILED if result.reason else OK, values or {}
    return result


def _run(command: Command, log: Path) -> tuple[int, bool]:
    """Start it, copy its log to the terminal as it grows, stop it at its limit: exit code, whether it timed out."""
    # In Paddle's launcher the environment overrides the flags, and an outer launch may have set these variables.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_") and name != "POD_IP"}
    if not env.get("CUDA_VISIBLE_DEVICES"):
        env.pop("CUDA_VISIBLE_DEVICES", None)  # an empty value makes the launcher fail
    env.update(dict(command.env), PYTHONUNBUFFERED="1")
    watched = [sys.executable, process_tree.__file__, str(os.getpid()), str(limits.TIPC_GRACE), *command.argv]
    late = False
    with log.open("wb") as out, log.open("rb") as shown:
        process = subprocess.Popen(
            watched, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
        try:
            deadline = time.monotonic() + command.limit
            while process.poll() is None:
                _copy(shown)
                if not late and time.monotonic() > deadline:
                    late = True
                    process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            process_tree.end_below(0)  # needed only if the guard itself was killed
            _copy(shown)
    return process.returncode, late


def _copy(shown: IO[bytes]) -> None:
    while piece := shown.read(65536):
        show(piece.decode(errors="replace"), end="")


def show(text: str, end: str = "\n") -> None:
    """Print to the terminal; the run continues if that has gone."""
    try:
        print(text, end=end, flush=True)
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for the rest of this process


def tail(path: Path) -> str:
    """The end of a log; "" if there is none."""
    with suppress(OSError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
        return log.read().decode(errors="replace")
    return ""


def _failure(command: Command, code: int, timed_out: bool, text: str) -> str:
    """Why the command failed; "" after exit code 0."""
    if timed_out:
        return f"stopped at its time limit of {command.limit:g} s"
    if code in (126, 127) and shutil.which(command.argv[0]) is None:  # the guard's first line says why
        return text.splitlines()[0]
    launched = "paddle.distributed.launch" in command.argv  # its exit code for a trainer's signal n is 256 - n
    for number in (-code, code - 128, 256 - code if launched else 0):
        with suppress(ValueError):
            if code:
                return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}" if code else ""


def _matching(directory: str, patterns: str) -> Snapshot:
    snapshot: Snapshot = {}
    for pattern in patterns.split("|"):
        for path in Path(directory).glob(pattern):
            with suppress(OSError):
                stat = path.stat()
                snapshot[path] = stat.st_mtime_ns, stat.st_size, stat.st_ino
    return snapshot


def _made_nothing(command: Command, before: list[Snapshot]) -> str:
    """What it should have written and did not: compared with the files before, not by the clock."""
    for (directory, patterns), old in zip(command.makes, before):
        new = {path: stat for path, stat in _matching(directory, patterns).items() if old.get(path) != stat}
        if not any(size for _, size, _ in new.values()):
            none = "only empty" if new else "no"
            return f"exit code 0, but it wrote {none} {patterns.replace('|', ' or ')} in {directory}"
    return ""


def _add_worker_logs(command: Command, log: Path) -> None:
    """Add the trainers' logs: the launcher shows only its first trainer, and another one may have failed."""
    directory = next((word.partition("=")[2] for word in command.argv if word.startswith("--log_dir=")), "")
    paths = sorted(Path(directory).glob("workerlog.*")) if directory else []
    ends = [(path, tail(path).rstrip().split("\n")[-20:]) for path in paths]
    ends.sort(key=lambda end: bool(foreign.telling_lines(end[1])))  # those with an error last
    with suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as out:
        for path, lines in ends:
            out.write("\n".join((f"\n--- end of {path}", *lines, "")))
