"""BatchNorm over the batches of all ranks: by the device's own operator where that works, otherwise by ours.

A layer keeps its class, parameters, hooks, mode and name; only its `forward` is replaced, and removing that restores
the stock layer. Frozen layers (`eval()`, `use_global_stats=True`) compute as before.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import _C_ops, nn
from paddle.autograd import PyLayer

from ppfleet.distributed.collectives import Comm
from ppfleet.errors import FleetError
from ppfleet.training.model import BATCH_NORMS

CHOICES = ("auto", True, False)
_CHANNELS_LAST = ("NHWC", "NLC", "NDHWC")


def synchronise(net: Any, comm: Comm, choice: Any) -> str:
    """Make the BatchNorm layers of `net` use the statistics of the global batch; return how, "" if they do not.

    `choice` is True, False or "auto": on accelerators only, where that costs little.
    """
    if choice not in CHOICES:
        raise FleetError(f"sync_bn must be one of {', '.join(map(repr, CHOICES))}, got {choice!r}")
    layers = [layer for layer in net.sublayers(include_self=True) if isinstance(layer, BATCH_NORMS)]
    wanted = comm.device.is_accelerator if choice == "auto" else choice
    if not layers or comm.world.alone or not wanted:
        return ""
    native = comm.device.is_accelerator and _works(comm)
    for layer in layers:
        if "forward" not in vars(layer):  # a user's own replacement stays
            layer.forward = types.MethodType(_Native() if native else _Own(comm), layer)
    return "Paddle's" if native else "ppfleet's"


@contextmanager
def stock(net: Any) -> Iterator[None]:
    """Within the block, BatchNorm layers compute alone, as inference does."""
    changed = [layer for layer in net.sublayers(include_self=True) if _is_synchronised(layer)]
    replaced = [layer.__dict__.pop("forward") for layer in changed]
    try:
        yield
    finally:
        for layer, forward in zip(changed, replaced):
            layer.forward = forward


def _is_synchronised(layer: Any) -> bool:
    return isinstance(getattr(vars(layer).get("forward"), "__func__", None), (_Own, _Native))


def _works(comm: Comm) -> bool:
    """Whether Paddle's operator synchronises here: a device may lack it, and some versions of Paddle leave the exchange
    out. All ranks get the same answer."""
    mean, variance, weight, bias = (paddle.full([1], value) for value in (0.0, 1.0, 1.0, 0.0))
    x = paddle.full([2, 1, 1, 1], float(comm.world.rank))
    comm.all_reduce(paddle.zeros([1]), "start of collectives")  # the operator uses a communicator that exists by then
    try:
        with comm.watched("check of SyncBatchNorm"):
            _C_ops.sync_batch_norm_(x, mean, variance, weight, bias, False, 0.0, 1e-5, "NCHW", False, False)
            found = float(comm.read(mean, "check of SyncBatchNorm")[0])
    except (RuntimeError, NotImplementedError, ValueError):  # no such operator on this device
        found = -1.0
    right = abs(found - (comm.world.size - 1) / 2) < 1e-5
    return all(comm.gather(right, "check of SyncBatchNorm"))


def _frozen(layer: Any) -> bool:
    return not layer.training or bool(layer._use_global_stats)


def _format(layer: Any) -> str:
    return str(getattr(layer, "_data_format", None) or getattr(layer, "_data_layout", "NCHW"))


class _Forward:
    """Stands in for a function: bound to a layer, it is that layer's `forward`."""

    def __call__(self, layer: Any, x: Any) -> Any:
        if not _frozen(layer):
            out = self.normalised(layer, x)
            act = getattr(layer, "_act", None)  # of the old nn.BatchNorm
            return getattr(F, act)(out) if act else out
        if isinstance(layer, nn.SyncBatchNorm):  # whose operator no CPU has
            return F.batch_norm(
                x, layer._mean, layer._variance, layer.weight, layer.bias, epsilon=layer._epsilon,
                data_format=layer._data_format,
            )  # fmt: skip
        return type(layer).forward(layer, x)

    def __deepcopy__(self, memo: Any) -> _Forward:
        return self  # with a model that is copied; what it holds belongs to the job

    def normalised(self, layer: Any, x: Any) -> Any:
        raise NotImplementedError


class _Native(_Forward):
    """Paddle's operator."""

    def normalised(self, layer: Any, x: Any) -> Any:
        form = "NHWC" if _format(layer) in _CHANNELS_LAST else "NCHW"
        weight, bias = _affine(layer)
        return _C_ops.sync_batch_norm_(
            x, layer._mean, layer._variance, weight, bias, False, layer._momentum, layer._epsilon, form, False, False
        )[0]


class _Own(_Forward):
    """Each rank computes mean and squared deviations of its batch; those of the global batch follow from them."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def normalised(self, layer: Any, x: Any) -> Any:
        axis = len(x.shape) - 1 if _format(layer) in _CHANNELS_LAST else 1
        if x.shape[axis] != layer._mean.shape[0]:
            return type(layer).forward(layer, x)  # Paddle's own error
        wide = x if x.dtype == layer._mean.dtype else x.astype(layer._mean.dtype)
        # Paddle's operator takes both as float32, which shows in float64.
        epsilon, momentum = float(np.float32(layer._epsilon)), float(np.float32(layer._momentum))
        out, mean, variance = _Normalise.apply(wide, self.comm, epsilon, axis)
        with paddle.no_grad():
            for kept, new in ((layer._mean, mean), (layer._variance, variance)):
                kept.copy_(kept * momentum + new * (1 - momentum), False)
        shape = [-1 if number == axis else 1 for number in range(len(x.shape))]
        weight, bias = _affine(layer)
        out = out * weight.reshape(shape) + bias.reshape(shape)
        return out if out.dtype == x.dtype else out.astype(x.dtype)


def _affine(layer: Any) -> tuple[Any, Any]:
    """Weight and bias. Where a layer lacks one of them, Paddle's own operator does not train the other one either."""
    weight, bias = layer.weight, layer.bias
    if weight is None:
        return paddle.ones_like(layer._mean), paddle.zeros_like(layer._mean) if bias is None else bias.detach()
    return (weight.detach(), paddle.zeros_like(layer._mean)) if bias is None else (weight, bias)


class _Normalise(PyLayer):
    """(x - mean) / deviation over all ranks' batches. Also returns mean and variance, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, comm: Comm, epsilon: float, axis: int) -> Any:
        axes = [number for number in range(len(x.shape)) if number != axis]
        count = x.size // x.shape[axis]
        own_mean = x.mean(axes, keepdim=True)
        own = paddle.concat(
            [
                paddle.full([1], float(count), dtype=x.dtype),
                own_mean.flatten(),
                (x - own_mean).square().sum(axes).flatten(),
            ]
        )
        every = comm.all_gather(own, "BatchNorm over all ranks")
        counts, (means, squares) = every[:, :1], every[:, 1:].split(2, axis=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total  # exact where one rank's count is that of another
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        inverse = (variance + epsilon).rsqrt().reshape(own_mean.shape)
        out = (x - mean.reshape(own_mean.shape)) * inverse
        ctx.save_for_backward(out, inverse, total)
        ctx.comm, ctx.axes = comm, axes
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        out, inverse, total = ctx.saved_tensor()
        sums = paddle.concat([gradient.sum(ctx.axes).flatten(), (gradient * out).sum(ctx.axes).flatten()])
        sums = ctx.comm.all_reduce(sums, "gradient of BatchNorm over all ranks", enqueue=True) / total
        plain, weighed = (part.reshape(inverse.shape) for part in sums.split(2))
        return inverse * (gradient - plain - out * weighed)
