"""What happened to a job, from the flight records of its ranks: the first cause in one sentence.

Most ranks fail because another rank failed before. `explain` lists all possible causes and picks the first one that is
not the consequence of another. Pure except for `answer`, which reads the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppfleet import limits
from ppfleet.commands.why import record_reader, sentences
from ppfleet.commands.why.job_start import Attempt, Rank, named, size
from ppfleet.commands.why.stall import find_stall, uneven
from ppfleet.commands.why.straggler import straggler
from ppfleet.watchdog.events import LOST, VERDICTS, Code, Event, Kind, Mark

_GUESS = "killed (SIGKILL), a crash, os._exit, or its host went down"
# Error code of an exception -> code of the event. The codes in _CONSEQUENCES mean that another rank failed first.
_RAISED = {
    "non_finite": Code.NAN, "mismatch": Code.MISMATCH, "interrupted": Code.INTERRUPTED, "port_taken": Code.PORT,
    "not_joined": Code.MISSING, "worker_died": Code.WORKER,
}  # fmt: skip
_CONSEQUENCES = ("comm", "peer_lost", "stalled", "preempted", "exit", "connection")


@dataclass(frozen=True)
class Cause:
    """What may have happened first."""

    event: Event
    ranks: tuple[int, ...] = ()  # the ranks responsible, if any in particular
    time: float = 0.0
    level: int = 0  # 0: a cause; 1: perhaps the consequence of another; 2: a consequence
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Everything that `why` shows. `ppfleet launch` prints `sentence`."""

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
        return sentences.text(self.event)

    @property
    def kind(self) -> str:
        return self.event.code.value


def answer(directories: Sequence[Path], back: int = 0) -> Answer | None:
    """What happened to the newest start of the job, or to the `back`-th before it; None if there is no record."""
    records = record_reader.collect(directories)
    return answer_from(records, back) if back < len(records.attempts) else None


def answer_from(records: record_reader.FlightRecords, back: int = 0) -> Answer:
    attempt = record_reader.attempt(records, back)
    cause = explain(attempt, records.now)
    earlier = len(records.attempts) - 1 - back
    notes = list(attempt.notes)
    if attempt.missing:
        shown = ", ".join(map(str, attempt.missing))
        notes.append(
            f"no record of rank {shown} of {attempt.size}: if it ran on another host, add that host's directory"
        )
    if earlier:
        notes.append(
            f"{earlier} earlier start{'s' if earlier > 1 else ''} of this job: --back {back + 1} shows the last of them"
        )
    return Answer(
        cause.event, cause.ranks, cause.time or attempt.last_seen,
        (*cause.evidence, *_endings(attempt, cause.event)), tuple(notes), attempt, records.now, earlier,
    )  # fmt: skip


def explain(attempt: Attempt, now: float) -> Cause:
    """The first cause of a failure; without one, why the job does not progress, or that there is no problem."""
    causes = [*_gone(attempt), *_diagnosed(attempt), *_raised(attempt), *_ended_by_others(attempt)]
    cut = any(cause.event.code == Code.HOST for cause in causes)  # ranks are wherever the link left them
    left_loop = uneven(attempt.ranks, attempt.last_seen) if causes and not cut else None
    if left_loop:
        causes.append(_stuck(left_loop, attempt.last_seen))
    if causes:
        first = min(causes, key=lambda cause: (cause.level, cause.time))
        if first.event.code in (Code.TERMINATED, Code.PREEMPTED, Code.ORPHAN, Code.GONE):
            stall = find_stall(attempt.ranks, attempt.last_seen)
            return (
                replace(first, evidence=(*first.evidence, f"before that: {sentences.text(stall)}")) if stall else first
            )
        return first
    running = [rank for rank in attempt.ranks if rank.state != "said"]
    if running and (stall := find_stall(attempt.ranks, now)):
        return _stuck(stall, now)
    healthy = _about(running or attempt.ranks, Code.RUNNING if running else Code.FINISHED)
    healthy = replace(healthy, operation=replace(healthy.operation, step=max(rank.steps for rank in attempt.ranks)))
    slow = straggler(attempt)
    return Cause(slow, (slow.rank,), evidence=(sentences.text(healthy),)) if slow else Cause(healthy)


