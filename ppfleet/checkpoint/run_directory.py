"""The run's directory, which rank 0 alone writes: lock, settings, checkpoints and the weights for other tools."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import paddle

from ppfleet import log
from ppfleet.checkpoint import files, manifest, tensors
from ppfleet.distributed.world import World
from ppfleet.errors import CheckpointError, FleetError
from ppfleet.watchdog import process, recorder
from ppfleet.watchdog.recorder import Flight

CARD = "model.json"
EXISTING = ("refuse", "move")
# What belongs to one training run; logs and flight records are of the directory.
_OF_A_RUN = ("checkpoints", "*.pdparams", CARD, "*.json", "history.jsonl", "visualdl", "export")


class RunDir:
    """`path` with its checkpoints; the newest `keep` of them stay, and the best."""

    def __init__(self, path: Path, keep: int, existing: str = EXISTING[0]) -> None:
        if existing not in EXISTING:
            raise FleetError(f"existing must be one of {', '.join(EXISTING)}, got {existing!r}")
        self.path, self.keep, self.existing = path, keep, existing
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def take(self) -> None:
        """Make the directory and keep every other job out of it until this process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a+")
            # A POSIX lock: it dies with this process and is not inherited by loader workers.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.existing == "move" and self._found():
                self._move_aside()
        except BlockingIOError:
            raise FleetError(
                f"another job is writing to {self.path}: wait for it to end, or choose another directory"
            ) from None
        except OSError as failure:
            raise FleetError(files.disk_message(failure, self.path)) from failure

    def _found(self) -> list[str]:
        """The checkpoints and weights of a run in this directory."""
        weights = sorted(path.name for path in self.path.glob("*.pdparams"))
        return [*(path.name for path in manifest.every(self.checkpoints)), *weights]

    def refuse_other(self) -> None:
        """Before the first step or save of a run that was not resumed from here: its checkpoints would take the place
        of another run's."""
        found = self._found()
        if found:
            raise FleetError(
                f"{self.path} already holds a run ({len(found)} checkpoints and weight files, newest: {found[0]}), "
                f"which would be overwritten. Call job.resume() before training to continue it, pass existing='move' "
                f"to Job to put it aside, or choose another directory"
            )

    def _move_aside(self) -> None:
        number = 1
        while (aside := self.path / f"previous-{number}").exists():
            number += 1
        aside.mkdir()
        for pattern in _OF_A_RUN:
            for path in sorted(self.path.glob(pattern)):
                path.rename(aside / path.name)
        log.info(f"moved the run in {self.path} to {aside}")

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_settings(self, text: str) -> None:
        files.replace_file(self.path / "settings.json", text.encode(errors=files.ODD))

    def save(
        self, net: Any, model: bytes, optimizer: bytes, facts: dict[str, Any], replaces: Path | None = None
    ) -> Path:
        """One checkpoint, and latest.pdparams (best.pdparams) beside it; the one that it `replaces` is removed."""
        parts = (model, optimizer, json.dumps(facts, indent=1).encode())
        best, step = bool(facts["is_best"]), int(facts["step"])
        written = manifest.write(self.checkpoints, step, dict(zip(manifest.PARTS, parts)), self.keep, best, replaces)
        self._write_weights(net, facts)
        return written

    def _write_weights(self, net: Any, facts: dict[str, Any]) -> None:
        """For other tools, which read no checkpoints: the weights, and the card that says what they mean."""
        latest = self.path / "latest.pdparams"
        if facts["card"]:
            files.replace_file(self.path / CARD, files.json_bytes(facts["card"]), CheckpointError)
        files.replace_file(latest, lambda path: paddle.save(net.state_dict(), str(path)), CheckpointError)
        if facts["is_best"]:
            # A second name of the same file: the next latest.pdparams is a new file, this one stays.
            files.replace_file(self.path / "best.pdparams", lambda path: _same_file(latest, path), CheckpointError)

    def mend(self, source: Path, net: Any, facts: dict[str, Any]) -> None:
        """After a resume from the newest checkpoint: redo what a kill right after its rename may have left undone."""
        manifest.link(self.checkpoints, "latest", source)
        if facts["is_best"]:
            manifest.link(self.checkpoints, "best", source)
        self._write_weights(net, facts)

    def find(self, source: str) -> tuple[str | None, bool]:
        """The checkpoint to go on from, and whether it is of this run. `auto`: the newest of this run that verifies, if
        there is one; else the one that the path names, or the newest of the run there."""
        there = self.checkpoints if source == "auto" else Path(source) / "checkpoints"
        path: Path | None
        if source != "auto" and not there.is_dir():
            path = Path(source)
            if not path.exists():
                raise CheckpointError(
                    f"{source} is not there: give a checkpoint's directory, a run's, 'auto' or 'none'"
                )
            manifest.verify(path)
        else:
            found = manifest.newest(there)
            if found.skipped:
                log.say(f"skipped {len(found.skipped)} checkpoint(s) that do not verify: {'; '.join(found.skipped)}")
            if source != "auto" and found.path is None:
                raise CheckpointError(f"{there} holds no checkpoint that verifies")
            path = found.path
        own = path is not None and path.resolve().parent == self.checkpoints.resolve()
        return (str(path) if path else None), own


