"""Fast training on a CPU: operators of our own for what Paddle's are slow at there, put into a model's layers.

Paddle computes depthwise convolutions through im2col and BatchNorm in several passes. Here are kernels that do neither
(C++, AVX2 where there is), and `fast_cpu(net)`, which lets the layers of any model use them; `stock(net)` is the way
back, so that what is exported holds Paddle's own operators only.
"""

from ppfleet.cpu.layers import all_finite, fast_cpu, fits, hooked, run, stock, usable

__all__ = ["all_finite", "fast_cpu", "fits", "hooked", "run", "stock", "usable"]
