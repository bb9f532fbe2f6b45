"""A training step of MobileNetV3-small: forward, cross entropy, backward, step with momentum. Ours against peers.

    make .venv-peers/.ready && python benchmarks/train.py        # about 10 minutes on 2 cores

Ours is `Job`'s own loop; Paddle is its own network of paddle.vision in a loop written by hand; PyTorch is the same
network, eager, and in the channels_last format with the fused optimizer. Batches lie ready in memory. All begin with
the same weights, and must have the same scores, gradients and weights after some steps before anything is timed.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import common
import numpy as np
import report
from common import ALLOCATOR, OURS, PEERS, Arrays, Case, Worker, batch, fill
from report import Row

RATE, MOMENTUM, DECAY = 0.1, 0.9, 1e-4
CHECKED = 2  # steps after which the change of weights is compared
# Errors against float64, of scores and gradients, and of the change of weights after some steps, which float32 weights
# hold less exactly. Wide, for everybody: where one input of a ReLU lies within rounding of 0, gradients of that layer
# differ by 1e-3 (seen with stock Paddle too), and PyTorch in channels_last sums BatchNorm's gradients less exactly.
TOLERANCES = {"": 3e-2, "change": 0.1}


def changes(weights: Arrays) -> Arrays:
    """The weights after the steps, from the same initial weights."""
    return {f"change: {name}": array - fill(name, array.shape) for name, array in weights.items()}


class Paddle:
    """The loop as a careful user of plain Paddle writes it."""

    def __init__(self, case: Case) -> None:
        import paddle
        from paddle.nn.functional import cross_entropy

        paddle.set_device("cpu")
        self.paddle, self.loss, self.case, self.ranks = paddle, cross_entropy, case, case.get("ranks", 1)
        self.images, self.labels = (paddle.to_tensor(array) for array in batch(case["batch"], case["pixels"]))
        net = self.make()
        net.set_state_dict({name: fill(name, tensor.shape) for name, tensor in net.state_dict().items()})
        self.named = {name: p for name, p in net.named_parameters() if not p.stop_gradient}
        optimizer = paddle.optimizer.Momentum(RATE, MOMENTUM, parameters=net.parameters(), weight_decay=DECAY)
        self.net, self.optimizer = self.prepare(net, optimizer)

    def make(self) -> Any:
        net = self.paddle.vision.models.mobilenet_v3_small()
        net.classifier[2].p = 0.0  # no dropout: everybody is to compute the same
        return net

    def prepare(self, net: Any, optimizer: Any) -> Any:
        if self.ranks > 1:
            self.paddle.distributed.init_parallel_env()
            net = self.paddle.DataParallel(net)
        return net, optimizer

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.loss(self.net(self.images), self.labels).backward()
            self.optimizer.step()
            self.optimizer.clear_grad()

    def check(self) -> Arrays:
        told = {}
        if self.ranks == 1:
            scores = self.net(self.images)
            self.loss(scores, self.labels).backward()
            told = {"scores": scores.numpy(), **{f"gradient: {name}": p.grad.numpy() for name, p in self.named.items()}}
            self.optimizer.clear_grad()
        self.run(CHECKED)
        return {**told, **changes({name: p.numpy() for name, p in self.named.items()})}


class Ours(Paddle):
    """What ppfleet's users run: `Job` with its defaults."""

    def make(self) -> Any:
        from models.mobilenet_v3_small.net import MobileNetV3Small

        return MobileNetV3Small(dropout=0.0)

    def prepare(self, net: Any, optimizer: Any) -> Any:
        import ppfleet

        job = ppfleet.Job(self.case["run"], device="cpu", log_every=10**9)
        net, optimizer = job.prepare(net, optimizer)
        loader = job.loader(range(10**6), len(self.labels), collate=lambda _: [self.images, self.labels])

        def loop() -> Any:
            for images, labels in job.steps(loader):
                job.backward(self.loss(net(images), labels))
                yield

        self.loop = loop()
        return net, optimizer

    def run(self, steps: int) -> None:
        for _ in range(steps):
            next(self.loop)


