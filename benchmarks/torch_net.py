"""MobileNetV3-small in PyTorch: the layers of models/mobilenet_v3_small/net.py, under the same names.

As torchvision builds it (activations in place); torchvision itself has no CPU wheel on every index.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import fill
from torch import nn

# kernel, expanded channels, output channels, squeeze-excite, Hardswish (else ReLU), stride
BLOCKS = [
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
]


class MobileNetV3Small(nn.Module):
    def __init__(self, classes: int = 1000, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = convolution(3, 16, 3, nn.Hardswish, stride=2)
        inside = [16, *(block[2] for block in BLOCKS)]
        self.blocks = nn.Sequential(*[Block(channels, *block) for channels, block in zip(inside, BLOCKS)])
        self.lastconv = convolution(96, 576, 1, nn.Hardswish)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(576, 1024), nn.Hardswish(inplace=True), nn.Dropout(dropout), nn.Linear(1024, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(self.lastconv(self.blocks(self.conv(images)))).flatten(1))


class Block(nn.Module):
    def __init__(self, inside: int, kernel: int, wide: int, outside: int, se: bool, hs: bool, stride: int) -> None:
        super().__init__()
        act = nn.Hardswish if hs else nn.ReLU
        self.bypass = stride == 1 and inside == outside
        self.expand_conv = convolution(inside, wide, 1, act) if inside != wide else nn.Identity()
        self.bottleneck_conv = convolution(wide, wide, kernel, act, stride, groups=wide)
        self.mid_se = SqueezeExcite(wide) if se else nn.Identity()
        self.linear_conv = convolution(wide, outside, 1, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear_conv(self.mid_se(self.bottleneck_conv(self.expand_conv(x))))
        return y + x if self.bypass else y


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        middle = max(8, (channels // 4 + 4) // 8 * 8)
        middle += 8 if middle < 0.9 * (channels // 4) else 0
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, middle, 1), nn.Conv2d(middle, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardsigmoid(self.fc2(F.relu(self.fc1(self.pool(x)), inplace=True))) * x


def convolution(inside: int, outside: int, kernel: int, act: Any, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layers = [
        nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside, momentum=0.1, eps=1e-3),
    ]
    return nn.Sequential(*layers, *([act(inplace=True)] if act else []))


def like_paddle(tensors: Any) -> dict[str, Any]:
    """Parameters, gradients or buffers under Paddle's names and in its layout (Linear: transposed)."""
    renamed = {}
    for name, tensor in tensors:
        name = name.replace("running_mean", "_mean").replace("running_var", "_variance")
        if not name.endswith("num_batches_tracked"):
            renamed[name] = tensor.T if tensor.dim() == 2 else tensor
    return renamed


def filled(classes: int = 1000) -> MobileNetV3Small:
    """The network with the weights that all contenders begin with; without dropout, so that all compute the same."""
    net = MobileNetV3Small(classes)
    with torch.no_grad():
        for name, tensor in like_paddle(net.state_dict().items()).items():
            tensor.copy_(torch.from_numpy(fill(name, tensor.shape)))
    return net
