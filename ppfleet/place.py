"""Where in training a job is: its epoch, how much of that is consumed, and what a checkpoint says of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppfleet.errors import CheckpointError


@dataclass
class Place:
    """Positions count samples of the epoch over all ranks, so that they mean the same to any number of ranks."""

    epoch: int = 0
    position: int = 0  # consumed in steps that are made
    ahead: int = 0  # with the batches at hand, whose step is not made yet
    order: dict[str, Any] = field(default_factory=dict)  # what decides the order of this epoch's samples
    in_epochs: bool = False  # the script is inside of `for epoch in job.epochs(...)`
    left: bool = False  # the last loop over job.steps was left before its end
    finished: tuple[int, int] | None = None  # epoch and position of the last loop's end, until the next one begins

    def start_of(self, epoch: int) -> None:
        self.epoch, self.position, self.left = epoch, 0, False

    def begin_loop(self, order: dict[str, Any]) -> None:
        """A loop over the samples that are left of this epoch. It can only be gone on with in the order in which it
        was begun."""
        if self.position and self.order != order:
            raise CheckpointError(
                f"the checkpoint is from the middle of an epoch of {self.order}, the training set now is {order}: "
                f"bring the same data, or go on from a checkpoint of an epoch's end"
            )
        self.order, self.finished = order, None

    def end_loop(self) -> None:
        self.finished = (self.epoch, self.position)
        self.start_of(self.epoch + 1)

    def back_to_end(self) -> None:
        """To where no sample is left of the epoch before, so that what follows an epoch is done again."""
        if self.finished is not None:
            self.epoch, self.position = self.finished

    def to_save(self) -> dict[str, int]:
        """A loop that was left by a break ends its epoch; one that an exception ended, out of job.epochs too, is gone
        on with where it was."""
        if self.left and self.in_epochs:
            return {"epoch": self.epoch + 1, "position": 0}
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, facts: dict[str, Any]) -> None:
        self.start_of(facts["epoch"])
        self.position, self.order = facts["position"], facts["order"]

    def __str__(self) -> str:
        return f"epoch {self.epoch}, samples up to {self.ahead}"
