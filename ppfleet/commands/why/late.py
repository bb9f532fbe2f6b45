"""Where nobody has given a verdict: who is late, who has left the loop, who is slower than the others. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ppfleet.commands.why.job_start import Attempt, Cause, Rank, named, place, span
from ppfleet.watchdog.recorder import Entry

_PATIENCE = 5.0  # seconds that a wait may always last
_STEPS = 10.0  # … or this many steps
_SLOWER = 1.15
_ENOUGH = 20  # steps, below which nobody is called slow
_NOISE = 0.001  # seconds of difference that mean nothing
_HINTS = {
    "data": "a slow disk or data set",
    "save": "a slow disk",
    "export": "a slow disk",
    "work": "a slow disk",
}


def hang(ranks: Sequence[Rank], until: float) -> Cause | None:
    """Why nothing goes on at that time: somebody is stopped, late, in another operation, or the network fails."""
    stopped = [rank for rank in ranks if rank.state == "stopped"]
    if stopped:
        first = min(stopped, key=lambda rank: rank.seen)
        what = f"{first.name} is stopped (process {first.record.facts.get('pid')}){_inside(first)}"
        return Cause("stopped", f"{what}; `kill -CONT` lets it go on", (first.number,), first.seen)
    waiting = [rank for rank in ranks if rank.waits]
    late = [rank for rank in ranks if not rank.waits and rank.said != "ended"]
    since = min((entry.entered for entry in map(_open, waiting)), default=max(rank.progress for rank in ranks))
    if until - since < max(_PATIENCE, _STEPS * _step_time(ranks)):
        return None
    found = uneven(ranks) or _different_ways(waiting)
    if found is not None:
        return found
    newest = max((_open(rank).operation for rank in waiting), default=0)
    late = late or [rank for rank in waiting if _open(rank).operation < newest]
    late = late or [rank for rank in ranks if rank.said == "ended"]
    if not late:
        entry = _open(waiting[0])
        text = f"all ranks have waited in {place(entry)} for {span(until - since)}: the network between them fails"
        return Cause("stall", text, (), since)
    return _late(late, [rank for rank in waiting if rank not in late], until)


def uneven(ranks: Sequence[Rank]) -> Cause | None:
    """Somebody has left the loop of steps while others wait for its gradients."""
    waiting = [rank for rank in ranks if _for_gradients(rank)]
    gone_on = [rank for rank in ranks if rank not in waiting and _out_of_loop(rank)]
    if not waiting or not gone_on:
        return None
    first = min(gone_on, key=lambda rank: rank.progress)
    entry = first.open
    now = "it has ended" if first.said == "ended" else f"it is in {place(entry)}" if entry else "it is in its own code"
    last = waiting[0].last
    wait = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'}" + (f" in {place(last)}" if last else "")
    text = f"{first.name} left its loop after step {first.steps} ({now}) while {wait}: it had fewer batches"
    return Cause(
        "uneven", f"{text}; every rank needs the same number, as `job.loader` gives", (first.number,), first.progress
    )


def out_of_loop(ranks: Sequence[Rank]) -> list[Rank]:
    """Where the ranks went different ways: those that were in no step any more while others exchanged gradients."""
    newest = {rank: next((entry for entry in reversed(rank.entries) if entry.operation), None) for rank in ranks}
    if not any(entry and "gradient" in entry.what for entry in newest.values()):
        return []
    return [
        rank for rank, entry in newest.items() if entry and "gradient" not in entry.what and not _in_step(rank, entry)
    ]


def _in_step(rank: Rank, entry: Entry) -> bool:
    """A step that lasts until the next operation began, or still does, has it inside."""
    steps = [each for each in rank.entries if each.kind == "step" and each.number < entry.number]
    return bool(steps) and (not steps[-1].left or steps[-1].left > entry.entered)


def _for_gradients(rank: Rank) -> bool:
    """Whether it waits for others in a step, or failed there because they did not come."""
    if rank.said == "exception":
        return rank.words.get("type") == "CommError" and "gradient" in rank.text
    return rank.waits and "gradient" in _open(rank).what


def _out_of_loop(rank: Rank) -> bool:
    if rank.said:
        return rank.said == "ended"
    entry = rank.open
    if entry is None:
        return bool(rank.entries) and rank.state != "gone"
    return entry.kind in ("save", "export", "evaluate") or (entry.waits and "gradient" not in entry.what)


def _different_ways(waiting: Sequence[Rank]) -> Cause | None:
    for other in waiting[1:]:
        mine, theirs = _open(waiting[0]), _open(other)
        if mine.operation == theirs.operation and (mine.what, mine.detail) != (theirs.what, theirs.detail):
            text = (
                f"the ranks went different ways: {waiting[0].name} waits in {_shaped(mine)}, {other.name} in "
                f"{_shaped(theirs)}; every rank must make the same calls in the same order"
            )
            return Cause("mismatch", text, (), min(mine.entered, theirs.entered))
    return None


def _late(late: Sequence[Rank], waiting: Sequence[Rank], until: float) -> Cause:
    """The one of them that has stood still the longest, and who waits for it in what."""
    first = min(late, key=lambda rank: rank.progress)
    entry = first.open
    inside = place(entry) if entry else f"its own code after {place(first.last)}" if first.last else "its own code"
    text = f"{first.name} has been in {inside} for {span(until - first.progress)}"
    if first.said == "ended":
        text = f"{first.name} has ended"
    if waiting:
        together = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        text += f" while {together} in {place(_open(waiting[0]))}"
    hint = _HINTS.get(entry.kind if entry else "")
    return Cause("stall", f"{text}: {hint}?" if hint else text, (first.number,), first.progress)


def _open(rank: Rank) -> Entry:
    if rank.open is None:
        raise ValueError(f"{rank.name} is in nothing")
    return rank.open


def _inside(rank: Rank) -> str:
    return f" in {place(rank.last)}" if rank.last else ""


def _shaped(entry: Entry) -> str:
    return f"{place(entry)}{f' with {entry.detail}' if entry.detail else ''}"


def _step_time(ranks: Sequence[Rank]) -> float:
    """Seconds that a step takes, where one is known."""
    taken = [
        entry.left - entry.entered for rank in ranks for entry in rank.entries if entry.kind == "step" and entry.left
    ]
    return statistics.median(taken) if taken else 0.0


def straggler(attempt: Attempt) -> Cause | None:
    """A rank for which the others regularly wait: by its own time for a step, without its waits for others."""
    times = {rank.number: _own_times(rank.entries) for rank in attempt.ranks}
    common = set.intersection(*(set(each) for each in times.values()))
    if len(times) < 2 or len(common) < _ENOUGH:
        return None
    data = {rank: statistics.median(each[step][0] for step in common) for rank, each in times.items()}
    work = {rank: statistics.median(each[step][1] for step in common) for rank, each in times.items()}
    own = {rank: statistics.median(sum(each[step]) for step in common) for rank, each in times.items()}
    slow = max(own, key=lambda rank: own[rank])
    rest = statistics.median(own[rank] for rank in own if rank != slow)
    if own[slow] < _SLOWER * rest or own[slow] - rest < _NOISE:
        return None
    rank = attempt.rank(slow)
    name = rank.name if rank else f"rank {slow}"
    excess = {
        what: (part[slow], statistics.median(part[rank] for rank in part if rank != slow))
        for what, part in (("data", data), ("computing", work))
    }
    what = max(excess, key=lambda each: excess[each][0] - excess[each][1])
    mine, others = (1e3 * seconds for seconds in excess[what])
    text = (
        f"{name} is {100 * (own[slow] / rest - 1):.0f} % slower than the others: its {what} takes {mine:.0f} ms of a "
        f"step's {1e3 * own[slow]:.0f} (others {others:.0f})"
    )
    return Cause("straggler", text, (slow,))


def _own_times(entries: Sequence[Entry]) -> dict[int, tuple[float, float]]:
    """step -> seconds of waiting for data, and of computing: the step without its waits for other ranks."""
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
