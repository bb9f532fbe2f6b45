"""Ranks on one host: how a training step scales from 1 to 2, and whole jobs from JPEG files to trained weights.

    python benchmarks/scale.py                   # about 5 minutes on 2 cores

A step: `Job` against Paddle's DataParallel and PyTorch's DistributedDataParallel (channels_last, fused optimizer), over
gloo, one thread a rank. A whole job: files are read, decoded, cropped, trained on; a turn is an epoch, from the first
file to the last step. PyTorch gets its best number of loader workers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import report
from common import OURS, PEERS, Case, Worker
from input import BATCH, SIZE, TOLERANCE, OurLoader, TorchLoader
from pictures import Pictures, make
from report import Row
from train import CONTENDERS, DECAY, MOMENTUM, RATE, TOLERANCES, Truth

PIXELS, SMALL_BATCH = 96, 16


class OurJob(OurLoader):
    """What ppfleet's users run."""

    def __init__(self, case: Case) -> None:
        import paddle

        self.length = case["images"] * case["ranks"]
        super().__init__(case)
        self.train = self.loader(seeded=False)
        self.loss, self.epochs = paddle.nn.functional.cross_entropy, 0

    def model(self) -> tuple[Any, Any]:
        import paddle

        from models.mobilenet_v3_small.net import MobileNetV3Small

        net = MobileNetV3Small()
        return net, paddle.optimizer.Momentum(RATE, MOMENTUM, parameters=net.parameters(), weight_decay=DECAY)

    def run(self, epochs: int) -> None:
        self.epochs += epochs
        for _ in self.job.epochs(self.epochs):
            for images, labels in self.job.steps(self.train):
                self.job.backward(self.loss(self.net(images), labels))


class TorchJob(TorchLoader):
    """DistributedDataParallel, or the plain network on one rank."""

    def __init__(self, case: Case) -> None:
        import torch
        import torch_net

        super().__init__(case)
        self.torch = torch
        torch.set_num_threads(case["threads"])
        self.net = torch_net.MobileNetV3Small(dropout=0.2).to(memory_format=torch.channels_last)
        sampler = None
        images = Pictures(self.paths, SIZE, case["images"] * case["ranks"])
        if case["ranks"] > 1:
            torch.distributed.init_process_group("gloo")
            self.net = torch.nn.parallel.DistributedDataParallel(self.net, gradient_as_bucket_view=True)
            sampler = torch.utils.data.DistributedSampler(images)
        self.optimizer = torch.optim.SGD(self.net.parameters(), RATE, MOMENTUM, weight_decay=DECAY, fused=True)
        self.train = torch.utils.data.DataLoader(
            images,
            BATCH,
            sampler=sampler,
            shuffle=sampler is None,
            drop_last=True,
            num_workers=self.workers,
            persistent_workers=True,
        )

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            for images, labels in self.train:
                scores = self.net(images.to(memory_format=self.torch.channels_last))
                self.torch.nn.functional.cross_entropy(scores, labels).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


def steps(rounds: int) -> tuple[dict[str, Any], Row]:
    """A step on 1 and on 2 ranks: the case for the plot, and the row."""
    title = f"step at {PIXELS}×{PIXELS}, batch {SMALL_BATCH} a rank, 1 thread a rank"
    common.say(title)
    names = {"ours": "ours", "Paddle": "Paddle DataParallel", "PyTorch channels_last": "PyTorch DDP"}
    workers = [
        Worker(
            f"{label}, {ranks} rank(s)",
            {"pixels": PIXELS, "batch": SMALL_BATCH, "threads": 1, "ranks": ranks},
            PEERS if kind.startswith("PyTorch") else OURS,
            kind=kind,
        )
        for kind, label in names.items()
        for ranks in (1, 2)
    ]
    errors = {}
    with common.started(workers):
        for ranks in (1, 2):
            group = [worker for worker in workers if worker.case["ranks"] == ranks]
            with common.started([Worker("float64", group[0].case, PEERS)]) as (truth,):
                errors.update(common.same(group, truth, TOLERANCES))
        seconds = common.take_turns(workers, rounds, 0.5)
    speeds = {
        worker.name: worker.case["ranks"] * SMALL_BATCH / common.spread(seconds[worker.name])["median"]
        for worker in workers
    }

    def scaling(label: str) -> dict[str, float]:
        doubled = [time / 2 for time in seconds[f"{label}, 2 rank(s)"]]
        return common.ratio(doubled, seconds[f"{label}, 1 rank(s)"])

    peers = ", ".join(f"{label}: {scaling(label)['value']:.2f}" for label in list(names.values())[1:])
    ours = " → ".join(f"{speeds[f'ours, {ranks} rank(s)']:.0f}" for ranks in (1, 2))
    row = Row(f"2 ranks against 1, {title}", f"{ours} images/s", peers, **scaling("ours"), goal=1.9, floor=1.65)
    return {"title": title, "unit": "images/s", "values": speeds, "seconds": seconds, "errors": errors}, row


def jobs(paths: list[str], ranks: int, images: int, rounds: int) -> tuple[dict[str, Any], Row]:
    """Whole jobs on that many ranks: the case for the plot, and the row."""
    title = f"whole job from JPEG files at {SIZE}×{SIZE}, batch {BATCH} a rank, {ranks} rank(s)"
    common.say(title)
    threads = max(1, common.cores() // ranks)
    kinds = [("ours", our_workers(ranks)), ("PyTorch", 1), ("PyTorch", 2)]
    workers = [
        Worker(
            f"{kind}, {count} loader worker(s) a rank",
            {"paths": paths, "workers": count, "threads": threads, "ranks": ranks, "images": images},
            PEERS if kind == "PyTorch" else OURS,
            kind=f"{kind} job",
        )
        for kind, count in kinds
    ]
    with common.started(workers):
        errors = common.same(workers, workers[-1], TOLERANCE)
        seconds = common.take_turns(workers, rounds, 0, lead=0, rest=1)
    speeds = {name: ranks * images / common.spread(times)["median"] for name, times in seconds.items()}
    ours, *others = speeds
    best = max(others, key=speeds.__getitem__)
    row = Row(
        title,
        f"{speeds[ours]:.1f} images/s",
        f"{best}: {speeds[best]:.1f}",
        **common.ratio(seconds[ours], seconds[best]),
        goal=1.8,
        floor=1.5,
    )
    return {"title": title, "unit": "images/s", "values": speeds, "seconds": seconds, "errors": errors}, row


def our_workers(ranks: int) -> int:
    """As tools/train.py chooses."""
    return max(1, min(8, common.cores() // ranks))


def main() -> None:
    common.serve({**CONTENDERS, "float64": Truth, "ours job": OurJob, "PyTorch job": TorchJob})
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=["steps", "jobs"], help="a part of it")
    parser.add_argument("--images", type=int, default=512, help="a rank and epoch of the jobs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contender (default: %(default)s)")
    o = parser.parse_args()
    common.need_peers()
    machine, told = common.machine(), []
    rounds = 2 if o.quick else o.rounds
    if o.only != "jobs":
        told.append(steps(rounds))
    if o.only != "steps":
        images = BATCH if o.quick else o.images
        with tempfile.TemporaryDirectory() as scratch:
            paths = make(Path(scratch), 8 if o.quick else 256)
            told += [jobs(paths, ranks, images, 2 if o.quick else max(3, rounds // 2)) for ranks in (1, 2)]
    cases, rows = zip(*told)
    report.write("scale", o.output, list(rows), list(cases), machine)


if __name__ == "__main__":
    sys.exit(main())
