"""Metrics as sums and counts over real samples, never as a mean of means.

A metric is a function `(output, *targets) -> one value per sample`, or `-> (sums, counts)`, both per sample, where
samples differ in how much there is to count (tokens, boxes). `Totals` adds them up without rounding, so neither the
order of the samples nor the number of ranks changes a digit of the result.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ppfleet.data.sampler import check_ends
from ppfleet.errors import DataError

_HELD = 64  # batches whose values stay on the device before they are fetched together
_READ = "samples read"  # cannot collide: a metric's name has no space
_MANTISSA, _HIGHEST = 53, 1024  # of a double: bits of the mantissa, largest exponent


class ExactSum:
    """A sum of doubles without rounding; NaN and infinities are kept apart and win."""

    def __init__(self, finite: Fraction = Fraction(0), special: float = 0.0) -> None:
        self.finite = finite
        self.special = special

    def add(self, values: np.ndarray[Any, Any]) -> None:
        finite = np.isfinite(values)
        self.special += sum(values[~finite].tolist())
        # Whole multiples of one power of two, so that a batch costs one fraction and not one for each value.
        mantissas, exponents = np.frexp(values[finite])
        lowest = int(exponents.min(initial=_HIGHEST))
        multiples = zip(np.ldexp(mantissas, _MANTISSA).astype(np.int64).tolist(), exponents.tolist())
        whole = sum(multiple << exponent - lowest for multiple, exponent in multiples)
        self.finite += whole * Fraction(2) ** (lowest - _MANTISSA)

    def __float__(self) -> float:
        return self.special if self.special else float(self.finite)


class Totals:
    """Named sums and counts of this rank; `merged` adds up those of all ranks."""

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
        # Not fetched here: every evaluation step would wait for the device.
        self._pending.append((name, values, weights, int(values.shape[0]) if real is None else real))
        if len(self._pending) >= _HELD:
            self._flush()

    def _flush(self) -> None:
        for name, values, weights, real in self._pending:
            self._sums.setdefault(name, ExactSum()).add(_doubles(values)[:real])
            counts = np.ones(real) if weights is None else _doubles(weights)[:real]
            if not np.isfinite(counts).all():
                raise DataError(f"metric {name!r} returned a weight that is NaN or infinite: weights must be finite")
            self._counts.setdefault(name, ExactSum()).add(counts)
        self._pending.clear()

    def to_json(self) -> dict[str, list[Any]]:
        """Plain JSON data from which another rank restores the same sums."""
        self._flush()
        sums = {
            name: [str(total.finite), repr(total.special), str(self._counts[name].finite)]
            for name, total in self._sums.items()
        }
        return {_READ: [self.read], **sums}

    @classmethod
    def merged(cls, parts: Sequence[Mapping[str, list[Any]]]) -> Totals:
        check_ends([part[_READ][0] for part in parts])
        totals = cls()
        for part in parts:
            for name, (finite, special, count) in ((name, sums) for name, sums in part.items() if name != _READ):
                into = totals._sums.setdefault(name, ExactSum())
                into.finite += Fraction(finite)
                into.special += float(special)
                totals._counts.setdefault(name, ExactSum()).finite += Fraction(count)
        return totals

    def means(self) -> dict[str, float]:
        """Sum over count for each name; NaN where nothing was counted."""
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
        with contextlib.suppress(TypeError, ValueError):  # not numbers: refused below
            values = np.array([float(number) for number in values])
    if len(getattr(values, "shape", ())) != 1:
        raise DataError(f"metric {name!r} must give one value per sample, shape [batch], not {values!r:.80}")
    return values


def _doubles(values: Any) -> np.ndarray[Any, Any]:
    if "bf" in str(values.dtype).lower():  # NumPy has no bfloat16 and would show its bits
        values = values.astype("float32")
    return np.asarray(values).astype(np.float64)


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