def _stuck(event: Event, now: float) -> Cause:
    return Cause(event, _culprits(event), now - event.seconds)


def _culprits(event: Event) -> tuple[int, ...]:
    ranks: Sequence[int] = event.fields.get("left_loop") or [event.rank]
    return tuple(rank for rank in ranks if rank >= 0)


def _about(ranks: Sequence[Rank], code: Code, **fields: Any) -> Event:
    """An event of those ranks, with the first one's host and operation."""
    numbers = [rank.number for rank in ranks]
    return Event(code, numbers[0], ranks[0].address, ranks[0].inside, fields={"ranks": numbers, **fields})


def _gone(attempt: Attempt) -> Iterator[Cause]:
    """Ranks that are gone and recorded no reason, unless a peer's watchdog saw more than can be derived here."""
    gone = sorted((rank for rank in attempt.ranks if rank.state == "gone"), key=lambda rank: rank.seen)
    diagnosed = {rank.event.rank for rank in attempt.ranks if rank.event and rank.event.code in VERDICTS}
    for rank in gone[:1]:
        sigterms = [e.entered for e in rank.record.entries if e.kind == Kind.MARK and e.what == Mark.SIGTERM]
        if sigterms and rank.seen - sigterms[-1] > limits.KILL_AFTER_SIGTERM:
            event = _about([rank], Code.TERMINATED, unsaved_for=rank.seen - sigterms[-1])
            yield Cause(event, (rank.number,), rank.seen)
            return
    if len(gone) > 1 and len(gone) == len(attempt.ranks) and gone[-1].seen - gone[0].seen < limits.TOGETHER:
        hosts = {rank.host for rank in gone}
        event = _about(gone, Code.GONE, count=len(gone))
        event = replace(event, host=gone[0].host if len(hosts) == 1 else "")
        yield Cause(event, (), gone[0].seen, 0, _evidence(gone[0]))
        return
    for host in {rank.host for rank in gone}:
        on_host = [rank for rank in attempt.ranks if rank.host == host]
        lost = [rank for rank in gone if rank.host == host]
        if len(on_host) == len(lost) > 1 and lost[-1].seen - lost[0].seen < limits.TOGETHER:
            event = replace(_about(lost, Code.HOST), host=host)
            yield Cause(event, tuple(rank.number for rank in lost), lost[0].seen - limits.BEAT_NEW)
    for rank in gone:
        if rank.number not in diagnosed:
            yield _silent(rank, attempt)


def _silent(rank: Rank, attempt: Attempt) -> Cause:
    events = [other.event for other in attempt.ranks if other.event]
    stalled = [event.time for event in events if event.code in (Code.STALL, Code.STOPPED)]
    # The watchdogs notice at once when a process dies: one that was silent for longer was stopped.
    if stalled and min(stalled) - rank.seen > 2 * limits.BEAT_NEW:
        return Cause(_about([rank], Code.STOPPED, since=rank.seen), (rank.number,), rank.seen)
    event = _about([rank], Code.KILLED, guess=_GUESS)
    return Cause(_or_oom(event, rank), (rank.number,), rank.seen, 0, _evidence(rank))


def _or_oom(event: Event, rank: Rank) -> Event:
    """The same event, or an out-of-memory kill if Linux has killed a process on that host since."""
    if rank.oom_kills <= rank.record.pulse.oom_kills:
        return event
    return replace(event, code=Code.OOM, fields={**event.fields, "probably": True, "guess": ""})


def _diagnosed(attempt: Attempt) -> Iterator[Cause]:
    """What the watchdogs diagnosed. If the culprit recorded a reason itself, that one is more exact."""
    # A watchdog on the culprit's host knows the signal; those on other hosts do not, so theirs come last.
    unknown = (Code.KILLED, None)
    events = [rank.event for rank in attempt.ranks if rank.event and rank.event.code in VERDICTS]
    for event in sorted(events, key=lambda event: (event.code, event.fields.get("signal")) == unknown):
        culprit = attempt.rank(event.rank)
        when = event.time - limits.BEAT_NEW
        if culprit is None or event.code not in LOST:
            gone = culprit is not None and culprit.state == "gone"
            yield Cause(event, _culprits(event), min(when, culprit.seen) if culprit and gone else when)
            continue
        if culprit.state == "gone":
            when, event = min(when, culprit.seen), replace(event, operation=culprit.inside)
        event = _or_oom(event, culprit) if event.code == Code.KILLED else event
        yield Cause(event, (event.rank,), when, 2 if culprit.state == "said" else 0, _evidence(culprit))


