"""What differs between ranks that must bring the same, and who has what. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Callable


def differences(brought: Sequence[dict[str, Any]], name: Callable[[int], str]) -> str:
    """One line for each key that is not the same on all ranks, with who has what."""
    lines = []
    for key in sorted({key for part in brought for key in part}):
        groups: dict[str, list[int]] = {}
        for rank, part in enumerate(brought):
            groups.setdefault(json.dumps(part[key]) if key in part else "missing", []).append(rank)
        if len(groups) > 1:
            lines.append(
                f"  {key}: " + "; ".join(f"{value} on {', '.join(map(name, ranks))}" for value, ranks in groups.items())
            )
    shown, more = lines[:20], len(lines) - 20
    return "\n".join(shown + ([f"  and {more} more"] if more > 0 else []))
