"""MobileNetV3-small 1.0x (arXiv 1905.02244), and weights for it that Paddle's own tools have written.

Parameters carry the names and shapes of `paddle.vision.models.mobilenet_v3_small`, so that weights go both ways.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import paddle.nn.functional as F
from paddle import nn

from ppfleet import cpu, log
from ppfleet.checkpoint import pdparams, tensors
from ppfleet.errors import CheckpointError

# kernel, expanded channels, output channels, squeeze-excite, activation, stride
BLOCKS = [
    (3, 16, 16, True, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 2),
    (3, 88, 24, False, nn.ReLU, 1),
    (5, 96, 40, True, nn.Hardswish, 2),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 120, 48, True, nn.Hardswish, 1),
    (5, 144, 48, True, nn.Hardswish, 1),
    (5, 288, 96, True, nn.Hardswish, 2),
    (5, 576, 96, True, nn.Hardswish, 1),
    (5, 576, 96, True, nn.Hardswish, 1),
]
STEM, LAST, HIDDEN = 16, 576, 1024
CLASSIFIER = "classifier.3"  # the layer whose shape depends on the number of classes


class MobileNetV3Small(nn.Layer):
    """Images of 3 x H x W, normalised, to one score a class."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv = convolution(3, STEM, 3, nn.Hardswish, stride=2)
        inside = [STEM, *(block[2] for block in BLOCKS)]
        self.blocks = nn.Sequential(*[Block(channels, *block) for channels, block in zip(inside, BLOCKS)])
        self.lastconv = convolution(inside[-1], LAST, 1, nn.Hardswish)
        self.pool = nn.AdaptiveAvgPool2D(1)
        self.classifier = nn.Sequential(
            nn.Linear(LAST, HIDDEN), nn.Hardswish(), nn.Dropout(dropout), nn.Linear(HIDDEN, num_classes)
        )

    def forward(self, images: Any) -> Any:
        pooled = self.pool(self.lastconv(self.blocks(self.conv(images))))
        return self.classifier(pooled.squeeze([2, 3]))  # in ONNX one operator, where flatten would be four


class Block(nn.Layer):
    """Widen, filter each channel by itself, weigh the channels, narrow; with a bypass where the shape stays."""

    def __init__(self, inside: int, kernel: int, wide: int, outside: int, squeeze: bool, act: Any, stride: int) -> None:
        super().__init__()
        self.bypass = stride == 1 and inside == outside
        self.expand_conv = convolution(inside, wide, 1, act) if inside != wide else None
        self.bottleneck_conv = convolution(wide, wide, kernel, act, stride, groups=wide)
        self.mid_se = SqueezeExcite(wide) if squeeze else None
        self.linear_conv = convolution(wide, outside, 1, None)

    def forward(self, x: Any) -> Any:
        y = x if self.expand_conv is None else self.expand_conv(x)
        y = self.bottleneck_conv(y)
        if self.mid_se is not None:
            y = self.mid_se(y)
        y = self.linear_conv(y)
        return x + y if self.bypass else y


class SqueezeExcite(nn.Layer):
    """A weight for each channel, from the means of all of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        middle = eighths(channels // 4)
        self.pool = nn.AdaptiveAvgPool2D(1)
        self.fc1, self.fc2 = nn.Conv2D(channels, middle, 1), nn.Conv2D(middle, channels, 1)

    def forward(self, x: Any) -> Any:
        weights = F.hardsigmoid(self.fc2(F.relu(self.fc1(self.pool(x)))))
        return x * weights  # in this order: the other one broadcasts eight times slower on a CPU

    def forward_on_cpu(self, x: Any) -> Any:
        """The same by one operator; ppfleet.cpu takes it where it can."""
        fc1, fc2 = self.fc1, self.fc2
        plain = type(fc1) is type(fc2) is nn.Conv2D and not cpu.hooked(self.pool, fc1, fc2) and cpu.usable(x)
        if plain:
            weights, channels, middle = (fc1.weight, fc1.bias, fc2.weight, fc2.bias), x.shape[1], fc1._out_channels
            shapes = [middle, channels, 1, 1], [middle], [channels, middle, 1, 1], [channels]
            if all(map(cpu.fits, weights, shapes)):
                return cpu.run("squeeze_excite", x, *weights)
        return SqueezeExcite.forward(self, x)


def convolution(inside: int, outside: int, kernel: int, act: Any, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution and BatchNorm, then the activation if there is one."""
    layers = [
        nn.Conv2D(inside, outside, kernel, stride, padding=kernel // 2, groups=groups, bias_attr=False),
        nn.BatchNorm2D(outside, momentum=0.9, epsilon=1e-3),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


def eighths(channels: int) -> int:
    """The nearest multiple of 8, at least 8; one more where rounding would take away over a tenth."""
    rounded = max(8, (channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


# PaddleClas' names for the same layers.
_CLAS_NAMES = [
    (r"^last_second_conv\.", "lastconv."),
    (r"^last_conv\.", "classifier.0."),
    (r"^fc\.", "classifier.3."),
    (r"\.conv([12])\.(weight|bias)$", r".fc\1.\2"),
    (r"(^|\.)(conv|\w+conv)\.conv\.", r"\1\2.0."),
    (r"(^|\.)(conv|\w+conv)\.bn\.", r"\1\2.1."),
]


def read_weights(path: str | Path) -> dict[str, Any]:
    """The arrays of a `.pdparams` or `.safetensors` of ppfleet, paddle.vision or PaddleClas, by the names used here."""
    path = Path(path)
    arrays = tensors.load_file(path) if path.suffix == ".safetensors" else pdparams.load(path)
    if "last_second_conv.conv.weight" not in arrays:
        return arrays
    renamed = {}
    for name, array in arrays.items():
        for pattern, ours in _CLAS_NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = array
    return renamed


def load_weights(net: MobileNetV3Small, path: str | Path, partial: bool = False) -> None:
    """Load all weights of a file into `net`; with `partial` only those that fit, and log the rest.

    For fine-tuning: a classifier for another number of classes, for example, keeps its initial values.
    """
    arrays = read_weights(path)
    if not partial and f"{CLASSIFIER}.bias" in arrays:
        theirs, ours = len(arrays[f"{CLASSIFIER}.bias"]), net.classifier[-1].weight.shape[1]
        if theirs != ours:
            raise CheckpointError(
                f"{path} has {theirs} classes, the data set has {ours}: use the data it was trained on"
            )
    unfit = tensors.load_model(net, arrays, str(path), strict=not partial)
    if not partial:
        return
    names = net.state_dict()
    loaded = sum(name in arrays and list(arrays[name].shape) == list(value.shape) for name, value in names.items())
    if not loaded:
        raise CheckpointError(
            f"{path} has no tensor that fits MobileNetV3-small: these are the weights of another model"
        )
    log.info(f"{path}: {loaded} of {len(names)} tensors loaded" + (f"; not: {'; '.join(unfit)}" if unfit else ""))