def _raised(attempt: Attempt) -> Iterator[Cause]:
    """Exceptions; the same exception on several ranks counts as one cause."""
    same: dict[tuple[str, str], list[tuple[Rank, Event]]] = {}
    for rank in attempt.ranks:
        if rank.event and rank.event.code == Code.EXCEPTION:
            key = str(rank.event.fields.get("type")), str(rank.event.fields.get("text"))
            same.setdefault(key, []).append((rank, rank.event))
    for pairs in same.values():
        ranks, fields = [rank for rank, _ in pairs], pairs[0][1].fields
        details, error = fields.get("fields", {}), str(fields.get("error"))
        code = _RAISED.get(error, Code.EXCEPTION)
        event = _about(ranks, code, **{name: fields[name] for name in ("type", "text", "where") if name in fields})
        when = min(event.time for _, event in pairs) - limits.BEAT_NEW
        culprits = tuple(rank.number for rank in ranks)
        evidence: tuple[str, ...] = ()
        level = 2 if error in _CONSEQUENCES or "origin" in details else 0
        if code in (Code.NAN, Code.MISMATCH):
            culprits = tuple(details.get("ranks", ()))
        elif code == Code.INTERRUPTED:
            culprits, when = (), when + limits.BEAT_NEW
        elif code == Code.MISSING:
            culprits, level = (), 1
        elif code == Code.WORKER:
            evidence = _evidence(ranks[0])
        yield Cause(event, culprits, when, level, evidence)


def _ended_by_others(attempt: Attempt) -> Iterator[Cause]:
    """Ranks ended from outside: the launcher died, or the job was preempted or terminated."""
    for code in (Code.ORPHAN, Code.PREEMPTED, Code.TERMINATED):
        pairs = [(rank, rank.event) for rank in attempt.ranks if rank.event and rank.event.code == code]
        if not pairs:
            continue
        first = min((event for _, event in pairs), key=lambda event: event.time)
        ranks = [rank for rank, _ in pairs]
        event = first if code == Code.ORPHAN else _about(ranks, code)
        detail = str(first.fields.get("text", "")) if code != Code.ORPHAN else ""
        culprits = () if len(ranks) == len(attempt.ranks) else tuple(rank.number for rank in ranks)
        when = first.time - limits.BEAT_NEW if code == Code.ORPHAN else first.time
        yield Cause(event, culprits, when, 0, (detail,) if detail else ())


def _endings(attempt: Attempt, cause: Event) -> Iterator[str]:
    """How each rank ended; ranks that ended alike share a line."""
    alike: dict[str, list[Rank]] = {}
    for rank in attempt.ranks:
        event = rank.event
        known = (cause.code, cause.rank, cause.fields.get("ranks"))
        other = event and event.code in VERDICTS and (event.code, event.rank, event.fields.get("ranks")) != known
        more = f": {sentences.text(event)}" if event and other else ""
        alike.setdefault(ending(rank) + more, []).append(rank)
    for text, ranks in alike.items():
        yield f"{named(ranks)}: {text}  {sentences.clock(min(rank.seen for rank in ranks))}"


def ending(rank: Rank) -> str:
    """How a rank ended, as far as it recorded that."""
    if rank.event:
        return sentences.ending(rank.event)
    states = {"gone": "gone without reporting a reason", "running": "still running"}
    return states.get(rank.state, rank.state)


def _evidence(rank: Rank) -> tuple[str, ...]:
    """A rank's memory and its host's free memory when last seen, and what its log says about a crash."""
    pulse = rank.record.pulse
    memory = f"{rank.name} used {size(pulse.memory)} of memory, {size(pulse.available)} were available on its host"
    return tuple(filter(None, (memory if pulse.time else "", rank.log_tail)))
