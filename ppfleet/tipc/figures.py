"""Reads measurements from a command's log: TIPC's benchmark block, and the `ips` of training."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

MISSING = {
    "benchmark": "its log has no benchmark block (Perf info with preprocess_time, inference_time, postprocess_time)",
    "ips": "its log has no `ips:` with the training speed",
}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_ROWS = {
    "data_num": rf"data_num: {_NUMBER}",
    "cpu_rss_mb": rf"cpu_rss\(MB\): {_NUMBER}",
    "total_s": rf"total time spent\(s\): {_NUMBER}",
    "preprocess_ms": rf"preprocess_time\(ms\): {_NUMBER}",
    "inference_ms": rf"inference_time\(ms\): {_NUMBER}",
    "postprocess_ms": rf"postprocess_time\(ms\): {_NUMBER}",
    "inference_p50_ms": rf"inference_time\(ms\) p50: {_NUMBER}",
    "inference_p99_ms": rf"inference_time\(ms\) p50: .*p99: {_NUMBER}",
    "images_per_s": rf"images/s: {_NUMBER}",
}
_NEEDED = {"total_s", "preprocess_ms", "inference_ms", "postprocess_ms"}
_BANNER = " Perf info -"


def read(kind: str, log: Path) -> dict[str, float] | None:
    """The log's measurements of that kind; None if it has none."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return _benchmark(lines) if kind == "benchmark" else _ips(lines)


def _benchmark(lines: Iterable[str]) -> dict[str, float] | None:
    values: dict[str, float] = {}
    after: set[str] = set()  # names seen after the last banner
    banner = False
    for line in lines:
        if _BANNER in line:
            banner, after = True, set()
        for name, row in _ROWS.items():
            if (match := re.search(row, line)) and math.isfinite(value := float(match[1])):
                values[name] = value
                after.add(name)
    return values if banner and after >= _NEEDED else None


def _ips(lines: Iterable[str]) -> dict[str, float] | None:
    values = [float(match) for line in lines for match in re.findall(rf"\bips: {_NUMBER}", line)]
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    # The first of several lines includes the start-up.
    return {"images_per_s": statistics.median(values[1:] or values)}
