"""The servers and workers of a parameter-server job on this host: how each of them ended, and when all may.

Paddle's launcher returns 0 however its workers ended, waits for ever for a worker whose server died, and ends its
servers when its own workers are done, though those of other hosts may need them. So it is given this file (`python
roles.py DIRECTORY train.py …`) instead of train.py, which runs the script, notes in the directory how it ended, and as
a worker waits until all workers everywhere have come to their end. It also refuses the modes that Paddle cannot run.
"""

from __future__ import annotations

import fcntl
import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_MODES = {"sync": 0, "async": 1, "geo": 3}  # paddle.distributed.ps.utils.public.DistributedMode
_INSTEAD = (
    "take GEO mode (a_sync=True, k_steps) with sparse embeddings, as examples/parameter_server.py does, or async mode "
    "(a_sync=True) with Executor.train_from_dataset"
)
_SYNC = f"parameter servers in sync mode (a_sync=False) crash in this PaddlePaddle: {_INSTEAD}"
_ASYNC = f"parameter servers in async mode learn nothing through Executor.run in this PaddlePaddle: {_INSTEAD}"
_GEO = (
    "parameter servers in GEO mode exchange nothing in this PaddlePaddle unless the model has a sparse embedding, and "
    f"this one has none, so that each worker would train alone: {_INSTEAD}"
)


class Roles:
    """What the launch command sees of them, through the directory."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory, self.workers = directory, workers
        self.over = False  # whether all workers everywhere are done
        directory.mkdir()

    def wrap(self, command: Sequence[str], script: int) -> list[str]:
        """The launcher's command, with the script's words from that place on run by this file."""
        return [*command[:script], str(Path(__file__).resolve()), str(self.directory), *command[script:]]

    def failed(self) -> str:
        """Which of them ended badly, and how; empty: none so far."""
        for lock in sorted(self.directory.glob("*.lock")):
            with lock.open("r+b") as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    alive = False
                except OSError:
                    alive = True
            end = lock.with_suffix(".end")
            how = end.read_text(encoding="utf-8") if end.exists() else None
            if how:
                return f"{lock.stem} failed: {how}"
            if how is None and not alive and not (self.over and lock.stem.startswith("server")):
                return f"{lock.stem} died"
        return ""

    def done(self) -> bool:
        """Whether the workers of this host have come to their end."""
        return len(list(self.directory.glob("worker*.end"))) == self.workers

    def release(self) -> None:
        """All workers everywhere are done: those that wait may end."""
        self.over = True
        (self.directory / "over").touch()


class _WhenImported(importlib.abc.MetaPathFinder):
    """Puts the check of modes into Paddle when the script imports it: before that would be too early for some."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "paddle.distributed.fleet.fleet":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _check_modes(module.Fleet)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _check_modes(fleet_class: Any) -> None:
    def checked(method: Any) -> Any:
        def call(fleet: Any, *arguments: Any, **named: Any) -> Any:
            context = getattr(fleet._runtime_handle, "context", {})
            mode = context.get("ps_mode")  # Paddle's own word, after minimize
            if mode == _MODES["sync"]:
                raise SystemExit(_SYNC)
            if mode == _MODES["async"]:
                _refuse_run()
            if mode == _MODES["geo"] and _is_worker() and not _sends(context["loss"].block.program):
                raise SystemExit(_GEO)
            return method(fleet, *arguments, **named)

        return call

    fleet_class.init_worker, fleet_class.init_server = map(checked, (fleet_class.init_worker, fleet_class.init_server))


def _refuse_run() -> None:
    """Executor.run of a program that sends gradients; of others, such as a test's, it does what it should."""
    import paddle

    run = paddle.static.Executor.run

    def checked(executor: Any, program: Any = None, *arguments: Any, **named: Any) -> Any:
        program = program or paddle.static.default_main_program()
        if _sends(program):
            raise SystemExit(_ASYNC)
        return run(executor, program, *arguments, **named)

    paddle.static.Executor.run = checked


def _is_worker() -> bool:
    return os.environ.get("TRAINING_ROLE") == "TRAINER"


def _sends(program: Any) -> bool:
    """Whether that program tells the servers something."""
    blocks = getattr(program, "blocks", ())
    return any(operator.type == "send" for block in blocks for operator in block.ops)


def main(directory: Path) -> None:
    worker = _is_worker()
    name = f"worker {os.environ['PADDLE_TRAINER_ID']}" if worker else f"server {os.environ['PADDLE_PORT']}"
    starting = directory / f"{name}.starting"
    lock = starting.open("wb")
    fcntl.lockf(lock, fcntl.LOCK_EX)  # Linux drops it when this process ends, however that happens
    starting.rename(directory / f"{name}.lock")
    how = "it was stopped"
    try:
        sys.meta_path.insert(0, _WhenImported())
        runpy.run_path(sys.argv[0], run_name="__main__")
        how = ""
    except SystemExit as end:
        how = f"exit code {end.code}" if isinstance(end.code, int) and end.code else str(end.code or "")
        raise
    except BaseException as failure:
        how = "".join(traceback.format_exception_only(type(failure), failure)).strip()
        raise
    finally:
        starting.write_text(how, encoding="utf-8")
        starting.rename(directory / f"{name}.end")
        while worker and not how and not (directory / "over").exists():
            time.sleep(0.1)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    main(place)
