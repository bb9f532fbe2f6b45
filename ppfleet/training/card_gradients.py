"""The exchange on accelerators: Paddle's reducer averages gradients during backward(), the vitals follow.

The device computes behind Python's back, so nothing is read from it until a collective of the vitals, which comes after
the gradients, is known to be done; until then the watchdog can end the wait. That read is the only one of a step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleet.distributed.collectives import Comm
from ppfleet.errors import FleetError, MismatchError
from ppfleet.training.gradients import EXCHANGE, FIND_UNUSED, Probe, Vitals, average_buffers, checksum
from ppfleet.training.precision import Precision


class CardExchange:
    """`find_unused`: parameters may be used in some steps, or on some ranks, only."""

    def __init__(
        self,
        comm: Comm,
        precision: Precision,
        parameters: dict[str, Any],
        buffers: list[Any],
        find_unused: bool = False,
    ) -> None:
        self.comm, self.precision, self.find_unused = comm, precision, find_unused
        self.names, self.parameters, self.buffers = list(parameters), list(parameters.values()), buffers
        self._frozen = [p for p in self.parameters if not p.trainable]
        self._probe = Probe(self.names, self.parameters)
        self._probed = ("", 0)  # a parameter and its checksum as the last read gave them: sent with the next vitals
        self._unused: list[str] | None = None  # parameters without a gradient, since the first step
        self._kept: dict[Any, Any] = {}  # flat copies of the buffers, by dtype
        # A group of its own: vitals must never meet another rank's gradients.
        self._group = None if comm.world.alone else dist.new_group(list(range(comm.world.size)))
        if self._group is not None:
            comm.all_gather(paddle.zeros([1]), "start of the exchange", group=self._group)
        self.remember()

    def add_loss(self, total: Any, loss: Any, share: float) -> Any:
        part = loss.detach().astype("float32").reshape([1])
        part = part if share == 1.0 else part * share
        return part if isinstance(total, float) else total + part

    def reduce(self, loss: Any, rate: float) -> Vitals:
        with paddle.no_grad():
            return self._reduce(loss, rate)

    def _reduce(self, loss: Any, rate: float) -> Vitals:
        comm = self.comm
        gradients = [parameter._grad_ivar() for parameter in self.parameters]
        if not comm.world.alone:
            self._check_used(gradients)
        found = self.precision.unscale([gradient for gradient in gradients if gradient is not None])
        name, number = self._probed
        known = [paddle.full([1], value, dtype="float32") for value in (rate, comm.watchdog.stop_requested, number)]
        mine = paddle.concat([loss, found, *known])
        if comm.world.alone:
            table = mine.numpy().reshape(1, -1).astype(np.float64)
        else:
            every = comm.all_gather(mine, EXCHANGE, checked=False, group=self._group)
            table = self._read(every, mine.shape[0])
        overflow = bool(table[0, 1])
        for row in table:
            row[1] = not math.isfinite(row[0]) or (overflow and comm.world.alone and not self.precision.scaling)
            row[0] = row[0] if math.isfinite(row[0]) else 0.0
        return Vitals(table, name, overflow)

    def _read(self, every: Any, width: int) -> np.ndarray[Any, Any]:
        """The vitals, and in the same copy some weights to compare at the next step."""
        name, part = self._probe.next()
        data: np.ndarray[Any, Any] = paddle.concat([every.flatten(), part.flatten().astype("float32")]).numpy()
        vitals = width * self.comm.world.size
        self._probed = name, checksum(data[vitals:])
        return data[:vitals].reshape(-1, width).astype(np.float64)

    def _check_used(self, gradients: list[Any]) -> None:
        """Paddle's reducer waits for the gradients that the first step had, and ignores others: unless it looks for
        unused parameters at each step, the ranks would hang or diverge."""
        if any(parameter._grad_ivar() is not None for parameter in self._frozen):
            raise FleetError(
                "on cards a parameter that was frozen at job.prepare cannot be unfrozen: Paddle's reducer ignores it"
            )
        if self.find_unused:
            return
        unused = [name for name, gradient in zip(self.names, gradients) if gradient is None]
        if self._unused is None:
            everywhere = self.comm.gather(unused, "check of unused parameters")
            for name in self.names:
                without = [rank for rank, names in enumerate(everywhere) if name in names]
                if 0 < len(without) < len(everywhere):
                    shown = ", ".join(map(self.comm.world.name, without))
                    raise MismatchError(
                        f"{name} was not used in the first step on {shown}: {FIND_UNUSED}", ranks=without
                    )
            self._unused = unused
        elif unused != self._unused:
            changed = sorted(set(unused) ^ set(self._unused))
            raise FleetError(
                f"{', '.join(changed[:4])}: {'not used' if changed[0] in unused else 'used'} at this step on "
                f"{self.comm.world.name()}, unlike at the first: {FIND_UNUSED}"
            )

    def remember(self) -> None:
        with paddle.no_grad():
            for dtype, same in self._by_dtype().items():
                self._kept[dtype] = paddle.concat([buffer.reshape([-1]) for buffer in same])

    def forget_step(self) -> None:
        with paddle.no_grad():
            for dtype, same in self._by_dtype().items():
                parts = self._kept[dtype].split([int(buffer.size) for buffer in same])
                for buffer, part in zip(same, parts):
                    buffer.copy_(part.reshape(buffer.shape), False)

    def _by_dtype(self) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for buffer in self.buffers:
            found.setdefault(buffer.dtype, []).append(buffer)
        return found

    def sync_buffers(self) -> None:
        if not self.comm.world.alone and self.buffers:
            self.remember()
            flat = {dtype: self.comm.read(kept, "reading buffers") for dtype, kept in self._kept.items()}
            done = dict.fromkeys(flat, 0)
            values = []
            for buffer in self.buffers:
                start, done[buffer.dtype] = done[buffer.dtype], done[buffer.dtype] + int(buffer.size)
                values.append(flat[buffer.dtype][start : done[buffer.dtype]])
            average_buffers(self.comm, self.buffers, values)
        self.remember()
