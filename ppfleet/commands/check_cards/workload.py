"""The small jobs that the checks run, written as a user would write them: with `ppfleet.Job` and nothing internal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn, profiler

import ppfleet

SIZE, CLASSES = 32, 10
COUNTED = 5  # steps whose copies are counted
# A single step with such a learning rate shows the gradient in the weights: it is not lost in their rounding.
RATE = 1024.0
Task = dict[str, Any]


class Pictures(paddle.io.Dataset):
    """Random pictures, a fixed function of the index."""

    def __init__(self, length: int, size: int = SIZE) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        picture = np.random.RandomState(index).standard_normal((3, self.size, self.size)).astype("float32")
        return picture, np.int64(index % CLASSES)


def network(batch_norm: bool, dropout: float = 0.0) -> Any:
    """Convolution, normalisation, depthwise convolution, linear. A second normalisation, or a bias before the first,
    would have gradients near 0 by construction, and the noise in them says nothing."""
    norm = nn.BatchNorm2D(16) if batch_norm else nn.GroupNorm(4, 16)
    return nn.Sequential(
        nn.Conv2D(3, 16, 3, stride=2, padding=1, bias_attr=False), norm, nn.Hardswish(),
        nn.Conv2D(16, 16, 3, padding=1, groups=16), nn.Hardswish(),
        nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, CLASSES),
    )  # fmt: skip


def train(task: Task) -> dict[str, Any]:
    """Some steps with a global batch of `task["batch"]`; weights before and after, losses, and what was used."""
    job = ppfleet.Job(task["run"], device=task["device"], seed=3, log_every=10**9, **task.get("options", {}))
    net = network(task["batch_norm"], task.get("dropout", 0.0))
    model, _ = job.prepare(net, _sgd(net) if task["steps"] == 1 else _momentum(net))
    batches = job.accumulate * task["steps"]
    data = job.loader(Pictures(task["batch"] * batches), task["batch"] // job.world.size, shuffle=True)
    before = _arrays(net)
    if task.get("resume"):
        job.resume()
    losses = []
    for pictures, labels in job.steps(data):
        _fault(task, job)
        time.sleep(task.get("pause", 0.0))
        loss = F.cross_entropy(model(pictures), labels)
        job.backward(loss)
        losses.append(float(loss))
    job.save()
    if job.world.first:
        _keep(task, net, before)
    return {
        "losses": losses,
        "sha256": ppfleet.fingerprint(net),
        "amp": job.settings["amp"],
        "batch_norm": job.settings["defaults"].get("BatchNorm", ""),
        "step": job.step,
    }


def _fault(task: Task, job: Any) -> None:
    """Something happens to this rank, as it happens to users."""
    fault = task.get("fault")
    if not fault or (job.world.rank, job.step) != (fault["rank"], fault["step"]):
        return
    (Path(task["out"]) / "fault.json").write_text(json.dumps({"time": time.time()}))
    if fault["kind"] == "stall":
        time.sleep(3600)
    if fault["kind"] == "exit":
        os._exit(3)
    if fault["kind"] == "raise":
        raise KeyError("made by check-cards")
    os.kill(os.getpid(), signal.SIGKILL)


class Branches(nn.Layer):
    """A stem and two heads; `other` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, CLASSES), nn.Linear(32, CLASSES)
        self.other = nn.Linear(32, CLASSES)

    def forward(self, points: Any, both: bool) -> Any:
        hidden = F.relu(self.stem(points))
        return self.a(hidden) + self.b(hidden) if both else self.a(hidden)


def branch(task: Task) -> dict[str, Any]:
    """A step has `task["blocks"]` batches: one on each of as many cards, or one after the other on a single card.
    With `task["branch"]` every second of them takes another way through the network."""
    blocks = task["blocks"]
    alone = int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) == 1
    job = ppfleet.Job(
        task["run"], device=task["device"], seed=3, log_every=10**9, accumulate=blocks if alone else 1
    )  # fmt: skip
    net = Branches()
    model, _ = job.prepare(net, _sgd(net), find_unused=task["branch"])
    before = _arrays(net)
    for number, _ in enumerate(job.steps(job.loader(Pictures(8 * blocks * task["steps"], 1), 8))):
        step, block = divmod(number, blocks) if job.world.alone else (number, job.world.rank)
        noise = np.random.RandomState(1000 * step + block)
        points = paddle.to_tensor(noise.standard_normal((8, 16)).astype("float32"))
        labels = paddle.to_tensor(noise.randint(0, CLASSES, [8]).astype("int64"))
        both = block % 2 == 1 if task["branch"] else True
        job.backward(F.cross_entropy(model(points, both), labels))
    if job.world.first:
        _keep(task, net, before)
    return {"sha256": ppfleet.fingerprint(net), "step": job.step}


