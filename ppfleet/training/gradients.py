"""The exchange of gradients at each step, and of the vitals that travel with them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, Callable, Protocol

import numpy as np
import paddle

from ppfleet.data.transfer import over
from ppfleet.distributed.collectives import Comm

_VITALS = 5  # numbers
_PROBE = 1 << 14  # elements of a parameter that are compared at a step
EXCHANGE = "all-reduce of gradients"
FIND_UNUSED = "pass find_unused=True to job.prepare if parameters are used in some steps or on some ranks only"


class Vitals:
    """What the ranks exchange at every step: loss, whether all values are finite, learning rate, whether SIGTERM came,
    and a checksum of some weights, which must be the same on all ranks."""

    def __init__(self, table: np.ndarray[Any, Any], probed: str, overflow: bool = False) -> None:
        self.loss = float(table[:, 0].mean())
        self.bad = [rank for rank, flag in enumerate(table[:, 1]) if flag]
        self.rates = [float(rate) for rate in table[:, 2]]
        self.end = bool(table[:, 3].any())
        self.sums = [int(total) for total in table[:, 4]]
        self.probed = probed  # which parameter
        self.overflow = overflow  # a gradient is not finite; on cards it is not known on which rank


class Exchange(Protocol):
    """Makes the gradients of all ranks one; see HostExchange and card_gradients.CardExchange."""

    names: list[str]
    parameters: list[Any]

    def add_loss(self, total: Any, loss: Any, share: float) -> Any:
        """`total`, which begins as 0.0, with this batch's part of a step's loss."""

    def reduce(self, loss: Any, rate: float) -> Vitals:
        """Replace every gradient by its mean over ranks; `loss` is what `add_loss` returned."""

    def remember(self) -> None:
        """Keep a copy of the buffers (BatchNorm statistics) of a good step, in case the next one is not."""

    def forget_step(self) -> None:
        """Restore the buffers to before a step that is skipped."""

    def sync_buffers(self) -> None:
        """Average over ranks the buffers that differ, as after a forward pass outside of a step."""


class Probe:
    """Takes its turn through the weights: a part of one at each step, so that diverging weights are found soon."""

    def __init__(self, names: list[str], parameters: list[Any]) -> None:
        self.names, self.parameters = names, parameters
        self._count = 0

    def next(self) -> tuple[str, Any]:
        """A parameter's name, and some of its values."""
        turn, number = divmod(self._count, len(self.parameters))
        self._count += 1
        parameter = self.parameters[number]
        if parameter.size > _PROBE:
            rows = parameter.shape[0]
            count = max(1, rows * _PROBE // int(parameter.size))
            start = turn * count % rows
            parameter = parameter._slice(start, min(rows, start + count)).clone()
        return self.names[number], parameter


def checksum(values: np.ndarray[Any, Any]) -> int:
    """Below 2 ** 24, so that it survives the way through float32; the order of elements counts."""
    bits = np.frombuffer(values.tobytes(), dtype=np.uint16)
    return int(np.dot(bits.astype(np.int64), np.arange(1, bits.size + 1))) % (1 << 24)


class HostExchange:
    """Averages gradients over ranks after `backward()`, where a dead peer raises an exception instead of aborting.

    All gradients of a rank are copied into one persistent flat buffer and reduced in one call: through shared memory
    if all ranks are on one host, otherwise through gloo. Afterwards each gradient is a view of the result. BatchNorm
    statistics travel in the same buffer, so that they are the same on every rank at every step. So do the vitals and
    which parameters were used at all: no second collective is needed, and a branch that only some ranks take is
    averaged correctly instead of diverging. In a job of one nothing is exchanged; the gradients are only checked.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: dict[str, Any],
        statistics: list[Any],
        buffers: list[Any],
        lent: bool = False,
        fast_finite: Callable[[list[Any]], bool | None] = lambda tensors: None,
    ) -> None:
        """`lent`: whether gradients may share the result's memory, as the optimizer only reads them."""
        self.comm = comm
        self._fast_finite = fast_finite  # whether all are finite, or None where it does not apply
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.buffers, self._lent = buffers, lent
        self._probe = Probe(self.names, self.parameters)
        self._travels = not comm.world.alone
        self.statistics = statistics if self._travels else []
        moved = [*self.parameters, *statistics] if self._travels else []
        lengths = [int(tensor.size) for tensor in moved]
        tail = comm.world.size * _VITALS + (len(self.parameters) if self._travels else 0)
        self._sums = sum(lengths)  # elements to average; the vitals follow
        dtype = "float64" if any(tensor.dtype == paddle.float64 for tensor in moved) else "float32"
        self._shared = comm.share(self._sums + tail, dtype) if self._travels else None
        self._mine = self._shared.mine if self._shared else np.zeros(self._sums + tail, dtype=dtype)
        self._total = self._shared.total if self._shared else self._mine
        self._flat = over(self._mine)
        self._views = _views(self._flat, moved)
        self._results = _views(over(self._total), moved) if self._shared else self._views
        self._gradients = _view(self._flat, 0, sum(lengths[: len(self.parameters)])) if self._travels else None
        self._zero = [False] * len(self.parameters)  # whether a parameter's part of the flat buffer is zero
        self._good = [buffer.clone() for buffer in buffers]

    def add_loss(self, total: float, loss: Any, share: float) -> float:
        return total + float(loss.item()) * share

    def reduce(self, loss: float, rate: float) -> Vitals:
        with paddle.no_grad():
            return self._reduce(loss, rate)

    def _reduce(self, loss: float, rate: float) -> Vitals:
        size, rank = self.comm.world.size, self.comm.world.rank
        vitals, tail = size * _VITALS, self._mine[self._sums :]
        tail[:] = 0
        gradients = [parameter._grad_ivar() for parameter in self.parameters]
        finite = math.isfinite(loss)
        if self._gradients is not None:
            tail[vitals:] = self._collect(gradients)
            finite = finite and math.isfinite(float(self._gradients.sum()))
        else:
            finite = finite and self._all_finite(gradients)
        probed, total = "", 0
        if self._travels:
            probed, values = self._probe.next()
            total = checksum(values.numpy())
        mine = loss if math.isfinite(loss) else 0.0, not finite, rate, self.comm.watchdog.stop_requested, total
        tail[_VITALS * rank : _VITALS * (rank + 1)] = mine
        self._sum(EXCHANGE)
        table = self._total[self._sums :].copy()
        if self._gradients is not None:
            self._hand_back(gradients, table[vitals:].tolist())
        return Vitals(table[:vitals].reshape(size, _VITALS), probed)

    def _sum(self, what: str) -> None:
        if self._shared is not None:
            self.comm.all_reduce_shared(self._shared, self._sums, what)
        elif self._travels:
            self.comm.all_reduce(self._flat, what, checked=False)  # job.prepare has compared the shapes
            self._mine[: self._sums] *= self._mine.dtype.type(1.0 / self.comm.world.size)

    def _collect(self, gradients: list[Any]) -> list[bool]:
        dtype = self._flat.dtype
        for number, (gradient, view) in enumerate(zip(gradients, self._views)):
            if gradient is not None:
                view.copy_(gradient if gradient.dtype == dtype else gradient.astype(dtype), True)
            elif not self._zero[number]:
                view.zero_()
        for buffer, view in zip(self.statistics, self._views[len(gradients) :]):
            view.copy_(buffer if buffer.dtype == dtype else buffer.astype(dtype), True)
        return [gradient is not None for gradient in gradients]

    def _hand_back(self, gradients: list[Any], users: list[float]) -> None:
        dtype = self._flat.dtype
        lent = self._lent or self._shared is None
        self._zero = [not used for used in users]
        for parameter, gradient, result, used in zip(self.parameters, gradients, self._results, users):
            if gradient is None:
                if used:  # on another rank, in a branch that this one did not take
                    parameter.grad = result.astype(parameter.dtype).clone()
            elif lent and gradient.dtype == dtype and gradient.is_contiguous():
                result._share_buffer_to(gradient)  # shares the memory, but not the strides
            else:
                gradient.copy_(result if gradient.dtype == dtype else result.astype(gradient.dtype), True)
        for buffer, result in zip(self.statistics, self._results[len(gradients) :]):
            buffer.copy_(result if buffer.dtype == dtype else result.astype(buffer.dtype), True)

    def _all_finite(self, gradients: list[Any]) -> bool:
        there = [gradient for gradient in gradients if gradient is not None]
        finite = self._fast_finite(there)
        if finite is not None:
            return finite
        sums: dict[Any, list[Any]] = {}
        with paddle.no_grad():
            for gradient in there:
                low = gradient.dtype in (paddle.float16, paddle.bfloat16)
                total = (gradient.astype("float32") if low else gradient).sum()  # a NaN or infinity makes the sum one
                sums.setdefault(total.dtype, []).append(total)
            return all(math.isfinite(float(paddle.add_n(same))) for same in sums.values())

    def remember(self) -> None:
        for kept, buffer in zip(self._good, self.buffers):
            kept.copy_(buffer, True)

    def forget_step(self) -> None:
        for kept, buffer in zip(self._good, self.buffers):
            buffer.copy_(kept, True)

    def sync_buffers(self) -> None:
        average_buffers(self.comm, self.buffers, [buffer.numpy() for buffer in self.buffers])
        self.remember()


def average_buffers(comm: Comm, buffers: list[Any], values: list[np.ndarray[Any, Any]]) -> None:
    """Average over ranks the buffers whose values differ."""
    if comm.world.alone or not buffers:
        return
    digests = [hashlib.sha256(array.tobytes()).hexdigest()[:16] for array in values]
    gathered = comm.gather(digests, "check of buffers")
    for buffer, *theirs in zip(buffers, *gathered):
        if len(set(theirs)) > 1:
            total = comm.all_reduce(buffer.astype("float64"), "average of buffers")
            buffer.copy_((total / comm.world.size).astype(buffer.dtype), True)


def _views(flat: Any, tensors: list[Any]) -> list[Any]:
    """Each tensor's part of `flat`, in its shape."""
    ends = list(itertools.accumulate((int(tensor.size) for tensor in tensors), initial=0))
    return [_view(flat, start, stop, tensor.shape) for start, stop, tensor in zip(ends, ends[1:], tensors)]


def _view(flat: Any, start: int, stop: int, shape: Sequence[int] | None = None) -> Any:
    view = flat._slice(start, stop)
    if shape is not None:
        view.get_tensor()._set_dims(list(shape))
    return view
