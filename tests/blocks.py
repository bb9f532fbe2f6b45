"""Small models, data sets and a training run that several tests share. Imported only inside ranks."""

from __future__ import annotations

import random

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

import ppfleet
from tests.harness import DEVICE


class Points(paddle.io.Dataset):
    """Classes of noisy points, a fixed function of the index, with augmentation that draws from both generators."""

    def __init__(self, length: int = 256, augment: bool = False) -> None:
        self.length, self.augment = length, augment

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        noise = np.random.RandomState(index)
        label = index % 10
        point = noise.standard_normal(16).astype("float32") + np.eye(10, 16, dtype="float32")[label] * 3
        if self.augment:
            point = point * np.float32(random.uniform(0.8, 1.2)) + np.random.normal(0, 0.1, 16).astype("float32")
        return point, np.int64(label)


class Pictures(paddle.io.Dataset):
    """Random pictures, a fixed function of the index."""

    def __init__(self, length: int, size: int = 32) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        picture = np.random.RandomState(index).standard_normal((3, self.size, self.size)).astype("float32")
        return picture, np.int64(index % 10)


def mlp(dropout: float = 0.0) -> nn.Layer:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))


def small_conv() -> nn.Layer:
    """Without BatchNorm: convolution, depthwise convolution, GroupNorm, linear."""
    return nn.Sequential(
        nn.Conv2D(3, 16, 3, stride=2, padding=1),
        nn.Hardswish(),
        nn.Conv2D(16, 16, 3, padding=1, groups=16),
        nn.GroupNorm(4, 16),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2D(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def with_batch_norm() -> nn.Layer:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1D(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


class TwoInputs(nn.Layer):
    """Whole-number ids and an array in, a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inside = nn.Embedding(16, 8), nn.Linear(8, 3)

    def forward(self, ids, x):
        both = self.table(ids).mean(1) + x
        return {"scores": self.inside(both), "both": both * 1.0}


class Random(nn.Layer):
    """Never answers the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)

    def forward(self, x):
        return self.inside(x) + paddle.rand([1])


class Unexportable(nn.Layer):
    """Leaves Paddle for NumPy, which a static graph cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)

    def forward(self, x):
        return self.inside(paddle.to_tensor(np.sort(x.numpy())))


def spread_network(classes: int, pictures: np.ndarray) -> nn.Layer:
    """A MobileNetV3-small, untrained, whose scores tell such pictures apart: a fresh one answers all alike."""
    from models.mobilenet_v3_small.net import MobileNetV3Small

    paddle.seed(4)
    net, batch = MobileNetV3Small(classes), paddle.to_tensor(pictures)
    for _ in range(40):  # until BatchNorm's statistics let a picture through to the scores
        net(batch)
    net.eval()
    scores, last = net(batch), net.classifier[3]
    scale = 1 / scores.std(0)
    last.weight.set_value(last.weight * scale)  # scores that spread by 1 around 0
    last.bias.set_value((last.bias - scores.mean(0)) * scale)
    return net


def train(
    directory: str,
    epochs: int = 2,
    batch: int = 8,
    workers: int = 0,
    length: int = 256,
    pause: float = 0.0,
    resume: str = "auto",
    **options,
) -> dict:
    """A run with shuffling, augmentation, dropout, BatchNorm, momentum and a schedule; `batch` is a rank's."""
    import time

    job = ppfleet.Job(directory, device=DEVICE, seed=7, **options)
    net = with_batch_norm()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.05, T_max=40)
    net, adam = job.prepare(net, paddle.optimizer.Adam(rate, parameters=net.parameters(), weight_decay=1e-4))
    data = job.loader(Points(length, augment=True), batch, shuffle=True, workers=workers)
    job.resume(resume)
    for _ in job.epochs(epochs):
        for points, labels in job.steps(data):
            job.backward(F.cross_entropy(net(points), labels))
            rate.step()
            if pause:
                time.sleep(pause)
        job.save()
    from ppfleet.checkpoint import tensors

    result = {"weights": tensors.fingerprint(job._net), "step": job.step, "epoch": job.epoch}
    job.close()
    return result
