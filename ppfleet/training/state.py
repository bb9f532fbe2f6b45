"""The training state: epoch, position, steps, the current step's batches, and whether all of it is saved. Pure.

It changes only through its named transitions, and it is what a checkpoint stores of the progress.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppfleet.errors import CheckpointError


@dataclass
class TrainingState:
    """Positions count samples over all ranks, so that they mean the same to any number of ranks.

    Within job.epochs an epoch may have several loops over job.steps; without job.epochs each loop is an epoch.
    """

    step: int = 0  # optimizer steps since the beginning of training
    skipped: int = 0  # steps skipped because a loss or gradient was not finite
    epoch: int = 0
    loop: int = 0  # loops of this epoch that are done
    position: int = 0  # samples of the current loop that completed steps have consumed
    ahead: int = 0  # the same including the batches of the current step
    order: dict[str, Any] = field(default_factory=dict)  # what the order of this loop's samples depends on
    loops: int | None = None  # per epoch of this script; unknown until an epoch has ended
    in_epochs: bool = False  # the script is within `for epoch in job.epochs(...)`
    running: bool = False  # the script is within `for batch in job.steps(...)`
    left_early: bool = False  # the last loop over job.steps was left before its end
    assumed: int | None = None  # the checkpoint assumed that an epoch ends after so many loops; `loops` was unknown
    done: int = 0  # batches of the current step that went through backward
    group: int = 0  # batches in the current step
    torn: bool = False  # the optimizer was interrupted in a step: the weights are partly updated
    unsaved: bool = False  # some steps are in no checkpoint
    preempted: bool = False  # a rank got SIGTERM; all ranks know since the same step
    repeats_loop: bool = False  # loops of this epoch are in the checkpoint and are skipped
    _begun: int = 0  # loops that the script has begun in this epoch
    _finished: tuple[int, int] | None = None  # epoch and position at the end of a loop outside of job.epochs

    def enter_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._start_of(epoch)
        # A loop that was left early together with job.epochs (by an exception or Ctrl-C) is continued.
        self.in_epochs, self.left_early, self.repeats_loop, self._begun = True, False, False, 0

    def leave_epoch(self) -> None:
        if self._begun:
            self.loops, self.assumed = self._begun, None
        self._start_of(self.epoch + 1)

    def leave_epochs(self) -> None:
        self.in_epochs = False

    def begin_loop(self, order: dict[str, Any]) -> bool:
        """Begin a loop over its remaining samples; false if the checkpoint has done it already. A loop can continue
        only in the order in which it began."""
        if self.left_early:  # by a break, and the script continues
            self._after_loop()
        self._finished = None
        if self.in_epochs:
            self._begun += 1
            if self._begun <= self.loop:
                self.repeats_loop = True
                return False
        if self.position and self.order != order:
            raise CheckpointError(
                f"the checkpoint was saved within an epoch over {self.order}, but the training set is now {order}: "
                f"use the same data, or resume from a checkpoint that was saved at an epoch's end"
            )
        self.order, self.running = order, True
        return True

    def end_loop(self) -> None:
        self.running = False
        if not self.in_epochs:
            self._finished = (self.epoch, self.position)
        self._after_loop()

    def leave_loop(self) -> None:
        """Before its end, by a break or an exception."""
        self.running, self.left_early = False, True

    # Steps

    def begin_step(self, batches: int) -> None:
        """Begin a step of so many batches; it is dropped if the loop is left before the last of them."""
        self.done, self.group = 0, batches

    def batch_done(self) -> bool:
        """A batch went through backward; true if it was the last one of its step."""
        self.done += 1
        return self.done == self.group

    def drop_batches(self) -> None:
        self.done = 0

    def exchange_done(self, preempted: bool) -> None:
        """All ranks have the same gradients, so the step counts."""
        self.done, self.preempted = 0, preempted
        self.step += 1

    def step_refused(self) -> None:
        """It was not finite and is not applied: the weights are those of the previous step."""
        self.step -= 1

    def step_skipped(self) -> None:
        self.skipped += 1
        self._consumed()

    def begin_update(self) -> None:
        """From here on the optimizer changes the weights."""
        self.torn = True

    def step_made(self) -> None:
        self.torn = False
        self._consumed()

    def _consumed(self) -> None:
        self.position, self.unsaved = self.ahead, True  # a save now includes the batches of this step

    def saved(self) -> None:
        self.unsaved = False

    # Checkpoints

    @property
    def interrupted(self) -> bool:
        """Whether an exception or Ctrl-C ended a loop, and job.epochs with it."""
        return self.left_early and not self.in_epochs

    @property
    def order_key(self) -> int:
        """Decides, with the seed, the order of this loop's samples. For the first loop it is the epoch."""
        return self.epoch + (self.loop << 32)

    @property
    def doubt(self) -> str:
        """What may be wrong with the checkpoint if this epoch has more loops than the checkpoint assumed."""
        if self.assumed is None or self._begun != self.assumed + 1:
            return ""
        return (
            f"the checkpoint was saved after loop {self.assumed} over job.steps of epoch {self.epoch - 1}, which was "
            f"assumed to be the last, but this epoch has more: if that epoch had more too, their steps were skipped"
        )

    def repeats(self, repeat: bool = False) -> bool:
        """Whether a resume from `to_save(repeat)` repeats the code after the loop that has ended."""
        if self.running or self.interrupted:
            return False
        saved = self.to_save(repeat)
        return saved["epoch"] == self.epoch and saved["loop"] > 0 or repeat and self._finished is not None

    def to_save(self, repeat: bool = False) -> dict[str, int]:
        """A loop that was left by a break counts as done; one that an exception ended, together with job.epochs, is
        continued. After the last loop of an epoch the next epoch follows (unless `repeat`: then the code after the loop
        runs again). As long as no epoch has ended, any loop is assumed to be the last of its epoch."""
        epoch, loop, position = self.epoch, self.loop, self.position
        if repeat and self._finished is not None:
            epoch, position = self._finished
        if self.left_early and self.in_epochs:
            loop, position = loop + 1, 0
        between = not self.running and not self.interrupted
        if between and loop and not repeat and (self.loops is None or loop >= self.loops):
            return {"epoch": epoch + 1, "loop": 0, "position": 0}
        return {"epoch": epoch, "loop": loop, "position": position}

    def facts(self, repeat: bool = False) -> dict[str, Any]:
        """What a checkpoint stores."""
        saved = self.to_save(repeat)
        guessed = self.loops is None and saved["epoch"] > self.epoch
        done = self.loop + (self.left_early and self.in_epochs)
        return {
            **saved,
            "step": self.step,
            "skipped": self.skipped,
            "order": self.order,
            "loops": self.loops,
            "assumed": done if guessed else None,
        }

    def restore(self, facts: dict[str, Any]) -> None:
        self._start_of(facts["epoch"])
        self.position, self.order = facts["position"], facts["order"]
        self.loop = facts.get("loop", 0)  # version 0.1.0 knew one loop per epoch
        self.loops, self.assumed = facts.get("loops"), facts.get("assumed")
        self.step, self.skipped = facts["step"], facts["skipped"]
        self.running = self.torn = self.unsaved = False

    def _after_loop(self) -> None:
        if self.in_epochs:
            self.loop, self.position, self.left_early = self.loop + 1, 0, False
        else:
            self._start_of(self.epoch + 1)

    def _start_of(self, epoch: int) -> None:
        self.epoch, self.loop, self.position, self.left_early = epoch, 0, 0, False

    def __str__(self) -> str:
        return f"epoch {self.epoch}, samples up to {self.ahead}"
