"""Autocast and loss scaling. Clipping is the optimizer's own `grad_clip`, which sees reduced, unscaled gradients."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import paddle

from ppfleet.distributed.devices import Device
from ppfleet.errors import FleetError

LEVELS = ("O0", "O1", "O2")
DTYPES = ("float16", "bfloat16")
_MOVING = ("scale", "incr_count", "decr_count")


class Precision:
    """AMP at one level: O0 is float32, O1 casts within the forward pass, O2 also stores weights in low precision.

    Paddle has no autocast on a CPU: there every level is O0, and `note` says so.
    """

    def __init__(self, level: str, dtype: str | None, device: Device) -> None:
        if level not in LEVELS:
            raise FleetError(f"amp must be one of {', '.join(LEVELS)}, got {level!r}")
        if dtype not in (None, *DTYPES):
            raise FleetError(f"amp_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.level = level if device.has_autocast else "O0"
        self.dtype = dtype or "float16"
        self.note = (
            f"amp={level} has no effect: Paddle has no autocast on a {device.title}, this job computes in float32"
        )
        if self.level == level:
            self.note = ""
        # bfloat16 has float32's range and needs no scaling; a disabled scaler passes everything through.
        self.scaler = paddle.amp.GradScaler(enable=self.scaling, init_loss_scaling=2.0**15)

    def __str__(self) -> str:
        return f"{self.level} {self.dtype}" if self.enabled else self.level

    @property
    def enabled(self) -> bool:
        return self.level != "O0"

    @property
    def scaling(self) -> bool:
        return self.enabled and self.dtype == "float16"

    def wrap(self, net: Any, optimizer: Any) -> None:
        """Make `net` compute in lower precision and return float32, so that the loss needs no change."""
        if not self.enabled:
            return
        if self.level == "O2":
            paddle.amp.decorate(models=net, optimizers=optimizer, level="O2", dtype=self.dtype, master_weight=True)
        forward = net.forward

        @functools.wraps(forward)
        def autocast(*inputs: Any, **options: Any) -> Any:
            with paddle.amp.auto_cast(level=self.level, dtype=self.dtype):
                return _float32(forward(*inputs, **options))

        net.forward = autocast

    def state(self) -> dict[str, float]:
        """The part of the scaler's state that changes during training, as plain data for state.json."""
        state = self.scaler.state_dict() if self.scaling else {}
        return {name: float(np.asarray(state[name]).reshape(-1)[0]) for name in _MOVING if name in state}

    def restore(self, state: dict[str, float]) -> None:
        if state:
            scale, increments, decrements = (state[name] for name in _MOVING)
            moving = dict(zip(_MOVING, (np.array([scale], dtype=np.float32), int(increments), int(decrements))))
            self.scaler.load_state_dict({**self.scaler.state_dict(), **moving})


def plain(net: Any) -> Any:
    """`net` without autocast, in float32: itself, or a copy if `Precision.wrap` changed it."""
    if "forward" not in net.__dict__:
        return net
    net = copy.deepcopy(net)
    del net.forward
    return net.to(dtype="float32")


def _float32(output: Any) -> Any:
    if isinstance(output, paddle.Tensor):
        low = output.dtype in (paddle.float16, paddle.bfloat16)
        return output.astype("float32") if low else output
    if isinstance(output, dict):
        return {name: _float32(value) for name, value in output.items()}
    if isinstance(output, (list, tuple)):
        return type(output)(_float32(value) for value in output)
    return output
