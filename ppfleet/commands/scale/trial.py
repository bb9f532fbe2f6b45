"""One run of a scaling series: started by `ppfleet launch`, ended with this process, and what it left behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleet import foreign, limits
from ppfleet.checkpoint import files, history
from ppfleet.cluster import process_tree
from ppfleet.commands.scale import time_breakdown
from ppfleet.commands.scale.series import Point
from ppfleet.commands.why import cause, record_reader
from ppfleet.errors import PREEMPTED, FleetError

_EVAL = "eval/"
_SAMPLES = "eval/samples"


@dataclass(frozen=True)
class Place:
    """The directory of a run on this host."""

    path: Path
    node: int = 0

    @property
    def run(self) -> Path:
        """The script's own."""
        return self.path / "run"

    @property
    def logs(self) -> Path:
        """Paddle's launcher's; of each host another, as they may share a disk."""
        return self.path / f"log{self.node}"

    @property
    def output(self) -> Path:
        return self.path / f"launch{self.node}.log"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def begun(self) -> bool:
        """Whether an earlier start left something to go on from."""
        return any((self.run / "checkpoints").glob("*/manifest.json"))


def execute(words: Sequence[str], place: Place, env: dict[str, str]) -> float:
    """`ppfleet launch` with those words, to its end: its seconds. A FleetError says why it failed."""
    try:
        place.path.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise FleetError(files.disk_message(failure, place.path)) from None
    launch = [sys.executable, "-m", "ppfleet", "launch", f"--log_dir={place.logs}", *words]
    watched = [sys.executable, process_tree.__file__, str(os.getpid()), str(limits.SCALE_GRACE), *launch]
    began, clock = time.time(), time.monotonic()
    with place.output.open("ab") as out:
        process = subprocess.Popen(
            watched,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C is for this process, which passes it on once
        )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code:
        raise FleetError(f"{_reason(place, began, code)} (exit code {code}; {place.output} tells more)")
    return time.monotonic() - clock


def _reason(place: Place, began: float, code: int) -> str:
    """What the flight records say; where there are none, the last word of the launcher."""
    if code == PREEMPTED:
        return "SIGTERM: it was saved, and the same command goes on from there"
    found = cause.answer([place.run, place.logs])
    if found is not None and found.attempt.started >= began:
        return found.sentence
    telling = foreign.telling_line("\n".join(_lines(place.output)[-200:]), last=True)
    return telling[:300] or "it exited without reporting a reason"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def records(place: Place) -> dict[str, Any]:
    """What the ranks of this host say of the time of the newest start."""
    found = record_reader.collect([place.run])
    return time_breakdown.told(found.attempts[0] if found.attempts else [])


def result(
    place: Place, words: Sequence[str], point: Point, seed: int, wall: float, resumed: bool, told: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the finished run left, as plain JSON data. A FleetError names what is missing."""
    path = place.run / history.NAME
    lines = history.read(path)
    if not lines:
        raise FleetError(
            f"{path} is not there or empty: the script must train with ppfleet.Job, and write to the directory that "
            f"--output-flag gives it"
        )
    # The time of a run that was interrupted is not that of the training; its metric is.
    parts = None if resumed else time_breakdown.together(told)
    if parts is None and not resumed:
        raise FleetError(f"the flight records in {place.run}/flight tell of no step: nothing was trained")
    _check_settings(place, point)
    figures = {name: points[-1][1] for name, points in history.curves(lines).items() if points}
    return {
        "command": list(words),
        "machines": point.machines,
        "ranks": point.ranks,
        "batch": point.batch,
        "seed": seed,
        "wall": wall,
        "resumed": resumed,
        "metrics": {
            name[len(_EVAL) :]: value if math.isfinite(value) else None
            for name, value in figures.items()
            if name.startswith(_EVAL) and name != _SAMPLES
        },
        "samples": figures.get(_SAMPLES),
        "parts": vars(parts) if parts else None,
        "finished": time.time(),
    }


def _check_settings(place: Place, point: Point) -> None:
    """Whether the script took what it was given: the table would compare the wrong things in silence."""
    path = place.run / "settings.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise FleetError(f"cannot read {path}: {failure}") from None
    for name, wanted in (("ranks", point.total), ("batch_size", point.batch)):
        if settings.get(name) != wanted:
            raise FleetError(
                f"the script trained with {name}={settings.get(name)} instead of {wanted} ({path}): "
                f"--batch-flag names the option by which it takes the batch of a rank"
            )


def write(place: Place, facts: dict[str, Any]) -> None:
    files.replace_file(place.result, files.json_bytes(facts))


def finished(place: Place) -> dict[str, Any] | None:
    """The result of a run that an earlier start of the series has finished."""
    try:
        found = json.loads(place.result.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as failure:
        raise FleetError(f"cannot read {place.result} ({failure}): remove it, and the run is made again") from None
    return dict(found)
