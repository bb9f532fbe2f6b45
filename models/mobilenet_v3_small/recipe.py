"""How MobileNetV3-small is trained: optimizer, learning-rate rule, loss and metrics."""

from __future__ import annotations

import math
from typing import Any, Callable

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleet import metrics

REFERENCE_LR, REFERENCE_BATCH = 0.1, 256  # arXiv 1706.02677
MOMENTUM, DECAY, SMOOTHING = 0.9, 2e-5, 0.1  # as PaddleClas trains this network
MEASURED: dict[str, Callable[..., Any]] = {"top5": metrics.top5, "loss": metrics.cross_entropy}  # beside top1


class Schedule(paddle.optimizer.lr.LambdaDecay):
    """Linear warm-up, then cosine decay to 0, updated for each batch.

    The peak is `lr` x global batch / 256: with a larger batch there are fewer steps, so each may be larger.
    """

    def __init__(self, lr: float, global_batch: int, epochs: int, steps: int) -> None:
        total = max(1, epochs * steps)
        warm = min(5 * steps, total // 10)
        peak = lr * global_batch / REFERENCE_BATCH
        self.rule = (
            f"{lr:g} at a global batch of {REFERENCE_BATCH}, so {peak:g} at {global_batch}; "
            f"linear warm-up over {warm} batches, cosine to 0 over {total - warm}"
        )
        super().__init__(peak, lambda step: _factor(step, warm, total))

    def follow(self, epoch: int, loader: Any) -> None:
        """Set the rate for the current batch from its position in training: after a resume with another batch size or
        number of ranks a step count would be wrong."""
        self.step(epoch * len(loader) + loader.position / loader.plan.global_batch - 1)


def _factor(step: float, warm: int, total: int) -> float:
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))


def optimizer(net: Any, schedule: Any) -> Any:
    """SGD with momentum; weight decay on matrices and kernels, not on biases and BatchNorm."""
    trained = [parameter for parameter in net.parameters() if not parameter.stop_gradient]
    groups = [
        {"params": [p for p in trained if len(p.shape) > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if len(p.shape) == 1], "weight_decay": 0.0},
    ]
    return paddle.optimizer.Momentum(schedule, MOMENTUM, parameters=groups, use_nesterov=True)


def loss(net: Any, images: Any, labels: Any, mixup: float = 0.0) -> Any:
    """Cross entropy with label smoothing; `mixup` > 0 blends each image with another (arXiv 1710.09412)."""
    if not mixup:
        return _smooth(net(images), labels)
    share = float(np.random.beta(mixup, mixup))
    scores = net(share * images + (1 - share) * images.flip(0))
    return share * _smooth(scores, labels) + (1 - share) * _smooth(scores, labels.flip(0))


def _smooth(scores: Any, labels: Any) -> Any:
    return F.cross_entropy(scores, labels, label_smoothing=SMOOTHING)
