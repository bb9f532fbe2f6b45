"""Autocast and loss scaling. Clipping is the optimizer's own `grad_clip`, which sees reduced, unscaled gradients."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import paddle

from ppfleet.distributed.devices import Device
from ppfleet.errors import FleetError

LEVELS = ("O0", "O1", "O2")
DTYPES = ("float16", "bfloat16")
FLOOR = 1.0  # of the loss scale
HOPELESS = 20  # overflows in a row: the scale has reached its floor from any start that makes sense


class LossScaler:
    """Keeps small float16 gradients from vanishing: the loss is multiplied before the backward pass, the gradients are
    divided after it. An overflow skips the step and halves the scale; many good steps double it.

    Paddle's own GradScaler reads the device at every step, and fails at the first overflow with NumPy 2.
    """

    def __init__(self, scale: float = 2.0**15, double_after: int = 2000) -> None:
        self.scale, self.double_after = scale, double_after
        self.good = 0  # steps since the scale changed
        self.overflows = 0  # in a row

    def update(self, overflow: bool) -> None:
        self.overflows = self.overflows + 1 if overflow else 0
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale = max(FLOOR, self.scale / 2)
        elif self.good == self.double_after:
            self.scale, self.good = self.scale * 2, 0


class Precision:
    """AMP at one level: O0 is float32, O1 casts within the forward pass, O2 also stores weights in low precision.

    Where Paddle has no autocast (on a CPU, for some dtypes on some devices) every level is O0, and `note` says so.
    """

    def __init__(self, level: str, dtype: str | None, device: Device) -> None:
        if level not in LEVELS:
            raise FleetError(f"amp must be one of {', '.join(LEVELS)}, got {level!r}")
        if dtype not in (None, *DTYPES):
            raise FleetError(f"amp_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.dtype = dtype or "float16"
        works = level == "O0" or (device.has_autocast and _casts(self.dtype))
        self.level = level if works else "O0"
        self.note = "" if works else _note(level, self.dtype if device.has_autocast else "", device)
        self.scaler = LossScaler()

    def __str__(self) -> str:
        return f"{self.level} {self.dtype}" if self.enabled else self.level

    @property
    def enabled(self) -> bool:
        return self.level != "O0"

    @property
    def scaling(self) -> bool:
        """Only for float16: bfloat16 has float32's range."""
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

    def scaled(self, loss: Any) -> Any:
        return loss * self.scaler.scale if self.scaling else loss

    def unscale(self, gradients: list[Any]) -> Any:
        """Divide gradients by the scale, in place; a float32 tensor of shape [1] that is 1 unless all are finite."""
        kinds: dict[Any, list[Any]] = {}
        for gradient in gradients:
            kinds.setdefault(gradient.dtype, []).append(gradient)
        scale = paddle.full([1], self.scaler.scale if self.scaling else 1.0, dtype="float32")
        found = [
            paddle._C_ops.check_finite_and_unscale_(same, scale.astype("float64") if kind == paddle.float64 else scale)[
                1
            ]
            for kind, same in kinds.items()
        ]
        bad = [flag.astype("float32") for flag in found]
        return bad[0] if len(bad) == 1 else paddle.add_n(bad) if bad else paddle.zeros([1])

    def state(self) -> dict[str, float]:
        """What changes during training, as plain data for state.json."""
        scaler = self.scaler
        return (
            {"scale": scaler.scale, "incr_count": scaler.good, "decr_count": scaler.overflows} if self.scaling else {}
        )

    def restore(self, state: dict[str, float]) -> None:
        if state:
            self.scaler.scale, self.scaler.good = float(state["scale"]), int(state["incr_count"])
            self.scaler.overflows = int(state["decr_count"])


def _casts(dtype: str) -> bool:
    """Whether Paddle computes in that dtype here: where it cannot, it takes float32 without a word."""
    one = paddle.ones([2, 2])
    try:
        with paddle.amp.auto_cast(level="O1", dtype=dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = paddle.matmul(one, one)
    except (RuntimeError, NotImplementedError, ValueError):  # no such operator
        return False
    return str(made.dtype).rpartition(".")[2] == dtype


def _note(level: str, dtype: str, device: Device) -> str:
    lacks = f"no autocast to {dtype}" if dtype else "no autocast"
    return f"amp={level} has no effect: Paddle has {lacks} on a {device.title}, this job computes in float32"


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
