"""The run directory, which only rank 0 writes: lock, settings, checkpoints and the weights for other tools."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

import paddle

from ppfleet import log
from ppfleet.checkpoint import files, manifest, retention, tensors
from ppfleet.distributed.world import World
from ppfleet.errors import CheckpointError, FleetError
from ppfleet.watchdog import process, recorder
from ppfleet.watchdog.recorder import Flight

CARD = "model.json"
LATEST = "latest.pdparams"
EXISTING = ("refuse", "move")
# What belongs to one training run. Logs and flight records belong to the directory.
_OF_A_RUN = ("checkpoints", "*.pdparams", CARD, "*.json", "history.jsonl", "visualdl", "export")


class RunDir:
    """`path` with its checkpoints, of which the newest `keep` and the best are kept."""

    def __init__(self, path: Path, keep: int, existing: str = EXISTING[0]) -> None:
        if existing not in EXISTING:
            raise FleetError(f"existing must be one of {', '.join(EXISTING)}, got {existing!r}")
        self.path, self.keep, self.existing = path, keep, existing
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def take(self) -> None:
        """Create the directory and lock it against other jobs until this process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a+")
            # A POSIX lock: it dies with this process and is not inherited by loader workers.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.existing == "move" and self._contents():
                self._move_aside()
        except BlockingIOError:
            raise FleetError(
                f"another job is writing to {self.path}: wait for it to end, or choose another directory"
            ) from None
        except OSError as failure:
            raise FleetError(files.disk_message(failure, self.path)) from failure

    def _contents(self) -> list[str]:
        """The checkpoints and weights of a run in this directory."""
        weights = sorted(path.name for path in self.path.glob("*.pdparams"))
        return [*(path.name for path in manifest.every(self.checkpoints)), *weights]

    def refuse_other(self) -> None:
        """Before the first step or save of a run that was not resumed from here, whose checkpoints would replace the
        other run's."""
        if contents := self._contents():
            raise FleetError(
                f"{self.path} already holds a run ({len(contents)} checkpoints and weight files, newest: "
                f"{contents[0]}), which would be overwritten. Call job.resume() before training to continue it, pass "
                f"existing='move' to Job to put it aside, or choose another directory"
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
        self, net: Any, tensor_files: tuple[bytes, bytes], digest: str, facts: dict[str, Any], replaces: Path | None
    ) -> Path:
        """Write a checkpoint, and latest.pdparams (best.pdparams) beside it; remove the one that it `replaces`.

        `tensor_files` are the model's and the optimizer's, `digest` is the SHA-256 of the former, "" if unknown.
        """
        parts = dict(zip(manifest.PARTS, (*tensor_files, json.dumps(facts, indent=1).encode())))
        best, step, digests = bool(facts["is_best"]), int(facts["step"]), {manifest.PARTS[0]: digest}
        with ThreadPoolExecutor(1) as pool:  # the files of the checkpoint while this thread writes the weights
            checkpoint = pool.submit(manifest.write, self.checkpoints, step, parts, best, digests)
            try:
                with self._weights(net):
                    written = checkpoint.result()
            except CheckpointError:
                checkpoint.result()  # if that failed as well, it is what counts
                raise
            removed = pool.submit(self._remove_old, replaces)
            self._describe_weights(facts)
            removed.result()
        return written

    def _remove_old(self, replaced: Path | None) -> None:
        if replaced is not None:
            retention.remove(replaced)
        retention.prune(self.checkpoints, self.keep)

    def _weights(self, net: Any) -> AbstractContextManager[None]:
        """latest.pdparams, for other tools, which do not read checkpoints: replaced at the end of the block."""
        return files.staged(self.path / LATEST, lambda path: paddle.save(net.state_dict(), str(path)), CheckpointError)

    def _describe_weights(self, facts: dict[str, Any]) -> None:
        """best.pdparams, and the model card beside the weights."""
        if facts["card"]:
            files.replace_file(self.path / CARD, files.json_bytes(facts["card"]), CheckpointError)
        if facts["is_best"]:
            # A hard link: the next latest.pdparams is a new file, and this one stays.
            best, latest = self.path / "best.pdparams", self.path / LATEST
            files.replace_file(best, lambda path: _link_or_copy(latest, path), CheckpointError)

    def mend(self, source: Path, net: Any, facts: dict[str, Any]) -> None:
        """After a resume from the newest checkpoint: finish what a kill right after its rename may have cut off."""
        manifest.link(self.checkpoints, "latest", source)
        if facts["is_best"]:
            manifest.link(self.checkpoints, "best", source)
        with self._weights(net):
            pass
        self._describe_weights(facts)

    def find(self, source: str) -> tuple[str | None, bool]:
        """The checkpoint to resume from, and whether it belongs to this run. `auto` is the newest of this run that
        verifies, if there is one; a path is a checkpoint, or a run, whose newest is taken."""
        checkpoints = self.checkpoints if source == "auto" else Path(source) / "checkpoints"
        path: Path | None
        if source != "auto" and not checkpoints.is_dir():
            path = Path(source)
            if not path.exists():
                raise CheckpointError(
                    f"{source} does not exist: give the directory of a checkpoint or of a run, 'auto' or 'none'"
                )
            manifest.verify(path)
        else:
            found = manifest.newest(checkpoints)
            if found.skipped:
                log.say(f"skipped {len(found.skipped)} checkpoint(s) that do not verify: {'; '.join(found.skipped)}")
            if source != "auto" and found.path is None:
                raise CheckpointError(f"{checkpoints} holds no checkpoint that verifies")
            path = found.path
        own = path is not None and path.resolve().parent == self.checkpoints.resolve()
        return (str(path) if path else None), own


def _link_or_copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)  # left by a kill halfway
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def open_flight(path: Path, world: World) -> Flight:
    """This rank's flight record in the run directory, and a link to it beside the launcher's logs."""
    facts = {
        "rank": world.rank,
        "size": world.size,
        "run": "",  # until the ranks have met
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
    """The entries of a model card that have changed. A new entry is an addition, not a difference."""
    now = json.loads(files.json_bytes(now))
    return [name for name in before if now.get(name) != before[name]]


def _shown(before: Any, now: Any) -> str:
    """The changed parts of an entry that is a dictionary."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return ""
    changed = ", ".join(f"{name} was {before[name]}, is {now.get(name)}" for name in differences(before, now))
    return f" ({changed})" if changed else ""


def restore(
    parts: dict[str, bytes],
    source: str,
    seed: int,
    card: dict[str, Any],
    net: Any,
    optimizer: Any,
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """Load a checkpoint's parts into model and optimizer; return the rest of it (state.json)."""
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
            f"{source} was trained with different {name}{_shown(facts['card'][name], card.get(name))}: use the same, "
            f"or start a run in another directory"
        )
    model = tensors.from_bytes(parts["model.safetensors"], f"{source}/model.safetensors")
    moments = tensors.from_bytes(parts["optimizer.safetensors"], f"{source}/optimizer.safetensors")
    tensors.load_model(net, model, f"{source}/model.safetensors")
    tensors.load_optimizer(optimizer, parameters, moments, f"{source}/optimizer.safetensors")
    tensors.load_schedule(optimizer, facts["schedule"])
    return facts
