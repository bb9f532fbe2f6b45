"""What happened to a job, from the flight records of its ranks: the first cause in one sentence.

Every rank that failed has a reason, most of them because another rank failed before. `explain` lists what might have
been the cause, and takes the first that is no consequence. Pure but for `answer`, which reads the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppfleet import limits
from ppfleet.commands.why import record_reader
from ppfleet.commands.why.job_start import Attempt, Rank, named, size
from ppfleet.commands.why.standstill import standstill, uneven
from ppfleet.commands.why.straggler import straggler
from ppfleet.watchdog import render
from ppfleet.watchdog.events import LOST, VERDICTS, Code, Event, Kind, Mark

_GUESS = "killed (SIGKILL), a crash, os._exit, or its host went down"
# What an exception's code makes of it; what a rank raises because another one failed comes last.
_RAISED = {
    "non_finite": Code.NAN, "mismatch": Code.MISMATCH, "interrupted": Code.INTERRUPTED, "port_taken": Code.PORT,
    "not_joined": Code.MISSING, "worker_died": Code.WORKER,
}  # fmt: skip
_CONSEQUENCES = ("comm", "peer_lost", "stalled", "preempted", "exit", "connection")


@dataclass(frozen=True)
class Cause:
    """What may have happened first."""

    event: Event
    ranks: tuple[int, ...] = ()  # whose doing it was; nobody's in particular: none
    time: float = 0.0
    level: int = 0  # 0: a cause; 1: perhaps the consequence of another; 2: a consequence
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Everything `why` tells. Launch prints `sentence`."""

    event: Event
    ranks: tuple[int, ...]
    time: float
    evidence: tuple[str, ...]
    notes: tuple[str, ...]
    attempt: Attempt
    now: float  # by rank 0's clock
    earlier: int  # attempts before this one

    @property
    def sentence(self) -> str:
        return render.text(self.event)

    @property
    def kind(self) -> str:
        return self.event.code.value


def answer(directories: Sequence[Path], back: int = 0) -> Answer | None:
    """What happened to the newest start of the job whose records are there, or to one before; None without any."""
    found = record_reader.collect(directories)
    return of(found, back) if back < len(found.attempts) else None


def of(found: record_reader.Found, back: int = 0) -> Answer:
    attempt = record_reader.attempt(found, back)
    cause = explain(attempt, found.now)
    earlier = len(found.attempts) - 1 - back
    notes = list(attempt.notes)
    if attempt.missing:
        shown = ", ".join(map(str, attempt.missing))
        notes.append(f"no record of rank {shown} of {attempt.size}: on another host? give its directory too")
    if earlier:
        notes.append(
            f"{earlier} earlier start{'s' if earlier > 1 else ''} of this job: --back {back + 1} shows the last of them"
        )
    return Answer(
        cause.event, cause.ranks, cause.time or attempt.last_seen,
        (*cause.evidence, *_endings(attempt, cause.event)), tuple(notes), attempt, found.now, earlier,
    )  # fmt: skip


def explain(attempt: Attempt, now: float) -> Cause:
    """The first cause; where nothing failed, what holds the job up, or that all is well."""
    causes = [*_gone(attempt), *_told(attempt), *_raised(attempt), *_ended_by_others(attempt)]
    left = uneven(attempt.ranks, attempt.last_seen) if causes else None
    if left:
        causes.append(_stuck(left, attempt.last_seen))
    if causes:
        first = min(causes, key=lambda cause: (cause.level, cause.time))
        if first.event.code in (Code.TERMINATED, Code.PREEMPTED, Code.ORPHAN, Code.GONE):
            hung = standstill(attempt.ranks, attempt.last_seen)
            return replace(first, evidence=(*first.evidence, f"before that: {render.text(hung)}")) if hung else first
        return first
    running = [rank for rank in attempt.ranks if rank.state != "said"]
    if running and (hung := standstill(attempt.ranks, now)):
        return _stuck(hung, now)
    fine = _about(running or attempt.ranks, Code.RUNNING if running else Code.FINISHED)
    fine = replace(fine, operation=replace(fine.operation, step=max(rank.steps for rank in attempt.ranks)))
    slow = straggler(attempt)
    return Cause(slow, (slow.rank,), evidence=(render.text(fine),)) if slow else Cause(fine)


