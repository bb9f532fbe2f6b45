"""What `make coverage` prints: statements and covered ones per folder of ppfleet/, from coverage's JSON report."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path


def table(report: dict[str, dict[str, dict[str, dict[str, int]]]]) -> list[str]:
    """One line per folder, and one per file of ppfleet/ itself; the total last."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in report["files"].items():
        parts = Path(name).parts
        key = "/".join(parts[:2]) + ("/" if len(parts) > 2 else "")
        for row in (sums[key], sums["total"]):
            row[0] += file["summary"]["num_statements"]
            row[1] += file["summary"]["covered_lines"]
    total = sums.pop("total")
    rows = [*sorted(sums.items(), key=lambda row: (not row[0].endswith("/"), row[0])), ("total", total)]
    lines = [f"{'folder':28}{'statements':>12}{'covered':>9}{'%':>7}"]
    return lines + [f"{name:28}{all_:12}{hit:9}{100 * hit / max(1, all_):7.1f}" for name, (all_, hit) in rows]


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
