"""Where a run's time went, from the flight records of its ranks. Pure.

Each host tells what its own records say (`told`, plain JSON data), the first puts it together (`together`). A rank
that is in an exchange either exchanges or waits for a slower rank: the last to come waits for nobody, so the shortest
time in an operation is that of the exchange, and the rest of everybody's is waiting.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ppfleet.watchdog.recorder import Entry, Record

_NEWEST = 256  # steps whose exchanges are looked at one by one: what every ring still holds, and fits into a message
_OVERLAPPED = "backward and all-reduce"  # what Comm.overlapped calls it
_SHAPE = re.compile(r"\[([\d, ]*)\] (\w+)")
_WIDTH = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Parts:
    """Seconds of a run, the mean over its ranks. They add up to `span`."""

    span: float  # from the first batch asked for to the end of the last step, evaluation or save
    compute: float
    communication: float
    stragglers: float  # in an exchange, for a slower rank
    data: float
    evaluation: float
    saving: float
    other: float
    steps: int  # batches of a rank
    looked_at: int  # steps by which communication and stragglers were told apart
    bytes: int  # that a rank brings to an exchange
    overlapped: bool  # on cards: the exchange goes on during the backward pass, and communication is both

    def a_step(self, *names: str) -> float:
        return float(sum(getattr(self, name) for name in names)) / max(1, self.steps)


def told(records: Sequence[Record]) -> dict[str, Any]:
    """What the ranks of this host say."""
    durations: dict[int, list[float]] = {}
    size, overlapped = 0, False
    for record in records:
        for entry in _exchanges(record)[-_NEWEST:]:
            durations.setdefault(entry.operation, []).append(entry.left - entry.entered)
            size = max(size, _bytes(entry.detail))
            overlapped = overlapped or entry.what == _OVERLAPPED
    whole = {number: each for number, each in durations.items() if len(each) == len(records)}
    return {
        "ranks": {str(record.facts["rank"]): vars(record.spent) for record in records},
        "operations": list(whole),
        "least": [round(1e6 * min(each)) for each in whole.values()],  # microseconds
        "mean": [round(1e6 * statistics.mean(each)) for each in whole.values()],
        "bytes": size,
        "overlapped": overlapped,
    }


def together(hosts: Iterable[dict[str, Any]]) -> Parts | None:
    """What all hosts said. Nothing where no rank has trained."""
    hosts = [host for host in hosts if host.get("ranks")]
    ranks: dict[str, dict[str, float]] = {rank: each for host in hosts for rank, each in host["ranks"].items()}
    if not ranks or not all(each["steps"] for each in ranks.values()):
        return None

    def mean(name: str) -> float:
        return statistics.mean(each[name] for each in ranks.values())

    common = set.intersection(*(set(host["operations"]) for host in hosts))
    exchange = waiting = 0.0
    least = [dict(zip(host["operations"], host["least"])) for host in hosts]
    means = [dict(zip(host["operations"], host["mean"])) for host in hosts]
    for number in common:
        exchange += min(each[number] for each in least)
        waiting += statistics.mean(each[number] for each in means)
    share = exchange / waiting if waiting else 1.0
    span, data, step, waited = mean("span"), mean("data"), mean("step"), mean("waited")
    return Parts(
        span=span,
        compute=step - waited,
        communication=waited * share,
        stragglers=waited * (1 - share),
        data=data,
        evaluation=mean("evaluate"),
        saving=mean("save"),
        other=span - data - step - mean("evaluate") - mean("save"),
        steps=round(mean("steps")),
        looked_at=len(common),
        bytes=max(int(host["bytes"]) for host in hosts),
        overlapped=any(host["overlapped"] for host in hosts),
    )


def _exchanges(record: Record) -> list[Entry]:
    """The operations in which steps waited for other ranks."""
    steps = [(entry.entered, entry.left) for entry in record.entries if entry.kind == "step" and entry.left]
    found, position = [], 0
    for entry in record.entries:
        if not (entry.waits and entry.operation and entry.left):
            continue
        while position < len(steps) and steps[position][1] < entry.left:
            position += 1
        if position < len(steps) and steps[position][0] <= entry.entered:
            found.append(entry)
    return found


def _bytes(detail: str) -> int:
    shape = _SHAPE.fullmatch(detail)
    if shape is None:
        return 0
    count = 1
    for number in shape[1].split(","):
        count *= int(number or 0)
    return count * _WIDTH.get(shape[2], 4)