def export(task: Task) -> dict[str, Any]:
    """Exports after some steps, as the end of a training script does; then trains on."""
    job = ppfleet.Job(task["run"], device=task["device"], seed=3, log_every=10**9)
    net = network(batch_norm=True)
    model, _ = job.prepare(net, _momentum(net))
    told: dict[str, Any] = {}
    for _ in job.epochs(2):
        for pictures, labels in job.steps(job.loader(Pictures(32 * job.world.size), 8, shuffle=True)):
            job.backward(F.cross_entropy(model(pictures), labels))
        preprocess = {"resize_short": SIZE, "crop": SIZE, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
        classes = [f"class {number}" for number in range(CLASSES)]
        told = job.export(model, [None, 3, SIZE, SIZE], classes=classes, preprocess=preprocess)
    return {"parity": told["parity"], "directory": str(job.directory / "export"), "place": str(net[0].weight.place)}


def speed(task: Task) -> dict[str, Any]:
    """Blocks of steps, in turn by `Job` and by a plain loop of Paddle's; the images/s of each, of all cards."""
    job = ppfleet.Job(task["run"], device=task["device"], seed=3, log_every=10**9)
    size, batch = (224, task["batch"]) if task["large"] else (SIZE, task["batch"])
    nets = [paddle.vision.models.resnet50() if task["large"] else network(batch_norm=True) for _ in range(2)]
    optimizers = [paddle.optimizer.Momentum(0.01, parameters=net.parameters()) for net in nets]
    by_job, _ = job.prepare(nets[0], optimizers[0], sync_bn=False)
    nets[1].to(device=job.device)
    plain = nets[1] if job.world.alone else paddle.DataParallel(nets[1])
    noise = np.random.RandomState(job.world.rank)
    pictures = paddle.to_tensor(noise.standard_normal((batch, 3, size, size)).astype("float32"))
    labels = paddle.to_tensor(noise.randint(0, CLASSES, [batch]).astype("int64"))
    length, rounds = task["block"], task["rounds"]
    seconds: dict[str, list[float]] = {"job": [], "plain": []}
    began = time.perf_counter()
    # The batches of the loader only count: both loops train on the same batch, which is on the card already.
    data = job.loader(Pictures(job.world.size * (length * (rounds + 1) + COUNTED), 1), 1)
    copies, last = _CopiesToHost(job.device.startswith("gpu")), length * (rounds + 1)
    for number, _ in enumerate(job.steps(data), 1):
        loss = F.cross_entropy(by_job(pictures), labels)
        job.backward(loss)
        if number == last:
            copies.begin()
        if number % length or number > last:
            continue
        float(loss)  # waits for the card
        seconds["job"].append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(length):
            loss = F.cross_entropy(plain(pictures), labels)
            loss.backward()
            optimizers[1].step()
            optimizers[1].clear_grad()
        float(loss)
        seconds["plain"].append(time.perf_counter() - began)
        began = time.perf_counter()
    counted = copies.end()
    images = batch * length * job.world.size
    pairs = list(zip(seconds["job"], seconds["plain"]))[1:]  # the first block compiles and searches
    ratios = sorted(plain / by_job for by_job, plain in pairs)
    return {
        "job": statistics.median(images / pair[0] for pair in pairs),
        "plain": statistics.median(images / pair[1] for pair in pairs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "network": "ResNet-50" if task["large"] else "a small network",
        "size": size,
        "batch": batch,
        "copies": None if counted is None else counted / COUNTED,
    }


class _CopiesToHost:
    """How often the card's memory is copied to the host: by Paddle's profiler, which knows NVIDIA's cards only."""

    def __init__(self, known: bool) -> None:
        self._folder = tempfile.mkdtemp() if known else ""
        self._profiler: Any = None

    def begin(self) -> None:
        if self._folder:
            targets = [profiler.ProfilerTarget.CPU, profiler.ProfilerTarget.GPU]
            ready = profiler.export_chrome_tracing(self._folder)
            self._profiler = profiler.Profiler(targets=targets, on_trace_ready=ready)
            self._profiler.start()

    def end(self) -> int | None:
        if self._profiler is None:
            return None
        self._profiler.stop()
        traces = [json.loads(path.read_text()) for path in Path(self._folder).glob("*.json")]
        shutil.rmtree(self._folder, ignore_errors=True)
        names = [str(event.get("name")) for trace in traces for event in trace["traceEvents"]]
        return sum("MEMCPY_DtoH" in name for name in names) or None  # each step has one: it was not recorded


def _arrays(net: Any) -> dict[str, Any]:
    return {name: value.astype("float32").numpy() for name, value in net.state_dict().items()}


def _keep(task: Task, net: Any, before: dict[str, Any]) -> None:
    """Gradients, if this was a single step of `_sgd`, and what became of the buffers."""
    trained = {id(parameter) for parameter in net.parameters()}
    rates = {name: RATE if id(value) in trained else 1.0 for name, value in net.state_dict().items()}
    changes = {name: (before[name].astype("float64") - now) / rates[name] for name, now in _arrays(net).items()}
    np.savez(Path(task["out"]) / "changes.npz", **changes)


def _sgd(net: Any) -> Any:
    return paddle.optimizer.SGD(RATE, parameters=net.parameters())


def _momentum(net: Any) -> Any:
    return paddle.optimizer.Momentum(0.05, parameters=net.parameters())
