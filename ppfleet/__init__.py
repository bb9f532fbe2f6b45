"""ppfleet: a plain Paddle training loop, on one card or on many machines, that can be trusted there.

    job = ppfleet.Job("output/run1")

`Job` is the one name a training script needs; the others are for what goes beyond it.
Importing this package imports nothing of Paddle's: that happens when one of these names is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ppfleet._version import __version__
from ppfleet.errors import FleetError, PaddleMissing

if TYPE_CHECKING:
    from ppfleet import metrics
    from ppfleet.checkpoint.tensors import fingerprint
    from ppfleet.data.loader import Loader
    from ppfleet.data.threads import ThreadedDataset
    from ppfleet.evaluation.confusion import Confusion
    from ppfleet.job import Job

# Public name -> the module that holds it.
_PUBLIC = {
    "Job": "ppfleet.job",
    "Loader": "ppfleet.data.loader",
    "ThreadedDataset": "ppfleet.data.threads",
    "Confusion": "ppfleet.evaluation.confusion",
    "fingerprint": "ppfleet.checkpoint.tensors",
    "metrics": "ppfleet",
}
__all__ = ["Confusion", "FleetError", "Job", "Loader", "ThreadedDataset", "__version__", "fingerprint", "metrics"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ppfleet' has no attribute {name!r}")
    try:
        home = _PUBLIC[name]
        return import_module(f"{home}.{name}") if home == "ppfleet" else getattr(import_module(home), name)
    except ModuleNotFoundError as missing:
        if missing.name != "paddle":
            raise
        raise PaddleMissing(
            "ppfleet needs PaddlePaddle, which is not installed here: "
            "pip install 'ppfleet[cpu]', or 'ppfleet[gpu]' on a machine with NVIDIA cards"
        ) from None
