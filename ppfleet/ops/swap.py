"""Which layers of a model can use the operators, and how they are made to: a `forward` of their own, nothing else.

A layer keeps its class, its parameters and its name; so checkpoints, hooks and `isinstance` see no difference, and
taking that `forward` away again gives the stock layer.
"""

from __future__ import annotations

import functools
import math
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

from ppfleet.ops import build

Forward = Callable[[Any, Any], Any]
_ACTS = {nn.ReLU: 1, nn.Hardswish: 2}
_SMALL = 200  # pixels of a map up to which a depthwise convolution is faster as a matrix product
_FEW = 64  # inputs of one output of a dense convolution up to which im2col stays in the cache


def fast_cpu(net: Any) -> str:
    """Let the layers of `net` use the fast operators where they can, and say which these are.

    Where they cannot be compiled, small depthwise convolutions become matrix products, and the rest stays Paddle's.
    """
    why = build.load()
    for layer, forward in _choices(net):
        if why is not None and forward is not _depthwise:
            continue
        layer.forward = types.MethodType(forward if why is None else _depthwise_product, layer)
    return "ppfleet's" if why is None else f"Paddle's, but for small depthwise convolutions ({why})"


@contextmanager
def stock(net: Any) -> Iterator[None]:
    """Inside of the block the layers are Paddle's own again."""
    swapped = [(layer, vars(layer).pop("forward")) for layer in net.sublayers(include_self=True) if _is_fast(layer)]
    try:
        yield
    finally:
        for layer, forward in swapped:
            layer.forward = forward


def _is_fast(layer: Any) -> bool:
    forward = getattr(vars(layer).get("forward"), "__func__", None)
    return forward is not None and forward in {_done_before, _depthwise_product, _choice(layer)}


def _choices(net: Any) -> Iterator[tuple[Any, Forward]]:
    layers = net.sublayers(include_self=True)
    for layer in layers:
        forward = _choice(layer)
        if forward is not None and "forward" not in vars(layer):  # a user's own stays
            yield layer, forward
    # An activation that follows BatchNorm in a Sequential, and nothing else, is done along with it.
    uses = Counter(id(child) for layer in layers for child in layer._sub_layers.values())
    for layer in layers:
        if type(layer) is nn.Sequential:
            parts = list(layer)
            for norm, act in zip(parts, parts[1:]):
                if _choice(norm) is _batch_norm and type(act) in _ACTS and uses[id(norm)] == uses[id(act)] == 1:
                    norm._with_act = act
                    yield act, _done_before


def _choice(layer: Any) -> Forward | None:
    if hasattr(type(layer), "forward_on_cpu"):
        forward: Forward = type(layer).forward_on_cpu  # a model's own: see MobileNetV3's squeeze-excite
        return forward
    if type(layer) is nn.Conv2D:
        return _convolution_choice(layer)
    if type(layer) is nn.BatchNorm2D and layer._data_format == "NCHW" and layer.weight is not None is not layer.bias:
        return _batch_norm
    if type(layer) is nn.AdaptiveAvgPool2D and layer._output_size in (1, (1, 1), [1, 1]):
        return _global_mean
    return None


def _convolution_choice(layer: Any) -> Forward | None:
    kernel, stride, padding = set(layer._kernel_size), set(layer._stride), layer._padding
    padding = {padding} if isinstance(padding, int) else set(padding) if isinstance(padding, (list, tuple)) else {None}
    plain = layer._data_format == "NCHW" and layer._padding_mode == "zeros" and set(layer._dilation) == {1}
    if not plain or len(kernel) > 1 or len(stride) > 1 or len(padding) > 1 or padding == {None}:
        return None
    size, step, border = kernel.pop(), stride.pop(), padding.pop()
    layer._plain = step, border
    if layer._groups == layer._in_channels == layer._out_channels > 1:
        return _depthwise if size in (3, 5) and step in (1, 2) and border < size else None
    if layer._groups > 1:
        return None
    if (size, step, border) == (1, 1, 0):
        return _pointwise
    return _stem if layer._in_channels * size * size <= _FEW and step in (1, 2) and border < size else None


