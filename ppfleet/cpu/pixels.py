"""The last step of a thread that loads images: from pixels to the network's planes, in one pass over both."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ppfleet.cpu import build

Array = np.ndarray[Any, Any]


class ToPlanes:
    """(pixel / 255 - mean) / std of each colour, as one product and one difference in float32: NumPy's bits."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._scale = np.array([1 / (255 * spread) for spread in std], np.float32)
        self._shift = np.array([centre / spread for centre, spread in zip(mean, std)], np.float32)

    def __call__(self, image: Array, out: Array) -> bool:
        """Height x width x 3 of 8 bits to `out`, 3 x height x width. False: not done, for want of compiled code,
        of AVX2, or of arrays in one piece."""
        fits = image.dtype == np.uint8 and out.dtype == np.float32 and (3, *image.shape) == (*out.shape, 3)
        if not (build.is_loaded() and fits and image.flags.c_contiguous and out.flags.c_contiguous):
            return False
        arrays = (image, self._scale, self._shift, out)
        # Other threads may run Python meanwhile.
        return bool(_compiled()(image.size // 3, *(array.ctypes.data for array in arrays)))


@functools.lru_cache(None)
def _compiled() -> Any:
    function = ctypes.CDLL(str(build.built())).ppfleet_planes
    function.argtypes, function.restype = [ctypes.c_int64, *[ctypes.c_void_p] * 4], ctypes.c_bool
    return function
