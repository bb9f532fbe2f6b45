"""The figures of a run over its steps, as lines of JSON that any program reads. Pure.

    <run>/history.jsonl   {"time": 1763400000.123, "step": 0, "job/ranks": 2}          training starts or resumes
                          {"time": 1763400002.5, "step": 20, "train/loss": 0.7, "train/lr": 0.01}

`time` is in seconds since 1970 by rank 0's clock. Values that are not finite are null, as JSON has no NaN. Rank 0
appends one line at a time, so a kill loses at most one. After a resume, repeated steps appear again; `read` and
`curves` handle this.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppfleet.errors import FleetError

NAME = "history.jsonl"
RANKS = "job/ranks"  # marks a line where training starts or resumes, on that many ranks
_OWN = ("time", "step")
_LARGEST = 1e12  # a larger time or step is damaged


@dataclass(frozen=True)
class Line:
    """The values logged at a step."""

    time: float
    step: int
    values: dict[str, float] = field(default_factory=dict)  # NaN: it was not finite


class History:
    """Appends lines. A failed write costs that line, not the training: `add` returns what went wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._whole = True  # whether the file ends with a whole line

    def add(self, step: int, values: Mapping[str, float]) -> str:
        """Why it could not be written; empty when it was."""
        line: dict[str, Any] = {"time": round(time.time(), 3), "step": int(step)}
        for name, value in values.items():
            if name in _OWN:
                raise FleetError(f"a logged value cannot be named {name!r}: every line of {NAME} has its own {name}")
            number = value if type(value) is int else float(value)
            line[name] = number if math.isfinite(number) else None
        data = json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        try:
            if self._file is None:
                self._open()
            # One call per line: after a kill it is complete or missing. Without fsync, which costs more than a line is
            # worth: only a power failure loses what Linux has not written yet.
            data = data if self._whole else b"\n" + data
            self._whole = os.write(self._file, data) == len(data)  # type: ignore[arg-type]
        except OSError as failure:
            return f"cannot write {self._path}: {failure.strerror}"
        return "" if self._whole else f"cannot write {self._path}: the disk is full"

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._file).st_size
        self._whole = not size or os.pread(self._file, 1, size - 1) == b"\n"

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read(path: Path) -> list[Line]:
    """The lines in the order in which they were written. Torn or foreign lines are skipped; a missing file has none."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line for text in data.split(b"\n") if (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> Line | None:
    try:
        found = json.loads(text)
        when, step = float(found["time"]), int(found["step"])
        values = {
            str(name): math.nan if value is None else float(value)
            for name, value in found.items()
            if name not in _OWN and (value is None or type(value) in (int, float))
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Line(when, step, values) if abs(when) < _LARGEST and abs(step) < _LARGEST else None


def kept(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Name -> its valid lines, by step. Where training resumes after a step, lines of later steps are dropped; a value
    replaces those that were written earlier for the same or a later step."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if RANKS in line.values:
            for before in found.values():
                _drop(before, line.step + 1)
        for name in line.values:
            before = found.setdefault(name, [])
            _drop(before, line.step)
            before.append(line)
    return {name: before for name, before in found.items() if before}


def _drop(lines: list[Line], step: int) -> None:
    """Drop the lines from that step on."""
    while lines and lines[-1].step >= step:
        lines.pop()


def curves(lines: Iterable[Line]) -> dict[str, list[tuple[int, float]]]:
    """Name -> (step, value), by step."""
    return {name: [(line.step, line.values[name]) for line in found] for name, found in kept(lines).items()}
