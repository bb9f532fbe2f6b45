"""What `Job.prepare` does to a model and its optimizer, and the exchange of gradients at each step."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ppfleet.comm import Comm
from ppfleet.errors import FleetError, MismatchError
from ppfleet.world import World

# `_BatchNormBase` is the parent of BatchNorm1D/2D/3D and SyncBatchNorm; BatchNorm is the old fluid-style layer.
_BATCH_NORMS = (nn.layer.norm._BatchNormBase, nn.BatchNorm)


def unwrap(net: Any) -> Any:
    """The user's own model inside `paddle.DataParallel`."""
    return net._layers if isinstance(net, paddle.DataParallel) else net


def structured_names(net: Any, optimizer: Any) -> dict[str, Any]:
    """Give every parameter its structured name (`features.0.weight`) and return them by it.

    Optimizer state, logs and errors then speak of the same names in every process, however many other models
    (a teacher, an average) were built before this one.
    """
    if getattr(optimizer, "_accumulators", None):
        raise FleetError("the optimizer has already made steps: call job.prepare before the first one")
    parameters = dict(net.named_parameters())
    known, held = {id(p) for p in parameters.values()}, optimizer._parameter_list or []
    if not any(id(p) in known for p in held):
        raise FleetError(
            "the optimizer holds none of the model's parameters: create it with parameters=net.parameters()"
        )
    for name, parameter in parameters.items():
        parameter.name = name
    return parameters


def check_same(comm: Comm, what: str, mine: dict[str, Any]) -> None:
    """Raise on every rank, listing what differs on which rank, unless all brought the same (plain JSON data)."""
    text = json.dumps(mine, sort_keys=True)
    digests = comm.gather(hashlib.sha256(text.encode()).hexdigest(), f"check of {what}")
    if len(set(digests)) == 1:
        return
    raise MismatchError(
        f"the ranks brought different {what}:\n" + differences(comm.world, comm.gather(mine, f"check of {what}"))
    )


def differences(world: World, brought: list[dict[str, Any]]) -> str:
    """One line for each key that is not the same on all ranks, with who has what."""
    lines = []
    for key in sorted({key for part in brought for key in part}):
        groups: dict[str, list[int]] = {}
        for rank, part in enumerate(brought):
            groups.setdefault(json.dumps(part[key]) if key in part else "missing", []).append(rank)
        if len(groups) > 1:
            lines.append(
                f"  {key}: " + "; ".join(f"{value} on {_ranks(world, ranks)}" for value, ranks in groups.items())
            )
    shown, more = lines[:20], len(lines) - 20
    return "\n".join(shown + ([f"  and {more} more"] if more > 0 else []))


def _ranks(world: World, ranks: list[int]) -> str:
    return ", ".join(world.name(rank) for rank in ranks)


def describe_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        name: f"{list(p.shape)} {str(p.dtype).rpartition('.')[2]}{'' if p.trainable else ' frozen'}"
        for name, p in parameters.items()
    }


# Bookkeeping of Paddle's, not settings.
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


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_plain(inner) for inner in value)
    return isinstance(value, (bool, int, float))


def batch_norm_statistics(net: Any) -> list[Any]:
    """The running means and variances of all BatchNorm layers."""
    return [
        buffer
        for layer in net.sublayers(include_self=True)
        if isinstance(layer, _BATCH_NORMS)
        for buffer in (layer._mean, layer._variance)
        if buffer is not None
    ]


class Vitals:
    """What each rank tells the others at every step: its loss, whether its numbers are finite, its learning rate."""

    def __init__(self, table: np.ndarray[Any, Any]) -> None:
        self.loss = float(table[:, 0].mean())
        self.bad = [rank for rank, flag in enumerate(table[:, 1]) if flag]
        self.rates = [float(rate) for rate in table[:, 2]]


