"""The one training state: epoch, position, steps, the batches at hand, and whether all of it is saved. Pure.

Others change it through its named transitions only; what a checkpoint stores of the progress is this object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppfleet.errors import CheckpointError


@dataclass
class TrainingState:
    """Positions count samples of a loop over all ranks, so that they mean the same to any number of ranks.

    Inside of job.epochs an epoch may have several loops over job.steps; without it, each loop is an epoch.
    """

    step: int = 0  # of the optimizer, since the beginning of training
    skipped: int = 0  # steps left out because a loss or gradient was not finite
    epoch: int = 0
    loop: int = 0  # loops of this epoch that are done
    position: int = 0  # consumed by the running loop in steps that are made
    ahead: int = 0  # with the batches at hand, whose step is not made yet
    order: dict[str, Any] = field(default_factory=dict)  # what decides the order of this loop's samples
    loops: int | None = None  # in an epoch of this script; unknown until one is over
    in_epochs: bool = False  # the script is inside of `for epoch in job.epochs(...)`
    running: bool = False  # the script is inside of `for batch in job.steps(...)`
    left: bool = False  # the last loop over job.steps was left before its end
    assumed: int | None = None  # a checkpoint took the epoch for over after so many loops, without knowing `loops`
    done: int = 0  # batches of the running step that went through backward
    group: int = 0  # and batches in all of it
    torn: bool = False  # a step was interrupted halfway: the weights are between two steps
    unsaved: bool = False  # there are steps that no checkpoint has
    preempted: bool = False  # some rank was asked to end: all ranks know it since the same step
    repeats_loop: bool = False  # loops of this epoch were done before, and are skipped
    _begun: int = 0  # loops that the script began in this pass through the epoch
    _finished: tuple[int, int] | None = None  # epoch and position at the end of a loop outside of job.epochs

    def enter_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._start_of(epoch)
        # What a loop has left in its middle when job.epochs was left too (an exception, Ctrl-C) is still to do.
        self.in_epochs, self.left, self.repeats_loop, self._begun = True, False, False, 0

    def leave_epoch(self) -> None:
        if self._begun:
            self.loops, self.assumed = self._begun, None
        self._start_of(self.epoch + 1)

    def leave_epochs(self) -> None:
        self.in_epochs = False

    def begin_loop(self, order: dict[str, Any]) -> bool:
        """A loop over the samples that are left of it; false if it was done before the checkpoint. It can only be gone
        on with in the order in which it was begun."""
        if self.left:  # by a break, and the script goes on
            self._after_loop()
        self._finished = None
        if self.in_epochs:
            self._begun += 1
            if self._begun <= self.loop:
                self.repeats_loop = True
                return False
        if self.position and self.order != order:
            raise CheckpointError(
                f"the checkpoint is from the middle of an epoch of {self.order}, the training set now is {order}: "
                f"bring the same data, or resume from a checkpoint of an epoch's end"
            )
        self.order, self.running = order, True
        return True

    def end_loop(self) -> None:
        self.running = False
        if not self.in_epochs:
            self._finished = (self.epoch, self.position)
        self._after_loop()

    def leave_loop(self) -> None:
        """Before its end: by a break, or by an exception."""
        self.running, self.left = False, True

    # Steps

    def begin_step(self, batches: int) -> None:
        """Of so many batches; dropped if the loop is left before the last of them."""
        self.done, self.group = 0, batches

    def batch_done(self) -> bool:
        """A batch went through backward; true if it was the last of its step."""
        self.done += 1
        return self.done == self.group

    def drop_batches(self) -> None:
        self.done = 0

    def exchange_done(self, preempted: bool) -> None:
        """All ranks have the same gradients: the step counts."""
        self.done, self.preempted = 0, preempted
        self.step += 1

    def step_refused(self) -> None:
        """It was not finite and is not made: the weights are those of the step before."""
        self.step -= 1

    def step_skipped(self) -> None:
        self.skipped += 1
        self._consumed()

    def begin_update(self) -> None:
        """The optimizer changes the weights from here on."""
        self.torn = True

    def step_made(self) -> None:
        self.torn = False
        self._consumed()

    def _consumed(self) -> None:
        self.position, self.unsaved = self.ahead, True  # from here on a save includes the batches of this step

    def saved(self) -> None:
        self.unsaved = False

    # Checkpoints

    @property
    def interrupted(self) -> bool:
        """Whether a loop was left in its middle, and job.epochs with it: by an exception or Ctrl-C."""
        return self.left and not self.in_epochs

    @property
    def order_key(self) -> int:
        """What decides, beside the seed, the order of this loop's samples: the epoch, for its first loop."""
        return self.epoch + (self.loop << 32)

    @property
    def doubt(self) -> str:
        """What may be wrong with the checkpoint, now that this epoch has more loops than the one it took for over."""
        if self.assumed is None or self._begun != self.assumed + 1:
            return ""
        return (
            f"the checkpoint was saved after loop {self.assumed} over job.steps of epoch {self.epoch - 1}, as if that "
            f"was the last, but this epoch has more loops: if that one had them too, their steps were skipped"
        )

    def repeats(self, repeat: bool = False) -> bool:
        """Whether a resume from `to_save(repeat)` runs the code after the loop that has ended once more."""
        if self.running or self.interrupted:
            return False
        saved = self.to_save(repeat)
        return saved["epoch"] == self.epoch and saved["loop"] > 0 or repeat and self._finished is not None

    def to_save(self, repeat: bool = False) -> dict[str, int]:
        """A loop that was left by a break is done; one that an exception ended, out of job.epochs too, is gone on with
        where it was. After the last loop of an epoch (`repeat`: unless what follows it is to be done again) the next
        epoch comes; before one is over, any loop is taken for its last."""
        epoch, loop, position = self.epoch, self.loop, self.position
        if repeat and self._finished is not None:
            epoch, position = self._finished
        if self.left and self.in_epochs:
            loop, position = loop + 1, 0
        between = not self.running and not self.interrupted
        if between and loop and not repeat and (self.loops is None or loop >= self.loops):
            return {"epoch": epoch + 1, "loop": 0, "position": 0}
        return {"epoch": epoch, "loop": loop, "position": position}

    def facts(self, repeat: bool = False) -> dict[str, Any]:
        """All that a checkpoint stores of it."""
        saved = self.to_save(repeat)
        guessed = self.loops is None and saved["epoch"] > self.epoch
        done = self.loop + (self.left and self.in_epochs)
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
        self.loop = facts.get("loop", 0)  # the first version knew one loop an epoch
        self.loops, self.assumed = facts.get("loops"), facts.get("assumed")
        self.step, self.skipped = facts["step"], facts["skipped"]
        self.running = self.torn = self.unsaved = False

    def _after_loop(self) -> None:
        if self.in_epochs:
            self.loop, self.position, self.left = self.loop + 1, 0, False
        else:
            self._start_of(self.epoch + 1)

    def _start_of(self, epoch: int) -> None:
        self.epoch, self.loop, self.position, self.left = epoch, 0, 0, False

    def __str__(self) -> str:
        return f"epoch {self.epoch}, samples up to {self.ahead}"
