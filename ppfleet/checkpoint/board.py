"""Curves and images of a run: history.jsonl, and VisualDL's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppfleet import log
from ppfleet.checkpoint.history import NAME, RANKS, History, kept, read

_SHOWN = 1000  # points of a curve that VisualDL draws


class Board:
    """Logs values to history.jsonl, and to VisualDL where it is installed.

    if job.world.first:
        job.board.add(job.step, {"eval/f1": f1})
    """

    def __init__(self, run: Path) -> None:
        self._path = run / NAME
        self._history, self._refused = History(self._path), False
        self._writer: Any = None
        try:
            from visualdl import LogWriter
        except ImportError as missing:
            log.info(f"VisualDL is not installed, no log for it is written ({missing}; pip install visualdl)")
            return
        self._writer = LogWriter(logdir=str(run / "visualdl"))

    def add(self, step: int, values: dict[str, float]) -> None:
        """Log values at a step, by name."""
        self._remember(self._history.add(step, values))
        if self._writer is not None:
            for tag, value in values.items():
                self._writer.add_scalar(tag=tag, step=step, value=value)

    def begin(self, step: int, ranks: int) -> None:
        """Training starts or resumes after that step. On a resume the earlier values are logged to VisualDL again: of
        several logs in one directory it shows only the newest."""
        try:
            before = read(self._path) if step and self._writer is not None else []
        except OSError:  # reported below, when it cannot be written either
            before = []
        for tag, lines in kept(line for line in before if line.step <= step).items():
            for line in lines[:: 1 + len(lines) // _SHOWN] if tag != RANKS else ():
                value, when = line.values[tag], round(1000 * line.time)
                self._writer.add_scalar(tag=tag, step=line.step, value=value, walltime=when)
        self._remember(self._history.add(step, {RANKS: ranks}))

    def _remember(self, problem: str) -> None:
        if problem and not self._refused:
            log.say(f"{problem}; training continues, its curves will have gaps")
        self._refused = bool(problem)

    def picture(self, tag: str, image: Any, step: int = 0) -> None:
        """Log an image: an array of height x width x 3, 8-bit RGB."""
        if self._writer is not None:
            self._writer.add_image(tag=tag, img=image, step=step)

    def close(self) -> None:
        self._history.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
