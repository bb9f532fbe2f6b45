"""Whether a metric is the same on more ranks: the mean difference over seeds with its t interval. Pure.

Runs with the same seed start with the same weights and see the samples in the same order, so the effect of the seed
cancels when they are compared in pairs; the effect of the ranks, and rounding, remain. Few seeds give a wide interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

CONFIDENCE = 0.95
PARITY, LOWER, HIGHER, UNKNOWN = "parity", "lower", "higher", "cannot tell"


@dataclass(frozen=True)
class Verdict:
    word: str
    sentence: str
    seeds: int
    difference: float | None = None  # mean over seeds
    low: float | None = None  # the interval of the mean
    high: float | None = None


def compare(
    base: Mapping[int, float], other: Mapping[int, float], tolerance: float, resolution: float = 0.0
) -> Verdict:
    """Compare the metrics of two points, by seed. `tolerance` is the largest difference that counts as equal,
    `resolution` the smallest one that the metric can show, such as one sample of the validation set."""
    pairs = [(base[seed], other[seed]) for seed in base if seed in other]
    finite = [b - a for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if len(finite) < len(pairs):
        return Verdict(UNKNOWN, "cannot tell: a metric is not finite", len(pairs))
    if len(finite) < 2:
        return Verdict(UNKNOWN, "cannot tell: one seed shows no spread; give more --seeds", len(finite))
    mean = statistics.mean(finite)
    # Metrics rounded to whole samples may be equal by chance: assume at least the spread of the rounding.
    spread = max(statistics.stdev(finite), resolution / math.sqrt(6))
    half = t_quantile(len(finite) - 1) * spread / math.sqrt(len(finite))
    low, high = mean - half, mean + half
    shown = f"{mean:+.4g}, {CONFIDENCE:.0%} interval {low:+.4g} to {high:+.4g}, {len(finite)} seeds in pairs"
    if -tolerance <= low and high <= tolerance:
        word, sentence = PARITY, f"parity: the difference is within ±{tolerance:.4g} ({shown})"
    elif high < 0:
        word, sentence = LOWER, f"lower ({shown})"
    elif low > 0:
        word, sentence = HIGHER, f"higher ({shown})"
    else:
        word = UNKNOWN
        sentence = f"cannot tell: the interval contains 0 and exceeds ±{tolerance:.4g} ({shown}); more seeds narrow it"
    return Verdict(word, sentence, len(finite), mean, low, high)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t distribution, in standard errors."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Probability of [-t, t] under Student's distribution, as a finite sum (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (number - 1) / number * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
