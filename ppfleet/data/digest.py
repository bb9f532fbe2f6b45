"""A digest of a sample's content, the same in every process that has the same sample. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AnySet
from typing import Any

import numpy as np


def digest(sample: Any) -> str:
    """Covers nested arrays, tensors, numbers, strings, bytes, lists, dictionaries, sets and images."""
    total = hashlib.blake2b(digest_size=16)
    _feed(total, sample)
    return total.hexdigest()


def _feed(total: Any, value: Any) -> None:
    if callable(getattr(value, "numpy", None)):  # a tensor
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        _mark(total, "array", array.dtype.str, array.shape)
        if array.dtype.hasobject:
            _feed(total, array.ravel().tolist())
        else:
            total.update(array.tobytes())
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray)):
        _mark(total, type(value).__name__, repr(value))
    elif isinstance(value, Mapping):
        _mark(total, "dict", len(value))
        for key in sorted(value, key=repr):
            _feed(total, key)
            _feed(total, value[key])
    elif isinstance(value, (list, tuple)):
        _mark(total, "list", len(value))
        for item in value:
            _feed(total, item)
    elif isinstance(value, AnySet):
        _mark(total, "set", *sorted(map(digest, value)))
    else:
        # Of an unknown object only the type counts: its content may differ between processes. The attributes are those
        # of PIL's images.
        _mark(total, type(value).__name__, getattr(value, "mode", ""), getattr(value, "size", ""))
        if callable(getattr(value, "tobytes", None)):
            total.update(value.tobytes())


def _mark(total: Any, *parts: Any) -> None:
    text = repr(parts).encode(errors="surrogatepass")
    total.update(len(text).to_bytes(8, "little") + text)
