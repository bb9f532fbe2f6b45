"""A training step of MobileNetV3-small: forward, cross entropy, backward, step with momentum. Ours against peers.

    make .venv-peers/.ready && python benchmarks/train.py        # about 8 minutes on 2 cores

Ours is `Job`'s own loop; Paddle is its own network of paddle.vision in a loop written by hand; PyTorch is the same
network, eager, and in the channels_last format with the fused optimizer. Batches lie ready in memory. All begin with
the same weights, and must have the same scores, gradients and weights after some steps before anything is timed.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import common
from common import ALLOCATOR, OURS, PEERS, Arrays, Case, Worker, batch, fill

RATE, MOMENTUM, DECAY = 0.01, 0.9, 1e-4
CHECKED = 2  # steps after which the weights are compared
# Against float64. PyTorch in channels_last sums BatchNorm's gradients less exactly: 1e-2 of them is wrong at 224x224.
TOLERANCES = {"ours": 3e-4, "Paddle": 3e-4, "PyTorch": 3e-4, "PyTorch channels_last": 5e-2}


class Paddle:
    """The loop as a careful user of plain Paddle writes it."""

    def __init__(self, case: Case) -> None:
        import paddle
        from paddle.nn.functional import cross_entropy

        paddle.set_device("cpu")
        self.paddle, self.loss = paddle, cross_entropy
        self.images, self.labels = (paddle.to_tensor(array) for array in batch(case["batch"], case["pixels"]))
        net = self.make()
        net.set_state_dict({name: fill(name, tensor.shape) for name, tensor in net.state_dict().items()})
        optimizer = paddle.optimizer.Momentum(RATE, MOMENTUM, parameters=net.parameters(), weight_decay=DECAY)
        self.net, self.optimizer = self.prepare(net, optimizer)

    def make(self) -> Any:
        net = self.paddle.vision.models.mobilenet_v3_small()
        net.classifier[2].p = 0.0  # no dropout: everybody is to compute the same
        return net

    def prepare(self, net: Any, optimizer: Any) -> Any:
        return net, optimizer

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.loss(self.net(self.images), self.labels).backward()
            self.optimizer.step()
            self.optimizer.clear_grad()

    def check(self, path: str) -> Arrays:
        scores = self.net(self.images)
        self.loss(scores, self.labels).backward()
        named = {name: p for name, p in self.net.named_parameters() if not p.stop_gradient}
        told = {f"gradient: {name}": p.grad.numpy() for name, p in named.items()}
        self.optimizer.clear_grad()
        self.run(CHECKED)
        weights = {f"after {CHECKED} steps: {name}": p.numpy() for name, p in named.items()}
        return {"scores": scores.numpy(), **told, **weights}


class Ours(Paddle):
    """What ppfleet's users run: `Job` with its defaults."""

    def make(self) -> Any:
        from models.mobilenet_v3_small.net import MobileNetV3Small

        return MobileNetV3Small(dropout=0.0)

    def prepare(self, net: Any, optimizer: Any) -> Any:
        import ppfleet

        job = ppfleet.Job(tempfile.mkdtemp(), device="cpu", log_every=10**9)
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
        self.torch, self.torch_net = torch, torch_net
        self.images, self.labels = (torch.from_numpy(array) for array in batch(case["batch"], case["pixels"]))
        self.net = torch_net.filled()
        if self.double:
            self.images, self.net = self.images.double(), self.net.double()
        if self.channels_last:
            self.images = self.images.to(memory_format=torch.channels_last)
            self.net.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), RATE, MOMENTUM, weight_decay=DECAY, fused=self.channels_last or None
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.torch.nn.functional.cross_entropy(self.net(self.images), self.labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self, path: str) -> Arrays:
        scores = self.net(self.images)
        self.torch.nn.functional.cross_entropy(scores, self.labels).backward()
        gradients = self.torch_net.like_paddle((name, p.grad) for name, p in self.net.named_parameters())
        told = {f"gradient: {name}": gradient.clone().numpy() for name, gradient in gradients.items()}
        self.optimizer.zero_grad()
        self.run(CHECKED)
        weights = self.torch_net.like_paddle(self.net.named_parameters())
        told.update({f"after {CHECKED} steps: {name}": p.detach().numpy() for name, p in weights.items()})
        return {"scores": scores.detach().numpy(), **told}


class TorchChannelsLast(Torch):
    """The strongest peer: channels_last and the fused optimizer."""

    channels_last = True


class Truth(Torch):
    """In float64: what the others should compute."""

    double = True


CONTENDERS = {"ours": Ours, "Paddle": Paddle, "PyTorch": Torch, "PyTorch channels_last": TorchChannelsLast}


def main() -> None:
    common.serve({**CONTENDERS, "float64": Truth})
    parser = common.parser(__doc__)
    parser.add_argument("--cases", default="224x16,64x32", help="pixels x batch (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    parser.add_argument("--allocator", default="default,tuned", help="glibc's settings (default: %(default)s)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender (default: %(default)s)")
    o = parser.parse_args()
    common.need_peers()
    for shape in o.cases.split(","):
        pixels, size = (int(number) for number in shape.split("x"))
        for threads in (int(number) for number in o.threads.split(",")):
            for allocator in o.allocator.split(","):
                case = {"pixels": pixels, "batch": size, "threads": threads}
                env = ALLOCATOR if allocator == "tuned" else {}
                common.say(f"{pixels}x{pixels}, batch {size}, {threads} thread(s), {allocator} allocator")
                workers = [
                    Worker(name, case, PEERS if name.startswith("PyTorch") else OURS, env)
                    for name in o.contenders.split(",")
                ]
                with common.started(workers):
                    with common.started([Worker("float64", case, PEERS)]) as (truth,):
                        common.same(workers, truth, TOLERANCES)
                    times = common.take_turns(workers, o.rounds, 0.5)
                ours = times.get("ours", next(iter(times.values())))
                for name, seconds in times.items():
                    middle = common.spread(seconds)["median"]
                    ratio = common.spread([theirs / mine for mine, theirs in zip(ours, seconds)])
                    print(
                        f"{name:24} {1000 * middle:8.1f} ms {size / middle:8.1f} images/s   "
                        f"ours is {ratio['median']:.2f}x as fast ({ratio['low']:.2f} to {ratio['high']:.2f})",
                        flush=True,
                    )


if __name__ == "__main__":
    sys.exit(main())
