"""Figures that are read off simulated cards: what a step asks of the card, what the host adds to it, and loss curves.

    python -m tests.simcard.figures counts       kernels, copies and waits a step: a plain loop and `Job`
    python -m tests.simcard.figures overlap      a step that takes the card 50 ms: the host's share, hidden exchange
    python -m tests.simcard.figures curves DATA [float64]   MobileNetV3-small on digits: CPU and cards, 1 and 2 ranks

They say nothing of the speed of real cards.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM, STEPS = 4, 8
SHOWN = ("kernels", "collectives", "h2d", "h2d_bytes", "d2h", "blocking_copies", "blocking_waits", "fallback_copies")


def _network(name: str) -> Any:
    import paddle
    from paddle import nn

    paddle.seed(1)
    if name == "mlp":
        return nn.Sequential(*[part for _ in range(10) for part in (nn.Linear(256, 256), nn.ReLU())])
    return paddle.vision.models.mobilenet_v3_small(num_classes=10)


def _data(name: str) -> Any:
    import numpy as np
    import paddle

    class Samples(paddle.io.Dataset):
        def __len__(self) -> int:
            return 10**5

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return np.full([256] if name == "mlp" else [3, 32, 32], index % 7 / 7, np.float32), np.int64(index % 10)

    return Samples()


def steps(path: str, how: str, name: str, sync_bn: bool) -> dict[str, Any]:
    """Some steps of a loop that reads nothing of its own; counted and timed after the first ones."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests.harness import DEVICE
    from tests.simcard import counters, read_trace

    job = ppfleet.Job(path, device=DEVICE, log_every=10**9)
    net = _network(name)
    sgd = paddle.optimizer.Momentum(0.01, parameters=net.parameters())

    def through_job() -> Any:
        model, _ = job.prepare(net, sgd, **({"sync_bn": True} if sync_bn else {}))
        for points, labels in job.steps(job.loader(_data(name), 4)):
            job.backward(F.cross_entropy(model(points), labels))
            yield

    def plain() -> Any:
        alone = job.world.alone
        layers = net if alone or not sync_bn else paddle.nn.SyncBatchNorm.convert_sync_batchnorm(net)
        model = layers if alone or how == "after" else paddle.DataParallel(layers)
        for points, labels in paddle.io.DataLoader(_data(name), batch_size=4, num_workers=0):
            F.cross_entropy(model(points), labels).backward()
            if how == "after":
                for part in (net.parameters()[:10], net.parameters()[10:]):  # DataParallel makes two buckets, too
                    total = paddle.concat([each.grad.flatten() for each in part])
                    paddle.distributed.all_reduce(total)
                    for each, mean in zip(part, (total / 2).split([int(each.size) for each in part])):
                        each.grad.copy_(mean.reshape(each.shape), False)
            sgd.step()
            sgd.clear_grad()
            yield

    loop = through_job() if how == "job" else plain()
    for _ in range(WARM):
        next(loop)
    paddle.device.synchronize()
    counters.reset()
    began, cpu = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        next(loop)
    asked = counters.counters()
    busy = time.thread_time() - cpu
    paddle.device.synchronize()
    took = time.perf_counter() - began
    counted = {each: asked[each] / STEPS for each in SHOWN}
    counted["hidden"] = _hidden(read_trace(os.environ["SIM_TRACE"].replace("%r", str(job.world.rank))))
    return {**counted, "wall_ms": 1000 * took / STEPS, "host_ms": 1000 * busy / STEPS}


def _hidden(trace: list[dict[str, Any]]) -> float:
    """The share of the gradients' time in collectives during which the card also computes."""
    collectives = {
        (event["name"], event["number"])
        for event in trace
        if event["event"] == "collective" and event["bytes"] > 1 << 16
    }
    begun, spans = {}, []
    for event in trace:
        if event["event"] in ("begin", "end"):
            which = event["name"], event["number"]
            if event["event"] == "begin":
                begun[which] = event["time"]
            elif which in begun:
                spans.append((which in collectives, begun.pop(which), event["time"]))
    computed = [(begin, end) for collective, begin, end in spans if not collective]
    exchange = [(begin, end) for collective, begin, end in spans if collective]
    both = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in exchange for b, e in computed)
    return both / max(1e-9, sum(end - begin for begin, end in exchange))


def _run(function: Any, ranks: int, *arguments: Any, **knobs: object) -> list[Any]:
    from tests.harness import run

    with tempfile.TemporaryDirectory() as scratch:
        knobs["trace"] = f"{scratch}/trace%r"
        env = {f"SIM_{name.upper()}": str(value) for name, value in knobs.items()}
        return run(function, ranks, Path(scratch), f"{scratch}/run", *arguments, timeout=900, env=env)


