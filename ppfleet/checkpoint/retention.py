"""Which checkpoints stay: the newest few, and those that `latest` and `best` point to."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from ppfleet.checkpoint import manifest
from ppfleet.checkpoint.files import TEMPORARY


def prune(root: Path, keep: int) -> None:
    """Remove all checkpoints below `root` but the newest `keep` and the linked ones."""
    linked = {(root / link).resolve() for link in manifest.LINKS}
    for path in manifest.every(root)[max(1, keep) :]:
        if path.resolve() not in linked:
            remove(path)


def remove(path: Path) -> None:
    trash = path.with_name(f"{TEMPORARY}{path.name}")  # so a kill halfway leaves nothing that looks whole
    shutil.rmtree(trash, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
