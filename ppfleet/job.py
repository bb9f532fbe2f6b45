"""`Job`: the facade. The loop stays the user's; this keeps what must be right on every rank around it.

job = ppfleet.Job("output/run1")
net, sgd = job.prepare(net, sgd)
train = job.loader(train_set, batch_size=64, shuffle=True)
job.resume()
for epoch in job.epochs(90):
    for images, labels in job.steps(train):
        job.backward(F.cross_entropy(net(images), labels))
    job.save(**job.evaluate(net, val, top1=metrics.top1))
job.export(net, [None, 3, 224, 224])
"""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NoReturn

import paddle
from paddle import nn

from ppfleet import cpu, limits, log
from ppfleet.checkpoint import pdparams, run_directory, tensors
from ppfleet.checkpoint.board import Board
from ppfleet.checkpoint.files import disk_message, json_bytes, replace_file
from ppfleet.checkpoint.saver import Saver
from ppfleet.checkpoint.settings import DEFAULTS, Settings
from ppfleet.cpu.tuning import tune
from ppfleet.data.loader import TRAINING, Collate, Loader, make_loader, seed_everything
from ppfleet.data.sampler import mix
from ppfleet.distributed import devices
from ppfleet.distributed.collectives import Comm
from ppfleet.distributed.world import World
from ppfleet.errors import PREEMPTED, FleetError
from ppfleet.evaluation.evaluate import SAMPLES, measure
from ppfleet.evaluation.metrics import Totals
from ppfleet.export.static_model import agreement, export
from ppfleet.training.gradients import Exchange
from ppfleet.training.model import (
    batch_norm_statistics,
    describe_optimizer,
    describe_parameters,
    float_buffers,
    held_parameters,
    unwrap,
)
from ppfleet.training.precision import Precision, plain
from ppfleet.training.state import TrainingState
from ppfleet.training.step import ON_NAN, Stepper
from ppfleet.watchdog.diagnosis import Limits

_END = object()