class Torch:
    """PyTorch, eager."""

    channels_last = double = False

    def __init__(self, case: Case) -> None:
        import torch
        import torch_net

        torch.set_num_threads(case["threads"])
        self.torch, self.torch_net, self.ranks = torch, torch_net, case.get("ranks", 1)
        self.images, self.labels = (torch.from_numpy(array) for array in batch(case["batch"], case["pixels"]))
        self.net = torch_net.filled()
        if self.double:
            self.images, self.net = self.images.double(), self.net.double()
        if self.channels_last:
            self.images = self.images.to(memory_format=torch.channels_last)
            self.net.to(memory_format=torch.channels_last)
        self.named = list(self.net.named_parameters())
        if self.ranks > 1:
            torch.distributed.init_process_group("gloo")
            self.net = torch.nn.parallel.DistributedDataParallel(self.net, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), RATE, MOMENTUM, weight_decay=DECAY, fused=self.channels_last or None
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.torch.nn.functional.cross_entropy(self.net(self.images), self.labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self) -> Arrays:
        told = {}
        if self.ranks == 1:
            scores = self.net(self.images)
            self.torch.nn.functional.cross_entropy(scores, self.labels).backward()
            gradients = self.torch_net.like_paddle((name, p.grad) for name, p in self.named)
            told = {f"gradient: {name}": gradient.clone().numpy() for name, gradient in gradients.items()}
            told["scores"] = scores.detach().numpy()
            self.optimizer.zero_grad()
        self.run(CHECKED)
        weights = self.torch_net.like_paddle((name, p.detach()) for name, p in self.named)
        return {**told, **changes({name: p.numpy() for name, p in weights.items()})}


class TorchChannelsLast(Torch):
    """The strongest peer: channels_last and the fused optimizer."""

    channels_last = True


class Truth(Torch):
    """In float64: what the others should compute."""

    double = True


CONTENDERS = {"ours": Ours, "Paddle": Paddle, "PyTorch": Torch, "PyTorch channels_last": TorchChannelsLast}


class Machine:
    """The upper bound of one core: the fastest matrix product here, and memory bandwidth."""

    def __init__(self, case: Case) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch = torch

    def peak(self) -> float:
        """FLOP/s of a large matrix product in float32."""
        libraries = [(self.torch.ones(2048, 2048), self.torch.mm), (np.ones((2048, 2048), np.float32), np.matmul)]
        return max(2 * 2048**3 / best(lambda: product(a, a)) for a, product in libraries)  # noqa: B023

    def bandwidth(self) -> float:
        """Bytes/s of a = b + 3 c, on arrays that fit into no cache."""
        a, b, c = (self.torch.ones(2**26) for _ in range(3))
        return 3 * 4 * 2**26 / best(lambda: self.torch.add(b, c, alpha=3, out=a))

    def work(self) -> list[float]:
        """FLOP and bytes of a training step, for an image of 224 x 224.

        Each multiply-add is done once forward and twice backward, except for the gradient of the image. The output of
        each convolution is written and read 14 times at least: forward it is written, read for BatchNorm's statistics,
        read and written by BatchNorm with its activation, read by the next layer; backward come the two reads of
        BatchNorm's sums, two and a write for its gradient, a read and a write for the input's gradient and two reads
        for the weights'.
        """
        import torch_net

        flops, outputs = [], []

        def count(layer: Any, inputs: Any, output: Any) -> None:
            if hasattr(layer, "weight") and layer.weight.dim() > 1:
                flops.append(2 * output.numel() * layer.weight[0].numel())
                outputs.append(output.numel() if output.dim() == 4 else 0)

        net = torch_net.filled().eval()
        for layer in net.modules():
            layer.register_forward_hook(count)
        net(self.torch.zeros(1, 3, 224, 224))
        return [3 * sum(flops) - flops[0], 14 * 4 * sum(outputs)]