def _same_file(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)  # of a run that was killed halfway
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def open_flight(path: Path, world: World) -> Flight:
    """This rank's flight record in the run's directory, and a link to it where the launcher's logs are."""
    facts = {
        "rank": world.rank,
        "size": world.size,
        "run": "",  # until the roll call
        "host": platform.node(),
        "address": world.host,
        "boot": process.this_host(),
        "pid": os.getpid(),
        "started": time.time(),
        "launcher": above.pid if (above := process.launcher()) else 0,
        "directory": str(path),
        "script": " ".join(sys.argv)[:500],
    }
    ring = recorder.new_path(path / "flight", world.rank)
    try:
        made = Flight(ring, facts)
    except OSError as failure:
        if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise FleetError(files.disk_message(failure, ring)) from None
        ring.with_suffix(".new").unlink(missing_ok=True)
        log.say(f"no flight record of {world.name()} in {ring.parent}: {failure.strerror}")
        return Flight(None, facts)
    logs = os.environ.get("PADDLE_LOG_DIR")
    if logs and facts["launcher"]:
        link = Path(logs) / f"rank{world.rank}{recorder.SUFFIX}"
        with suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(ring)
    return made


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a card said otherwise before; what it did not say at all is an addition, not a difference."""
    now = json.loads(files.json_bytes(now))
    return [name for name in before if now.get(name) != before[name]]


def _shown(before: Any, now: Any) -> str:
    """What of it, where it has parts with names."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return ""
    other = differences(before, now)
    return f" ({', '.join(f'{name} was {before[name]}, is {now.get(name)}' for name in other)})" if other else ""


def restore(
    parts: dict[str, bytes],
    source: str,
    seed: int,
    card: dict[str, Any],
    net: Any,
    optimizer: Any,
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """Put a checkpoint's parts into model and optimizer; what remains (state.json) is returned."""
    try:
        facts: dict[str, Any] = json.loads(parts["state.json"])
    except ValueError as failure:
        raise CheckpointError(f"{source}/state.json is damaged: {failure}") from None
    if facts["seed"] != seed:
        raise CheckpointError(
            f"{source} was trained with seed={facts['seed']}, not {seed}: the order of samples would change midway"
        )
    facts.setdefault("card", {})
    for name in differences(facts["card"], card) if card else ():
        raise CheckpointError(
            f"{source} was trained with other {name} than now{_shown(facts['card'][name], card.get(name))}: bring the "
            f"same, or begin a run in another directory"
        )
    model = tensors.from_bytes(parts["model.safetensors"], f"{source}/model.safetensors")
    moments = tensors.from_bytes(parts["optimizer.safetensors"], f"{source}/optimizer.safetensors")
    tensors.load_model(net, model, f"{source}/model.safetensors")
    tensors.load_optimizer(optimizer, parameters, moments, f"{source}/optimizer.safetensors")
    tensors.load_schedule(optimizer, facts["schedule"])
    return facts
