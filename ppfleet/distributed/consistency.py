"""Ranks that must bring the same: compared by digest, and where they differ, who has what."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ppfleet.distributed.collectives import Comm
from ppfleet.distributed.world import World
from ppfleet.errors import MismatchError


def check_same(comm: Comm, what: str, mine: dict[str, Any]) -> None:
    """Raise on every rank, listing what differs on which rank, unless all brought the same (plain JSON data)."""
    text = json.dumps(mine, sort_keys=True)
    digests = comm.gather(hashlib.sha256(text.encode()).hexdigest(), f"check of {what}")
    if len(set(digests)) == 1:
        return
    raise MismatchError(
        f"the ranks brought different {what}:\n" + differences(comm.world, comm.gather(mine, f"check of {what}"))
    )


def differences(world: World, brought: list[dict[str, Any]]) -> str:
    """One line for each key that is not the same on all ranks, with who has what."""
    lines = []
    for key in sorted({key for part in brought for key in part}):
        groups: dict[str, list[int]] = {}
        for rank, part in enumerate(brought):
            groups.setdefault(json.dumps(part[key]) if key in part else "missing", []).append(rank)
        if len(groups) > 1:
            lines.append(
                f"  {key}: " + "; ".join(f"{value} on {_ranks(world, ranks)}" for value, ranks in groups.items())
            )
    shown, more = lines[:20], len(lines) - 20
    return "\n".join(shown + ([f"  and {more} more"] if more > 0 else []))


def _ranks(world: World, ranks: list[int]) -> str:
    return ", ".join(world.name(rank) for rank in ranks)
