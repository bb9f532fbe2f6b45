"""Runs a plan: one process tree, one log and one limit for each command, live output, a status that can be red."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ppfleet
from ppfleet import guard
from ppfleet.errors import CommError
from ppfleet.tipc import figures, report
from ppfleet.tipc.command import Command
from ppfleet.tipc.meet import Meeting
from ppfleet.tipc.plan import Plan

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
DEFAULT_PORT = 6070  # Paddle's launcher's; the nodes meet one below
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
# What an earlier launch may have left in the environment, and what overrides the launcher's own flags.
_FOREIGN = frozenset(
    f"PADDLE_{name}"
    for name in (
        *("TRAINER_ID", "TRAINERS_NUM", "TRAINER_ENDPOINTS", "CURRENT_ENDPOINT", "MASTER", "NNODES", "IPS", "NODES"),
        *("LOCAL_RANK", "LOCAL_SIZE", "GLOBAL_RANK", "GLOBAL_SIZE", "RANK_IN_NODE", "START_PORT"),
    )
)


@dataclass
class Result:
    command: Command
    status: str
    reason: str = ""
    seconds: float = 0.0
    code: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    tail: str = ""


class Stopped(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP came."""

    def __init__(self, number: int) -> None:
        self.number = number


class Runner:
    def __init__(self, plan: Plan, patience: float) -> None:
        self.plan, self.patience = plan, patience
        self.root = self.directory = Path(plan.root)
        self.results: list[Result] = []
        self.started = time.time()
        self.nodes = max((command.nodes for command in plan.commands), key=len, default=())
        self.node = self.nodes.index(plan.here.address) if plan.here.address in self.nodes else 0
        self.absent = ""  # why the nodes did not meet
        self.token = ""
        self.others: dict[str, Any] = {}
        self._begun = False
        self._meetings: dict[tuple[str, ...], Meeting] = {}

    def run(self) -> int:
        """The exit code: 0 when nothing failed, 1 otherwise, 128 + n after signal n."""
        stopped = 0
        with _signals():
            try:
                self._meet()
                for number, command in enumerate(self.plan.commands, 1):
                    self._show(f"[{number}/{len(self.plan.commands)}] {command.id}")
                    self._finish(self._one(command))
                if self.node == 0 and self.token:
                    self._gather()
            except Stopped as stop:
                stopped = stop.number
                if not (self.directory / report.STATUS).exists():  # still waiting for the other nodes
                    return 128 + stopped
                self._stopped(signal.Signals(stopped).name)
        self.write(finished=not stopped)
        failed = [result for result in self.results if result.status == FAILED]
        counted = ", ".join(f"{sum(r.status == s for r in self.results)} {s}" for s in (OK, FAILED, SKIPPED))
        self._show(f"{counted}; {self.directory / report.PAGE}")
        for result in failed:
            self._show(f"failed: {result.command.id}: {result.reason} ({result.command.log})")
        return 128 + stopped if stopped else int(bool(failed))

    # The directory

    def _meet(self) -> None:
        """Begin a fresh directory. Several nodes meet first, since they may share it: then the first begins it, and
        the others have a folder of their own in it."""
        if len(self.nodes) < 2:
            self._begin("")
        else:
            try:
                self.token = self._meeting(self.nodes).gather("the start", self._begin)
            except CommError as failure:
                self.absent = str(failure)
            if self.node and (self.absent or self._mark(self.token).exists()):
                self.directory = self.root / f"node_{self.node}"
                shutil.rmtree(self.directory, ignore_errors=True)
                self._own_logs()
            elif not self._begun:
                self._begin(self.token)
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        (self.directory / report.STATUS).write_text("", encoding="utf-8")
        for note in self.plan.notes:
            self._say(f"note: {note}")

    def _begin(self, token: str) -> None:
        self._begun = True
        if self.root.exists():
            before = self.root.with_name(f"{self.root.name}.previous")
            shutil.rmtree(before, ignore_errors=True)
            self.root.rename(before)
            self._show(f"the last run's results are now in {before}")
        self.root.mkdir(parents=True)
        if token:
            self._mark(token).touch()

    def _mark(self, token: str) -> Path:
        return self.root / f".run-{token}"

    def _own_logs(self) -> None:
        before, after = f"{self.plan.root}/logs/", f"{self.directory}/logs/"
        self.plan.commands = [
            replace(
                command,
                log=command.log.replace(before, after),
                argv=tuple(word.replace(before, after) for word in command.argv),
            )
            for command in self.plan.commands
        ]

    def _meeting(self, nodes: tuple[str, ...]) -> Meeting:
        if nodes not in self._meetings:
            text = self.plan.config.path.read_bytes() + f"{self.plan.mode} {ppfleet.__version__}".encode()
            port = (self.plan.here.start_port or DEFAULT_PORT) - 1
            digest = hashlib.sha256(text).hexdigest()
            self._meetings[nodes] = Meeting(
                nodes, nodes.index(self.plan.here.address), port, digest, self.patience, self._show
            )
        return self._meetings[nodes]

    # One command

    def _one(self, command: Command) -> Result:
        states = {result.command.id: result.status for result in self.results}
        for needed in command.needs:
            if states[needed] == FAILED or (states[needed] == SKIPPED and not command.skip):
                return Result(command, SKIPPED, f"{needed} {'failed' if states[needed] == FAILED else 'was skipped'}")
        if command.skip:
            return Result(command, SKIPPED, command.skip)
        if command.refused:
            return Result(command, FAILED, f"refused: {command.refused}")
        if len(command.nodes) > 1:
            try:
                if self.absent:
                    raise CommError(self.absent)
                self._meeting(command.nodes).gather(command.id)
            except CommError as failure:
                return Result(command, FAILED, str(failure))
        return self._start(command)

    def _start(self, command: Command) -> Result:
        log = Path(command.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._show(f"$ {command.text}")
        began, clock = time.time(), time.monotonic()
        code, late = self._execute(command, log)
        result = Result(command, OK, seconds=time.monotonic() - clock, code=code)
        if code or late:
            self._add_worker_logs(command, log)
        text = log.read_text(encoding="utf-8", errors="replace")
        result.tail = report.end_of(text)
        result.reason = self._verdict(command, code, late, text, began)
        if result.reason:
            result.status = FAILED
        if command.shows:
            result.figures = figures.found(command.shows, text) or {}
        return result

    def _execute(self, command: Command, log: Path) -> tuple[int, bool]:
        """Start it, copy its log to the terminal as it grows, stop it at its limit: exit code, whether it was late."""
        env = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        if not env.get("CUDA_VISIBLE_DEVICES"):
            env.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one makes Paddle's launcher fail
        env.update(dict(command.env), PYTHONUNBUFFERED="1")
        watched = [sys.executable, guard.__file__, str(os.getpid()), str(_GRACE), *command.argv]
        late = False
        with log.open("wb") as out, log.open("rb") as shown:
            process = subprocess.Popen(watched, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env,
                                       start_new_session=True)  # fmt: skip
            try:
                deadline = time.monotonic() + command.limit
                while process.poll() is None:
                    self._copy(shown)
                    if not late and time.monotonic() > deadline:
                        late = True
                        process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.1)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
                self._copy(shown)
        return process.returncode, late

    @staticmethod
    def _copy(shown: Any) -> None:
        while piece := shown.read(65536):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()

    def _verdict(self, command: Command, code: int, late: bool, text: str, began: float) -> str:
        """Why it failed; nothing where it did what it should."""
        if late:
            return f"stopped at its time limit of {command.limit:g} s"
        if code in (126, 127) and text.startswith("cannot start"):
            return text.splitlines()[0]
        if code > 128:
            with suppress(ValueError):
                return f"ended by {signal.Signals(code - 128).name}"
        if code:
            return f"exit code {code}"
        if command.nodes and command.nodes[0] != self.plan.here.address:
            return ""  # what it makes is on the first node
        for directory, patterns in command.makes:
            found = (path for pattern in patterns.split("|") for path in Path(directory).glob(pattern))
            if not any(_is_new(path, began) for path in found):
                return f"exit code 0, but it wrote no {patterns.replace('|', ' or ')} in {directory}"
        if command.shows and figures.found(command.shows, text) is None:
            return f"exit code 0, but {figures.MISSING[command.shows]}"
        return ""

    @staticmethod
    def _add_worker_logs(command: Command, log: Path) -> None:
        """The launcher shows its first trainer alone; the one that failed may be another."""
        directory = next((word.partition("=")[2] for word in command.argv if word.startswith("--log_dir=")), "")
        with log.open("a", encoding="utf-8") as out:
            for path in sorted(Path(directory).glob("workerlog.*")) if directory else []:
                out.write(f"\n--- the end of {path}\n{report.end_of(path.read_text(errors='replace'), 25)}\n")

    # What is told

    def _finish(self, result: Result) -> None:
        self.results.append(result)
        command, model = result.command, self.plan.config.model
        mapped = f" [device map: {command.note}]" if command.note else ""
        if result.status == SKIPPED:
            self._say(f"skipped: {result.reason} - {model} - {command.text}")
        else:
            word, colour = ("successfully", 32) if result.status == OK else ("failed", 31)
            self._say(f"Run {word} with command - {model} - {command.text}!{mapped}", colour)
            if result.status == FAILED:
                self._say(f"  {result.reason}; {command.log}")
        self.write(finished=False)

    def _stopped(self, name: str) -> None:
        done = {result.command.id for result in self.results}
        left = [command for command in self.plan.commands if command.id not in done]
        for number, command in enumerate(left):
            if number == 0 and Path(command.log).exists():
                tail = report.end_of(Path(command.log).read_text(errors="replace"))
                self._finish(Result(command, FAILED, f"interrupted by {name}", tail=tail))
            else:
                self._finish(Result(command, SKIPPED, f"interrupted by {name}"))

    def _say(self, text: str, colour: int = 0) -> None:
        """To the terminal, and to the status log, there without colour."""
        with (self.directory / report.STATUS).open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(f"{text}\n")
        self._show(text, colour)

    @staticmethod
    def _show(text: str, colour: int = 0) -> None:
        print(f"\033[{colour}m{text}\033[0m" if colour and sys.stdout.isatty() else text, flush=True)

    def _gather(self) -> None:
        """What the other nodes wrote into a directory that all share."""
        for number, name in enumerate(self.nodes[1:], 1):
            self.others[name] = report.of_node(self.root / f"node_{number}", self.token)

    def write(self, finished: bool) -> None:
        """All forms of the report; after every command, so that a killed runner leaves what was known."""
        here = self.plan.here
        facts = {
            "model": self.plan.config.model,
            "mode": self.plan.mode,
            "config": str(self.plan.config.path),
            "finished": finished,
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "node": {"number": self.node, "address": here.address, "host": platform.node()},
            "token": self.token,
            "notes": self.plan.notes,
            "python": platform.python_version(),
            "ppfleet": ppfleet.__version__,
            "commands": [report.entry(result, self.directory) for result in self.results],
            "planned": len(self.plan.commands),
            "nodes": self.others,
        }
        report.write(self.directory, facts)


def _is_new(path: Path, began: float) -> bool:
    with suppress(OSError):
        return path.stat().st_mtime >= began - 2  # file systems round
    return False


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped, once: what is running is ended in order."""

    def stop(number: int, frame: Any) -> None:
        for each in kept:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    kept = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for each in kept:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