def _stuck(event: Event, now: float) -> Cause:
    return Cause(event, _culprits(event), now - event.seconds)


def _culprits(event: Event) -> tuple[int, ...]:
    found: Sequence[int] = event.fields.get("left_loop") or [event.rank]
    return tuple(rank for rank in found if rank >= 0)


def _about(ranks: Sequence[Rank], code: Code, **fields: Any) -> Event:
    """An event of those ranks, where the first of them was."""
    numbers = [rank.number for rank in ranks]
    return Event(code, numbers[0], ranks[0].address, ranks[0].inside, fields={"ranks": numbers, **fields})


def _gone(attempt: Attempt) -> Iterator[Cause]:
    """Ranks that are gone and recorded nothing. What a peer's watchdog saw is better than what can be derived."""
    gone = sorted((rank for rank in attempt.ranks if rank.state == "gone"), key=lambda rank: rank.seen)
    told = {rank.event.rank for rank in attempt.ranks if rank.event and rank.event.code in VERDICTS}
    for rank in gone[:1]:
        asked = [e.entered for e in rank.record.entries if e.kind == Kind.MARK and e.what == Mark.SIGTERM]
        if asked and rank.seen - asked[-1] > limits.KILL_AFTER_SIGTERM:
            event = _about([rank], Code.TERMINATED, unsaved_for=rank.seen - asked[-1])
            yield Cause(event, (rank.number,), rank.seen)
            return
    if len(gone) > 1 and len(gone) == len(attempt.ranks) and gone[-1].seen - gone[0].seen < limits.TOGETHER:
        hosts = {rank.host for rank in gone}
        event = _about(gone, Code.GONE, count=len(gone))
        event = replace(event, host=gone[0].host if len(hosts) == 1 else "")
        yield Cause(event, (), gone[0].seen, 0, _evidence(gone[0]))
        return
    for host in {rank.host for rank in gone}:
        there = [rank for rank in attempt.ranks if rank.host == host]
        lost = [rank for rank in gone if rank.host == host]
        if len(there) == len(lost) > 1 and lost[-1].seen - lost[0].seen < limits.TOGETHER:
            event = replace(_about(lost, Code.HOST), host=host)
            yield Cause(event, tuple(rank.number for rank in lost), lost[0].seen - limits.BEAT_NEW)
    for rank in gone:
        if rank.number not in told:
            yield _silent(rank, attempt)


def _silent(rank: Rank, attempt: Attempt) -> Cause:
    events = [other.event for other in attempt.ranks if other.event]
    stalled = [event.time for event in events if event.code in (Code.STALL, Code.STOPPED)]
    if (
        stalled and min(stalled) - rank.seen > 2 * limits.BEAT_NEW
    ):  # of a process that dies the others' watchdog hears at once
        return Cause(_about([rank], Code.STOPPED, since=rank.seen), (rank.number,), rank.seen)
    event = _about([rank], Code.KILLED, guess=_GUESS)
    return Cause(_or_oom(event, rank), (rank.number,), rank.seen, 0, _evidence(rank))


def _or_oom(event: Event, rank: Rank) -> Event:
    """Linux has killed a process of its host since that rank was last seen: probably this one."""
    if rank.oom_kills <= rank.record.pulse.oom_kills:
        return event
    return replace(event, code=Code.OOM, fields={**event.fields, "probably": True, "guess": ""})


def _told(attempt: Attempt) -> Iterator[Cause]:
    """What the watchdogs pronounced. A culprit that recorded something of its own knows better why it ended."""
    # Of the same death, who was on the same host has seen more.
    unknown = (Code.KILLED, None)
    events = [rank.event for rank in attempt.ranks if rank.event and rank.event.code in VERDICTS]
    for event in sorted(events, key=lambda each: (each.code, each.fields.get("signal")) == unknown):
        culprit = attempt.rank(event.rank)
        when = event.time - limits.BEAT_NEW
        if culprit is None or event.code not in LOST:
            gone = culprit is not None and culprit.state == "gone"
            yield Cause(event, _culprits(event), min(when, culprit.seen) if culprit and gone else when)
            continue
        if culprit.state == "gone":
            when = min(when, culprit.seen)
            seen = event.operation.step or event.operation.kind
            event = event if seen else replace(event, operation=culprit.inside)
        event = _or_oom(event, culprit) if event.code == Code.KILLED else event
        yield Cause(event, (event.rank,), when, 2 if culprit.state == "said" else 0, _evidence(culprit))


