"""Fast training on a CPU: our own operators where Paddle's are slow, used by a model's layers.

Paddle computes depthwise convolutions through im2col, and BatchNorm in several passes. The kernels here (C++, with AVX2
where available) do neither. `fast_cpu(net)` makes the layers of any model use them; within `stock(net)` they are
Paddle's own again, so that an exported model contains only Paddle's operators.
"""

from ppfleet.cpu.layers import all_finite, fast_cpu, fits, hooked, run, stock, usable

__all__ = ["all_finite", "fast_cpu", "fits", "hooked", "run", "stock", "usable"]
