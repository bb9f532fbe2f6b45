"""Files that are written completely or not at all. Pure."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from ppfleet.errors import FleetError, OutputError

TEMPORARY = ".tmp-"
ODD = "backslashreplace"  # for file names that are not valid text; in JSON this gives the matching escape
Writer = Callable[[Path], None]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode(errors=ODD)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write and flush to the disk."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(path: Path, content: bytes | Writer, error: type[FleetError] = OutputError) -> None:
    """Replace a file atomically: a reader sees the old content or the new, never a part of it."""
    with staged(path, content, error):
        pass


@contextmanager
def staged(path: Path, content: bytes | Writer, error: type[FleetError] = OutputError) -> Iterator[None]:
    """Write and flush a new version of a file, which replaces it at the end of the block unless that fails."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with _explained(path, error):
            if callable(content):
                content(temporary)
                sync(temporary)
            else:
                write_bytes(temporary, content)
        yield
        with _explained(path, error):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _explained(path: Path, error: type[FleetError]) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise error(disk_message(failure, path)) from failure


def disk_message(failure: OSError, path: Path) -> str:
    """An OSError of a write as a sentence that says what to do."""
    advice = {
        errno.ENOSPC: "the disk is full: make room, or write to another output directory",
        errno.EDQUOT: "the disk quota is used up: make room, or write to another output directory",
        errno.EROFS: "the file system is read-only: choose another output directory",
        errno.EACCES: "no permission to write there: choose another output directory",
    }.get(failure.errno or 0, failure.strerror or str(failure))
    return f"cannot write {failure.filename or path}: {advice}"
