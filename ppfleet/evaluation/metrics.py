"""Metrics as sums and counts over real samples; never a mean of means.

A metric is a function `(output, *targets) -> one value per sample`, or `-> (sums, counts)`, both per sample, where a
sample holds more or less than one thing to count (tokens, boxes). `Totals` adds them up exactly: the sum is kept as a
whole number, so neither the order of the samples nor the number of ranks can change a digit of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ppfleet.data.sampler import check_ends
from ppfleet.errors import DataError

_HELD = 64  # batches' values kept before they are fetched
_READ = "samples read"  # no metric has a name with a space
_BITS = 1074  # every finite double is a whole multiple of 2**-1074


class ExactSum:
    """A sum of doubles without rounding; NaN and infinities are carried along."""

    def __init__(self, whole: int = 0, special: float = 0.0) -> None:
        self.whole = whole
        self.special = special

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            if math.isfinite(value):
                top, bottom = value.as_integer_ratio()
                self.whole += top << (_BITS + 1 - bottom.bit_length())
            else:
                self.special += value

    def __float__(self) -> float:
        # Python divides whole numbers with one correct rounding, whatever their size.
        return self.special if self.special else self.whole / (1 << _BITS)


class Totals:
    """Named sums and counts of this rank; `merged` joins those of all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, ExactSum] = {}
        self._counts: dict[str, ExactSum] = {}
        self._pending: list[tuple[str, Any, Any, int]] = []
        self.read = 0  # samples that all ranks have read, by this rank's count

    def add(self, name: str, values: Any, weights: Any = None, real: int | None = None) -> None:
        """Add one value per sample (array, tensor or list); of a padded batch only the first `real` count."""
        values = per_sample(name, values)
        weights = None if weights is None else per_sample(name, weights)
        if weights is not None and len(weights) != len(values):
            raise DataError(f"metric {name!r} returned {len(values)} values and {len(weights)} weights")
        # Held as they come: fetching from a card here would make every evaluation step wait for it.
        self._pending.append((name, values, weights, int(values.shape[0]) if real is None else real))
        if len(self._pending) >= _HELD:
            self._flush()

    def _flush(self) -> None:
        for name, values, weights, real in self._pending:
            self._sums.setdefault(name, ExactSum()).add(_doubles(values)[:real])
            counts = [1.0] * real if weights is None else _doubles(weights)[:real]
            if not all(map(math.isfinite, counts)):
                raise DataError(f"metric {name!r} returned a weight that is NaN or infinite: weights must be finite")
            self._counts.setdefault(name, ExactSum()).add(counts)
        self._pending.clear()

    def to_json(self) -> dict[str, list[Any]]:
        """Plain data that loses nothing on its way to another rank."""
        self._flush()
        sums = {
            name: [hex(total.whole), repr(total.special), hex(self._counts[name].whole)]
            for name, total in self._sums.items()
        }
        return {_READ: [self.read], **sums}

    @classmethod
    def merged(cls, parts: Sequence[Mapping[str, list[Any]]]) -> Totals:
        check_ends([part[_READ][0] for part in parts])
        totals = cls()
        for part in parts:
            for name, (whole, special, count) in ((name, sums) for name, sums in part.items() if name != _READ):
                into = totals._sums.setdefault(name, ExactSum())
                into.whole += int(whole, 16)
                into.special += float(special)
                totals._counts.setdefault(name, ExactSum()).whole += int(count, 16)
        return totals

    def means(self) -> dict[str, float]:
        """Sum over count, of each name; NaN where nothing was counted."""
        self._flush()
        return {
            name: float(total) / float(self._counts[name]) if float(self._counts[name]) else math.nan
            for name, total in self._sums.items()
        }

    def total(self, name: str) -> float:
        """The sum itself."""
        self._flush()
        return float(self._sums[name])


def per_sample(name: str, values: Any) -> Any:
    """The array or tensor of one dimension that a metric returned; a list of numbers becomes one."""
    if isinstance(values, list) and all(len(getattr(number, "shape", ())) == 0 for number in values):
        with contextlib.suppress(TypeError, ValueError):  # no numbers: refused below
            values = np.array([float(number) for number in values])
    if len(getattr(values, "shape", ())) != 1:
        raise DataError(f"metric {name!r} must give one value per sample, shape [batch], not {values!r:.80}")
    return values


def _doubles(values: Any) -> list[float]:
    if "bf" in str(values.dtype).lower():  # NumPy has no bfloat16 and would show its bits
        values = values.astype("float32")
    numbers: list[float] = np.asarray(values).astype(np.float64).tolist()
    return numbers


def top1(output: Any, label: Any) -> Any:
    """1 where the highest score is the label's."""
    return topk(output, label, 1)


def top5(output: Any, label: Any) -> Any:
    """1 where the label is among the five highest scores (all of them, if there are fewer)."""
    return topk(output, label, 5)


def topk(output: Any, label: Any, k: int) -> Any:
    """1 where the label is among the k highest scores."""
    import paddle

    best = paddle.topk(output, min(k, int(output.shape[-1])), axis=-1)[1]
    return (best == label.reshape([-1, 1])).any(axis=-1).astype("float32")


def cross_entropy(output: Any, label: Any) -> Any:
    """The loss of each sample."""
    import paddle.nn.functional as F

    return F.cross_entropy(output.astype("float32"), label.reshape([-1, 1]), reduction="none").reshape([-1])