class Exchange:
    """Sums gradients over ranks, outside of `backward()`, where a dead peer is an exception and not an abort.

    All gradients of a rank are copied into one persistent flat buffer and reduced in one call; afterwards each
    gradient is a view of that buffer. BatchNorm statistics travel in the same buffer, so that every rank has the same
    at every step, and so do the ranks' vitals and which parameters were used at all: nothing here needs a second
    collective, and a branch that only some ranks take is summed right instead of diverging.
    On cards Paddle's own reducer does this during `backward()`, overlapping it; then only the vitals go through here.
    """

    def __init__(self, comm: Comm, parameters: dict[str, Any], statistics: list[Any]) -> None:
        self.comm = comm
        self.parameters = [p for p in parameters.values() if p.trainable]
        self.statistics = statistics
        size = comm.world.size
        wide = any(p.dtype == paddle.float64 for p in self.parameters)
        shapes = [] if comm.on_cards else [list(t.shape) for t in [*self.parameters, *statistics]]
        tail = size * 3 + (0 if comm.on_cards else len(self.parameters))
        lengths = [math.prod(shape) for shape in shapes]
        self.flat = paddle.zeros([sum(lengths) + tail], dtype="float64" if wide else "float32")
        self.views = []
        start = 0
        for shape, length in zip(shapes, lengths):
            self.views.append(_view(self.flat, start, start + length, shape))
            start += length
        gradients = sum(lengths[: len(self.parameters)])
        # None on cards, where Paddle's reducer has the gradients.
        self._gradients = _view(self.flat, 0, gradients, [gradients]) if gradients else None
        self._sums = _view(self.flat, 0, start, [start]) if start else self.flat
        self._tail = _view(self.flat, start, start + tail, [tail])
        self._good: list[Any] = []
        self.remember()

    def reduce(self, loss: float, rate: float) -> Vitals:
        """Replace every gradient by its mean over ranks."""
        size, rank = self.comm.world.size, self.comm.world.rank
        tail = np.zeros(self._tail.shape, dtype=np.float64 if self.flat.dtype == paddle.float64 else np.float32)
        finite = math.isfinite(loss)
        if self._gradients is not None:
            tail[3 * size :] = self._collect()
            finite = finite and math.isfinite(float(self._gradients.sum()))
        tail[3 * rank : 3 * rank + 3] = loss if math.isfinite(loss) else 0.0, not finite, rate
        self._tail.copy_(paddle.to_tensor(tail), True)
        self.comm.all_reduce(self.flat, "all-reduce of gradients")
        table = self._tail.clone().numpy()  # numpy() of a view would copy the whole buffer
        if self._gradients is not None:
            if size > 1:
                self._sums.scale_(1.0 / size)
            self._hand_back(table[3 * size :])
        return Vitals(table[: 3 * size].reshape(size, 3))

    def _collect(self) -> list[bool]:
        used = []
        for parameter, view in zip(self.parameters, self.views):
            gradient = parameter._grad_ivar()
            used.append(gradient is not None)
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient if gradient.dtype == view.dtype else gradient.astype(view.dtype), True)
        for buffer, view in zip(self.statistics, self.views[len(self.parameters) :]):
            view.copy_(buffer if buffer.dtype == view.dtype else buffer.astype(view.dtype), True)
        return used

    def _hand_back(self, users: Any) -> None:
        for parameter, view, used in zip(self.parameters, self.views, users):
            gradient = parameter._grad_ivar()
            if gradient is None:
                if used:  # by another rank, in a branch that this one did not take
                    parameter.grad = view.astype(parameter.dtype).clone()
            elif gradient.dtype == view.dtype:
                view._share_buffer_to(gradient)
            else:
                gradient.copy_(view.astype(gradient.dtype), True)
        for buffer, view in zip(self.statistics, self.views[len(self.parameters) :]):
            buffer.copy_(view if buffer.dtype == view.dtype else view.astype(buffer.dtype), True)

    def reduced_finite(self) -> bool:
        """On cards: whether the gradients are finite, now that the reducer has summed them."""
        sums = [g.astype("float32").sum() for p in self.parameters if (g := p._grad_ivar()) is not None]
        return not sums or math.isfinite(float(paddle.add_n(sums)))

    def remember(self) -> None:
        """Keep the BatchNorm statistics of a good step, in case the next one is skipped."""
        if not self._good:
            self._good = [buffer.clone() for buffer in self.statistics]
        for kept, buffer in zip(self._good, self.statistics):
            kept.copy_(buffer, True)

    def forget_step(self) -> None:
        """Put the BatchNorm statistics back to before a skipped step."""
        for kept, buffer in zip(self._good, self.statistics):
            buffer.copy_(kept, True)

    def same_statistics(self) -> None:
        """Average the BatchNorm statistics over ranks where a forward pass outside of a step made them differ."""
        if self.comm.world.alone or not self.statistics:
            return
        digest = hashlib.sha256(b"".join(buffer.numpy().tobytes() for buffer in self.statistics)).hexdigest()
        if len(set(self.comm.gather(digest, "check of BatchNorm statistics"))) == 1:
            return
        for buffer in self.statistics:
            total = self.comm.all_reduce(buffer.clone(), "average of BatchNorm statistics")
            buffer.copy_(total / self.comm.world.size, True)
        self.remember()


def _view(flat: Any, start: int, stop: int, shape: list[int]) -> Any:
    view = flat._slice(start, stop)
    view.get_tensor()._set_dims(shape)
    return view
