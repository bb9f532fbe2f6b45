"""What a job needs to know about a model and its optimizer: parameters, buffers, settings, evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from ppfleet.errors import FleetError

# `_BatchNormBase` is the parent of BatchNorm1D/2D/3D and SyncBatchNorm; BatchNorm is the old fluid-style layer.
BATCH_NORMS = (nn.layer.norm._BatchNormBase, nn.BatchNorm)


def unwrap(net: Any) -> Any:
    """The model without `paddle.DataParallel`."""
    return net._layers if isinstance(net, paddle.DataParallel) else net


@contextmanager
def evaluating(net: Any) -> Iterator[None]:
    """Evaluation mode within the block; afterwards each layer has its former mode, also those frozen on purpose."""
    before = {layer: layer.training for layer in net.sublayers(include_self=True)}
    net.eval()
    try:
        yield
    finally:
        for layer, training in before.items():
            layer.training = training


def held_parameters(net: Any, optimizer: Any) -> dict[str, Any]:
    """What the optimizer updates, by structured name (`features.0.weight`): the same in every process."""
    if hasattr(optimizer, "inner_optimizer"):
        raise FleetError(
            f"{type(optimizer).__name__} keeps its state in another optimizer and could not be resumed: pass that one"
        )
    if getattr(optimizer, "_accumulators", None):
        raise FleetError("the optimizer has already made steps: call job.prepare before the first step")
    sparse = [name for name, layer in net.named_sublayers() if getattr(layer, "_sparse", False)]
    if sparse:
        raise FleetError(
            f"{', '.join(sparse)}: sparse gradients cannot be exchanged; create the embedding with sparse=False"
        )
    held = {
        id(p)
        for item in optimizer._parameter_list or []
        for p in (item["params"] if isinstance(item, dict) else [item])
    }
    found = {name: p for name, p in net.named_parameters() if id(p) in held}
    if not found:
        raise FleetError(
            "the optimizer holds none of the model's parameters: create it with parameters=net.parameters()"
        )
    if len(found) < len(held):
        raise FleetError(
            f"the optimizer also holds {len(held) - len(found)} parameters that are not the model's: they would be "
            f"neither exchanged nor saved; put everything to be trained into one Layer"
        )
    return found


def describe_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    def one(parameter: Any) -> str:
        kind = f"{list(parameter.shape)} {str(parameter.dtype).rpartition('.')[2]}"
        rate = parameter.optimize_attr.get("learning_rate", 1.0)
        return kind + ("" if parameter.trainable else " frozen") + ("" if rate == 1.0 else f" learning rate x {rate}")

    return {name: one(parameter) for name, parameter in parameters.items()}


# Paddle's bookkeeping, not settings.
_NOT_SETTINGS = (
    "learning_rate",
    "master_grad",
    "use_fusion_storage",
    "need_refuse",
    "fuse_buffer_version",
    "verbose",
    "multi_precision",
)


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """The optimizer's plain settings (learning rate, weight decay, betas, schedule, clipping …) by attribute name."""
    found: dict[str, Any] = {"class": type(optimizer).__name__, "learning_rate": float(optimizer.get_lr())}
    parts = {
        "": optimizer,
        "schedule": optimizer._learning_rate,
        "clip": optimizer._grad_clip,
        "decay": optimizer.regularization,
    }
    for prefix, part in parts.items():
        if not hasattr(part, "__dict__"):
            continue
        if prefix:
            found[prefix] = type(part).__name__
        for name, value in vars(part).items():
            name = name.lstrip("_")
            if _plain(value) and name not in _NOT_SETTINGS:
                found[f"{prefix}.{name}".lstrip(".")] = value
    for number, group in enumerate(optimizer._param_groups):
        if isinstance(group, dict):
            found.update({f"group{number}.{name}": value for name, value in group.items() if _plain(value)})
    return found


def only_reads_gradients(optimizer: Any) -> bool:
    """Whether a step leaves gradients unchanged. Paddle's own optimizers do; its clipping modifies them."""
    groups = [group for group in optimizer._param_groups if isinstance(group, dict)]
    clips = [optimizer._grad_clip, *(group.get("grad_clip") for group in groups)]
    return type(optimizer).__module__.startswith("paddle.optimizer.") and not any(clips)


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_plain(inner) for inner in value)
    return isinstance(value, (bool, int, float))


def float_buffers(net: Any) -> list[Any]:
    """Everything that a forward pass may change. (BatchNorm's statistics are frozen parameters in Paddle.)"""
    buffers = [buffer for buffer in net.buffers() if buffer is not None and paddle.is_floating_point(buffer)]
    return [*batch_norm_statistics(net), *buffers]


def batch_norm_statistics(net: Any) -> list[Any]:
    """The running means and variances of all BatchNorm layers."""
    return [
        buffer
        for layer in net.sublayers(include_self=True)
        if isinstance(layer, BATCH_NORMS)
        for buffer in (layer._mean, layer._variance)
        if buffer is not None
    ]
