"""What the directories of a run tell: its figures, starts, checkpoints, settings and last evaluation."""

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

_WELL = ("finished", "running", "straggler")
_PARTS = f"{history.NAME}, settings.json, {confusion.NAME}, checkpoints/ and flight/*.ring"


@dataclass(frozen=True)
class Start:
    """The job from one launch to its end."""

    time: float
    ended: float  # by rank 0's clock, as `time` is; NaN while it runs
    ranks: int
    first: int | None  # the step after which it began to train; none: it never did
    last: int  # the step to which training had come by its end
    sentence: str
    well: bool  # whether nothing failed, as far as is known
    evidence: tuple[str, ...] = ()
    back: int | None = None  # for `why --back`; none: it has left no record


@dataclass(frozen=True)
class Kept:
    """One checkpoint."""

    name: str
    links: tuple[str, ...]  # latest, best
    facts: dict[str, Any]  # its state.json
    files: dict[str, Any]  # those of its manifest: bytes and sha256 of each
    problem: str  # why it does not verify; empty: it does


@dataclass
class Run:
    """All that was found. What could not be read is in `notes`."""

    directories: Sequence[Path]
    lines: list[Line] = field(default_factory=list)
    answer: Answer | None = None  # about the newest start
    starts: list[Start] = field(default_factory=list)  # the oldest first
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[Kept] = field(default_factory=list)  # the newest first
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


def collect(directories: Sequence[Path]) -> Run:
    """Of each thing the first that is there: rank 0's host has all but the records of the other hosts' ranks."""
    run = Run(directories)
    for directory in directories:
        run.lines = run.lines or _lines(directory / history.NAME, run.notes)
        run.settings = run.settings or _json(directory / "settings.json", run.notes)
        run.checkpoints = run.checkpoints or _checkpoints(directory / "checkpoints", run.notes)
    found = record_reader.collect(directories)
    run.notes += found.notes
    answers = [cause.of(found, back) for back in range(len(found.attempts))]
    run.answer = answers[0] if answers else None
    run.starts = starts(run.lines, answers[::-1])
    run.seen = _newest_evaluation(directories, run.notes)
    if run.answer and run.answer.attempt.missing:
        missing = ", ".join(map(str, run.answer.attempt.missing))
        run.notes.append(f"no record of rank {missing}: on another host? Give its copy of the directory too")
    if run.starts and not run.lines:
        run.notes.append(f"no {history.NAME}: rank 0 writes it, at its first line of progress, on its own host")
    return run


def starts(lines: Sequence[Line], answers: Sequence[Answer]) -> list[Start]:
    """From both, the oldest first: flight records, of which some starts are kept, and the history, which knows when
    training began, and of all."""
    trained: list[list[Line]] = []  # the lines of each, the one that says where it begins first
    for line in lines:
        if math.isfinite(line.values.get(RANKS, math.nan)):
            trained.append([])
        if trained:
            trained[-1].append(line)
    known = [answer.attempt.started for answer in answers]
    found = []
    for begin, *more in trained:  # without a record any more
        if known and begin.time >= known[0]:
            break
        last = more[-1] if more else begin
        text = f"no flight record is left of it ({KEPT} starts are kept): how it ended is not known"
        found.append(Start(begin.time, last.time, int(begin.values[RANKS]), begin.step, last.step, text, well=False))
    for n, answer in enumerate(answers):
        attempt = answer.attempt
        until = known[n + 1] if n + 1 < len(known) else math.inf
        first = next((begin.step for begin, *_ in trained if known[n] <= begin.time < until), None)
        steps = max(rank.steps for rank in attempt.ranks)
        runs = any(rank.state in ("running", "stopped") for rank in attempt.ranks)
        found.append(
            Start(
                known[n],
                math.nan if runs else attempt.last_seen,
                attempt.size,
                first,
                steps or (found[-1].last if found else 0),  # it failed before it knew where to go on
                answer.sentence,
                answer.kind in _WELL,
                answer.evidence,
                len(answers) - 1 - n,
            )
        )
    return found


def _lines(path: Path, notes: list[str]) -> list[Line]:
    try:
        return history.read(path)
    except OSError as failure:
        notes.append(f"{path.name} cannot be read: {failure.strerror}")
        return []


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as failure:
        notes.append(f"{path} cannot be read: {failure.strerror}")
    except (ValueError, RecursionError):
        notes.append(f"{path} is damaged: it is no JSON")
    else:
        if isinstance(found, dict):
            return found
        notes.append(f"{path} is damaged: it is something else")
    return {}


def _checkpoints(root: Path, notes: list[str]) -> list[Kept]:
    try:
        there = checkpoint.every(root)
    except OSError as failure:
        notes.append(f"{root} cannot be read: {failure.strerror}")
        return []
    links: dict[Path, list[str]] = {}
    for name in ("latest", "best"):
        links.setdefault((root / name).resolve(), []).append(name)
    found = []
    for path in there:
        try:
            manifest, problem = checkpoint.verify(path), ""
        except (CheckpointError, OSError) as failure:
            manifest, problem = {}, str(failure).replace(f"{path}/", "")
        facts = _json(path / "state.json", [])
        if path.exists():  # a run that goes on removes old ones
            found.append(
                Kept(path.name, tuple(links.get(path.resolve(), ())), facts, manifest.get("files", {}), problem)
            )
    return found


def _newest_evaluation(directories: Sequence[Path], notes: list[str]) -> Seen | None:
    """Training's own, or one that was made below the run's directory since, as tools/eval.py does."""
    found = []
    for directory in directories:
        for path in (directory / confusion.NAME, *sorted(directory.glob(f"*/{confusion.NAME}"))):
            try:
                found.append(confusion.read(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as failure:
                notes.append(f"{path} cannot be read: {failure.strerror}")
            except ValueError as failure:
                notes.append(f"{path}: {failure}")
    return max(found, key=lambda seen: seen.time, default=None)
