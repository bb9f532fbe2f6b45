"""The settings of a run: the same on all ranks, logged once, stored in the run directory."""

from __future__ import annotations

import json
import platform
from typing import Any

import paddle

from ppfleet import log
from ppfleet._version import __version__
from ppfleet.checkpoint.run_directory import RunDir
from ppfleet.data.loader import Loader
from ppfleet.distributed.collectives import Comm

HERE, DEFAULTS = "here", "defaults"  # entries that may differ between hosts, such as paths


class Settings(dict[str, Any]):
    """A script may add its own, such as lr_rule. They must be the same on all ranks, except for the entries "here" and
    "defaults" (what tuning.py chose for this process)."""

    def __init__(self, **decided: Any) -> None:
        versions = {"paddle": paddle.__version__, "ppfleet": __version__, "python": platform.python_version()}
        super().__init__(**decided, **versions)
        self._agreed: dict[str, Any] = {}

    def agree(self, comm: Comm, run: RunDir, loader: Loader, accumulate: int) -> bool:
        """Compare between ranks, log and store, before the first step on a loader; true at the very first."""
        plan = loader.plan
        self.update(
            samples=plan.length if loader.steps_left is not None else "stream",
            batch_size=plan.batch_size,
            global_batch=plan.global_batch * accumulate,
            shuffle=plan.shuffle,
            tail=plan.tail,
        )
        text = json.dumps(self, indent=1, ensure_ascii=False, default=str)
        shared = {name: value for name, value in json.loads(text).items() if name not in (HERE, DEFAULTS)}
        comm.check_same("settings", shared)  # each time: whether anything changed is for all ranks to decide together
        if shared == self._agreed:
            return False
        first, self._agreed = not self._agreed, shared
        for name in [name for name, value in self.items() if isinstance(value, dict)]:
            log.info(f"{name}: " + ", ".join(f"{key}={value}" for key, value in self[name].items()))
        log.info("settings: " + ", ".join(f"{k}={v}" for k, v in self.items() if not isinstance(v, dict)))
        comm.on_first(lambda: run.write_settings(text), "writing settings.json")
        return first
