"""Plain JSON data as bytes for another rank, and why a value is not plain JSON data. Pure.

Numbers (NaN and infinities too), strings, None, lists and dictionaries with string keys arrive as they are; a tuple
arrives as a list.
"""

from __future__ import annotations

import json
from typing import Any

_LEAVES = (str, int, float, bool, type(None))


class NotPlain(ValueError):
    """The value cannot be sent; the message names the part of it that is at fault and what to pass instead."""


def encode(value: Any) -> bytes:
    try:
        fault = _fault(value)
        if fault is not None:
            raise NotPlain(fault[0] + " at value" + "".join(reversed(fault[2:])) + fault[1])
        return json.dumps(value).encode()
    except RecursionError:
        raise NotPlain("the value contains itself or is nested too deeply") from None
    except NotPlain:
        raise
    except (TypeError, ValueError, OverflowError) as failure:
        raise NotPlain(str(failure)) from None


def decode(data: bytes) -> Any:
    return json.loads(data)


def _fault(value: Any) -> list[str] | None:
    """What is wrong, the advice, and the way there from the inside out; none if nothing is wrong."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return [f"the dict key {key!r:.40}", ": JSON has string keys only; pass str(key) or a list of pairs"]
            if type(item) not in _LEAVES and (fault := _fault(item)) is not None:
                return [*fault, f"[{key!r:.40}]"]
        return None
    if isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            if type(item) not in _LEAVES and (fault := _fault(item)) is not None:
                return [*fault, f"[{place}]"]
        return None
    return [f"a {type(value).__name__}", _advice(value)]


def _advice(value: Any) -> str:
    if hasattr(value, "tolist"):  # arrays, tensors and NumPy's numbers
        return ": pass .tolist()" if len(getattr(value, "shape", ())) else ": pass .item()"
    return ": pass numbers, strings, None, lists and dicts of these"