class Job:
    """One training job as this process sees it: alone, or one rank of a launched job.

    directory   the run's: checkpoints/, latest.pdparams, best.pdparams, settings.json, history.jsonl, logs/, …
    device      auto, cpu or gpu
    seed        decides initial weights, sample order, augmentation and dropout
    accumulate  batches whose gradients are summed up for one step of the optimizer
    amp         O0, O1 or O2, on cards; amp_dtype: float16 (with loss scaling) or bfloat16
    on_nan      stop: raise on every rank when a loss or gradient is not finite; skip: leave that step out
    save_every  steps between checkpoints inside an epoch; 0: only where the script says job.save
    keep        how many checkpoints stay (the best stays besides)
    existing    what to do if the directory holds a run and job.resume does not continue it: refuse, or move it aside
    log_every   steps between progress lines
    stall       seconds that a rank may let others wait in a collective before the job is ended (25: gloo aborts at 30)
    stall_long  the same in sections that may take long: on rank 0 alone (saving, export), and where no work is done
    """

    def __init__(
        self,
        directory: str | Path = "output",
        *,
        device: str = "auto",
        seed: int = 0,
        accumulate: int = 1,
        amp: str = "O0",
        amp_dtype: str | None = None,
        on_nan: str = "stop",
        save_every: int = 0,
        keep: int = 3,
        existing: str = "refuse",
        log_every: int = 20,
        stall: float = limits.STALL,
        stall_long: float = limits.STALL_LONG,
    ) -> None:
        least_values = {"accumulate": (accumulate, 1), "keep": (keep, 1), "save_every": (save_every, 0)}
        for name, (value, least) in {**least_values, "stall": (stall, 1), "stall_long": (stall_long, 1)}.items():
            if value < least:
                raise FleetError(f"{name}={value}: the least is {least}")
        if on_nan not in ON_NAN:
            raise FleetError(f"on_nan={on_nan!r} is none of {', '.join(ON_NAN)}")
        self.world = World.from_env()
        row = devices.select(device)
        self.device = paddle.get_device()
        defaults = tune(self.world.local_size) if not row.is_accelerator else {}
        self.directory = Path(directory).absolute()  # a script may change its working directory
        self.seed, self.accumulate, self.on_nan = seed, accumulate, on_nan
        self.save_every, self.log_every = save_every, log_every
        self.flight = run_directory.open_flight(self.directory, self.world)
        self.comm = Comm(self.world, row, self.flight, Limits(stall, stall_long))
        if self.world.alone:
            self.comm.watch.start()
        self.comm.watch.stacks = self.directory / "logs" / f"rank{self.world.rank}.stacks"
        _crash_at_once()
        self.comm.watch.take_sigterm()
        self.precision = Precision(amp, amp_dtype, row)
        self._state = TrainingState()
        self._epochs = 0  # how many there are to be
        self._stepper: Stepper | None = None
        self._board: Board | None = None
        self._run = run_directory.RunDir(self.directory, keep, existing)
        self._owns_directory = False  # whether what it holds is of this run
        self.comm.on_first(self._run.take, "opening of the run directory")
        self.flight.remove_old()
        try:
            log.set_up(self.directory / "logs", self.world.rank)
        except OSError as failure:
            raise FleetError(disk_message(failure, self.directory / "logs")) from None
        if self.precision.note:
            log.info(self.precision.note)
        self._seed_all(0)
        # What the weights mean (classes, preprocessing …), kept beside them; a resume refuses those of another card.
        self.card: dict[str, Any] = {}
        # What was decided; printed and stored at the first step.
        self.settings = Settings(
            ranks=self.world.size,
            device=row.name,
            seed=seed,
            accumulate=accumulate,
            amp=str(self.precision),
            on_nan=on_nan,
            save_every=save_every,
            defaults=defaults,
        )

    @property
    def epoch(self) -> int:
        """The epoch at hand, from 0; after the last one, how many there were."""
        return self._state.epoch

    @property
    def best(self) -> float | None:
        """The best score that was saved."""
        return self._saver.best if self._stepper else None

    @property
    def step(self) -> int:
        """Steps of the optimizer since the beginning of training."""
        return self._state.step

    @property
    def skipped(self) -> int:
        """Steps left out because a loss or gradient was not finite."""
        return self._state.skipped

    @property
    def board(self) -> Board:
        """history.jsonl and VisualDL's log; rank 0 writes: `if job.world.first: job.board.add(job.step, {"f1": f1})`"""
        if self._board is None:
            self._board = Board(self.directory)
        return self._board

    # Setting up

    def prepare(self, net: Any, optimizer: Any, *, fast_cpu: bool = True) -> tuple[Any, Any]:
        """Make `net` and `optimizer` ready for this job: device, precision, sync-BN, DataParallel.

        All ranks must bring the same parameters and the same settings of the optimizer; rank 0's weights are taken.
        On a CPU, with `fast_cpu`, layers use ppfleet's own operators where these know what to do (see ppfleet.cpu).
        """
        if self._stepper is not None:
            raise FleetError("job.prepare was called before: a job trains one model with one optimizer")
        if isinstance(net, paddle.DataParallel):
            raise FleetError("give job.prepare the plain model: it applies paddle.DataParallel itself")
        if self.comm.device.is_accelerator:
            net.to(device=self.device)
            if self.comm.device.has_sync_batch_norm and not self.world.alone:
                net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        elif fast_cpu:
            with self.flight.during("work", "compiling of operators"):
                self.settings[DEFAULTS]["operators"] = cpu.fast_cpu(net)
        self._parameters = held_parameters(net, optimizer)
        settings = describe_optimizer(optimizer)
        self.comm.check_same("parameters", describe_parameters(self._parameters))
        self.comm.check_same("settings of the optimizer", settings)
        self.precision.wrap(net, optimizer)
        statistics = batch_norm_statistics(net)
        if statistics and not self.comm.device.has_sync_batch_norm and not self.world.alone:
            log.info(
                f"BatchNorm is not synchronised on a {self.comm.device.title}: each rank normalises by its own batch, "
                f"and the running statistics are averaged"
            )
        self._net = net  # the user's own; what prepare returns may be wrapped
        wrapped = net if self.world.alone else paddle.DataParallel(net)
        exchange = Exchange(self.comm, self._parameters, statistics, float_buffers(net), cpu.all_finite)
        self._stepper = Stepper(
            self.comm, self._state, self.precision, exchange, wrapped, optimizer, self.accumulate, self.on_nan
        )
        self._saver = Saver(self._run, self.seed, net, self._stepper, self._parameters)
        self.settings.update(parameters=sum(int(p.size) for p in self._parameters.values()), optimizer=settings)
        return wrapped, optimizer

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        tail: str | None = None,
        workers: int = 0,
        collate: Collate | None = None,
    ) -> Loader:
        """Batches of `batch_size` a rank, in an order that seed and epoch decide.

        `tail` says what becomes of a last global batch that is not full: "drop" it (the default with shuffle), or
        "pad" it with a mask (the default without), so that evaluation counts every sample once. `workers` are threads
        where the data set is a ppfleet.data.threads.ThreadedDataset, else processes; 0 loads in the loop itself.
        """
        plan = {
            "batch_size": batch_size,
            "rank": self.world.rank,
            "size": self.world.size,
            "seed": self.seed,
            "shuffle": shuffle,
            "tail": tail or ("drop" if shuffle else "pad"),
        }
        loader = make_loader(dataset, plan, workers, collate, self.world.local_size)
        loader.gather = None if self.world.alone else self.comm.gather
        loader.epoch_of_job = lambda: (self.epoch, self._state.in_epochs)
        return loader

    # The loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to do, of `count` in all."""
        stepper, state = self._ready("job.epochs"), self._state
        self._epochs = count
        if state.epoch >= count:
            log.info(f"nothing to do: {state.epoch} of {count} epochs are done already")
        if state.interrupted:  # the loop before, in this process: a notebook's cell is run again
            self._saver.loop_ended()
            stepper.drop_batch()
        try:
            for epoch in range(state.epoch, count):
                state.enter_epoch(epoch)
                self._tell_watchdog()
                self._seed_all(epoch)
                yield epoch
                state.leave_epoch()
                self._saver.amend()
        finally:
            state.leave_epochs()
            self._tell_watchdog()

    def steps(self, loader: Loader) -> Iterator[Any]:
        """The batches of this epoch that are still to do, with progress, checkpoints and generators seeded for each.

        An epoch of job.epochs may have several such loops. After a resume in the middle of one, those before it are
        skipped; what the script does between them is run again.
        """
        stepper, state = self._ready("job.steps"), self._state
        if not self._begin_loop(loader, stepper):
            return
        left = loader.steps_left
        label = f"epoch: [{state.epoch + 1}/{self._epochs or '?'}]"
        progress = log.Progress(label, left, loader.plan.global_batch, self.log_every, self.world.first)
        batches, depth = iter(loader), len(self.flight.open)
        try:
            while (batch := self._next_batch(batches, progress)) is not _END:
                state.ahead = loader.position
                stepper.begin(loader, left)
                self._seed_all(state.order_key, state.ahead, self.world.rank + 1)
                entry = self.flight.enter("step", f"step {state.step + 1}", str(state))
                yield batch
                self.flight.leave(entry)
                stepper.end()
                left = None if left is None else left - 1
                self._end_batch(loader, progress)
            state.end_loop()
            self._saver.loop_ended()
        finally:
            progress.close()
            stepper.abandon()
            self.flight.unwind(depth)
            if state.running:
                state.leave_loop()
            self._tell_watchdog()

    def _begin_loop(self, loader: Loader, stepper: Stepper) -> bool:
        """Check and announce a loop over `loader`; false if a checkpoint says that it is done."""
        state = self._state
        if not isinstance(loader, Loader):
            raise FleetError(f"job.steps takes what job.loader returns, not a {type(loader).__name__}")
        if not stepper.called:
            raise FleetError("job.steps inside of another job.steps: a job goes over one training set at a time")
        if loader.steps_left is None and self.accumulate > 1:
            raise FleetError(
                "accumulate needs a data set with a length: a stream's last step cannot be known in advance"
            )
        self._own_directory()
        begins = state.begin_loop({"samples": loader.plan.length, "shuffle": loader.plan.shuffle})
        if state.repeats_loop:
            self._saver.loop_repeated()
        if begins:
            state.repeats_loop = False
            if state.doubt:
                log.info(state.doubt)
            self._saver.amend()
            loader.begin(state.order_key, state.position, TRAINING)
            if self.settings.agree(self.comm, self._run, loader, self.accumulate) and self.world.first:
                self.board.begin(self.step, self.world.size)
            self._tell_watchdog()
        return begins

    def _next_batch(self, batches: Iterator[Any], progress: log.Progress) -> Any:
        asked = time.perf_counter()
        with self.flight.during("data", "next batch"):
            batch = next(batches, _END)
        if batch is not _END:
            progress.waited(time.perf_counter() - asked)
        return batch

    def _end_batch(self, loader: Loader, progress: log.Progress) -> None:
        """What may be due between two batches: a line, a checkpoint, the end."""
        state = self._state
        if progress.step() and self.world.first:
            self._report(loader, progress)
        self._saver.amend()
        if state.done:
            return
        if self.save_every and state.step % self.save_every == 0:
            self.save()
        if state.preempted:
            self._preempt()

    def _tell_watchdog(self) -> None:
        """What it must know when SIGTERM comes: is there a step boundary ahead, is there something to save?"""
        self.comm.watch.in_loop = self._state.running or self._state.in_epochs
        self.comm.watch.unsaved = self._state.unsaved

    def _preempt(self) -> NoReturn:
        """All ranks are here, after the same step: one checkpoint, and the end."""
        if not self._saver.is_current():
            self.save()
        self._end_preempted()

    def _end_preempted(self) -> NoReturn:
        text = f"ending after SIGTERM: saved at step {self.step}; the same command goes on from there"
        log.info(f"{text} (exit code {PREEMPTED})")
        if self._board is not None:
            self._board.close()
        self.comm.watch.preempted(text)

    def backward(self, loss: Any) -> None:
        """Backward pass of this batch, and with the last batch of a step: exchange, checks, optimizer step."""
        self._ready("job.backward").backward(loss)
        self._tell_watchdog()

    def _report(self, loader: Loader, progress: log.Progress) -> None:
        stepper = self._ready("this")
        later = (
            (self._epochs - self.epoch - 1) * len(loader) if self._epochs and loader.steps_left is not None else None
        )
        values = {"loss": stepper.loss, "lr": float(stepper.optimizer.get_lr())}
        costs = progress.line(values, later)
        self.board.add(self.step, {f"train/{name}": value for name, value in {**values, **costs}.items()})

    # Evaluation

    def evaluate(self, net: Any, loader: Loader, **metrics: Callable[..., Any]) -> dict[str, float]:
        """The mean of each metric over every sample of `loader` once, on any number of ranks, and how many they were.

        A batch is `(input, *targets)`; a metric takes `(net(input), *targets)` and gives one value per sample.
        """
        if not metrics:
            raise FleetError(
                "job.evaluate needs at least one metric: job.evaluate(net, val, top1=ppfleet.evaluation.metrics.top1)"
            )
        model = unwrap(net)
        self._same_buffers(model)
        with self.flight.during("evaluate", "evaluation"):
            totals = measure(model, loader, metrics, self.world.first, self.comm)
            everybodys = self.comm.gather(totals.to_json() if totals else None, "evaluation")
        if None in everybodys:
            self._preempt_evaluation()
        whole = Totals.merged(everybodys)
        scores: dict[str, float] = {**whole.means(), SAMPLES: round(whole.total(SAMPLES))}
        log.info("eval: " + ", ".join(f"{name}: {log.number(value)}" for name, value in scores.items()))
        if self.world.first:
            self.board.add(self.step, {f"eval/{name}": value for name, value in scores.items()})
        return scores

    def _preempt_evaluation(self) -> NoReturn:
        """Some rank was asked to end, and all know it. Nothing of this evaluation counts; one after an epoch is made
        again after the resume, by a loop over steps of which none is left."""
        state = self._state
        if state.unsaved and not state.done and not state.torn:
            self._save("max", {}, repeat=True)
            self._end_preempted()
        self.comm.watch.preempted("SIGTERM in an evaluation")

    # Checkpoints and export

    def save(self, *, mode: str = "max", **metrics: float) -> None:
        """Write a checkpoint (rank 0; all ranks learn whether it worked) and latest.pdparams.

        The first metric decides which is best: `mode` says whether larger ("max") or smaller ("min") is better.
        """
        self._ready("job.save")
        self._own_directory()
        self._save(mode, metrics)

    def _save(self, mode: str, metrics: dict[str, float], repeat: bool = False) -> None:
        with self.flight.during("save", "saving"):
            self._saver.save(self.card, mode, metrics, repeat)
        self._tell_watchdog()

    def resume(self, source: str | Path = "auto") -> bool:
        """Go on from a checkpoint; true if there was one. Rank 0 reads it and sends it to the others.

        "auto" takes the newest of this run that verifies, if there is one; "none" starts from scratch; a path takes
        that checkpoint, or the newest of that run. Without a call, or with "none", a directory that holds a run is
        refused at the first step: see `existing`.
        """
        self._ready("job.resume")
        found, own = self._saver.restore(self.card, str(source))
        self._owns_directory = own
        if found:
            self.flight.step = self.step
            self.flight.mark("resumed", f"{found}: epoch {self.epoch}, step {self.step}")
        return bool(found)

    def load(self, path: str | Path, strict: bool = True) -> list[str]:
        """Weights from a `.pdparams` or `.safetensors` file into the model: before fine-tuning, or to evaluate.

        With strict=False what is missing or of another shape is left out, said, and returned.
        """
        stepper = self._ready("job.load")
        path = Path(path)
        arrays = tensors.load_file(path) if path.suffix == ".safetensors" else pdparams.load(path)
        left_out = tensors.load_model(self._net, arrays, str(path), strict)
        # Each rank read its own host's file: they must have been the same.
        self.comm.check_same(f"weights in {path.name}", {"sha256": tensors.fingerprint(self._net)})
        stepper.exchange.remember()
        if left_out:
            log.info(f"{path}: left out: " + "; ".join(left_out))
        return left_out

    def export(self, net: Any, spec: Any, directory: str | Path | None = None, **stamp: Any) -> dict[str, Any]:
        """Write the static model for inference (rank 0; all ranks learn whether it worked) and return its stamp.

        `spec` is `[None, 3, 224, 224]` or a list of `InputSpec`; `stamp` adds to export.json: classes, preprocessing.
        `formats=("paddle", "pdmodel", "onnx")` among it asks for more than Paddle's own form (see ppfleet/export/).
        """
        target = Path(directory) if directory is not None else self.directory / "export"
        model = unwrap(net)
        with self.flight.during("export", "export"):
            self._same_buffers(model)
            with cpu.stock(model):
                facts = self.comm.on_first(lambda: export(plain(model), spec, target, **stamp), "export")
        log.info(f"exported to {target}: {agreement(facts['parity'])}")
        return facts

    def write_json(self, path: str | Path, facts: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all (rank 0; all ranks learn whether it worked)."""
        path = Path(path)
        self.comm.on_first(lambda: replace_file(path, json_bytes(facts)), f"writing of {path.name}")

    def close(self) -> None:
        """Flush the scalars and let other jobs write to the directory. The end of the process does this too."""
        if self._board is not None:
            self._board.close()
        self._run.release()
        if self.world.alone:
            self.comm.watch.stop()

    # Details

    def _own_directory(self) -> None:
        if not self._owns_directory:
            self.comm.on_first(self._run.refuse_other, "check of the run directory")
            self._owns_directory = True

    def _same_buffers(self, model: Any) -> None:
        if self._stepper is not None and model is self._net:
            self._stepper.exchange.same_buffers()

    def _seed_all(self, *where: int) -> None:
        """Randomness is derived from the place in training, not carried along: so it is the same after a resume."""
        number = mix(self.seed, *where)
        seed_everything(number)
        paddle.seed(number >> 33)

    def _ready(self, what: str) -> Stepper:
        if self._stepper is None:
            raise FleetError(f"{what} needs a model: call job.prepare(net, optimizer) first")
        return self._stepper


def _crash_at_once() -> None:
    """Paddle's own handler of SIGSEGV and the like may wait for a lock for ever, and the process with it. Python's
    shows the Python stacks, and lets it die."""
    paddle.disable_signal_handler()
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, ValueError, RuntimeError, OSError):  # a notebook has no real stderr
            faulthandler.enable()
