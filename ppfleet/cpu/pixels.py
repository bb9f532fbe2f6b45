"""The last step of loading an image: normalise its pixels and split them into channels, in one pass."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ppfleet.cpu import build

Array = np.ndarray[Any, Any]


class ToPlanes:
    """(pixel / 255 - mean) / std for each channel, as one product and one difference: the same bits as NumPy."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._scale = np.array([1 / (255 * spread) for spread in std], np.float32)
        self._shift = np.array([centre / spread for centre, spread in zip(mean, std)], np.float32)

    def __call__(self, image: Array, out: Array) -> bool:
        """Convert uint8 of height x width x 3 to `out`, 3 x height x width. False if nothing was done, because there is
        no compiled code or AVX2, or the arrays are not contiguous."""
        fits = image.dtype == np.uint8 and out.dtype == np.float32 and (3, *image.shape) == (*out.shape, 3)
        if not (build.is_loaded() and fits and image.flags.c_contiguous and out.flags.c_contiguous):
            return False
        arrays = (image, self._scale, self._shift, out)
        # ctypes releases the GIL here.
        return bool(_compiled()(image.size // 3, *(array.ctypes.data for array in arrays)))


@functools.lru_cache(None)
def _compiled() -> Any:
    function = ctypes.CDLL(str(build.built())).ppfleet_planes
    function.argtypes, function.restype = [ctypes.c_int64, *[ctypes.c_void_p] * 4], ctypes.c_bool
    return function
