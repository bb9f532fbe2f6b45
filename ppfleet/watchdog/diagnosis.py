"""From where all ranks are: is the job stuck, which rank caused it, and what do the others wait for? Pure.

`diagnose` is called by rank 0's watchdog, which gets a beat from each rank once a second, and by `why`, which reads the
same from flight records. A rank that waits for others is never the late one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ppfleet.limits import BEAT_FRESH, BEAT_NEW, DIVERGED, STALL, STALL_LONG
from ppfleet.watchdog.events import Code, Event, Kind, Operation, Waiting

_WORKS = 0.01  # share of a core below which a process does nothing


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a job is ended."""

    stall: float = STALL  # while others wait in a collective
    long: float = STALL_LONG  # where nobody waits in a collective, and no work is done
    stopped: float = float("inf")  # while a process is stopped
    first: float = 0.0  # at least, while others wait in a collective and some rank has not made a step yet
    asynchronous: bool = False  # a device computes behind Python, which it may block: a silent rank may be waiting
    outside: bool = False  # whether a rank that is in nothing counts; live, that may be a person at a notebook

    @property
    def silent(self) -> float:
        """While others wait on the store for a rank that does not answer: some library may hold its Python up."""
        return min(2 * self.stall, self.long)


@dataclass(frozen=True)
class Beat:
    """Where a rank is. Seconds are counted from `heard`, so that clocks need not agree."""

    rank: int
    heard: float = 0.0  # by the clock of the process that diagnoses
    host: str = ""
    operations: int = 0  # number of its newest collective or meeting
    inside: Operation = field(default_factory=Operation)
    waits: bool = False
    in_step: bool = False  # whether what it is in belongs to a step
    age: float = 0.0  # in that
    idle: float = 0.0  # since anything began or ended
    step: int = 0
    recent: Sequence[Operation] = ()  # its newest numbered ones
    busy: float = 1.0  # share of a core that it and its workers have used while idle
    ended: bool = False  # in order, and others may still wait for it
    warm: bool = True  # whether it has made a step
    stopped: int = 0  # the number of its process, where that is stopped

    @classmethod
    def from_json(cls, data: Mapping[str, Any], **more: Any) -> Beat:
        inside, recent = Operation(**data["inside"]), [Operation(**each) for each in data["recent"]]
        return cls(**{**data, "inside": inside, "recent": recent, **more})

    def waited(self, now: float) -> float:
        return self.age + now - self.heard

    def idled(self, now: float) -> float:
        return self.idle + now - self.heard

    def event(self, code: Code, now: float, **fields: Any) -> Event:
        """About this rank, which has been where it is since it last went on, or has not answered."""
        quiet = now - self.heard
        if quiet > BEAT_FRESH or self.stopped:
            code = Code.STOPPED if self.stopped else code
            fields.update(silent=True, **({"pid": self.stopped} if self.stopped else {}))
        seconds = quiet if fields.get("silent") else self.idled(now)
        return Event(code, self.rank, self.host, replace(self.inside, step=self.step), seconds, fields=fields)

    def waiting(self, after: Operation | None = None) -> Waiting:
        return Waiting((self.rank,), self.inside, self.host, after)


def diagnose(beats: Sequence[Beat], now: float, limits: Limits) -> Event | None:
    """What is wrong, from the newest beat of each rank; None while nothing may be."""
    return (
        _stopped(beats, now, limits)
        or _diverged(beats, now)
        or _blocked(beats, now, limits)
        or _late(beats, now, limits)
        or _silent(beats, now, limits)
        or _idle(beats, now, limits)
    )


def _stopped(beats: Sequence[Beat], now: float, limits: Limits) -> Event | None:
    stopped = [b for b in beats if b.stopped and now - b.heard >= limits.stopped]
    return max(stopped, key=lambda b: now - b.heard).event(Code.STOPPED, now, alive=True) if stopped else None


def _diverged(beats: Sequence[Beat], now: float) -> Event | None:
    """Two ranks wait, and at the number where one of them is the other was in something else: they will never meet.
    (A rank may also be behind in the same operation, because the result has not reached it yet.)"""
    stuck = [
        b for b in beats if b.waits and b.age > DIVERGED and now - b.heard < BEAT_NEW and b.inside.kind != Kind.START
    ]
    for other in stuck[1:]:
        behind, ahead = sorted((stuck[0], other), key=lambda b: b.operations)
        there = next((op for op in ahead.recent if op.number == behind.operations), None)
        if there is not None and (there.name, there.detail) != (behind.inside.name, behind.inside.detail):
            after = None if ahead.operations == behind.operations else there
            sides = sorted((behind.waiting(), ahead.waiting(after)), key=lambda side: side.ranks)
            fields: dict[str, Any] = {"step": behind.step} if behind.step == ahead.step else {}
            out = [b for b in stuck if not b.in_step]
            if any(b.in_step for b in stuck) and out:  # and not only by a branch inside of a step
                fields["left_loop"] = [b.rank for b in out]
                return Event(Code.UNEVEN, out[0].rank, out[0].host, waiting=tuple(sides), fields=fields)
            return Event(Code.MISMATCH, waiting=tuple(sides), fields=fields)
    return None


