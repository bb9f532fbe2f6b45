"""`Job`: the facade. The loop stays the user's; `Job` handles what must be right on every rank.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import paddle

from ppfleet import cpu, limits, log
from ppfleet.checkpoint import pdparams, run_directory, tensors
from ppfleet.checkpoint.board import Board
from ppfleet.checkpoint.files import disk_message, json_bytes, replace_file
from ppfleet.checkpoint.saver import Saver
from ppfleet.checkpoint.settings import DEFAULTS, Settings
from ppfleet.cpu.tuning import tune
from ppfleet.data.create import make_loader
from ppfleet.data.loader import Loader
from ppfleet.data.seeding import seed_all
from ppfleet.data.workers import Collate
from ppfleet.distributed import devices
from ppfleet.distributed.collectives import Comm
from ppfleet.distributed.world import World
from ppfleet.errors import FleetError
from ppfleet.evaluation.evaluate import evaluate
from ppfleet.export.static_model import agreement, export
from ppfleet.training import batch_norm
from ppfleet.training.card_gradients import CardExchange
from ppfleet.training.gradients import Exchange, HostExchange
from ppfleet.training.loop import Loop
from ppfleet.training.model import (
    batch_norm_statistics,
    describe_optimizer,
    describe_parameters,
    float_buffers,
    held_parameters,
    only_reads_gradients,
    unwrap,
)
from ppfleet.training.precision import Precision, plain
from ppfleet.training.state import TrainingState
from ppfleet.training.step import ON_NAN, Stepper
from ppfleet.watchdog.diagnosis import Limits


class Job:
    """One training job as this process sees it: alone, or one rank of a launched job.

    directory   the run directory: checkpoints/, latest.pdparams, best.pdparams, settings.json, history.jsonl, logs/, …
    device      auto, cpu, gpu, xpu, npu … (ppfleet/distributed/devices.py); auto: a card where there is one
    seed        decides initial weights, sample order, augmentation and dropout
    accumulate  batches per optimizer step, whose gradients are added up
    amp         O0, O1 or O2, on cards; amp_dtype: float16 (with loss scaling) or bfloat16
    deterministic  on a GPU: only operators that give the same bits each time, which are slower
    on_nan      if a loss or gradient is not finite: stop (raise on every rank), or skip that step
    save_every  steps between checkpoints within an epoch; 0: only where the script calls job.save
    keep        number of checkpoints to keep, besides the best
    existing    if the directory holds a run that job.resume does not continue: refuse, or move it aside
    log_every   steps between progress lines
    stall       seconds that a rank may keep others waiting in a collective before the job is ended (gloo aborts at 30)
    stall_long  the same for sections that may take long: on rank 0 alone (saving, export), and without any progress
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
        deterministic: bool = False,
        on_nan: str = "stop",
        save_every: int = 0,
        keep: int = 3,
        existing: str = "refuse",
        log_every: int = 20,
        stall: float = limits.STALL,
        stall_long: float = limits.STALL_LONG,
    ) -> None:
        at_least = {"accumulate": (accumulate, 1), "keep": (keep, 1), "save_every": (save_every, 0)}
        for name, (value, least) in {**at_least, "stall": (stall, 1), "stall_long": (stall_long, 1)}.items():
            if value < least:
                raise FleetError(f"{name} must be >= {least}, got {value}")
        if on_nan not in ON_NAN:
            raise FleetError(f"on_nan must be one of {', '.join(ON_NAN)}, got {on_nan!r}")
        self.world = World.from_env()
        row = devices.select(device)
        self.device = paddle.get_device()
        if deterministic:
            _make_deterministic(row)
        defaults = tune(self.world.local_size) if not row.is_accelerator else {}
        self.directory = Path(directory).absolute()  # a script may change its working directory
        self.seed, self.accumulate, self.on_nan = seed, accumulate, on_nan
        self.save_every, self.log_every = save_every, log_every
        self.flight = run_directory.open_flight(self.directory, self.world)
        card = row.is_accelerator
        rules = Limits(stall, stall_long, first=limits.FIRST_STEP if card else 0.0)
        self.comm = Comm(self.world, row, self.flight, rules)
        if self.world.alone:
            self.comm.watchdog.start()
        self.comm.watchdog.stacks = self.directory / "logs" / f"rank{self.world.rank}.stacks"
        _crash_at_once()
        self.comm.watchdog.take_sigterm()
        self.precision = Precision(amp, amp_dtype, row)
        self._state = TrainingState()
        self._loop: Loop | None = None
        self._board: Board | None = None
        self._run = run_directory.RunDir(self.directory, keep, existing)
        self.comm.on_first(self._run.take, "opening the run directory")
        self.flight.remove_old()
        try:
            log.set_up(self.directory / "logs", self.world.rank)
        except OSError as failure:
            raise FleetError(disk_message(failure, self.directory / "logs")) from None
        if self.precision.note:
            log.info(self.precision.note)
        seed_all(seed, 0)
        # The model card: what the weights mean (classes, preprocessing …). It is stored beside them, and a resume from
        # weights with another card is refused.
        self.card: dict[str, Any] = {}
        # Logged and stored at the first step.
        self.settings = Settings(
            ranks=self.world.size,
            device=row.name,
            seed=seed,
            accumulate=accumulate,
            amp=str(self.precision),
            deterministic=deterministic or row.deterministic == (),
            on_nan=on_nan,
            save_every=save_every,
            defaults=defaults,
        )

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; after the last one, the number of epochs."""
        return self._state.epoch

    @property
    def best(self) -> float | None:
        """The best score that was saved."""
        return self._loop.saver.best if self._loop else None

    @property
    def step(self) -> int:
        """Optimizer steps since the beginning of training."""
        return self._state.step

    @property
    def skipped(self) -> int:
        """Steps that were skipped because a loss or gradient was not finite."""
        return self._state.skipped

    @property
    def board(self) -> Board:
        """history.jsonl and VisualDL's log; rank 0 writes: `if job.world.first: job.board.add(job.step, {"f1": f1})`"""
        if self._board is None:
            self._board = Board(self.directory)
        return self._board

    # Setting up

    def prepare(
        self, net: Any, optimizer: Any, *, sync_bn: Any = "auto", find_unused: bool = False, fast_cpu: bool = True
    ) -> tuple[Any, Any]:
        """Make `net` and `optimizer` ready for this job: device, precision, BatchNorm, DataParallel.

            net, sgd = job.prepare(net, sgd)

        Parameters and optimizer settings must be the same on all ranks; rank 0's weights are used.

        sync_bn      whether BatchNorm uses the global batch: True, False, or "auto": on accelerators
        find_unused  on several accelerators: parameters may be unused in some steps or on some ranks, which costs time
                     (on CPUs that is always allowed)
        fast_cpu     on a CPU: let layers use ppfleet's own operators where these support them (see ppfleet.cpu)
        """
        if self._loop is not None:
            raise FleetError("job.prepare was called twice: a job trains one model with one optimizer")
        if isinstance(net, paddle.DataParallel):
            raise FleetError("pass the plain model to job.prepare: it applies paddle.DataParallel itself")
        accelerated = self.comm.device.is_accelerator
        if accelerated:
            net.to(device=self.device)
        self._parameters = held_parameters(net, optimizer)
        settings = describe_optimizer(optimizer)
        self.comm.check_same("parameters", describe_parameters(self._parameters))
        self.comm.check_same("optimizer settings", settings)
        self._synchronise(net, sync_bn)
        if fast_cpu and not accelerated:
            with self.flight.during("work", "compiling operators"):
                self.settings[DEFAULTS]["operators"] = cpu.fast_cpu(net)
        self.precision.wrap(net, optimizer)
        self._net = net  # without DataParallel
        with self.flight.during("start", "DataParallel", waits=not self.world.alone):
            wrapped = net
            if not self.world.alone:
                wrapped = paddle.DataParallel(net, find_unused_parameters=accelerated and find_unused)
            exchange = self._exchange(net, optimizer, find_unused)
        stepper = Stepper(
            self.comm, self._state, self.precision, exchange, wrapped, optimizer, self.accumulate, self.on_nan
        )
        saver = Saver(self._run, self.seed, net, stepper, self._parameters)
        self._loop = Loop(
            stepper,
            saver,
            board=lambda: self.board,
            begin=self._begin_loop,
            save=lambda repeat: self._save("max", {}, repeat),
            save_every=self.save_every,
            log_every=self.log_every,
        )
        self.settings.update(parameters=sum(int(p.size) for p in self._parameters.values()), optimizer=settings)
        return wrapped, optimizer

    def _synchronise(self, net: Any, choice: Any) -> None:
        how = batch_norm.synchronise(net, self.comm, choice)
        if batch_norm_statistics(net) and not self.world.alone:
            self.settings[DEFAULTS]["BatchNorm"] = f"synchronised by {how} operator" if how else "not synchronised"
            if not how and choice == "auto":
                log.info(
                    "BatchNorm is not synchronised: each rank uses its own batch, and running statistics are averaged; "
                    "sync_bn=True in job.prepare synchronises it"
                )

    def _exchange(self, net: Any, optimizer: Any, find_unused: bool) -> Exchange:
        statistics = batch_norm_statistics(net)
        apart = {id(tensor) for tensor in statistics}
        own = {
            name: p for name, p in self._parameters.items() if id(p) not in apart
        }  # frozen ones may be unfrozen later
        buffers = float_buffers(net)
        if self.comm.device.is_accelerator:
            return CardExchange(self.comm, self.precision, own, buffers, find_unused)
        return HostExchange(self.comm, own, statistics, buffers, only_reads_gradients(optimizer), cpu.all_finite)

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        tail: str | None = None,
        workers: int = 0,
        collate: Collate | None = None,
        on_device: Callable[[Any], Any] | None = None,
    ) -> Loader:
        """Batches of `batch_size` samples per rank, in an order decided by seed and epoch.

            train = job.loader(train_set, batch_size=64, shuffle=True, workers=4)

        `tail` says what to do with an incomplete last global batch: "drop" it (the default with shuffle), or "pad" it
        with a mask (the default without), so that evaluation counts every sample once. `workers` are threads if the
        data set is a ppfleet.ThreadedDataset, otherwise processes; 0 loads in the loop itself.

        `collate` makes a batch of a list of samples, on the host. `on_device` changes the batch when it has arrived on
        the device, such as `lambda batch: [normalise(batch[0]), batch[1]]`: an image of 8 bits travels faster. A card
        gets each batch while it computes the step before.
        """
        plan = {
            "batch_size": batch_size,
            "rank": self.world.rank,
            "size": self.world.size,
            "seed": self.seed,
            "shuffle": shuffle,
            "tail": tail or ("drop" if shuffle else "pad"),
        }
        loader = make_loader(dataset, plan, workers, collate, on_device, self.world.local_size)
        loader.gather = None if self.world.alone else self.comm.gather
        loader.epoch_of_job = lambda: (self.epoch, self._state.in_epochs)
        return loader

    # The loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that remain, of `count` in all: `for epoch in job.epochs(90):`"""
        return self._ready("job.epochs").epochs(count)

    def steps(self, loader: Loader) -> Iterator[Any]:
        """The batches that remain of this epoch: `for images, labels in job.steps(train):`

        Around them: progress, checkpoints, and generators seeded for each batch. An epoch of job.epochs may have
        several such loops. After a resume in the middle of one, those before it are skipped; what the script does
        between them runs again.
        """
        return self._ready("job.steps").steps(loader)

    def backward(self, loss: Any) -> None:
        """Backward pass of this batch; after the last batch of a step also exchange, checks and optimizer step.

        job.backward(F.cross_entropy(net(images), labels))
        """
        self._ready("job.backward").stepper.backward(loss)

    def _begin_loop(self, loader: Loader) -> None:
        if self.settings.agree(self.comm, self._run, loader, self.accumulate) and self.world.first:
            self.board.begin(self.step, self.world.size)

    # Evaluation

    def evaluate(self, net: Any, loader: Loader, **metrics: Callable[..., Any]) -> dict[str, float]:
        """The mean of each metric over every sample of `loader` once, on any number of ranks, and the sample count.

            scores = job.evaluate(net, val, top1=ppfleet.metrics.top1)   # {"top1": 0.98, "samples": 360}

        A batch is `(input, *targets)`; a metric takes `(net(input), *targets)` and returns one value per sample.
        """
        if not metrics:
            raise FleetError("job.evaluate needs a metric: job.evaluate(net, val, top1=ppfleet.metrics.top1)")
        model = unwrap(net)
        self._sync_buffers(model)
        with self.flight.during("evaluate", "evaluation"):
            scores = evaluate(model, loader, metrics, self.comm)
        if scores is None:
            if self._loop is not None:
                self._loop.preempt_evaluation()
            self.comm.watchdog.preempted("SIGTERM in an evaluation")
        log.info("eval: " + ", ".join(f"{name}: {log.number(value)}" for name, value in scores.items()))
        if self.world.first:
            self.board.add(self.step, {f"eval/{name}": value for name, value in scores.items()})
        return scores

    # Checkpoints and export

    def save(self, *, mode: str = "max", **metrics: float) -> None:
        """Write a checkpoint and latest.pdparams (rank 0; every rank learns whether it worked).

            job.save(**job.evaluate(net, val, top1=metrics.top1))

        The first metric decides which checkpoint is best; `mode` says whether larger ("max") or smaller ("min") is.
        """
        self._ready("job.save").saver.own_directory()
        self._save(mode, metrics)

    def _save(self, mode: str, metrics: dict[str, float], repeat: bool = False) -> None:
        loop = self._ready("job.save")
        with self.flight.during("save", "saving"):
            loop.saver.save(self.card, mode, metrics, repeat)

    def resume(self, source: str | Path = "auto") -> bool:
        """Resume from a checkpoint; true if there was one. Rank 0 reads it and sends it to the others.

        "auto" uses the newest of this run that verifies, if there is one; "none" starts from scratch; a path is a
        checkpoint, or a run, whose newest is used. Without a call, or with "none", a directory that holds a run is
        refused at the first step: see `existing`.
        """
        path = self._ready("job.resume").saver.restore(self.card, str(source))
        if path:
            self.flight.step = self.step
            self.flight.mark("resumed", f"{path}: epoch {self.epoch}, step {self.step}")
        return bool(path)

    def load(self, path: str | Path, strict: bool = True) -> list[str]:
        """Load weights from a `.pdparams` or `.safetensors` file into the model, for fine-tuning or evaluation.

            job.load("pretrained.pdparams", strict=False)

        With strict=False tensors that are missing or have another shape are skipped, logged and returned.
        """
        stepper = self._ready("job.load").stepper
        path = Path(path)
        arrays = tensors.load_file(path) if path.suffix == ".safetensors" else pdparams.load(path)
        skipped = tensors.load_model(self._net, arrays, str(path), strict)
        # Each rank read its own host's file, which must be the same.
        self.comm.check_same(f"weights in {path.name}", {"sha256": tensors.fingerprint(self._net)})
        stepper.exchange.remember()
        if skipped:
            log.info(f"{path}: skipped: " + "; ".join(skipped))
        return skipped

    def export(self, net: Any, spec: Any, directory: str | Path | None = None, **stamp: Any) -> dict[str, Any]:
        """Write the static model for inference (rank 0; every rank learns whether it worked); return its export.json.

            job.export(net, [None, 3, 224, 224], formats=("paddle", "onnx"), classes=classes)

        `spec` is a shape or a list of `InputSpec`. `stamp` is added to export.json (classes, preprocessing …); only
        `formats` selects some of "paddle", "pdmodel" and "onnx" (see ppfleet/export/).
        """
        target = Path(directory) if directory is not None else self.directory / "export"
        model = unwrap(net)
        with self.flight.during("export", "export"):
            self._sync_buffers(model)
            with cpu.stock(model), batch_norm.stock(model):
                facts = self.comm.on_first(lambda: self._exported(model, spec, target, stamp), "export")
        log.info(f"exported to {target}: {agreement(facts['parity'])}")
        return facts

    def _exported(self, model: Any, spec: Any, target: Path, stamp: dict[str, Any]) -> dict[str, Any]:
        """From the CPU, whose operators every runtime has, and with whose results the runtimes are compared."""
        if not self.comm.device.is_accelerator:
            return export(plain(model), spec, target, **stamp)
        model.to(device="cpu")
        paddle.set_device("cpu")
        try:
            return export(plain(model), spec, target, **stamp)
        finally:
            paddle.set_device(self.device)
            model.to(device=self.device)

    def write_json(self, path: str | Path, facts: dict[str, Any]) -> None:
        """Write a JSON file atomically (rank 0; every rank learns whether it worked)."""
        path = Path(path)
        self.comm.on_first(lambda: replace_file(path, json_bytes(facts)), f"writing {path.name}")

    def close(self) -> None:
        """Flush the logged values and unlock the directory. The end of the process does this too."""
        if self._board is not None:
            self._board.close()
        self._run.release()
        if self.world.alone:
            self.comm.watchdog.stop()

    # Details

    def _sync_buffers(self, model: Any) -> None:
        if self._loop is not None and model is self._net:
            self._loop.stepper.exchange.sync_buffers()

    def _ready(self, method: str) -> Loop:
        if self._loop is None:
            raise FleetError(f"{method} needs a model: call job.prepare(net, optimizer) first")
        return self._loop


def _make_deterministic(device: devices.Device) -> None:
    if device.deterministic is None:
        raise FleetError(f"deterministic=True: it is not known how a {device.title} computes the same bits each time")
    if device.deterministic:
        paddle.set_flags(dict.fromkeys(device.deterministic, 1))


def _crash_at_once() -> None:
    """Paddle's own handler of SIGSEGV and the like may wait for a lock forever. Python's prints the Python stacks and
    lets the process die."""
    paddle.disable_signal_handler()
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, ValueError, RuntimeError, OSError):  # a notebook has no real stderr
            faulthandler.enable()