def _raised(attempt: Attempt) -> Iterator[Cause]:
    """Exceptions; the same one on several ranks is one."""
    together: dict[tuple[str, str], list[tuple[Rank, Event]]] = {}
    for rank in attempt.ranks:
        if rank.event and rank.event.code == Code.EXCEPTION:
            key = str(rank.event.fields.get("type")), str(rank.event.fields.get("text"))
            together.setdefault(key, []).append((rank, rank.event))
    for pairs in together.values():
        ranks, told = [rank for rank, _ in pairs], pairs[0][1].fields
        more, error = told.get("fields", {}), str(told.get("error"))
        code = _RAISED.get(error, Code.EXCEPTION)
        event = _about(ranks, code, **{name: told[name] for name in ("type", "text", "where") if name in told})
        when = min(event.time for _, event in pairs) - limits.BEAT_NEW
        found = tuple(rank.number for rank in ranks)
        evidence: tuple[str, ...] = ()
        level = 2 if error in _CONSEQUENCES or "origin" in more else 0
        if code in (Code.NAN, Code.MISMATCH):
            found = tuple(more.get("ranks", ()))
        elif code == Code.INTERRUPTED:
            found, when = (), when + limits.BEAT_NEW
        elif code == Code.MISSING:
            found, level = (), 1
        elif code == Code.WORKER:
            evidence = _evidence(ranks[0])
        yield Cause(event, found, when, level, evidence)


def _ended_by_others(attempt: Attempt) -> Iterator[Cause]:
    """By whoever started the job, or stops it."""
    for code in (Code.ORPHAN, Code.PREEMPTED, Code.TERMINATED):
        pairs = [(rank, rank.event) for rank in attempt.ranks if rank.event and rank.event.code == code]
        if not pairs:
            continue
        first = min((event for _, event in pairs), key=lambda event: event.time)
        ranks = [rank for rank, _ in pairs]
        event = first if code == Code.ORPHAN else _about(ranks, code)
        told = str(first.fields.get("text", "")) if code != Code.ORPHAN else ""
        found = () if len(ranks) == len(attempt.ranks) else tuple(rank.number for rank in ranks)
        when = first.time - limits.BEAT_NEW if code == Code.ORPHAN else first.time
        yield Cause(event, found, when, 0, (told,) if told else ())


def _endings(attempt: Attempt, cause: Event) -> Iterator[str]:
    """How each rank ended, the same for several in one line."""
    together: dict[str, list[Rank]] = {}
    for rank in attempt.ranks:
        event = rank.event
        told = (cause.code, cause.rank, cause.fields.get("ranks"))
        other = event and event.code in VERDICTS and (event.code, event.rank, event.fields.get("ranks")) != told
        more = f": {render.text(event)}" if event and other else ""
        together.setdefault(ending(rank) + more, []).append(rank)
    for text, ranks in together.items():
        yield f"{named(ranks)}: {text}  {render.clock(min(rank.seen for rank in ranks))}"


def ending(rank: Rank) -> str:
    """How it ended, as far as it recorded that."""
    if rank.event:
        return render.ending(rank.event)
    states = {"gone": "gone without reporting a reason", "running": "still running"}
    return states.get(rank.state, rank.state)


def _evidence(rank: Rank) -> tuple[str, ...]:
    """What it used and what was left when it was last seen, and what its log says of a crash."""
    pulse = rank.record.pulse
    memory = f"{rank.name} used {size(pulse.memory)} of memory, {size(pulse.available)} were left on its host"
    return tuple(filter(None, (memory if pulse.time else "", rank.log_tail)))
