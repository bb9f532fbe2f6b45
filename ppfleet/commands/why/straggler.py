"""Which rank is slower than the others, and whether because of data or of computing. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ppfleet.commands.why.job_start import Attempt
from ppfleet.watchdog.events import Code, Event
from ppfleet.watchdog.recorder import Entry

_SLOWER = 1.15  # times the others' time for a step
_MIN_STEPS = 20  # fewer say nothing
_NOISE = 0.001  # seconds of difference that mean nothing


def straggler(attempt: Attempt) -> Event | None:
    """A rank that the others regularly wait for: compared by the time for a step, without waiting for other ranks."""
    times = {rank.number: _own_times(rank.entries) for rank in attempt.ranks}
    common = set.intersection(*(set(steps) for steps in times.values()))
    if len(times) < 2 or len(common) < _MIN_STEPS:
        return None
    data = {rank: statistics.median(steps[step][0] for step in common) for rank, steps in times.items()}
    work = {rank: statistics.median(steps[step][1] for step in common) for rank, steps in times.items()}
    own = {rank: statistics.median(sum(steps[step]) for step in common) for rank, steps in times.items()}
    slow = max(own, key=lambda rank: own[rank])
    rest = statistics.median(own[rank] for rank in own if rank != slow)
    if own[slow] < _SLOWER * rest or own[slow] - rest < _NOISE:
        return None
    excess = {
        name: (part[slow], statistics.median(part[rank] for rank in part if rank != slow))
        for name, part in (("data", data), ("computing", work))
    }
    part = max(excess, key=lambda name: excess[name][0] - excess[name][1])
    mine, others = (1e3 * seconds for seconds in excess[part])
    fields = {"percent": 100 * (own[slow] / rest - 1), "part": part, "mine": mine, "others": others}
    rank = attempt.rank(slow)
    host = rank.record.facts.get("address", "") if rank else ""
    return Event(Code.STRAGGLER, slow, host, fields={**fields, "step": 1e3 * own[slow]})


def _own_times(entries: Sequence[Entry]) -> dict[int, tuple[float, float]]:
    """step -> seconds spent waiting for data, and computing (the step without its waits for other ranks)."""
    data: dict[int, float] = {}
    work: dict[int, float] = {}
    waits = [entry for entry in entries if entry.waits and entry.left]
    for entry in entries:
        if not entry.left:
            continue
        if entry.kind == "data":
            data[entry.step] = data.get(entry.step, 0.0) + entry.left - entry.entered
        elif entry.kind == "step":
            work[entry.step] = work.get(entry.step, 0.0) + entry.left - entry.entered
    spans = [entry for entry in entries if entry.kind == "step" and entry.left]
    position = 0
    for wait in waits:  # both are in order of time, so one pass finds the step around each wait
        while position < len(spans) and spans[position].left < wait.left:
            position += 1
        if position < len(spans) and spans[position].entered <= wait.entered:
            work[spans[position].step] -= wait.left - wait.entered
    return {step: (data.get(step, 0.0), seconds) for step, seconds in work.items()}
