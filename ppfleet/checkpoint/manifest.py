"""One directory = one checkpoint, whole or not at all. Pure: files and hashes, no Paddle.

    checkpoints/000012-step-1200/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/latest, best     links to two of them

A checkpoint is written to a temporary directory, flushed to the disk, read back and only then renamed into place.
Whatever happens before the rename, the earlier checkpoints are untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleet.checkpoint.files import TEMPORARY, digest, disk_message, sync, write_bytes
from ppfleet.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
UNTOUCHED = ". Earlier checkpoints are untouched"
LINKS = ("latest", "best")
PARTS = ("model.safetensors", "optimizer.safetensors", "state.json")
_NAME = re.compile(r"(\d{6,})-step-\d+$")  # a serial number: the newest is the one written last


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that verifies, and the newer ones that do not."""

    path: Path | None
    skipped: tuple[str, ...] = ()


def write(
    root: Path,
    step: int,
    files: Mapping[str, bytes],
    best: bool = False,
    digests: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint of the given files below `root`; link it as latest (and best).

    `digests` are the SHA-256 of files, where the caller knows them already.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        target = _next_name(root, step)
        temporary = root / f"{TEMPORARY}{target.name}-{os.getpid()}"
        try:
            temporary.mkdir()
            _write_files(temporary, files, digests or {})
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for name in LINKS if best else LINKS[:1]:
            link(root, name, target)  # flushes the renaming, too
    except OSError as failure:
        raise CheckpointError(disk_message(failure, root) + UNTOUCHED) from failure
    return target


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and unaltered; an error names the file that is not."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        form = int(manifest["format"])
    except FileNotFoundError:
        raise CheckpointError(f"{path / MANIFEST} is missing") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file: a checkpoint is a directory (job.load takes weights alone)") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path / MANIFEST} is damaged: not the manifest of a checkpoint") from None
    if form > FORMAT:
        raise CheckpointError(f"{path} has format {form}, this ppfleet reads up to {FORMAT}: upgrade ppfleet")
    for name in PARTS:
        if name not in files:
            raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list {name}")
    for name, (size, expected) in files.items():
        part = path / name
        if Path(name).name != name:
            raise CheckpointError(f"{path / MANIFEST} is damaged: {name!r} is not a plain file name")
        if not part.is_file():
            raise CheckpointError(f"{part} is missing")
        if part.stat().st_size != size:
            raise CheckpointError(f"{part} is truncated or altered: {part.stat().st_size} bytes instead of {size}")
        if digest(part) != expected:
            raise CheckpointError(f"{part} is altered: its SHA-256 is not the manifest's")
    return dict(manifest)


def newest(root: Path) -> Found:
    """The newest checkpoint below `root` that verifies. It is an error if there are some and none verifies."""
    skipped: list[str] = []
    for path in every(root):
        try:
            verify(path)
            return Found(path, tuple(skipped))
        except CheckpointError as failure:
            skipped.append(f"{path.name} ({failure})")
        except OSError as failure:
            skipped.append(f"{path.name} (cannot be read: {failure})")
    if skipped:
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {root} verifies: {'; '.join(skipped)}. "
            f"Move them away to start from scratch, or restore one from a backup"
        )
    return Found(None)


def _write_files(directory: Path, files: Mapping[str, bytes], digests: Mapping[str, str]) -> None:
    with ThreadPoolExecutor(len(files)) as pool:  # writing and hashing release the GIL: the disk and both at once
        written = {name: pool.submit(write_bytes, directory / name, data) for name, data in files.items()}
        entries = {
            name: {"bytes": len(data), "sha256": digests.get(name) or hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        }
    for name, data in files.items():
        part = directory / name
        try:
            written[name].result()
            whole = part.read_bytes() == data
        except OSError as failure:
            raise CheckpointError(disk_message(failure, part) + UNTOUCHED) from failure
        if not whole:
            raise CheckpointError(f"{part} is altered: it does not read back as it was written" + UNTOUCHED)
    write_bytes(directory / MANIFEST, json.dumps({"format": FORMAT, "files": entries}, indent=1).encode())
    sync(directory)


def every(root: Path) -> list[Path]:
    """The checkpoints below `root`, newest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.match(path.name)), key=_serial, reverse=True)


def _serial(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _next_name(root: Path, step: int) -> Path:
    earlier = every(root)
    return root / f"{_serial(earlier[0]) + 1 if earlier else 1:06d}-step-{step}"


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def link(root: Path, name: str, target: Path) -> None:
    """Make `root/name` a link to the checkpoint `target`."""
    link = root / name
    if link.is_dir() and not link.is_symlink():  # the run was copied with links followed
        shutil.rmtree(link)
    temporary = root / f"{TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    temporary.replace(link)
    sync(root)
