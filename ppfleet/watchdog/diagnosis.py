"""From what all ranks say of themselves: is somebody stuck, who is it, and what do the others wait for? Pure.

Each rank tells rank 0 once a second what it is in. A rank that waits for others is never the one who is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

BLOCKED = "its process is stopped, or its Python is blocked"
_SURE = 2.5  # seconds that two ranks must have been where they are, by their own word, to have gone different ways
_NEW = 1.5  # seconds, a bit more than between two beats: for that verdict, nothing older counts
_WORKS = 0.01  # share of a core below which a process does nothing
_FRESH = 3.0  # seconds after which a beat says nothing about now


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a job is ended."""

    stall: float = 25.0  # while others wait in a collective: gloo would abort after 30
    long: float = 1800.0  # where nobody waits in a collective, and no work is done

    @property
    def silent(self) -> float:
        """While others wait on the store for a rank that does not answer: some library may hold its Python up."""
        return min(2 * self.stall, self.long)


@dataclass(frozen=True)
class Beat:
    """What a rank is in. Seconds are counted from `heard`, so that clocks need not agree."""

    rank: int
    heard: float = 0.0  # by the clock of whoever judges
    operation: int = 0  # number of the newest collective or meeting
    kind: str = ""  # of what it is in; "" between two entries
    what: str = ""
    detail: str = ""
    where: str = ""
    waits: bool = False
    age: float = 0.0  # in that
    idle: float = 0.0  # since anything began or ended
    at: str = ""  # where the user's code is: `evaluate` (tools/train.py:71)
    step: int = 0
    recent: Sequence[Sequence[object]] = ()  # number, what and detail of its newest operations
    busy: float = 1.0  # share of a core that it and its workers have used while idle

    def waited(self, now: float) -> float:
        return self.age + now - self.heard

    def idled(self, now: float) -> float:
        return self.idle + now - self.heard


@dataclass(frozen=True)
class Verdict:
    """Why the job must end: `kind` is stall or mismatch; `culprit` a rank, or -1 where nobody is late alone."""

    kind: str
    text: str
    culprit: int = -1


def judge(beats: Sequence[Beat], now: float, limits: Limits, name: Callable[[int], str]) -> Verdict | None:
    """The verdict over the newest beat of each rank, or nothing while all may still be well."""
    return (
        _different_ways(beats, now, name)
        or _late(beats, now, limits, name)
        or _silent(beats, now, limits, name)
        or _idle(beats, now, limits, name)
    )


def _different_ways(beats: Sequence[Beat], now: float, name: Callable[[int], str]) -> Verdict | None:
    """Two ranks wait, and at the number where one of them is the other was in something else: neither will ever come.
    (A rank may also be behind in the same operation, because the network has not brought it the end of it.)"""
    stuck = [b for b in beats if b.waits and b.age > _SURE and now - b.heard < _NEW and b.kind != "start"]
    for other in stuck[1:]:
        behind, ahead = sorted((stuck[0], other), key=lambda b: b.operation)
        there = next((op for op in ahead.recent if op[0] == behind.operation), None)
        if there is not None and tuple(there[1:]) != (behind.what, behind.detail):
            then = "" if ahead.operation == behind.operation else f", after {there[1]} #{there[0]}"
            words = {behind.rank: in_words(behind), ahead.rank: in_words(ahead) + then}
            (one, first), (two, second) = sorted(words.items())
            after = f" after step {behind.step}" if behind.step == ahead.step else ""
            text = (
                f"the ranks went different ways{after}: {name(one)} waits in {first}, {name(two)} in {second}; "
                f"every rank must make the same calls in the same order"
            )
            return Verdict("mismatch", text)
    return None


def _late(beats: Sequence[Beat], now: float, limits: Limits, name: Callable[[int], str]) -> Verdict | None:
    """Somebody has waited too long: the one who is late has not come to that operation."""
    heard = [b for b in beats if b.waits and now - b.heard < _FRESH]
    waiting = [b for b in heard if b.waited(now) > (limits.stall if b.kind == "collective" else limits.silent)]
    if not waiting:
        return None
    first = max(waiting, key=lambda b: b.operation)
    late = [b for b in beats if b.operation < first.operation or b not in heard]
    if not late:
        text = (
            f"all ranks have waited in {in_words(first)} for {first.waited(now):.0f} s: the network between them fails"
        )
        return Verdict("stall", text)
    culprit = max(late, key=lambda b: b.idled(now))
    quiet = now - culprit.heard
    works = quiet < _FRESH and (culprit.busy >= _WORKS or first.waited(now) < limits.long)
    if first.kind != "collective" and (works or _FRESH < quiet < limits.silent):
        return None  # through the store, work may take as long as it takes
    ranks = [b.rank for b in heard if b.operation == first.operation]
    others = listed(ranks) + (" wait" if len(ranks) > 1 else " waits")
    if quiet > _FRESH:
        did = f"has not answered for {quiet:.0f} s ({BLOCKED}; last seen in {place(culprit)})"
    else:
        did = f"has been in {place(culprit)} for {culprit.idled(now):.0f} s"
    text = f"{name(culprit.rank)} {did} while {others} in {in_words(first)}"
    return Verdict("stall", text, culprit.rank)


def _silent(beats: Sequence[Beat], now: float, limits: Limits, name: Callable[[int], str]) -> Verdict | None:
    """A rank whose host answers, but not its watch: stopped, or Python held up by one call. Nobody waits for it in a
    collective: that would be `_late`."""
    for beat in beats:
        quiet = now - beat.heard
        if quiet > limits.long:
            text = f"{name(beat.rank)} has not answered for {quiet:.0f} s ({BLOCKED}; last seen in {place(beat)})"
            return Verdict("stall", text, beat.rank)
    return None


def _idle(beats: Sequence[Beat], now: float, limits: Limits, name: Callable[[int], str]) -> Verdict | None:
    """Nobody waits for it, but it neither goes on nor computes: a data set on a dead disk, a worker that hangs."""
    for beat in beats:
        if beat.kind and not beat.waits and beat.idled(now) > limits.long and beat.busy < _WORKS:
            text = f"{name(beat.rank)} has been in {place(beat)} for {beat.idled(now):.0f} s and does nothing"
            return Verdict("stall", text, beat.rank)
    return None


def in_words(beat: Beat) -> str:
    """all-reduce of gradients #1284 ([1519906] float32, step 640, tools/train.py:66)"""
    facts = [beat.detail, f"step {beat.step}", beat.where]
    return f"{beat.what} #{beat.operation} ({', '.join(filter(None, facts))})"


def place(beat: Beat) -> str:
    """Where a late rank is: the library's word for it, and the line of the user's code."""
    line = beat.at or beat.where
    if beat.kind in ("", "step", "mark"):
        return line or "the script"
    return f"{beat.what} ({line})" if line else beat.what


def listed(ranks: Sequence[int]) -> str:
    """rank 1; ranks 0–2 and 5"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs]
    text = " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {text}"
