"""The figures in a command's log: TIPC's benchmark block, and the `ips` of training. Pure."""

from __future__ import annotations

import re
import statistics
from typing import Any

MISSING = {
    "benchmark": "its log has no benchmark block (Perf info with preprocess_time, inference_time, postprocess_time)",
    "ips": "its log has no `ips:` to read the training speed from",
}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_ROWS = {
    "cpu_rss_mb": rf"cpu_rss\(MB\): {_NUMBER}",
    "total_s": rf"total time spent\(s\): {_NUMBER}",
    "preprocess_ms": rf"preprocess_time\(ms\): {_NUMBER}",
    "inference_ms": rf"inference_time\(ms\): {_NUMBER}",
    "postprocess_ms": rf"postprocess_time\(ms\): {_NUMBER}",
    "data_num": rf"data_num: {_NUMBER}",
    "inference_p50_ms": rf"inference_time\(ms\) p50: {_NUMBER}",
    "inference_p99_ms": rf"inference_time\(ms\) p50: .*p99: {_NUMBER}",
    "images_per_s": rf"images/s: {_NUMBER}",
}
_NEEDED = ("total_s", "preprocess_ms", "inference_ms", "postprocess_ms")


def found(kind: str, log: str) -> dict[str, Any] | None:
    """What the log tells of that kind; None where it does not tell it."""
    return _benchmark(log) if kind == "benchmark" else _ips(log)


def _benchmark(log: str) -> dict[str, Any] | None:
    _, banner, block = log.rpartition(" Perf info -")
    if not banner:
        return None
    # The rows before Perf info belong to the block too; the last of each counts.
    values = {name: matches[-1] for name, row in _ROWS.items() if (matches := re.findall(row, log))}
    inside = {name: re.search(row, block) for name, row in _ROWS.items()}
    if not all(inside[name] for name in _NEEDED):
        return None
    return {name: float(value) for name, value in values.items()}


def _ips(log: str) -> dict[str, Any] | None:
    values = [float(value) for value in re.findall(rf"\bips: {_NUMBER}", log)]
    if not values:
        return None
    steady = values[1:] or values  # the first line includes the start
    return {"images_per_s": statistics.median(steady), "lines": len(values)}
