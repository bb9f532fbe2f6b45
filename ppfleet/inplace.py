"""The former name of `ppfleet.ThreadedDataset`, for scripts that use it."""

from ppfleet.data.threads import ThreadedDataset as InPlaceDataset

__all__ = ["InPlaceDataset"]