def counts() -> None:
    """Of rank 0; what the plain loop does is the network's own."""
    print("| loop | ranks | " + " | ".join(SHOWN) + " |")
    print("|---" * (2 + len(SHOWN)) + "|")
    for ranks in (1, 2):
        for how in ("plain", "job"):
            told = _run(steps, ranks, how, "mobilenet", False)[0]
            print(f"| {how} | {ranks} | " + " | ".join(f"{told[each]:g}" for each in SHOWN) + " |", flush=True)


def overlap() -> None:
    free = _run(steps, 1, "plain", "mlp", False)[0]
    guess = 50000 / free["kernels"]
    tried = _run(steps, 1, "plain", "mlp", False, delay_us=round(guess))[0]  # sleeping takes longer than asked for
    delay = {"delay_us": round(guess * (50 - free["wall_ms"]) / (tried["wall_ms"] - free["wall_ms"]))}
    print("| loop | ranks | step, ms | the host's CPU time in it, ms | share of the exchange that is hidden |")
    print("|---|---|---|---|---|")
    waits = {"collective_delay_us": 10000}
    for label, ranks, how, more in (
        ("plain", 1, "plain", {}),
        ("Job", 1, "job", {}),
        ("plain, a collective takes 10 ms more", 2, "plain", waits),
        ("plain, exchange after backward, 10 ms more", 2, "after", waits),
        ("Job, a collective takes 10 ms more", 2, "job", waits),
    ):
        told = _run(steps, ranks, how, "mlp", False, **delay, **more)[0]
        hidden = f"{100 * told['hidden']:.0f} %" if ranks > 1 else ""
        shown = f"{told['wall_ms']:.1f} | {told['host_ms']:.1f} | {hidden}"
        print(f"| {label} | {ranks} | {shown} |", flush=True)


def losses(path: str, data: str, epochs: int, dtype: str) -> list[float]:
    """MobileNetV3-small on images of 32 x 32, a global batch of 32: the loss of each step."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from deploy.inference_python import preprocess
    from models.mobilenet_v3_small import recipe
    from models.mobilenet_v3_small.data import Images, find
    from models.mobilenet_v3_small.net import MobileNetV3Small
    from tests.harness import DEVICE

    paddle.set_default_dtype(dtype)
    job = ppfleet.Job(path, device=DEVICE, seed=1, log_every=10**9)
    files = find(data)
    images = Images(files.train, preprocess.settings(32), 0.6, pixels=DEVICE != "cpu")
    train = job.loader(images, 32 // job.world.size, shuffle=True, on_device=images.normalised)
    net = MobileNetV3Small(len(files.classes))
    for layer in net.sublayers():
        if isinstance(layer, paddle.nn.Dropout):
            layer.p = 0.0  # each rank drops other units
    rate = recipe.Schedule(0.1, 32, epochs, len(train))
    net, _ = job.prepare(net, recipe.optimizer(net, rate), sync_bn=True, fast_cpu=False)
    found = []
    for epoch in job.epochs(epochs):
        for batch, labels in job.steps(train):
            rate.follow(epoch, train)
            job.backward(F.cross_entropy(net(batch.astype(dtype)), labels))
            found.append(job._loop.stepper.loss)
    return found


def curves(data: str, dtype: str = "float32", epochs: str = "2") -> None:
    """Rounding grows from step to step. In float64 it starts so small that the curves stay together."""
    from tests import harness

    found = {}
    for device in ("cpu", "sim"):
        harness.DEVICE = os.environ["PPFLEET_TEST_DEVICE"] = device
        for ranks in (1, 2):
            found[f"{device} x {ranks}"] = _run(losses, ranks, str(Path(data).absolute()), int(epochs), dtype)[0]
            print(f"{device} x {ranks}: {len(found[f'{device} x {ranks}'])} steps", flush=True)
    first = found["cpu x 1"]
    shown = sorted({0, 1, 2, 4, 9, 19, 39, len(first) - 1} & set(range(len(first))))
    print("| step | " + " | ".join(found) + " | largest relative difference so far |")
    print("|---" * (2 + len(found)) + "|")
    for step in shown:
        apart = max(abs(a / b - 1) for one in found.values() for a, b in zip(one[: step + 1], first))
        print(f"| {step + 1} | " + " | ".join(f"{one[step]:.9g}" for one in found.values()) + f" | {apart:.1e} |")


if __name__ == "__main__":
    os.environ.setdefault("PPFLEET_TEST_DEVICE", "sim")
    from tests.simcard import figures  # by this name the ranks find its functions

    getattr(figures, sys.argv[1])(*sys.argv[2:])
