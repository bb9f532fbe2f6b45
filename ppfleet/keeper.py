"""Saves a job and brings it back: rank 0 writes and reads, all ranks learn whether it worked and get the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import paddle

import ppfleet
from ppfleet import checkpoint, log, rundir, state
from ppfleet.comm import Comm
from ppfleet.errors import FleetError
from ppfleet.place import Place
from ppfleet.rundir import RunDir
from ppfleet.stepper import Stepper
from ppfleet.wrap import check_same


class Keeper:
    """Of one model with its optimizer: `net` is the plain one, `parameters` those that the optimizer updates."""

    def __init__(self, comm: Comm, run: RunDir, seed: int, net: Any, stepper: Stepper, parameters: dict[str, Any]):
        self.comm, self.run, self.seed = comm, run, seed
        self.net, self.stepper, self.parameters = net, stepper, parameters
        self.best: float | None = None
        self._last: tuple[int, dict[str, int]] | None = None  # the newest checkpoint's step and place
        self._schedule = state.schedule_settings(stepper.optimizer._learning_rate)

    def has(self, place: Place) -> bool:
        """Whether the newest checkpoint is of this very place."""
        return self._last == (self.stepper.step, place.to_save())

    def save(self, place: Place, card: dict[str, Any], mode: str, metrics: dict[str, float]) -> None:
        stepper = self.stepper
        if mode not in ("max", "min"):
            raise FleetError(f"mode={mode!r} is neither max nor min")
        if stepper.done:
            raise FleetError(
                f"job.save in the middle of a step ({stepper.done} of {stepper.group} batches): save between steps"
            )
        if stepper.torn:
            raise FleetError(
                "job.save after a step that was interrupted halfway: the weights are between two steps; resume instead"
            )
        where = {**place.to_save(), "step": stepper.step}
        stepper.exchange.same_buffers()
        check_same(self.comm, "points or weights to save", {**where, "weights": state.fingerprint(self.net)})
        score = next((float(value) for value in metrics.values()), math.nan)
        best = self._is_best(score, mode)
        facts = {
            **where,
            "order": place.order,
            "seed": self.seed,
            "ranks": self.comm.world.size,
            "best": score if best else self.best,
            "is_best": best,
            "skipped": stepper.skipped,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "card": card,
            "schedule": state.schedule_state(stepper.optimizer._learning_rate, self._schedule),
            "scaler": stepper.precision.state(),
            "paddle": paddle.__version__,
            "ppfleet": ppfleet.__version__,
        }
        written = self.comm.on_first(lambda: str(self._write(facts)), "saving of a checkpoint")
        self.best, self._last = facts["best"], (stepper.step, place.to_save())
        log.info(f"saved {written}" + (f", the best so far: {log.number(score)}" if best else ""))

    def _is_best(self, score: float, mode: str) -> bool:
        if math.isnan(score) or self.best is None:
            return not math.isnan(score)
        return score > self.best if mode == "max" else score < self.best

    def _write(self, facts: dict[str, Any]) -> Path:
        moments = state.optimizer_arrays(self.stepper.optimizer, self.parameters)
        return self.run.save(self.net, moments, facts)

    def restore(self, place: Place, card: dict[str, Any], source: str) -> str:
        """What it was restored from; empty if there is nothing. `source`: auto, none, or a path, rank 0's word."""
        stepper = self.stepper
        source = self.comm.on_first(lambda: source, "looking for a checkpoint")
        if source == "none":
            return ""
        found, own = self.comm.on_first(lambda: self.run.find(source), "looking for a checkpoint")
        if found is None:
            log.info(f"no checkpoint in {self.run.checkpoints}: training starts anew")
            return ""
        parts = {
            name: self.comm.broadcast_bytes(
                (Path(found) / name).read_bytes() if self.comm.world.first else None, "sending of a checkpoint"
            )
            for name in checkpoint.PARTS
        }
        facts = rundir.restore(parts, found, self.seed, card, self.net, stepper.optimizer, self.parameters)
        stepper.precision.restore(facts["scaler"])
        stepper.step, stepper.skipped, stepper.torn = facts["step"], facts["skipped"], False
        stepper.exchange.remember()
        place.restore(facts)
        self.best = facts["best"] if own else None  # another run's: this directory holds no weights of it
        self._last = (stepper.step, place.to_save())
        if source == "auto":
            self.comm.on_first(lambda: self.run.mend(Path(found), self.net, facts), "mending of links")
        ranks = f" (written by {facts['ranks']} ranks)" if facts["ranks"] != self.comm.world.size else ""
        log.info(f"resumed from {found}{ranks}: epoch {place.epoch}, step {stepper.step}, sample {place.position}")
        return str(found)
