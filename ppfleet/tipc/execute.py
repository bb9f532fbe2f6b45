"""Runs one command: a process tree and a log of its own, live output, a time limit, and the verdict on what it did."""

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
_TAIL = 65536  # bytes at the end of a log that are looked at for the report
Snapshot = dict[Path, tuple[int, int, int]]


@dataclass
class Result:
    command: Command
    status: str
    reason: str = ""
    seconds: float = 0.0
    code: int | None = None  # None: it was not started
    figures: dict[str, Any] = field(default_factory=dict)
    tail: str = ""  # the end of its log


def execute(command: Command, makes: bool = True) -> Result:
    """Run it to its end. `makes`: whether what it should write must be on this machine afterwards."""
    log = Path(command.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    before = [_matching(*each) for each in command.makes]
    clock = time.monotonic()
    code, late = _run(command, log)
    result = Result(command, OK, seconds=time.monotonic() - clock, code=code)
    if code or late:
        _add_worker_logs(command, log)
    result.tail = tail(log)
    found = figures.found(command.shows, log) if command.shows else None
    result.reason = _ended(command, code, late, result.tail)
    if not result.reason and makes:
        result.reason = _made_nothing(command, before)
    if not result.reason and command.shows and found is None:
        result.reason = f"exit code 0, but {figures.MISSING[command.shows]}"
    result.status, result.figures = FAILED if result.reason else OK, found or {}
    return result


def _run(command: Command, log: Path) -> tuple[int, bool]:
    """Start it, copy its log to the terminal as it grows, stop it at its limit: exit code, whether it was late."""
    # Paddle's launcher lets the environment override its flags, and an earlier launch may have left something there.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_") and name != "POD_IP"}
    if not env.get("CUDA_VISIBLE_DEVICES"):
        env.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one makes the launcher fail
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
            process_tree.end_below(0)  # only if the guard itself was killed is there anything
            _copy(shown)
    return process.returncode, late


def _copy(shown: IO[bytes]) -> None:
    while piece := shown.read(65536):
        show(piece.decode(errors="replace"), end="")


def show(text: str, end: str = "\n") -> None:
    """To the terminal; a run outlives whoever looked at it."""
    try:
        print(text, end=end, flush=True)
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for the rest of this process


def tail(path: Path) -> str:
    """The end of a log; nothing where there is none."""
    with suppress(OSError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
        return log.read().decode(errors="replace")
    return ""


def _ended(command: Command, code: int, late: bool, text: str) -> str:
    """Why its end was a bad one; nothing after exit code 0."""
    if late:
        return f"stopped at its time limit of {command.limit:g} s"
    if code in (126, 127) and shutil.which(command.argv[0]) is None:  # our guard says why, first of all
        return text.splitlines()[0]
    launched = "paddle.distributed.launch" in command.argv  # which tells of its trainers' signals as 256 - n
    for number in (-code, code - 128, 256 - code if launched else 0):
        with suppress(ValueError):
            if code:
                return f"ended by {signal.Signals(number).name}"
    return f"exit code {code}" if code else ""


def _matching(directory: str, patterns: str) -> Snapshot:
    found: Snapshot = {}
    for pattern in patterns.split("|"):
        for path in Path(directory).glob(pattern):
            with suppress(OSError):
                facts = path.stat()
                found[path] = facts.st_mtime_ns, facts.st_size, facts.st_ino
    return found


def _made_nothing(command: Command, before: list[Snapshot]) -> str:
    """What it should have written and did not. Compared with the files of before, not with the clock."""
    for (directory, patterns), old in zip(command.makes, before):
        new = {path: facts for path, facts in _matching(directory, patterns).items() if old.get(path) != facts}
        if not any(size for _, size, _ in new.values()):
            empty = "only empty ones of" if new else "no"
            return f"exit code 0, but it wrote {empty} {patterns.replace('|', ' or ')} in {directory}"
    return ""


def _add_worker_logs(command: Command, log: Path) -> None:
    """The launcher shows its first trainer alone; the one that failed may be another."""
    directory = next((word.partition("=")[2] for word in command.argv if word.startswith("--log_dir=")), "")
    paths = sorted(Path(directory).glob("workerlog.*")) if directory else []
    ends = [(path, tail(path).rstrip().split("\n")[-20:]) for path in paths]
    ends.sort(key=lambda end: bool(foreign.telling_lines(end[1])))  # the telling ones last
    with suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as out:
        for path, lines in ends:
            out.write("\n".join((f"\n--- the end of {path}", *lines, "")))
