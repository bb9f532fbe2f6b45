"""Log lines and progress: one log file per rank; on rank 0's console plain lines, or a bar on a terminal."""

from __future__ import annotations

import logging
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_logger = logging.getLogger("ppfleet")


def say(message: str) -> None:
    """A line that matters: to this rank's console and log file, on every rank."""
    if _logger.handlers:
        _logger.warning(message)
    else:
        print(f"[ppfleet] {message}", file=sys.stderr, flush=True)


def info(message: str) -> None:
    """An ordinary line: to every rank's log file, and to rank 0's console."""
    _logger.info(message)


def set_up(directory: Path, rank: int) -> None:
    """Log to `directory/rank<N>.log` and to the console: everything on rank 0, on others only what `say` says."""
    for handler in list(_logger.handlers):
        handler.close()
        _logger.removeHandler(handler)
    line_format = logging.Formatter("[%(asctime)s] ppfleet %(levelname)s: %(message)s", "%Y/%m/%d %H:%M:%S")
    console = _Console()
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    directory.mkdir(parents=True, exist_ok=True)
    for handler in (
        console,
        logging.FileHandler(directory / f"rank{rank}.log", encoding="utf-8", errors="backslashreplace"),
    ):
        handler.setFormatter(line_format)
        _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


class _Console(logging.Handler):
    """Prints above a progress bar rather than through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class Progress:
    """The progress of one epoch: lines in the form that Paddle users know, or a bar on a terminal."""

    def __init__(self, label: str, steps: int | None, samples_per_step: int, every: int, shown: bool) -> None:
        self.label, self.steps, self.every, self.shown = label, steps, max(1, every), shown
        self.samples_per_step = samples_per_step
        self.done = 0
        self._since = 0
        self._reader = 0.0
        self._began = time.perf_counter()
        self._bar: Any = None
        if shown and sys.stdout.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, desc=label, unit="step", file=sys.stdout, dynamic_ncols=True)

    def waited(self, seconds: float) -> None:
        """Add time that the loop spent waiting for its next batch."""
        self._reader += seconds

    def step(self) -> bool:
        """Count a finished step; true when a line is due."""
        self.done += 1
        self._since += 1
        if self._bar is not None:
            self._bar.update()
        return self.done % self.every == 0 or self.done == self.steps

    def line(self, values: dict[str, float], steps_later: int | None = None) -> dict[str, float]:
        """Print a line of `values` and the costs since the last line; return the costs.

        `steps_later` counts the steps of the epochs after this one, for the estimated time of arrival.
        """
        now = time.perf_counter()
        batch = (now - self._began) / max(1, self._since)
        costs = {
            "batch_cost": batch,
            "reader_cost": self._reader / max(1, self._since),
            "ips": self.samples_per_step / batch if batch else math.nan,
        }
        remaining = None if self.steps is None or steps_later is None else self.steps - self.done + steps_later
        if self.shown:
            shown = ", ".join(f"{name}: {number(value)}" for name, value in values.items())
            if self._bar is not None:
                self._bar.set_postfix_str(f"{shown}, ips: {costs['ips']:.1f}")
            else:
                info(
                    f"{self.label}, step: [{self.done}/{'?' if self.steps is None else self.steps}], {shown}, "
                    f"batch_cost: {batch:.5f} s, reader_cost: {costs['reader_cost']:.5f} s, "
                    f"ips: {costs['ips']:.2f} samples/s"
                    + (f", eta: {timedelta(seconds=round(remaining * batch))}" if remaining is not None else "")
                )
        self._began, self._since, self._reader = now, 0, 0.0
        return costs

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def number(value: float) -> str:
    return f"{value:.6g}"
