"""Save and restore a job: rank 0 writes and reads; every rank learns whether it worked and gets the same state."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import paddle

from ppfleet import log
from ppfleet._version import __version__
from ppfleet.checkpoint import manifest, run_directory, tensors
from ppfleet.checkpoint.run_directory import RunDir
from ppfleet.errors import FleetError
from ppfleet.training.step import Stepper

_NOT_PROGRESS = ("loops", "assumed")  # what is learnt about the script on the way


class Saver:
    """For one model and its optimizer: `net` without DataParallel, `parameters` those that the optimizer updates."""

    def __init__(self, run: RunDir, seed: int, net: Any, stepper: Stepper, parameters: dict[str, Any]) -> None:
        self.comm, self.state, self.run, self.seed = stepper.comm, stepper.state, run, seed
        self.net, self.stepper, self.parameters = net, stepper, parameters
        self.best: float | None = None
        self._owns_directory = False  # whether the run directory's contents belong to this run
        self._warned = False
        self._in_loop: tuple[int, int] | None = None  # epoch and loop within which the newest checkpoint was saved
        self._last: tuple[int, dict[str, int]] | None = None  # the newest checkpoint's step and position
        self._written: tuple[Path, dict[str, Any]] | None = None  # the newest that this process wrote, and its state
        self._start = tensors.schedule_settings(stepper.optimizer._learning_rate)
        self._at_loop_end: dict[str, Any] | None = None  # the schedule's state where the last loop ended

    def own_directory(self) -> None:
        """Before the first step or save: refuse a directory that holds another run."""
        if not self._owns_directory:
            self.comm.on_first(self.run.refuse_other, "checking the run directory")
            self._owns_directory = True

    def is_current(self) -> bool:
        """Whether the newest checkpoint was saved at exactly this point."""
        return self._last == (self.state.step, self.state.to_save())

    def save(self, card: dict[str, Any], mode: str, metrics: dict[str, float], repeat: bool = False) -> None:
        """`repeat`: a resume repeats what follows the loop that has just ended."""
        state = self.state
        if mode not in ("max", "min"):
            raise FleetError(f"mode must be max or min, got {mode!r}")
        if state.done:
            raise FleetError(
                f"job.save was called within a step ({state.done} of {state.group} accumulated batches): save between "
                f"steps"
            )
        if state.torn:
            raise FleetError(
                "job.save was called after an interrupted optimizer step: the weights are partly updated; call "
                "job.resume() instead"
            )
        score = next((float(value) for value in metrics.values()), math.nan)
        best = self._is_best(score, mode)
        facts = {
            **self._progress(repeat),
            "seed": self.seed,
            "ranks": self.comm.world.size,
            "best": score if best else self.best,
            "is_best": best,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "card": card,
            "scaler": self.stepper.precision.state(),
            "paddle": paddle.__version__,
            "ppfleet": __version__,
        }
        written = self._write(facts)
        self._in_loop = (self.state.epoch, self.state.loop) if self.state.running else None
        state.saved()
        self.best = facts["best"]
        log.info(f"saved {written}" + (f", the best so far: {log.number(score)}" if best else ""))

    def amend(self) -> None:
        """Write the newest checkpoint again if the script has changed what it stores without making a step: stepped the
        learning-rate schedule after job.save, or begun another loop in an epoch that seemed to be over."""
        if self._written is None:
            return
        before, facts = self._written
        if facts["step"] != self.state.step or self.state.done or self.state.torn:
            return
        if self._in_loop and (self._in_loop != (self.state.epoch, self.state.loop) or not self.state.running):
            return  # a resume repeats what follows that loop
        now = self._progress(repeat=False)
        if all(facts[name] == value for name, value in now.items() if name not in _NOT_PROGRESS):
            return
        if facts["schedule"] != now["schedule"] and not self._warned:
            self._warned = True
            log.info(
                "the learning rate changed after job.save: writing the checkpoint again; call the scheduler's step() "
                "before job.save to avoid the second write"
            )
        self._write({**facts, **now}, replaces=before)

    def loop_ended(self) -> None:
        """It ended or was interrupted: a resume continues the script from here."""
        self._at_loop_end = self._schedule()

    def loop_repeated(self) -> None:
        """A loop that the checkpoint has done already, or the first one after those, begins: the checkpoint has what
        the script did to the schedule in between."""
        if self._at_loop_end is not None:
            tensors.load_schedule(self.stepper.optimizer, {**self._start, **self._at_loop_end})

    def _schedule(self) -> dict[str, Any]:
        return tensors.schedule_state(self.stepper.optimizer._learning_rate, self._start)

    def _progress(self, repeat: bool) -> dict[str, Any]:
        """How far training has come: what changes from one checkpoint to the next."""
        schedule = self._at_loop_end if self.state.repeats(repeat) else None
        schedule = self._schedule() if schedule is None else schedule
        return {**self.state.facts(repeat), "schedule": schedule}

    def _is_best(self, score: float, mode: str) -> bool:
        if math.isnan(score) or self.best is None:
            return not math.isnan(score)
        return score > self.best if mode == "max" else score < self.best

    def _write(self, facts: dict[str, Any], replaces: Path | None = None) -> str:
        """Rank 0 writes; every rank must be at the same point, with the same weights."""
        self.stepper.exchange.sync_buffers()
        where = {name: facts[name] for name in ("epoch", "loop", "position", "step", "schedule")}
        model, digest = tensors.to_bytes(tensors.model_arrays(self.net)), ""
        if not self.comm.world.alone:
            digest = hashlib.sha256(model).hexdigest()
            self.comm.check_same("training progress or weights to save", {**where, "weights": digest})

        def write() -> str:
            moments = tensors.to_bytes(tensors.optimizer_arrays(self.stepper.optimizer, self.parameters))
            return str(self.run.save(self.net, (model, moments), digest, facts, replaces))

        written = self.comm.on_first(write, "saving a checkpoint")
        self._last = facts["step"], {name: facts[name] for name in ("epoch", "loop", "position")}
        self._written = Path(written), facts
        return written

    def restore(self, card: dict[str, Any], source: str) -> str:
        """Restore from a checkpoint; its path, or "" if there is none.

        `source` is auto, none or a path; rank 0's is used."""
        stepper, self._owns_directory = self.stepper, False
        source = self.comm.on_first(lambda: source, "finding a checkpoint")
        if source == "none":
            return ""
        found, own = self.comm.on_first(lambda: self.run.find(source), "finding a checkpoint")
        if found is None:
            log.info(f"no checkpoint found in {self.run.checkpoints}, starting from scratch")
            return ""
        parts = {
            name: self.comm.broadcast_bytes(
                (Path(found) / name).read_bytes() if self.comm.world.first else None, "sending a checkpoint"
            )
            for name in manifest.PARTS
        }
        facts = run_directory.restore(parts, found, self.seed, card, self.net, stepper.optimizer, self.parameters)
        stepper.precision.restore(facts["scaler"])
        stepper.exchange.remember()
        self.state.restore(facts)
        self.best = facts["best"] if own else None  # another run's best weights are not in this directory
        self._last, self._written = (self.state.step, self.state.to_save()), None
        self._at_loop_end = facts["schedule"] if self.state.loop else None
        if source == "auto":
            self.comm.on_first(lambda: self.run.mend(Path(found), self.net, facts), "repairing links")
        ranks = f" (written by {facts['ranks']} ranks)" if facts["ranks"] != self.comm.world.size else ""
        log.info(
            f"resumed from {found}{ranks}: epoch {self.state.epoch}, step {self.state.step}, "
            f"sample {self.state.position}"
        )
        self._owns_directory = own
        return str(found)
