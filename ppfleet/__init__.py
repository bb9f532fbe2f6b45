"""ppfleet: a plain Paddle training loop, on one card or on many machines, that can be trusted there.

    job = ppfleet.Job("output/run1")

`Job` is the one name a training script needs; everything else is a part of it and may be used alone.
Importing this package imports nothing of Paddle's: that happens when `Job` is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppfleet.errors import FleetError, PaddleMissing

if TYPE_CHECKING:
    from ppfleet.job import Job

__version__ = "0.1.0"
__all__ = ["FleetError", "Job", "__version__"]


def __getattr__(name: str) -> object:
    if name != "Job":
        raise AttributeError(f"module 'ppfleet' has no attribute {name!r}")
    try:
        from ppfleet.job import Job
    except ModuleNotFoundError as missing:
        if missing.name != "paddle":
            raise
        raise PaddleMissing(
            "ppfleet needs PaddlePaddle, which is not installed here: "
            "pip install 'ppfleet[cpu]', or 'ppfleet[gpu]' on a machine with NVIDIA cards"
        ) from None
    return Job
