"""Reads the directories of a run: its metrics, starts, checkpoints, settings and last evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppfleet.checkpoint import history
from ppfleet.checkpoint import manifest as checkpoint
from ppfleet.checkpoint.history import RANKS, Line
from ppfleet.commands.why import cause, record_reader
from ppfleet.commands.why.cause import Answer
from ppfleet.errors import CheckpointError
from ppfleet.evaluation import confusion
from ppfleet.evaluation.confusion import Seen
from ppfleet.watchdog.recorder import KEPT

_NO_FAILURE = ("finished", "running", "straggler")
_PARTS = f"{history.NAME}, settings.json, {confusion.NAME}, checkpoints/ and flight/*.ring"


@dataclass(frozen=True)
class Start:
    """The job from one launch to its end."""

    time: float
    ended: float  # by rank 0's clock, as `time` is; NaN while it runs
    ranks: int
    first: int | None  # the step from which it trained; None: it did not get to training
    last: int  # the last step of training at its end
    sentence: str
    well: bool  # whether nothing failed, as far as is known
    evidence: tuple[str, ...] = ()
    back: int | None = None  # for `why --back`; None: it has no flight record


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint."""

    name: str
    links: tuple[str, ...]  # latest, best
    state: dict[str, Any]  # its state.json
    files: dict[str, Any]  # of its manifest: bytes and sha256 of each
    problem: str  # why it does not verify; empty: it does


@dataclass
class RunData:
    """Everything read from the directories. `notes` tells what could not be read."""

    directories: Sequence[Path]
    lines: list[Line] = field(default_factory=list)
    answer: Answer | None = None  # about the newest start
    starts: list[Start] = field(default_factory=list)  # the oldest first
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[CheckpointInfo] = field(default_factory=list)  # the newest first
    seen: Seen | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.lines or self.starts or self.settings or self.checkpoints or self.seen)

    @property
    def running(self) -> bool:
        return self.answer is not None and any(r.state in ("running", "stopped") for r in self.answer.attempt.ranks)


def looked_for(directories: Sequence[Path]) -> str:
    return f"{_PARTS} in {', '.join(map(str, directories))}"


def collect(directories: Sequence[Path]) -> RunData:
    """Read each part from the first directory that has it: rank 0's host has all but the other hosts' records."""
    run = RunData(directories)
    for directory in directories:
        run.lines = run.lines or _lines(directory / history.NAME, run.notes)
        run.settings = run.settings or _json(directory / "settings.json", run.notes)
        run.checkpoints = run.checkpoints or _checkpoints(directory / "checkpoints", run.notes)
    records = record_reader.collect(directories)
    run.notes += records.notes
    answers = [cause.answer_from(records, back) for back in range(len(records.attempts))]
    run.answer = answers[0] if answers else None
    run.starts = starts(run.lines, answers[::-1])
    run.seen = _newest_evaluation(directories, run.notes)
    if run.answer and run.answer.attempt.missing:
        missing = ", ".join(map(str, run.answer.attempt.missing))
        run.notes.append(f"no record of rank {missing}: if it ran on another host, add a copy of that host's directory")
    if run.starts and not run.lines:
        run.notes.append(f"no {history.NAME}: rank 0 writes it on its host, with the first line of progress")
    return run


def starts(lines: Sequence[Line], answers: Sequence[Answer]) -> list[Start]:
    """All starts, the oldest first, from the flight records (only the newest starts have them) and from the history
    (which has all starts that trained)."""
    trained: list[list[Line]] = []  # the history of each start, beginning with the line that marks it
    for line in lines:
        if math.isfinite(line.values.get(RANKS, math.nan)):
            trained.append([])
        if trained:
            trained[-1].append(line)
    known = [answer.attempt.started for answer in answers]
    result = []
    for begin, *more in trained:  # starts whose record has been deleted
        if known and begin.time >= known[0]:
            break
        last = more[-1] if more else begin
        text = f"its flight record was deleted (the newest {KEPT} starts are kept): how it ended is unknown"
        result.append(Start(begin.time, last.time, int(begin.values[RANKS]), begin.step, last.step, text, well=False))
    for n, answer in enumerate(answers):
        attempt = answer.attempt
        until = known[n + 1] if n + 1 < len(known) else math.inf
        first = next((begin.step for begin, *_ in trained if known[n] <= begin.time < until), None)
        steps = max(rank.steps for rank in attempt.ranks)
        runs = any(rank.state in ("running", "stopped") for rank in attempt.ranks)
        result.append(
            Start(
                known[n],
                math.nan if runs else attempt.last_seen,
                attempt.size,
                first,
                steps or (result[-1].last if result else 0),  # it failed before it resumed
                answer.sentence,
                answer.kind in _NO_FAILURE,
                answer.evidence,
                len(answers) - 1 - n,
            )
        )
    return result


def _lines(path: Path, notes: list[str]) -> list[Line]:
    try:
        return history.read(path)
    except OSError as failure:
        notes.append(f"cannot read {path.name}: {failure.strerror}")
        return []


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as failure:
        notes.append(f"cannot read {path}: {failure.strerror}")
    except (ValueError, RecursionError):
        notes.append(f"{path} is damaged: not JSON")
    else:
        if isinstance(content, dict):
            return content
        notes.append(f"{path} is damaged: not a JSON object")
    return {}


def _checkpoints(root: Path, notes: list[str]) -> list[CheckpointInfo]:
    try:
        paths = checkpoint.every(root)
    except OSError as failure:
        notes.append(f"cannot read {root}: {failure.strerror}")
        return []
    links: dict[Path, list[str]] = {}
    for name in ("latest", "best"):
        links.setdefault((root / name).resolve(), []).append(name)
    checkpoints = []
    for path in paths:
        try:
            manifest, problem = checkpoint.verify(path), ""
        except (CheckpointError, OSError) as failure:
            manifest, problem = {}, str(failure).replace(f"{path}/", "")
        state = _json(path / "state.json", [])
        if path.exists():  # a running job deletes old ones
            names = tuple(links.get(path.resolve(), ()))
            checkpoints.append(CheckpointInfo(path.name, names, state, manifest.get("files", {}), problem))
    return checkpoints


def _newest_evaluation(directories: Sequence[Path], notes: list[str]) -> Seen | None:
    """That of training, or a newer one in a directory below the run's, where tools/eval.py writes it."""
    evaluations = []
    for directory in directories:
        for path in (directory / confusion.NAME, *sorted(directory.glob(f"*/{confusion.NAME}"))):
            try:
                evaluations.append(confusion.read(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as failure:
                notes.append(f"cannot read {path}: {failure.strerror}")
            except ValueError as failure:
                notes.append(f"{path}: {failure}")
    return max(evaluations, key=lambda seen: seen.time, default=None)
