"""The training loop around the user's code: epochs and steps, with progress, checkpoints, seeding and preemption."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, NoReturn

from ppfleet import log
from ppfleet.data.loader import TRAINING, Loader
from ppfleet.data.seeding import seed_all
from ppfleet.errors import PREEMPTED, FleetError
from ppfleet.training.step import Stepper

if TYPE_CHECKING:  # what uses training is given to the loop, not imported by it
    from ppfleet.checkpoint.board import Board
    from ppfleet.checkpoint.saver import Saver

_END = object()


class Loop:
    """`job.epochs` and `job.steps`. The progress itself is the training state's, the work of a step the stepper's.

    begin   is called before the first batch of each loop, with its loader
    save    writes a checkpoint; with True, one after which a resume repeats what follows the loop that has ended
    """

    def __init__(
        self,
        stepper: Stepper,
        saver: Saver,
        board: Callable[[], Board],
        begin: Callable[[Loader], None],
        save: Callable[[bool], None],
        save_every: int,
        log_every: int,
    ) -> None:
        self.stepper, self.saver, self.board = stepper, saver, board
        self.comm, self.state = stepper.comm, stepper.state
        self.comm.watchdog.training = self.state  # SIGTERM is handled by what it says
        self._begin, self._save = begin, save
        self._save_every, self._log_every = save_every, log_every
        self._epochs = 0  # that the script asks for; 0: unknown

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that remain, of `count` in all."""
        state = self.state
        self._epochs = count
        if state.epoch >= count:
            log.info(f"nothing to do: {state.epoch} of {count} epochs are done")
        if state.interrupted:  # an earlier loop in this process, as when a notebook's cell is run again
            self.saver.loop_ended()
            self.stepper.drop_batch()
        try:
            for epoch in range(state.epoch, count):
                state.enter_epoch(epoch)
                seed_all(self.saver.seed, epoch)
                yield epoch
                state.leave_epoch()
                self.saver.amend()
        finally:
            state.leave_epochs()

    def steps(self, loader: Loader) -> Iterator[Any]:
        """The batches that remain of this epoch's loop over `loader`."""
        stepper, state, flight = self.stepper, self.state, self.comm.flight
        if not self._start(loader):
            return
        remaining = loader.steps_left
        label = f"epoch: [{state.epoch + 1}/{self._epochs or '?'}]"
        progress = log.Progress(label, remaining, loader.plan.global_batch, self._log_every, self.comm.world.first)
        batches, depth = iter(loader), len(flight.open)
        try:
            while (batch := self._next_batch(batches, progress)) is not _END:
                state.ahead = loader.position
                stepper.begin(loader, remaining)
                seed_all(self.saver.seed, state.order_key, state.ahead, self.comm.world.rank + 1)
                entry = flight.enter("step", f"step {state.step + 1}", str(state))
                yield batch
                flight.leave(entry)
                stepper.end()
                remaining = None if remaining is None else remaining - 1
                self._end_batch(loader, progress)
            state.end_loop()
            self.saver.loop_ended()
        finally:
            progress.close()
            stepper.abandon()
            flight.unwind(depth)
            if state.running:
                state.leave_loop()

    def _start(self, loader: Loader) -> bool:
        """Check and announce a loop over `loader`; false if the checkpoint has done it already."""
        state = self.state
        if not isinstance(loader, Loader):
            raise FleetError(f"job.steps takes what job.loader returns, not a {type(loader).__name__}")
        if not self.stepper.called:
            raise FleetError("job.steps was called within another job.steps: a job iterates over one loader at a time")
        if loader.steps_left is None and self.stepper.accumulate > 1:
            raise FleetError("accumulate needs a data set with a length: the last step of a stream is not known")
        self.saver.own_directory()
        starts = state.begin_loop({"samples": loader.plan.length, "shuffle": loader.plan.shuffle})
        if state.repeats_loop:
            self.saver.loop_repeated()
        if starts:
            state.repeats_loop = False
            if state.doubt:
                log.info(state.doubt)
            self.saver.amend()
            loader.begin(state.order_key, state.position, TRAINING)
            self._begin(loader)
        return starts

    def _next_batch(self, batches: Iterator[Any], progress: log.Progress) -> Any:
        began = time.perf_counter()
        with self.comm.flight.during("data", "next batch"):
            batch = next(batches, _END)
        if batch is not _END:
            progress.waited(time.perf_counter() - began)
        return batch

    def _end_batch(self, loader: Loader, progress: log.Progress) -> None:
        """What may be due between two batches: a progress line, a checkpoint, the end after SIGTERM."""
        state = self.state
        if progress.step() and self.comm.world.first:
            self._report(loader, progress)
        self.saver.amend()
        if state.done:
            return
        if self._save_every and state.step % self._save_every == 0:
            self._save(False)
        if state.preempted:
            if not self.saver.is_current():
                self._save(False)
            self._end_preempted()

    def _report(self, loader: Loader, progress: log.Progress) -> None:
        epochs_later = self._epochs - self.state.epoch - 1 if self._epochs and loader.steps_left is not None else None
        values = {"loss": self.stepper.loss, "lr": float(self.stepper.optimizer.get_lr())}
        costs = progress.line(values, None if epochs_later is None else epochs_later * len(loader))
        self.board().add(self.state.step, {f"train/{name}": value for name, value in {**values, **costs}.items()})

    def preempt_evaluation(self) -> NoReturn:
        """After SIGTERM to some rank, of which all know. The evaluation is dropped; one that follows an epoch is made
        again after the resume, which then has no steps left to do before it."""
        state = self.state
        if state.unsaved and not state.done and not state.torn:
            self._save(True)
            self._end_preempted()
        self.comm.watchdog.preempted("SIGTERM in an evaluation")

    def _end_preempted(self) -> NoReturn:
        text = f"stopping after SIGTERM: saved at step {self.state.step}; run the same command again to resume"
        log.info(f"{text} (exit code {PREEMPTED})")
        self.board().close()
        self.comm.watchdog.preempted(text)
