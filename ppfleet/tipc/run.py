"""Runs a plan: prepares the directory, runs the commands in order, reports each one, returns the exit code."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ppfleet._version import __version__
from ppfleet.cli import Stopped, stoppable
from ppfleet.cluster import hosts, process_tree
from ppfleet.cluster.rendezvous import Meeting
from ppfleet.errors import CommError, ConfigError
from ppfleet.tipc import report
from ppfleet.tipc.command import Command
from ppfleet.tipc.execute import FAILED, OK, SKIPPED, Result, execute, show, tail
from ppfleet.tipc.plan import CommandPlan

_SAME = "TIPC file, mode or version of ppfleet"


class Runner:
    def __init__(self, plan: CommandPlan, timeout: float) -> None:
        self.plan = plan
        self.root = self.directory = Path(plan.root)
        self.results: list[Result] = []
        self.started = time.time()
        self.nodes = plan.config.nodes() if any(command.nodes for command in plan.commands) else ()
        self.node = self.nodes.index(plan.machine.address) if self.nodes else 0
        self.absent = ""  # why not all nodes joined
        self.token = ""
        self.others: dict[str, Any] = {}
        self._made = self._open = False  # whether this run's directory exists, and its status log
        self._lock: IO[str] | None = None
        text = plan.config.path.read_bytes() + f"{plan.mode} {__version__}".encode()
        port = (plan.machine.start_port or hosts.DEFAULT_PORT) - 1
        self.meeting = Meeting(
            list(self.nodes), self.node, port, hashlib.sha256(text).hexdigest(), timeout, show, _SAME
        )

    def run(self) -> int:
        """The exit code: 0 if nothing failed, 1 otherwise, 128 + n after signal n."""
        stopped = 0
        process_tree.adopt()
        with stoppable():
            try:
                self._begin()
                for number, command in enumerate(self.plan.commands, 1):
                    show(f"[{number}/{len(self.plan.commands)}] {command.id}")
                    self._finish(self._one(command))
                if self.node == 0 and self.token:
                    self._gather()
            except Stopped as stop:
                stopped = stop.number
                if not self._open:  # still waiting for the other nodes
                    return 128 + stopped
                self._stopped(signal.Signals(stopped).name)
            finally:
                self.meeting.close()
        results = self.write(finished=not stopped)
        counted = ", ".join(f"{sum(r.status == s for r in self.results)} {s}" for s in (OK, FAILED, SKIPPED))
        show(f"{counted}; {self.directory / report.PAGE}")
        problems = report.problems(results)
        for problem in problems:
            show(f"failed: {problem}")
        return 128 + stopped if stopped else int(bool(problems))

    # The directory

    def _begin(self) -> None:
        """Create an empty directory. Several nodes meet first, because they may share it: then the first node creates
        it, and the others get a subdirectory each."""
        if self.node == 0:
            self._take()
        if len(self.nodes) < 2:
            self._make("")
        else:
            try:
                self.token = self.meeting.start(self._make)
            except CommError as failure:
                self.absent = str(failure)
            if self.node and self.absent:  # another node may use the directory: do not touch it
                self.directory = self.root.with_name(f"{self.root.name}.node_{self.node}")
                shutil.rmtree(self.directory, ignore_errors=True)
                self._own_logs()
            elif self.node and self._mark(self.token).exists():
                self.directory = self.root / f"node_{self.node}"
                self._own_logs()
            elif self.node:
                self._take()
                self._make(self.token)
            elif not self._made:  # it could not listen
                self._make("")
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        (self.directory / report.STATUS).write_text("", encoding="utf-8")
        self._open = True
        for note in self.plan.notes:
            self._say(f"note: {note}")

    def _take(self) -> None:
        """Lock this directory against other runners until this process ends."""
        path = self.root.with_name(f".{self.root.name}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.open("a+")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another runner is using {self.root}: wait for it, or choose another --output") from None

    def _make(self, token: str) -> None:
        """Create an empty directory; the previous run's is kept beside it, one for each text file."""
        if self.root.exists():
            before = self.root.with_name(f"{self.root.name}.previous{report.name_of(self.root)}")
            if before.is_dir() and not before.is_symlink():
                shutil.rmtree(before)
            else:
                before.unlink(missing_ok=True)
            self.root.rename(before)
            show(f"moved the results of the previous run to {before}")
        self.root.mkdir(parents=True)
        self._made = True
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

    # The commands

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
                self.meeting.gather(command.id, command.nodes)
            except CommError as failure:
                return Result(command, FAILED, str(failure))
        self.meeting.tell(command.id)
        show(f"$ {command.text}")
        return execute(command, makes=not command.nodes or command.nodes[0] == self.plan.machine.address)

    def _finish(self, result: Result) -> None:
        self._add(result)
        self.write(finished=False)

    def _add(self, result: Result) -> None:
        self.results.append(result)
        command, model = result.command, self.plan.config.model
        mapped = f" [device map: {command.note}]" if command.note else ""
        if result.status == SKIPPED:
            self._say(f"skipped: {result.reason} - {model} - {command.text}")
        else:
            word, colour = ("successfully", 32) if result.status == OK else ("failed", 31)
            self._say(f"Run {word} with command - {model} - {command.text}!{mapped}", colour)
            if result.status == FAILED:
                self._say(f"  {result.reason}{f'; {command.log}' if result.code is not None else ''}")

    def _stopped(self, name: str) -> None:
        done = {result.command.id for result in self.results}
        left = [command for command in self.plan.commands if command.id not in done]
        for number, command in enumerate(left):
            if number == 0 and Path(command.log).exists():
                self._add(Result(command, FAILED, f"interrupted by {name}", tail=tail(Path(command.log)), code=-1))
            else:
                self._add(Result(command, SKIPPED, f"interrupted by {name}"))

    def _gather(self) -> None:
        """Read the results that the other nodes wrote, if they share the directory."""
        for number, name in enumerate(self.nodes[1:], 1):
            self.others[name] = report.of_node(self.root / f"node_{number}", self.token)

    # Output

    def _say(self, text: str, colour: int = 0) -> None:
        """Write to the status log, without colour, and to the terminal."""
        self.directory.mkdir(parents=True, exist_ok=True)  # a command may have removed it
        with (self.directory / report.STATUS).open("a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(f"{text}\n")
        show(f"\033[{colour}m{text}\033[0m" if colour and sys.stdout.isatty() else text)

    def write(self, finished: bool) -> dict[str, Any]:
        """Write all formats of the report; after every command, so that a killed runner leaves its results."""
        results = {
            "model": self.plan.config.model,
            "mode": self.plan.mode,
            "config": str(self.plan.config.path),
            "finished": finished,
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "node": {"number": self.node, "address": self.plan.machine.address, "host": platform.node()},
            "token": self.token,
            "notes": self.plan.notes,
            "python": platform.python_version(),
            "ppfleet": __version__,
            "commands": [report.entry(result, self.directory) for result in self.results],
            "planned": len(self.plan.commands),
            "nodes": self.others,
        }
        report.write(self.directory, results)
        return results