def best(work: Any) -> float:
    """The shortest of ten times, in seconds."""
    times = []
    for _ in range(10):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def bound() -> dict[str, float]:
    """Images/s that one core could train at 224 x 224, if computing and moving data did not overlap."""
    with common.started([Worker("machine", {"threads": 1, "pinned": True}, PEERS)]) as (worker,):
        peak, bandwidth, (flops, traffic) = (worker.ask(what)[1] for what in ("peak", "bandwidth", "work"))
    told = {"peak": peak, "bandwidth": bandwidth, "flops": flops, "bytes": traffic}
    common.say(f"one core: {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s")
    common.say(f"an image: {flops / 1e9:.3f} GFLOP, {traffic / 1e6:.0f} MB")
    return {**told, "images_per_s": 1 / (flops / peak + traffic / bandwidth)}


def measure(case: Case, allocator: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Seconds a step of each contender, round by round, and how exactly it computed."""
    env = ALLOCATOR if allocator == "tuned" else {}
    workers = [Worker(name, case, PEERS if name.startswith("PyTorch") else OURS, env) for name in names]
    with common.started(workers):
        with common.started([Worker("float64", case, PEERS)]) as (truth,):
            errors = common.same(workers, truth, TOLERANCES)
        return {"seconds": common.take_turns(workers, rounds, 0.5), "errors": errors}


def main() -> None:
    common.serve({**CONTENDERS, "float64": Truth, "machine": Machine})
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--cases", default="224x16,64x32", help="pixels x batch (default: %(default)s)")
    add("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    add("--allocator", default="default,tuned", help="glibc's own settings, or tuned ones (default: %(default)s)")
    add("--contenders", default=",".join(CONTENDERS), help="(default: %(default)s)")
    add("--rounds", type=int, default=10, help="turns of each contender (default: %(default)s)")
    o = parser.parse_args()
    if o.quick:
        o.cases, o.threads, o.allocator, o.rounds = "64x8", "1", "default", 2
    common.need_peers()
    machine, rows, cases = common.machine(), [], []
    limit = bound()
    machine["bound"] = limit
    for shape, threads, allocator in itertools.product(
        *(text.split(",") for text in (o.cases, o.threads, o.allocator))
    ):
        pixels, size = (int(number) for number in shape.split("x"))
        title = f"{pixels}×{pixels}, batch {size}, {threads} thread(s), {allocator} allocator"
        common.say(title)
        case = {"pixels": pixels, "batch": size, "threads": int(threads), "pinned": True}
        told = measure(case, allocator, o.contenders.split(","), o.rounds)
        speeds = {name: size / common.spread(seconds)["median"] for name, seconds in told["seconds"].items()}
        cases.append({"title": title, "unit": "images/s", "values": speeds, **told})
        rows += compare(title, told["seconds"], speeds, 1.15 if allocator == "tuned" else 1.2)
        if pixels == 224 and threads == "1" and "ours" in speeds:
            rows.append(share(title, speeds["ours"], limit))
    report.write("train", o.output, rows, cases, machine)


def compare(title: str, seconds: dict[str, list[float]], speeds: dict[str, float], floor: float) -> list[Row]:
    """The rows of one case: against the strongest peer and against stock Paddle."""
    return [
        Row(
            f"training step, {title}",
            f"{speeds['ours']:.1f} images/s",
            f"{peer}: {speeds[peer]:.1f}",
            **common.ratio(seconds["ours"], seconds[peer]),
            goal=goal,
            floor=floor,
        )
        for peer, goal, floor in (("PyTorch channels_last", 1.5, floor), ("Paddle", 5.5, 4.2))
        if "ours" in speeds and peer in speeds
    ]


def share(title: str, speed: float, limit: dict[str, float]) -> Row:
    most = limit["images_per_s"]
    machine = f"{limit['peak'] / 1e9:.0f} GFLOP/s, {limit['bandwidth'] / 1e9:.1f} GB/s"
    return Row(
        f"share of the machine's bound, {title}",
        f"{speed:.1f} images/s",
        f"bound: {most:.1f} ({machine})",
        speed / most,
        goal=0.75,
        floor=0.6,
    )


if __name__ == "__main__":
    sys.exit(main())
