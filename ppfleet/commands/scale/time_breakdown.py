"""Where a run's time went, from the flight records of its ranks. Pure.

Each host summarises its own records (`host_times`, plain JSON data), the first host combines them (`combine`). A rank
in an exchange either exchanges or waits for a slower rank. The last rank to arrive does not wait, so the shortest time
in an operation is the exchange itself, and what the other ranks spend beyond that is waiting.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ppfleet.watchdog.recorder import Entry, Record

_NEWEST = 256  # exchanges that are examined one by one: every ring still holds them, and they fit into a message
_OVERLAPPED = "backward and all-reduce"  # the name that Stepper gives it
_SHAPE = re.compile(r"\[([\d, ]*)\] (\w+)")
_WIDTH = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Parts:
    """Seconds of a run, averaged over its ranks. They add up to `span`."""

    span: float  # from requesting the first batch to the end of the last step, evaluation or save
    compute: float
    communication: float
    stragglers: float  # waiting in an exchange for a slower rank
    data: float
    evaluation: float
    saving: float
    other: float
    steps: int  # batches per rank
    looked_at: int  # steps used to separate communication from stragglers
    bytes: int  # that a rank contributes to an exchange
    overlapped: bool  # on cards the exchange runs during the backward pass, and `communication` is both

    def per_step(self, *names: str) -> float:
        return float(sum(getattr(self, name) for name in names)) / max(1, self.steps)


def host_times(records: Sequence[Record]) -> dict[str, Any]:
    """The times of this host's ranks."""
    durations: dict[int, list[float]] = {}
    size, overlapped = 0, False
    for record in records:
        for entry in _exchanges(record)[-_NEWEST:]:
            durations.setdefault(entry.operation, []).append(entry.left - entry.entered)
            size = max(size, _bytes(entry.detail))
            overlapped = overlapped or entry.what == _OVERLAPPED
    complete = {number: seconds for number, seconds in durations.items() if len(seconds) == len(records)}
    return {
        "ranks": {str(record.facts["rank"]): vars(record.spent) for record in records},
        "operations": list(complete),
        "least": [round(1e6 * min(seconds)) for seconds in complete.values()],  # microseconds
        "mean": [round(1e6 * statistics.mean(seconds)) for seconds in complete.values()],
        "bytes": size,
        "overlapped": overlapped,
    }


def combine(hosts: Iterable[dict[str, Any]]) -> Parts | None:
    """The times of all hosts as one; None if no rank has trained."""
    hosts = [host for host in hosts if host.get("ranks")]
    ranks: dict[str, dict[str, float]] = {rank: spent for host in hosts for rank, spent in host["ranks"].items()}
    if not ranks or not all(spent["steps"] for spent in ranks.values()):
        return None

    def mean(name: str) -> float:
        return statistics.mean(spent[name] for spent in ranks.values())

    common = set.intersection(*(set(host["operations"]) for host in hosts))
    exchange = inside = 0.0  # the exchanges alone; all time inside them, with the waiting
    least = [dict(zip(host["operations"], host["least"])) for host in hosts]
    means = [dict(zip(host["operations"], host["mean"])) for host in hosts]
    for number in common:
        exchange += min(host[number] for host in least)
        inside += statistics.mean(host[number] for host in means)
    share = exchange / inside if inside else 1.0
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
    exchanges, position = [], 0
    for entry in record.entries:
        if not (entry.waits and entry.operation and entry.left):
            continue
        while position < len(steps) and steps[position][1] < entry.left:
            position += 1
        if position < len(steps) and steps[position][0] <= entry.entered:
            exchanges.append(entry)
    return exchanges


def _bytes(detail: str) -> int:
    shape = _SHAPE.fullmatch(detail)
    if shape is None:
        return 0
    count = 1
    for number in shape[1].split(","):
        count *= int(number or 0)
    return count * _WIDTH.get(shape[2], 4)
