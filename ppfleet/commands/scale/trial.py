"""One run of a scaling series: starts it with `ppfleet launch`, and reads its results."""

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
from ppfleet.commands.scale.series import Point, Trial
from ppfleet.commands.why import cause, record_reader
from ppfleet.errors import PREEMPTED, FleetError

_EVAL = "eval/"
_SAMPLES = "eval/samples"


@dataclass(frozen=True)
class TrialDirectory:
    """The directory of a run on this host."""

    path: Path
    node: int = 0

    @property
    def run(self) -> Path:
        """The script's run directory."""
        return self.path / "run"

    @property
    def logs(self) -> Path:
        """The log directory of Paddle's launcher; one for each host, because hosts may share a disk."""
        return self.path / f"log{self.node}"

    @property
    def output(self) -> Path:
        return self.path / f"launch{self.node}.log"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def has_checkpoint(self) -> bool:
        """Whether an earlier start left a checkpoint to resume from."""
        return any((self.run / "checkpoints").glob("*/manifest.json"))


def execute(arguments: Sequence[str], directory: TrialDirectory, env: dict[str, str]) -> float:
    """Run `ppfleet launch` with those arguments; the seconds it took. A FleetError says why it failed."""
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise FleetError(files.disk_message(failure, directory.path)) from None
    launch = [sys.executable, "-m", "ppfleet", "launch", f"--log_dir={directory.logs}", *arguments]
    watched = [sys.executable, process_tree.__file__, str(os.getpid()), str(limits.SCALE_GRACE), *launch]
    began, clock = time.time(), time.monotonic()
    with directory.output.open("ab") as out:
        process = subprocess.Popen(
            watched,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
        )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if code:
        raise FleetError(f"{_reason(directory, began, code)} (exit code {code}; see {directory.output})")
    return time.monotonic() - clock


def _reason(directory: TrialDirectory, began: float, code: int) -> str:
    """The explanation of the flight records; without any, the last relevant line of the launcher."""
    if code == PREEMPTED:
        return "SIGTERM: the run was saved; run the same command again to continue"
    answer = cause.answer([directory.run, directory.logs])
    if answer is not None and answer.attempt.started >= began:
        return answer.sentence
    telling = foreign.telling_line("\n".join(_lines(directory.output)[-200:]), last=True)
    return telling[:300] or "it exited without reporting a reason"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def host_times(directory: TrialDirectory) -> dict[str, Any]:
    """How the ranks of this host spent their time in the newest start."""
    records = record_reader.collect([directory.run])
    return time_breakdown.host_times(records.attempts[0] if records.attempts else [])


def result(
    directory: TrialDirectory,
    command: Sequence[str],
    run: Trial,
    wall: float,
    resumed: bool,
    hosts: list[dict[str, Any]],
) -> dict[str, Any]:
    """The results of a finished run, as plain JSON data. A FleetError names what is missing."""
    path = directory.run / history.NAME
    lines = history.read(path)
    if not lines:
        raise FleetError(
            f"{path} is missing or empty: the script must train with ppfleet.Job and write to the directory passed "
            f"with --output-flag"
        )
    # An interrupted run has a valid metric, but no valid time.
    parts = None if resumed else time_breakdown.combine(hosts)
    if parts is None and not resumed:
        raise FleetError(f"the flight records in {directory.run}/flight contain no step: nothing was trained")
    _check_settings(directory, run.point)
    figures = {name: points[-1][1] for name, points in history.curves(lines).items() if points}
    return {
        "command": list(command),
        "machines": run.point.machines,
        "ranks": run.point.ranks,
        "batch": run.point.batch,
        "seed": run.seed,
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


def _check_settings(directory: TrialDirectory, point: Point) -> None:
    """Whether the script used the given ranks and batch; otherwise the table would silently compare the wrong runs."""
    path = directory.run / "settings.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise FleetError(f"cannot read {path}: {failure}") from None
    for name, wanted in (("ranks", point.total), ("batch_size", point.batch)):
        if settings.get(name) != wanted:
            raise FleetError(
                f"the script trained with {name}={settings.get(name)} instead of {wanted} ({path}): "
                f"--batch-flag must name the script's option for the batch per rank"
            )


def write(directory: TrialDirectory, result: dict[str, Any]) -> None:
    files.replace_file(directory.result, files.json_bytes(result))


def finished(directory: TrialDirectory) -> dict[str, Any] | None:
    """The result of a run that an earlier start of the series has finished."""
    try:
        return dict(json.loads(directory.result.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as failure:
        raise FleetError(f"cannot read {directory.result} ({failure}): delete it to repeat the run") from None
