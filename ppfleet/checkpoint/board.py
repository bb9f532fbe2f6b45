"""Curves and pictures of a run: its history.jsonl, and VisualDL's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppfleet import log
from ppfleet.checkpoint.history import NAME, RANKS, History, kept, read

_SHOWN = 1000  # points of a curve that VisualDL draws


class Board:
    """The figures of a run: its history.jsonl, and VisualDL's log where VisualDL is installed (said once)."""

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._history, self._refused = History(self._path), False
        self._writer: Any = None
        try:
            from visualdl import LogWriter
        except ImportError as missing:
            log.info(f"nothing for VisualDL: {missing} (pip install visualdl)")
            return
        self._writer = LogWriter(logdir=str(run / "visualdl"))

    def add(self, step: int, values: dict[str, float]) -> None:
        """Numbers at a step, each under its name."""
        self._remember(self._history.add(step, values))
        if self._writer is not None:
            for tag, value in values.items():
                self._writer.add_scalar(tag=tag, step=step, value=value)

    def begin(self, step: int, ranks: int) -> None:
        """Training begins after that step. Where it goes on, VisualDL is told what was before: of several logs in one
        directory it shows only the newest."""
        try:
            before = read(self._path) if step and self._writer is not None else []
        except OSError:  # said below, when it cannot be written to either
            before = []
        for tag, lines in kept(line for line in before if line.step <= step).items():
            for line in lines[:: 1 + len(lines) // _SHOWN] if tag != RANKS else ():
                value, when = line.values[tag], round(1000 * line.time)
                self._writer.add_scalar(tag=tag, step=line.step, value=value, walltime=when)
        self._remember(self._history.add(step, {RANKS: ranks}))

    def _remember(self, problem: str) -> None:
        if problem and not self._refused:
            log.say(f"{problem}; training goes on, its curves have gaps")
        self._refused = bool(problem)

    def picture(self, tag: str, image: Any, step: int = 0) -> None:
        """A picture: an array of height x width x 3, RGB of 8 bits."""
        if self._writer is not None:
            self._writer.add_image(tag=tag, img=image, step=step)

    def close(self) -> None:
        self._history.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
