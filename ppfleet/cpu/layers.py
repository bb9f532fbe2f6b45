"""Which layers of a model can use the operators, and how: through a replaced `forward`, nothing else.

A layer keeps its class, parameters and name, so checkpoints, hooks and `isinstance` see no difference, and removing
the `forward` restores the stock layer.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

from ppfleet.cpu import build

Forward = Callable[[Any, Any], Any]
_ACTS = {nn.ReLU: 1, nn.Hardswish: 2}
_SMALL = 200  # up to so many pixels a depthwise convolution is faster as a matrix product
_FEW = 64  # up to so many inputs per output im2col of a dense convolution stays in the cache
_MOST = 2**30  # elements of a tensor: the kernels count in 32 bits
_FLOAT32 = (paddle.float32,)  # `in` tries identity first, which takes a fifth of the time of ==
_HAS_GPU = bool(paddle.is_compiled_with_cuda())


def fast_cpu(net: Any) -> str:
    """Make the layers of `net` use the fast operators where possible; return which operators are used.

    If they cannot be compiled, small depthwise convolutions become matrix products, and the rest stays Paddle's.
    """
    why = build.load()
    for layer, forward in _choices(net):
        if why is not None and forward is not _depthwise:
            continue
        layer.forward = types.MethodType(forward if why is None else _depthwise_product, layer)
    return "ppfleet's" if why is None else f"Paddle's, except for small depthwise convolutions ({why})"


@contextmanager
def stock(net: Any) -> Iterator[None]:
    """Within the block the layers are Paddle's own; afterwards as before, as Paddle 2.6's export modifies layers."""
    before = [(layer, vars(layer).get("forward")) for layer in net.sublayers(include_self=True)]
    for layer, _ in before:
        if _is_fast(layer):
            del layer.forward
    try:
        yield
    finally:
        for layer, forward in before:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _is_fast(layer: Any) -> bool:
    forward = _fast_forward(layer)
    return forward is not None and forward in {_depthwise_product, _choice(layer)}


def _choices(net: Any) -> Iterator[tuple[Any, Forward]]:
    for layer in net.sublayers(include_self=True):
        forward = _choice(layer)
        if forward is not None and "forward" not in vars(layer):  # a user's own replacement stays
            yield layer, forward


def _choice(layer: Any) -> Forward | None:
    if hasattr(type(layer), "forward_on_cpu"):
        forward: Forward = type(layer).forward_on_cpu  # a model's own, such as MobileNetV3's squeeze-excite
        return forward
    if type(layer) is nn.Conv2D:
        return _convolution_choice(layer)
    if type(layer) is nn.BatchNorm2D and layer._data_format == "NCHW" and layer.weight is not None is not layer.bias:
        return _batch_norm
    if type(layer) is nn.Sequential:
        return _sequence
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
        return _depthwise if size in (3, 5) and step in (1, 2) and 0 <= border < size else None
    if layer._groups > 1:
        return None
    if (size, step, border) == (1, 1, 0):
        return _pointwise
    return _stem if layer._in_channels * size * size <= _FEW and step in (1, 2) and 0 <= border < size else None


# Checks. The kernels trust the extents they are given, so each forward compares all of them first and passes anything
# else to the stock layer: the user then sees Paddle's own result or error.


def usable(x: Any) -> bool:
    """Whether the operators support these images: float32 on the CPU, not empty, in dynamic mode."""
    if not (paddle.in_dynamic_mode() and isinstance(x, paddle.Tensor) and x.dtype in _FLOAT32):
        return False
    shape = x.shape
    # Paddle's convolutions produce negative extents where a kernel is larger than its images.
    return len(shape) == 4 and min(shape) > 0 and math.prod(shape) <= _MOST and bool(x.place.is_cpu_place())


def fits(weight: Any, shape: list[int]) -> bool:
    """Whether a weight is what an operator expects: float32 of this shape (a user may have replaced or cast it)."""
    known = isinstance(weight, paddle.Tensor) and weight.dtype in _FLOAT32 and weight.shape == shape
    return known and math.prod(shape) <= _MOST and not (_HAS_GPU and not weight.place.is_cpu_place())


def hooked(*layers: Any) -> bool:
    """Whether one of these layers has forward hooks."""
    return any(layer._forward_pre_hooks or layer._forward_post_hooks for layer in layers)


def _fitting_weight(layer: Any, x: Any) -> tuple[Any, list[int]] | None:
    """The weight of a convolution and the shape of its output, if its operator supports both weight and images."""
    if not usable(x):
        return None
    (batch, channels, height, width), size, (stride, border) = x.shape, layer._kernel_size[0], layer._plain
    weight, out = layer.weight, layer._out_channels
    made = [batch, out, (height + 2 * border - size) // stride + 1, (width + 2 * border - size) // stride + 1]
    good = channels == layer._in_channels and min(made) > 0 and math.prod(made) <= _MOST
    good = good and fits(weight, [out, channels // layer._groups, size, size])
    return (weight, made) if good else None


def _fitting_statistics(norm: Any, shape: list[int]) -> tuple[Any, ...] | None:
    """Weights and running statistics of a BatchNorm, if its operator supports them and images of this shape."""
    tensors = norm.weight, norm.bias, norm._mean, norm._variance
    batch, channels, height, width = shape
    if batch * height * width == 1 and _of_batch(norm):
        return None  # one value per channel has no variance: Paddle returns the input
    # The operator writes the running statistics; non-contiguous ones would be passed as a copy.
    good = all(fits(tensor, [channels]) for tensor in tensors) and tensors[2].is_contiguous()
    return tensors if good and tensors[3].is_contiguous() else None


def _of_batch(norm: Any) -> bool:
    return bool(norm.training and not norm._use_global_stats)


# The forwards.


def all_finite(tensors: list[Any]) -> bool | None:
    """Whether all values are finite; None if the operators are not compiled or the tensors not float32 on a CPU."""
    known = build.is_loaded() and all(
        tensor.dtype == paddle.float32 and tensor.place.is_cpu_place() and tensor.is_contiguous() for tensor in tensors
    )
    return bool(run("finite", tensors)) if known and tensors else None


def run(name: str, *arguments: Any) -> Any:
    made = core.eager._run_custom_op(  # type: ignore[no-untyped-call]
        "ppfleet_" + name, *arguments
    )
    return made[0] if isinstance(made, (list, tuple)) else made


def _with_bias(layer: Any, y: Any) -> Any:
    return y if layer.bias is None else y + layer.bias.reshape([1, -1, 1, 1])


def _depthwise(self: Any, x: Any) -> Any:
    found = _fitting_weight(self, x)
    if found is None:
        return type(self).forward(self, x)
    return _with_bias(self, run("depthwise", x, found[0], *self._plain))


def _depthwise_product(self: Any, x: Any) -> Any:
    """Without a compiler: one matrix product per channel, with a matrix that has each weight wherever it is used."""
    found = _fitting_weight(self, x)
    if found is None or x.shape[2] * x.shape[3] > _SMALL:
        return type(self).forward(self, x)
    batch, channels, height, width = x.shape
    places = _places(height, width, self._kernel_size[0], *self._plain)
    weight, made = found
    matrices = paddle.matmul(weight.reshape([channels, -1]), places).reshape([channels, height * width, -1])
    planes = x.reshape([batch, channels, -1]).transpose([1, 0, 2])
    return _with_bias(self, paddle.bmm(planes, matrices).transpose([1, 0, 2]).reshape(made))


@functools.lru_cache(None)
def _places(height: int, width: int, kernel: int, stride: int, border: int) -> Any:
    """For each weight of a kernel, 1 wherever it connects an input pixel with an output pixel, else 0."""
    shape = [(side + 2 * border - kernel) // stride + 1 for side in (height, width)]
    ones = np.zeros([kernel, kernel, height, width, *shape], np.float32)
    for i, j, y, x in np.ndindex(kernel, kernel, *shape):
        row, column = y * stride + i - border, x * stride + j - border
        if 0 <= row < height and 0 <= column < width:
            ones[i, j, row, column, y, x] = 1
    return paddle.to_tensor(ones.reshape([kernel * kernel, -1]))


def _pointwise(self: Any, x: Any) -> Any:
    found = _fitting_weight(self, x)
    if found is None:
        return type(self).forward(self, x)
    return _with_bias(self, run("pointwise", x, found[0]))


def _stem(self: Any, x: Any) -> Any:
    found = _fitting_weight(self, x)
    if found is None or not x.stop_gradient:  # its operator has no gradient for images
        return type(self).forward(self, x)
    return _with_bias(self, run("stem", x, found[0], *self._plain))


def _batch_norm(self: Any, x: Any) -> Any:
    made = _normalised(self, None, x)
    return type(self).forward(self, x) if made is None else made


def _normalised(norm: Any, act: Any, x: Any, convolution: Any = None) -> Any:
    """BatchNorm, and in the same operator the convolution before it and the activation after it, if any.

    None if something does not fit: nothing is computed then.
    """
    if convolution is None:
        found = (None, x.shape) if usable(x) else None
    else:
        found = _fitting_weight(convolution, x)
    is_stem = convolution is not None and _fast_forward(convolution) is _stem
    if found is None or (is_stem and not x.stop_gradient):  # the stem's operator has no gradient for images
        return None
    statistics = _fitting_statistics(norm, found[1])
    if statistics is None:
        return None
    how = float(norm._momentum), float(norm._epsilon), _ACTS.get(type(act), 0), _of_batch(norm)
    if convolution is None:
        return run("batch_norm", x, *statistics, *how)
    return run("stem_norm" if is_stem else "convolution_norm", x, found[0], *statistics, *convolution._plain, *how)


def _sequence(self: Any, x: Any) -> Any:
    """Run the layers in order, with convolution, BatchNorm and activation fused where possible."""
    layers = list(self._sub_layers.values())
    while layers:
        kind = _fast_forward(layers[0])
        convolution = layers[0] if kind in (_depthwise, _pointwise, _stem) else None
        place = 0 if convolution is None else 1
        norm = layers[place] if place < len(layers) and _fast_forward(layers[place]) is _batch_norm else None
        biased = convolution is not None and convolution.bias is not None
        if norm is None or biased:
            x = layers.pop(0)(x)
            continue
        act = layers[place + 1] if place + 1 < len(layers) and type(layers[place + 1]) in _ACTS else None
        together = [layer for layer in (convolution, norm, act) if layer is not None]
        made = None if hooked(*together) else _normalised(norm, act, x, convolution)
        if made is None:
            x = layers.pop(0)(x)
            continue
        x = made
        del layers[: len(together)]
    return x


def _fast_forward(layer: Any) -> Forward | None:
    return getattr(vars(layer).get("forward"), "__func__", None)


def _global_mean(self: Any, x: Any) -> Any:
    return run("global_mean", x) if usable(x) else type(self).forward(self, x)
