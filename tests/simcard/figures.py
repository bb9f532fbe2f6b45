"""Figures that are read off simulated cards: what a step asks of the card, what the host adds to it, and loss curves.

    python -m tests.simcard.figures counts       kernels, copies and waits a step: a plain loop and `Job`
    python -m tests.simcard.figures overlap      a step that takes the card 50 ms: the host's share, hidden exchange
    python -m tests.simcard.figures curves DATA  MobileNetV3-small on digits: CPU and cards, 1 and 2 ranks

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
        return nn.Sequential(*[part for _ in range(10) for part in (nn.Linear(1024, 1024), nn.ReLU())])
    return paddle.vision.models.mobilenet_v3_small(num_classes=10)


def _data(name: str) -> Any:
    import numpy as np
    import paddle

    class Samples(paddle.io.Dataset):
        def __len__(self) -> int:
            return 10**5

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return np.full([1024] if name == "mlp" else [3, 32, 32], index % 7 / 7, np.float32), np.int64(index % 10)

    return Samples()


def steps(path: str, how: str, name: str, sync_bn: bool) -> dict[str, Any]:
    """Some steps of a loop that reads nothing of its own; counted and timed after the first ones."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests.harness import DEVICE
    from tests.simcard import counters

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
                fused_allreduce_gradients(list(net.parameters()), None)
            sgd.step()
            sgd.clear_grad()
            yield

    if how == "after":
        from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
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
    return {**counted, "wall_ms": 1000 * took / STEPS, "host_ms": 1000 * busy / STEPS}


def _run(function: Any, ranks: int, *arguments: Any, **knobs: object) -> list[Any]:
    from tests.harness import run

    env = {f"SIM_{name.upper()}": str(value) for name, value in knobs.items()}
    with tempfile.TemporaryDirectory() as scratch:
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
    kernels = _run(steps, 1, "plain", "mlp", False)[0]["kernels"]
    delay = {"delay_us": round(50000 / kernels)}
    print("| loop | ranks | step, ms | the host's CPU time in it, ms |")
    print("|---|---|---|---|")
    waits = {"collective_delay_us": 10000}
    for label, ranks, how, more in (
        ("plain", 1, "plain", {}),
        ("Job", 1, "job", {}),
        ("plain, a collective takes 10 ms more", 2, "plain", waits),
        ("plain, exchange after backward, 10 ms more", 2, "after", waits),
        ("Job, a collective takes 10 ms more", 2, "job", waits),
    ):
        told = _run(steps, ranks, how, "mlp", False, **delay, **more)[0]
        print(f"| {label} | {ranks} | {told['wall_ms']:.1f} | {told['host_ms']:.1f} |", flush=True)


def losses(path: str, data: str, epochs: int) -> list[float]:
    """MobileNetV3-small on images of 32 x 32, a global batch of 32: the loss of each step."""
    import paddle.nn.functional as F

    import ppfleet
    from deploy.inference_python import preprocess
    from models.mobilenet_v3_small import recipe
    from models.mobilenet_v3_small.data import Images, find
    from models.mobilenet_v3_small.net import MobileNetV3Small
    from tests.harness import DEVICE

    job = ppfleet.Job(path, device=DEVICE, seed=1, log_every=10**9)
    files = find(data)
    images = Images(files.train, preprocess.settings(32), 0.6, pixels=DEVICE != "cpu")
    train = job.loader(images, 32 // job.world.size, shuffle=True, on_device=images.normalised)
    net = MobileNetV3Small(len(files.classes))
    rate = recipe.Schedule(0.1, 32, epochs, len(train))
    net, _ = job.prepare(net, recipe.optimizer(net, rate), sync_bn=True, fast_cpu=False)
    found = []
    for epoch in job.epochs(epochs):
        for batch, labels in job.steps(train):
            rate.follow(epoch, train)
            job.backward(F.cross_entropy(net(batch), labels))
            found.append(job._loop.stepper.loss)
    return found


def curves(data: str, epochs: int = 2) -> None:
    from tests import harness

    found = {}
    for device in ("cpu", "sim"):
        harness.DEVICE = os.environ["PPFLEET_TEST_DEVICE"] = device
        for ranks in (1, 2):
            found[f"{device} x {ranks}"] = _run(losses, ranks, str(Path(data).absolute()), epochs)[0]
            print(f"{device} x {ranks}: {len(found[f'{device} x {ranks}'])} steps", flush=True)
    first = found["cpu x 1"]
    shown = sorted({0, 1, 2, 4, 9, 19, 39, len(first) - 1} & set(range(len(first))))
    print("| step | " + " | ".join(found) + " | largest relative difference so far |")
    print("|---" * (2 + len(found)) + "|")
    for step in shown:
        apart = max(abs(a / b - 1) for one in found.values() for a, b in zip(one[: step + 1], first))
        print(f"| {step + 1} | " + " | ".join(f"{one[step]:.7f}" for one in found.values()) + f" | {apart:.1e} |")


if __name__ == "__main__":
    os.environ.setdefault("PPFLEET_TEST_DEVICE", "sim")
    made = {"counts": counts, "overlap": overlap, "curves": curves}
    made[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
