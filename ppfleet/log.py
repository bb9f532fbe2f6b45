"""What a person reads: one log file per rank, plain lines or a bar on rank 0. It only observes."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_logger = logging.getLogger("ppfleet")


def say(message: str) -> None:
    """One line that matters: console of the rank that says it, and its log file."""
    if _logger.handlers:
        _logger.warning(message)
    else:
        print(f"[ppfleet] {message}", file=sys.stderr, flush=True)


def info(message: str) -> None:
    """One line of ordinary news: rank 0's console, every rank's log file."""
    _logger.info(message)


def set_up(directory: Path, rank: int) -> None:
    """Send this process's lines to `directory/rank<N>.log`, and to the console: all of rank 0's, else what matters."""
    for handler in list(_logger.handlers):
        handler.close()
        _logger.removeHandler(handler)
    form = logging.Formatter("[%(asctime)s] ppfleet %(levelname)s: %(message)s", "%Y/%m/%d %H:%M:%S")
    console = _Console()
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    directory.mkdir(parents=True, exist_ok=True)
    for handler in (
        console,
        logging.FileHandler(directory / f"rank{rank}.log", encoding="utf-8", errors="backslashreplace"),
    ):
        handler.setFormatter(form)
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
    """The lines of one epoch in the form Paddle users know, or a bar where a person watches."""

    def __init__(self, label: str, steps: int | None, samples_a_step: int, every: int, shown: bool) -> None:
        self.label, self.steps, self.every, self.shown = label, steps, max(1, every), shown
        self.samples_a_step = samples_a_step
        self.done = 0
        self._since = 0
        self._reader = 0.0
        self._began = time.perf_counter()
        self._bar: Any = None
        terminal = _terminal() if shown else None
        if terminal is not None:
            from tqdm import tqdm

            width = {"dynamic_ncols": True} if terminal is sys.stdout else {"ncols": 72, "leave": False}
            self._bar = tqdm(total=steps, desc=label, unit="step", file=terminal, **width)

    def waited(self, seconds: float) -> None:
        """Time that the loop spent waiting for its next batch."""
        self._reader += seconds

    def step(self) -> bool:
        """Count a finished step; true when a line is due."""
        self.done += 1
        self._since += 1
        if self._bar is not None:
            self._bar.update()
        return self.done % self.every == 0 or self.done == self.steps

    def line(self, values: dict[str, float], left_later: int | None = None) -> dict[str, float]:
        """Print a line of `values` and the costs since the last one; the costs are returned."""
        now = time.perf_counter()
        batch = (now - self._began) / max(1, self._since)
        costs = {
            "batch_cost": batch,
            "reader_cost": self._reader / max(1, self._since),
            "ips": self.samples_a_step / batch if batch else math.nan,
        }
        left = None if self.steps is None or left_later is None else self.steps - self.done + left_later
        if self.shown:
            shown = ", ".join(f"{name}: {number(value)}" for name, value in values.items())
            if self._bar is not None:
                self._bar.set_postfix_str(f"{shown}, ips: {costs['ips']:.1f}")
            else:
                info(
                    f"{self.label}, step: [{self.done}/{'?' if self.steps is None else self.steps}], {shown}, "
                    f"batch_cost: {batch:.5f} s, reader_cost: {costs['reader_cost']:.5f} s, "
                    f"ips: {costs['ips']:.2f} samples/s"
                    + (f", eta: {timedelta(seconds=round(left * batch))}" if left is not None else "")
                )
        self._began, self._since, self._reader = now, 0, 0.0
        return costs

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _terminal() -> Any:
    """Where a bar can be drawn for a person: our own terminal, or under Paddle's launcher, which sends our output to
    `workerlog.0` and shows that file's lines now and then, the launcher's."""
    if sys.stdout.isatty():
        return sys.stdout
    try:
        mine = Path("/proc/self/fd/1").readlink()
        theirs = Path(f"/proc/{os.getppid()}/fd/1").readlink()
        if not mine.name.startswith("workerlog.") or not str(theirs).startswith("/dev/pts/"):
            return None
        # Not as our controlling terminal: its end would be the end of the training.
        return _Above(os.fdopen(os.open(theirs, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8"))
    except OSError:
        return None


class _Above:
    """A terminal to which another process writes lines: the cursor stays in front of the bar, such a line goes over it,
    and the bar is drawn again below."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def write(self, text: str) -> None:
        self._terminal.write(text if text.endswith(("\n", "\r")) else f"{text}\r")

    def flush(self) -> None:
        self._terminal.flush()

    def fileno(self) -> int:
        return int(self._terminal.fileno())


def number(value: float) -> str:
    return f"{value:.6g}"
