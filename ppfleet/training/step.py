"""From a loss to an optimizer step: accumulation, exchange, checks that the ranks agree, NaN guard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import paddle

from ppfleet import foreign, log
from ppfleet.data.loader import Loader
from ppfleet.distributed.collectives import Comm
from ppfleet.errors import FleetError, MismatchError, NonFiniteError
from ppfleet.training.gradients import FIND_UNUSED, Exchange, Vitals
from ppfleet.training.precision import HOPELESS, Precision
from ppfleet.training.state import TrainingState

ON_NAN = ("stop", "skip")
BACKWARD = "backward and all-reduce"


class Stepper:
    """Groups batches into steps. A step has `accumulate` batches, fewer at the end of an epoch."""

    def __init__(
        self,
        comm: Comm,
        state: TrainingState,
        precision: Precision,
        exchange: Exchange,
        net: Any,
        optimizer: Any,
        accumulate: int = 1,
        on_nan: str = ON_NAN[0],
    ) -> None:
        self.comm, self.state, self.precision, self.exchange = comm, state, precision, exchange
        self.net, self.optimizer, self.accumulate, self.on_nan = net, optimizer, accumulate, on_nan
        self.loss = math.nan  # mean over all ranks, of the last good step
        self.called = True  # whether the current batch went through backward
        self._share = 1.0  # of the current batch in its step, by samples
        self._sum: Any = 0.0  # the loss of the batches of this step so far; on an accelerator it stays there
        self._samples = 0
        self._overlaps = comm.device.overlaps_exchange and isinstance(net, paddle.DataParallel)
        self._forwarded = False  # whether the model that job.prepare returned has been called for this batch
        if self._overlaps:
            net.register_forward_pre_hook(self._note_forward)
        self._everything = net.parameters()  # collected once: walking a large model takes time

    def begin(self, loader: Loader, remaining: int | None) -> None:
        """A batch is about to be yielded; `remaining` counts it and those after it in this epoch."""
        state = self.state
        if state.done == 0:
            state.begin_step(self.accumulate if remaining is None else min(self.accumulate, remaining))
            ahead = loader.plan.length - (loader.position - loader.real)
            self._samples = min(state.group * loader.plan.global_batch, ahead)
        # By samples, not 1 / group: the last batch of an epoch may contain padding.
        self._share = loader.real / self._samples if state.group > 1 else 1.0
        self.called = self._forwarded = False
        if isinstance(self.net, paddle.DataParallel):
            # On cards Paddle's reducer overlaps with the last backward pass of a step; on gloo it must never run.
            self.net.grad_need_sync = self._overlaps and state.done == state.group - 1

    def _note_forward(self, *_: Any) -> None:
        self._forwarded = True

    def backward(self, loss: Any) -> None:
        state = self.state
        if self.called:
            raise FleetError("job.backward must be called within `for batch in job.steps(loader)`, once per batch")
        if state.torn:
            raise FleetError(
                "the previous step was interrupted while the optimizer changed the weights, which are now partly "
                "updated: call job.resume() to return to the last checkpoint"
            )
        if state.done == 0:
            self._refuse_leftovers()
        if loss.size != 1:
            raise FleetError(f"job.backward needs a scalar loss, this one has shape {list(loss.shape)}: take its mean")
        self.called = True
        self._sum = self.exchange.add_loss(self._sum, loss, self._share)
        scaled = self.precision.scaled(loss * self._share if state.group > 1 else loss)
        if self._overlaps and self.net.grad_need_sync:
            self._backward_and_exchange(scaled)
        else:
            scaled.backward()
        if state.batch_done():
            self._finish()

    def _backward_and_exchange(self, loss: Any) -> None:
        """On cards: Paddle's reducer exchanges gradients as they are made, and may wait for the others in there."""
        if not self._forwarded:
            raise FleetError(
                f"the loss was not computed by the model that job.prepare returned ({self.comm.world.name()}): call "
                f"that one, as `net, optimizer = job.prepare(net, optimizer)` does, or no gradients are exchanged"
            )
        try:
            with self.comm.watched(BACKWARD):
                loss.backward()
        except RuntimeError as failure:
            if not foreign.tells_of_unused_parameters(str(failure)):
                raise
            raise FleetError(
                f"a parameter that was unused in the first step is used now on {self.comm.world.name()}: {FIND_UNUSED}"
            ) from failure

    def _refuse_leftovers(self) -> None:
        """Gradients of another loss would be added to this one's silently. (Zeros, as clear_grad() leaves them, are
        harmless.)"""
        names = zip(self.exchange.names, self.exchange.parameters)
        found = {name: gradient for name, p in names if (gradient := p._grad_ivar()) is not None}
        if not found:
            return
        used = paddle.stack([(gradient != 0).any() for gradient in found.values()])
        for name, left in zip(found, self.comm.read(used, "check of left gradients")):
            if left:
                raise FleetError(
                    f"{name} already has a gradient before job.backward on {self.comm.world.name()}, from another "
                    f"loss.backward(): the two would be added. Call job.backward(loss + other) to train on both, or "
                    f"optimizer.clear_grad() before job.backward to drop the other one"
                )

    def drop_batch(self) -> None:
        """Discard what an interrupted batch left behind: gradients, and statistics of its forward pass."""
        self._clear()
        self.exchange.forget_step()

    def end(self) -> None:
        """The loop asks for the next batch."""
        if not self.called:
            raise FleetError(
                f"job.backward was not called for a batch on {self.comm.world.name()} ({self.state}): every rank must "
                f"call it for every batch, or the others wait; to skip a batch, multiply its loss by 0"
            )

    def abandon(self) -> None:
        """The loop has ended or was left: drop gradients that were waiting for more batches."""
        self.called = True
        if self.state.done:
            log.say(
                f"the loop was left within a step: {self.state.done} of {self.state.group} accumulated batches are "
                f"dropped"
            )
            self.state.drop_batches()
            self._sum = 0.0
            self._clear()

    def _clear(self) -> None:
        # All of the model's, not only the optimizer's: the others would accumulate from step to step.
        for parameter in self._everything:
            parameter.clear_gradient(False)

    def _finish(self) -> None:
        vitals = self.exchange.reduce(self._sum, self.optimizer.get_lr())
        self._sum = 0.0
        self.state.exchange_done(vitals.end)
        self.comm.flight.step = self.state.step
        where = f"step {self.state.step}, {self.state}"
        self._check_rates(vitals, where)
        self._check_weights(vitals, where)
        if not vitals.bad and not vitals.overflow:
            self.loss = vitals.loss
            self.state.begin_update()
            self.optimizer.step()
            self.precision.scaler.update(overflow=False)
            self.exchange.remember()
            self._clear()
            self.state.step_made()
        elif self.precision.scaling and not vitals.bad:
            self._skip_overflow(where)
        else:
            self._skip_or_stop(vitals, where)

    def _check_rates(self, vitals: Vitals, where: str) -> None:
        if len(set(vitals.rates)) > 1:
            name = self.comm.world.name
            shown = "; ".join(f"{rate:.9g} on {name(rank)}" for rank, rate in enumerate(vitals.rates))
            raise MismatchError(
                f"the learning rates differ between ranks ({where}): {shown}. Derive them from values that are the "
                f"same on all ranks, such as job.evaluate's",
                ranks=_odd(vitals.rates),
            )

    def _check_weights(self, vitals: Vitals, where: str) -> None:
        if len(set(vitals.sums)) > 1:
            groups: dict[int, list[str]] = {}
            for rank, total in enumerate(vitals.sums):
                groups.setdefault(total, []).append(self.comm.world.name(rank))
            shown = " and ".join(", ".join(ranks) for ranks in sorted(groups.values(), key=len))
            raise MismatchError(
                f"the weights differ ({where}): {vitals.probed} differs between {shown}. Something changed them on "
                f"some ranks only, or the hosts compute differently",
                ranks=_odd(vitals.sums),
            )

    def _skip_overflow(self, where: str) -> None:
        """float16 gradients that do not fit: expected now and then, the loss scale adapts."""
        scaler = self.precision.scaler
        scaler.update(overflow=True)
        if scaler.overflows >= HOPELESS:
            self._drop_step()
            raise NonFiniteError(
                f"{scaler.overflows} steps in a row had float16 gradients that are not finite, at last with a loss "
                f"scale of {scaler.scale:g} ({where}): the model diverges, or needs amp_dtype='bfloat16' or 'O0'"
            )
        self._skip(f"float16 gradients overflowed ({where}); the loss scale is now {scaler.scale:g}")

    def _skip_or_stop(self, vitals: Vitals, where: str) -> None:
        who = ", ".join(self.comm.world.name(rank) for rank in vitals.bad) or "some rank"
        what = f"the loss or a gradient is NaN or infinite on {who} ({where})"
        if self.on_nan == "stop":
            self._drop_step()
            raise NonFiniteError(
                f"{what}. The weights are those of the previous step; on_nan='skip' skips such steps",
                ranks=vitals.bad,
            )
        self._skip(what)

    def _skip(self, why: str) -> None:
        self.drop_batch()
        self.state.step_skipped()
        if self.comm.world.first:
            log.say(f"step skipped: {why}; {self.state.skipped} steps skipped so far")

    def _drop_step(self) -> None:
        self.drop_batch()
        self.state.step_refused()
        self.comm.flight.step = self.state.step


def _odd(values: Sequence[float]) -> list[int]:
    """The ranks whose value is not the most common one; none if there is a tie."""
    (common, most), *others = Counter(values).most_common(2)
    return [rank for rank, value in enumerate(values) if value != common] if others and most > others[0][1] else []