# The forwards. Each gives way to the stock layer for what its operator does not know.


def usable(x: Any) -> bool:
    """Whether the operators can take this: float32 images, computed at once."""
    return bool(paddle.in_dynamic_mode()) and x.dtype == paddle.float32 and x.ndim == 4 and x.place.is_cpu_place()


def run(name: str, *arguments: Any) -> Any:
    made = core.eager._run_custom_op(  # type: ignore[no-untyped-call]
        "ppfleet_" + name, *arguments
    )
    return made[0] if isinstance(made, (list, tuple)) else made


def _with_bias(layer: Any, y: Any) -> Any:
    return y if layer.bias is None else y + layer.bias.reshape([1, -1, 1, 1])


def _depthwise(self: Any, x: Any) -> Any:
    if not usable(x):
        return type(self).forward(self, x)
    return _with_bias(self, run("depthwise", x, self.weight, *self._plain))


def _depthwise_product(self: Any, x: Any) -> Any:
    """Without a compiler: one matrix product a channel, with a matrix that holds each weight wherever it is used."""
    height, width = x.shape[2:]
    if not usable(x) or height * width > _SMALL:
        return type(self).forward(self, x)
    taps = self._kernel_size[0] ** 2
    places, shape = _places(height, width, self._kernel_size[0], *self._plain)
    matrices = paddle.matmul(self.weight.reshape([-1, taps]), places)
    planes = x.reshape([x.shape[0], -1, height * width]).transpose([1, 0, 2])
    made = paddle.bmm(planes, matrices.reshape([-1, height * width, math.prod(shape)]))
    return _with_bias(self, made.transpose([1, 0, 2]).reshape([x.shape[0], -1, *shape]))


@functools.lru_cache(None)
def _places(height: int, width: int, kernel: int, stride: int, border: int) -> tuple[Any, list[int]]:
    """For each weight of a kernel a 1 wherever it takes a pixel of the input to one of the output, else 0."""
    shape = [(side + 2 * border - kernel) // stride + 1 for side in (height, width)]
    ones = np.zeros([kernel, kernel, height, width, *shape], np.float32)
    for i, j, y, x in np.ndindex(kernel, kernel, *shape):
        row, column = y * stride + i - border, x * stride + j - border
        if 0 <= row < height and 0 <= column < width:
            ones[i, j, row, column, y, x] = 1
    return paddle.to_tensor(ones.reshape([kernel * kernel, -1])), shape


def _pointwise(self: Any, x: Any) -> Any:
    if not usable(x):
        return type(self).forward(self, x)
    return _with_bias(self, run("pointwise", x, self.weight))


def _stem(self: Any, x: Any) -> Any:
    if not usable(x) or not x.stop_gradient:  # its operator has no gradient for images
        return type(self).forward(self, x)
    return _with_bias(self, run("stem", x, self.weight, *self._plain))


def _batch_norm(self: Any, x: Any) -> Any:
    act = self._with_act if hasattr(self, "_with_act") else None
    if act is not None:
        # What hooks see between the two must be there.
        act._done = usable(x) and not self._forward_post_hooks and not act._forward_pre_hooks
    if not usable(x):
        return type(self).forward(self, x)
    kind = _ACTS[type(act)] if act is not None and act._done else 0
    batch = self.training and not self._use_global_stats
    return run(
        "batch_norm",
        x,
        self.weight,
        self.bias,
        self._mean,
        self._variance,
        self._momentum,
        self._epsilon,
        kind,
        batch,
    )


def _done_before(self: Any, x: Any) -> Any:
    return x if self._done else type(self).forward(self, x)


def _global_mean(self: Any, x: Any) -> Any:
    return run("global_mean", x) if usable(x) else type(self).forward(self, x)