def _blocked(beats: Sequence[Beat], now: float, limits: Limits) -> Event | None:
    """On an accelerator: ranks do not answer, as their Python waits for the device in one call. If a rank that answers
    stands still of its own accord, they wait for it; if none answers, they wait for each other."""
    stall = limits.stall if all(b.warm for b in beats) else max(limits.stall, limits.first)
    silent = [b for b in beats if not b.stopped and now - b.heard > stall]
    if not limits.asynchronous or not silent:
        return None
    answering = [b for b in beats if b not in silent]
    if not answering:
        inside = replace(silent[0].inside, step=silent[0].step)
        return Event(Code.STALL, operation=inside, seconds=now - silent[0].heard, fields={"card": True})
    idle = [b for b in answering if not b.waits and now - b.heard < BEAT_FRESH and b.idled(now) > stall]
    if not idle:
        return None  # a rank that waits for them in a collective tells, by `_late`
    culprit = max(idle, key=lambda b: b.idled(now))
    first = silent[0]
    waiting = Waiting(tuple(b.rank for b in silent), first.inside, first.host)
    return replace(culprit.event(Code.STALL, now), waiting=(waiting,))


def _late(beats: Sequence[Beat], now: float, limits: Limits) -> Event | None:
    """A rank has waited too long: the late one has not reached that operation."""
    heard = [b for b in beats if b.waits and now - b.heard < BEAT_FRESH]
    limits = limits if all(b.warm for b in beats) else replace(limits, stall=max(limits.stall, limits.first))
    limit = {True: limits.stall, False: limits.silent}
    waiting = [b for b in heard if b.waited(now) > limit[b.inside.kind == Kind.COLLECTIVE]]
    if not waiting:
        return None
    first = max(waiting, key=lambda b: b.operations)
    late = [b for b in beats if b.operations < first.operations or b not in heard]
    late = [b for b in late if not b.ended] or late
    if not late:
        fields = {"card": True} if limits.asynchronous else {}
        return Event(Code.STALL, operation=first.inside, seconds=first.waited(now), fields=fields)
    standing = [b for b in late if not b.waits and now - b.heard < BEAT_FRESH and b.idled(now) > limits.stall / 2]
    if limits.asynchronous and standing:
        late = standing  # others that do not answer may be blocked by their device, which waits for one of these
    culprit = max(late, key=lambda b: b.idled(now))
    quiet = now - culprit.heard
    works = quiet < BEAT_FRESH and (culprit.busy >= _WORKS or first.waited(now) < limits.long)
    if first.inside.kind != Kind.COLLECTIVE and (works or BEAT_FRESH < quiet < limits.silent):
        return None  # on the store, ranks wait for work however long it takes
    ranks = tuple(b.rank for b in heard if b.operations == first.operations)
    uneven = limits.outside and first.in_step and _out_of_loop(culprit)
    event = culprit.event(Code.UNEVEN if uneven else Code.STALL, now, ended=culprit.ended)
    return replace(event, waiting=(Waiting(ranks, first.inside, first.host),))


def _out_of_loop(beat: Beat) -> bool:
    """Whether it is past its loop of steps: of what it does between two of them, only data is waited for there."""
    past = (Kind.SAVE, Kind.EXPORT, Kind.EVALUATE)
    return not beat.in_step and (beat.ended or beat.waits or not beat.inside.kind or beat.inside.kind in past)


def _silent(beats: Sequence[Beat], now: float, limits: Limits) -> Event | None:
    """A rank whose host answers, but not its watchdog: stopped, or Python blocked by one call. No rank waits for it in
    a collective: that would be `_late`."""
    return next((b.event(Code.STALL, now) for b in beats if now - b.heard > limits.long), None)


def _idle(beats: Sequence[Beat], now: float, limits: Limits) -> Event | None:
    """No rank waits for it, but it makes no progress and uses no CPU: a dead disk, a worker that hangs."""
    for beat in sorted(beats, key=lambda b: -b.idled(now)):
        inside = not beat.ended and (beat.inside.kind or limits.outside)
        if inside and not beat.waits and beat.idled(now) > limits.long and beat.busy < _WORKS:
            return beat.event(Code.STALL, now, idle=True)
    return None
