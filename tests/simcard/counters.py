"""What this process asked of its simulated cards, counted by the plugin.

reset(); step(); assert counters()["d2h"] == 0      # the step reads nothing back
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from tests.simcard.build import LIBRARY

NAMES = (
    "kernels",  # launched
    "kernels_done",
    "h2d",  # copies from the host to a card; a fallback's too
    "d2h",
    "d2d",
    "h2d_bytes",
    "d2h_bytes",
    "blocking_waits",  # how often the host waited for a card, in a copy or a synchronisation
    "blocking_copies",
    "fallback_copies",  # of h2d and d2h: made by Paddle because the card lacks a kernel
    "collectives",  # launched; send and recv too
    "collectives_done",
    "allocations",
)


def counters() -> dict[str, int]:
    values = (ctypes.c_uint64 * len(NAMES))()
    known = _library().sim_counters(values, len(NAMES))
    assert known == len(NAMES), "NAMES and the enum Counter of card.h differ"
    return dict(zip(NAMES, values))


def reset() -> None:
    _library().sim_reset_counters()


def native_kernels() -> set[str]:
    """The kernels that run on the card. Others fall back to the CPU, with copies that wait."""
    return set(_library().sim_kernels().decode().split())


def _library() -> ctypes.CDLL:
    """The plugin that Paddle has loaded; importing Paddle comes first."""
    library = ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / LIBRARY))
    library.sim_counters.restype = ctypes.c_size_t
    library.sim_counters.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    library.sim_reset_counters.restype = None
    library.sim_kernels.restype = ctypes.c_char_p
    return library
