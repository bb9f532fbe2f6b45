"""The servers and workers of a parameter-server job on this host: how each of them ended, and when they may end.

Paddle's launcher returns 0 however its workers ended, waits forever for a worker whose server died, and stops its
servers when its own workers are done, although workers on other hosts may still need them. So the launcher starts this
file instead of train.py (`python ps_roles.py DIRECTORY train.py …`). It runs the script, writes to the directory how
the script ended, and makes a worker wait until the workers of all hosts are done.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path


class Roles:
    """What the launch command reads from the directory."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory, self.workers = directory, workers
        self.over = False  # whether the workers of all hosts are done
        directory.mkdir()

    def wrap(self, command: Sequence[str], script: int) -> list[str]:
        """The launcher's command, changed so that this file runs the script, which begins at that index."""
        return [*command[:script], str(Path(__file__).resolve()), str(self.directory), *command[script:]]

    def failed(self) -> str:
        """Which server or worker failed, and how; empty: none so far."""
        for lock in sorted(self.directory.glob("*.lock")):
            with lock.open("r+b") as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    alive = False
                except OSError:
                    alive = True
            end = lock.with_suffix(".end")
            reason = end.read_text(encoding="utf-8") if end.exists() else None
            if reason:
                return f"{lock.stem} failed: {reason}"
            if reason is None and not alive and not (self.over and lock.stem.startswith("server")):
                return f"{lock.stem} died"
        return ""

    def done(self) -> bool:
        """Whether the workers of this host are done."""
        return len(list(self.directory.glob("worker*.end"))) == self.workers

    def release(self) -> None:
        """The workers of all hosts are done: let the waiting ones end."""
        self.over = True
        (self.directory / "over").touch()


def main(directory: Path) -> None:
    worker = os.environ.get("TRAINING_ROLE") == "TRAINER"
    name = f"worker {os.environ['PADDLE_TRAINER_ID']}" if worker else f"server {os.environ['PADDLE_PORT']}"
    starting = directory / f"{name}.starting"
    lock = starting.open("wb")
    fcntl.lockf(lock, fcntl.LOCK_EX)  # Linux releases it when this process ends, however it ends
    starting.rename(directory / f"{name}.lock")
    reason = "it was stopped"
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        reason = ""
    except SystemExit as end:
        reason = f"exit code {end.code}" if isinstance(end.code, int) and end.code else str(end.code or "")
        raise
    except BaseException as failure:
        reason = "".join(traceback.format_exception_only(type(failure), failure)).strip()
        raise
    finally:
        starting.write_text(reason, encoding="utf-8")
        starting.rename(directory / f"{name}.end")
        while worker and not reason and not (directory / "over").exists():
            time.sleep(0.1)


if __name__ == "__main__":
    roles_directory = Path(sys.argv[1])
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    main(roles_directory)
