"""A small training script that something happens to; `tests/faults/chaos.py` starts it.

    python -m paddle.distributed.launch --nproc_per_node 2 victim.py RUN '{"kind": "nan", "rank": 1, "step": 7}'

Faults of the script's own (an exception, NaN, a branch that one rank takes) are made here, at the given step of the
given rank; what is done to a process from outside (kill, stop, a cut link) is the business of whoever started it.
With `"plain": true` the same loop is written with Paddle alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

DEVICE = os.environ.get("PPFLEET_TEST_DEVICE", "cpu")
PAUSE = 0.03  # seconds a step, so that there is a middle of a step for something to happen in


class Points(paddle.io.Dataset):
    def __init__(self, plan: dict, rank: int) -> None:
        self.plan, self.rank, self.drawn = plan, rank, 0

    def __len__(self) -> int:
        return self.plan.get("samples", 512)

    def __getitem__(self, index: int):
        self.drawn += 1
        if self.plan.get("sample") == self.drawn and self.rank == self.plan["rank"]:
            if self.plan["kind"] == "data-stall":
                time.sleep(self.plan.get("seconds", 600))
            if self.plan["kind"] == "bad-sample":
                raise ValueError(f"sample {index} is broken")
        noise = np.random.RandomState(index)
        return noise.standard_normal(32).astype("float32"), np.int64(index % 10)


class Network(nn.Layer):
    """A stem and two heads; the loop uses the first, unless a rank goes another way."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1D(256), nn.ReLU(), nn.Dropout(0.1))
        self.head, self.other = nn.Linear(256, classes), nn.Linear(256, 10)

    def forward(self, points, other: bool = False):
        return (self.other if other else self.head)(self.stem(points))


def checksum(net: nn.Layer) -> str:
    """To see whether ranks have the same weights."""
    return f"{sum(float(p.abs().sum()) for p in net.parameters() if p.trainable):.6f}"  # not BatchNorm's statistics


def stand_still(seconds: float) -> None:
    """What a person would do on rank 0 alone: evaluate, unpack, wait for a file."""
    time.sleep(seconds)


def now(plan: dict, rank: int, step: int, kind: str) -> bool:
    return plan["kind"] == kind and rank == plan["rank"] and step == plan["step"]


def before_step(plan: dict, rank: int, step: int, points, rate):
    """Faults in the user's own code."""
    if now(plan, rank, step, "stall"):
        stand_still(plan.get("seconds", 600))
    if now(plan, rank, step, "gil"):  # no thread of this process goes on
        ctypes.PyDLL(None).sleep(plan.get("seconds", 600))
    if now(plan, rank, step, "exception"):
        raise KeyError("learning_curve")
    if now(plan, rank, step, "exit"):
        os._exit(3)
    if now(plan, rank, step, "abort"):
        os.kill(os.getpid(), signal.SIGABRT)
    if now(plan, rank, step, "memory"):
        hoard = [bytearray(64 << 20)]
        while True:
            hoard.append(bytearray(64 << 20))
    if rank == plan["rank"] and step >= plan["step"] and plan["kind"] == "rate":
        rate.base_lr = rate.last_lr = 0.02
    if now(plan, rank, step, "nan"):
        points = points * float("nan")
    if plan["kind"] == "slow" and rank == plan["rank"]:
        time.sleep(0.05)
    time.sleep(plan.get("pause", PAUSE))
    return points


def train(directory: str, plan: dict) -> None:
    import ppfleet
    from ppfleet import metrics

    job = ppfleet.Job(directory, device=DEVICE, seed=3, save_every=plan.get("save_every", 5), **plan.get("options", {}))
    rank = job.world.rank
    net = Network(11 if plan["kind"] == "other-shape" and rank == plan["rank"] else 10)
    rate = paddle.optimizer.lr.StepDecay(0.05, step_size=1000)
    wrapped, optimizer = job.prepare(net, paddle.optimizer.Momentum(rate, parameters=net.parameters()))
    samples = Points(plan, rank)
    train = job.loader(samples, plan.get("batch", 8), shuffle=True, workers=plan.get("workers", 0))
    val = job.loader(Points({"kind": "none", "samples": 64}, rank), 16)
    job.resume()
    for _ in job.epochs(plan.get("epochs", 2)):
        for points, labels in job.steps(train):
            if now(plan, rank, job.step, "uneven"):
                break
            points = before_step(plan, rank, job.step, points, rate)
            if now(plan, rank, job.step, "branch"):
                job.comm.all_reduce(paddle.ones([7]), "all-reduce of a branch")
            if plan["kind"] == "shape" and job.step == plan["step"]:
                job.comm.all_reduce(paddle.ones([7 + (rank == plan["rank"])]), "all-reduce of a mean")
            if now(plan, rank, job.step, "drift"):
                net.head.weight.set_value(net.head.weight * 1.01)
            if plan["kind"] == "slow-save" and job.step == plan["step"]:
                job.comm.on_first(lambda: stand_still(plan.get("seconds", 600)), "copying to the archive")
            other = plan["kind"] == "other-branch" and rank == plan["rank"] and job.step >= plan["step"]
            job.backward(F.cross_entropy(wrapped(points, other), labels))
        job.save(**job.evaluate(net, val, top1=metrics.top1))
    print(f"rank {rank} trained to step {job.step}, sum of weights {checksum(net)}", flush=True)


def train_plainly(plan: dict) -> None:
    """The same loop as Paddle's documents write it."""
    import paddle.distributed as dist

    dist.init_parallel_env()
    rank = dist.get_rank()
    net = Network(11 if plan["kind"] == "other-shape" and rank == plan["rank"] else 10)
    wrapped = paddle.DataParallel(net)
    rate = paddle.optimizer.lr.StepDecay(0.05, step_size=1000)
    optimizer = paddle.optimizer.Momentum(rate, parameters=wrapped.parameters())
    samples = Points(plan, rank)
    sampler = paddle.io.DistributedBatchSampler(samples, plan.get("batch", 8), shuffle=True, drop_last=True)
    step = 0
    for _ in range(plan.get("epochs", 2)):
        for points, labels in paddle.io.DataLoader(samples, batch_sampler=sampler, num_workers=plan.get("workers", 0)):
            if now(plan, rank, step, "uneven"):
                break
            points = before_step(plan, rank, step, points, rate)
            if now(plan, rank, step, "branch"):
                dist.all_reduce(paddle.ones([7]))
            if now(plan, rank, step, "drift"):
                net.head.weight.set_value(net.head.weight * 1.01)
            if now(plan, rank, step, "slow-save"):
                stand_still(plan.get("seconds", 600))
            other = plan["kind"] == "other-branch" and rank == plan["rank"] and step >= plan["step"]
            F.cross_entropy(wrapped(points, other), labels).backward()
            optimizer.step()
            optimizer.clear_grad()
            step += 1
            Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
            (Path(sys.argv[1]) / f"plain_step_{rank}").write_text(str(step))
    print(f"rank {rank} trained to step {step}, sum of weights {checksum(net)}", flush=True)


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    (train_plainly(told) if told.get("plain") else train(sys.argv[1], told))
