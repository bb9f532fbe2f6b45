"""The loader that fits a data set."""

from __future__ import annotations

from typing import Any, Callable

from paddle.io import IterableDataset

from ppfleet.data.loader import Loader
from ppfleet.data.sampler import Plan
from ppfleet.data.stream import ENDLESS, StreamLoader
from ppfleet.data.workers import Collate
from ppfleet.errors import DataError


def make_loader(
    dataset: Any,
    plan: dict[str, Any],
    workers: int = 0,
    collate: Collate | None = None,
    on_device: Callable[[Any], Any] | None = None,
    local_size: int = 1,
) -> Loader:
    """A `Loader` or `StreamLoader`; a DataError says what to change if neither fits."""
    if workers < 0:
        raise DataError(f"workers must be >= 0, got {workers}: 0 loads in the loop itself")
    if isinstance(dataset, IterableDataset):
        if workers or plan["shuffle"]:
            raise DataError(
                "an IterableDataset is read in its own order by one process (shuffle=False, workers=0): every worker "
                "would read the whole stream again. To use either, pass a map-style Dataset (__getitem__, __len__)"
            )
        return StreamLoader(dataset, Plan(length=ENDLESS, **plan), collate, on_device)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"{type(dataset).__name__} is not a data set: it must have __getitem__ and __len__, or be an "
            f"IterableDataset"
        )
    return Loader(dataset, Plan(length=len(dataset), **plan), workers, collate, on_device, local_size)
