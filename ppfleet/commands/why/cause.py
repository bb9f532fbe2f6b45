"""What happened to a job, from the flight records of its ranks: the first cause in one sentence.

Every rank that failed has a reason, most of them because another rank failed before. `explain` lists what might have
been the cause, and takes the first that is no consequence. Pure but for `answer`, which reads the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppfleet.commands.why import late, record_reader
from ppfleet.commands.why.job_start import Attempt, Cause, Rank, clock, label, named, size

_BEAT = 1.5  # seconds that a process may have lived after its last pulse, a bit more than there are between two
_GRACE = 15.0  # seconds after SIGTERM within which nobody kills
_AT_ONCE = 3.0  # seconds within which the ranks of a host go together
_TOLD = ("stall", "mismatch", "lost")  # words of the watch: a finished sentence about a culprit
_CONSEQUENCES = ("CommError", "Stalled", "SystemExit", "Preempted")
_SOCKETS = re.compile(r"connection (reset|closed)|broken pipe|by peer|gloo|failed on rank \d", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    """Everything `why` tells. Launch prints `sentence`."""

    sentence: str
    kind: str
    ranks: tuple[int, ...]
    time: float
    evidence: tuple[str, ...]
    notes: tuple[str, ...]
    attempt: Attempt
    now: float  # by rank 0's clock
    earlier: int  # attempts before this one


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
        cause.sentence, cause.kind, cause.ranks, cause.time or attempt.last_seen,
        (*cause.evidence, *_endings(attempt, cause.sentence)), tuple(notes), attempt, found.now, earlier,
    )  # fmt: skip


def explain(attempt: Attempt, now: float) -> Cause:
    """The first cause; where nothing failed, what holds the job up, or that all is well."""
    causes = [*_gone(attempt), *_told(attempt), *_raised(attempt), *_ended_by_others(attempt)]
    left = late.uneven(attempt.ranks)
    if causes and left:
        causes.append(left)
    if causes:
        first = min(causes, key=lambda cause: (cause.level, cause.time))
        if first.kind in ("terminated", "preempted", "orphan", "gone"):
            hung = late.hang(attempt.ranks, attempt.last_seen)
            return replace(first, evidence=(*first.evidence, f"before that: {hung.sentence}")) if hung else first
        return first
    running = [rank for rank in attempt.ranks if rank.state != "said"]
    if running and (hung := late.hang(attempt.ranks, now)):
        return hung
    return _well(attempt, running)


def _well(attempt: Attempt, running: Sequence[Rank]) -> Cause:
    steps = max(rank.steps for rank in attempt.ranks)
    who = named(attempt.ranks) if len(attempt.ranks) == 1 else f"all {len(attempt.ranks)} ranks"
    if running:
        text, kind = (
            f"nothing failed: {named(running)} still run{'s' if len(running) == 1 else ''}, at step {steps}",
            "running",
        )
    else:
        text, kind = f"nothing failed: {who} came to the end, after {steps} steps", "finished"
    slow = late.straggler(attempt)
    return replace(slow, evidence=(text,)) if slow else Cause(kind, text)


def _gone(attempt: Attempt) -> Iterator[Cause]:
    """Ranks that ended without a word. What a peer's watch saw of it is better than what can be derived."""
    gone = sorted((rank for rank in attempt.ranks if rank.state == "gone"), key=lambda rank: rank.seen)
    told = {rank.words.get("culprit") for rank in attempt.ranks if rank.said in _TOLD}
    for rank in gone[:1]:
        asked = [e.entered for e in rank.record.entries if e.kind == "mark" and e.what == "SIGTERM"]
        if asked and rank.seen - asked[-1] > _GRACE:
            at = f"after {rank.seen - asked[-1]:.0f} s without a step boundary{_inside(rank)}"
            text = f"{rank.name} got SIGTERM and was killed {at}: nothing was saved since the last checkpoint"
            yield Cause("terminated", text, (rank.number,), rank.seen)
            return
    if len(gone) > 1 and len(gone) == len(attempt.ranks) and gone[-1].seen - gone[0].seen < _AT_ONCE:
        hosts = {rank.host for rank in gone}
        text = f"all {len(gone)} ranks were gone at once, without a word, at step {gone[0].steps}"
        why = (
            f"{next(iter(hosts))} went down, or all were killed"
            if len(hosts) == 1
            else "all were killed, or the power failed"
        )
        yield Cause("gone", f"{text}: {why}", (), gone[0].seen, 0, tuple(_memory(rank) for rank in gone[:1]))
        return
    for host in {rank.host for rank in gone}:
        there = [rank for rank in attempt.ranks if rank.host == host]
        lost = [rank for rank in gone if rank.host == host]
        if len(there) == len(lost) > 1 and lost[-1].seen - lost[0].seen < _AT_ONCE:
            text = f"host {host} was lost with {named(lost)} at step {lost[0].steps}{_inside(lost[0])}"
            yield Cause(
                "host",
                f"{text}: it went down, or lost its network",
                tuple(r.number for r in lost),
                lost[0].seen - _BEAT,
            )
    for rank in gone:
        if rank.number not in told:
            yield _silent(rank, attempt)


def _silent(rank: Rank, attempt: Attempt) -> Cause:
    facts = [_memory(rank), rank.log_tail]
    at = f"at step {rank.steps}{_inside(rank)}"
    stalled = [float(other.words["time"]) for other in attempt.ranks if other.said == "stall"]
    if stalled and min(stalled) - rank.seen > 2 * _BEAT:  # of a process that dies the others' watch hears at once
        text = (
            f"{rank.name} gave no sign of life from {clock(rank.seen)} on, {at}: it was stopped, or its Python blocked"
        )
        return Cause("stopped", text, (rank.number,), rank.seen)
    text = f"{rank.name} ended without a word {at}"
    if rank.oom_kills > rank.record.pulse.oom_kills:
        text += ": Linux has killed a process of its host for want of memory since, probably this one"
        return Cause("oom", text, (rank.number,), rank.seen, 0, tuple(filter(None, facts)))
    text += ": killed (SIGKILL), a crash, os._exit, or its host went down"
    return Cause("killed", text, (rank.number,), rank.seen, 0, tuple(filter(None, facts)))


def _told(attempt: Attempt) -> Iterator[Cause]:
    """The sentences of the watch. A culprit that has words of its own knows better why it ended."""
    # Of the same death, who was on the same host has seen more.
    for rank in sorted(attempt.ranks, key=lambda rank: rank.words.get("how") == "silent"):
        if rank.said not in _TOLD:
            continue
        number = int(rank.words.get("culprit", -1))
        culprit = attempt.rank(number)
        when = float(rank.words["time"]) - _BEAT
        if culprit is not None and culprit.state == "gone":
            when = min(when, culprit.seen)
        spoke = culprit is not None and culprit.state == "said" and rank.said == "lost"
        facts = tuple(filter(None, (_memory(culprit), culprit.log_tail))) if culprit and rank.said == "lost" else ()
        kind = _told_kind(rank)
        text = rank.text or f"{culprit.name if culprit else f'rank {number}'}: {kind}"
        if kind == "killed" and culprit and culprit.oom_kills > culprit.record.pulse.oom_kills:
            kind, text = "oom", f"{text}, probably by Linux for want of memory"
        if culprit and culprit.state == "gone" and rank.said == "lost" and "step" not in text:
            text += f" at step {culprit.steps}{_inside(culprit)}"
        found: tuple[int, ...] = (number,) if number >= 0 else ()
        if rank.said == "mismatch" and (out := late.out_of_loop(attempt.ranks)):
            kind, found = "uneven", tuple(each.number for each in out)
            text += f"; {named(out)} had left the loop of steps: fewer batches, or a break that the others did not make"
        yield Cause(kind, text, found, when, 2 if spoke else 0, facts)


def _told_kind(rank: Rank) -> str:
    how = rank.words.get("how")
    if how == "killed" and rank.words.get("oom"):
        return "oom"
    if how == "stopped":
        return "stopped"
    kinds = {"killed": "killed", "silent": "killed", "exit": "exit", "unreachable": "host"}
    return kinds.get(str(how), "killed") if rank.said == "lost" else rank.said


def _raised(attempt: Attempt) -> Iterator[Cause]:
    """Exceptions; the same one on several ranks is one."""
    together: dict[tuple[str, str], list[Rank]] = {}
    for rank in attempt.ranks:
        if rank.said == "exception":
            together.setdefault((str(rank.words.get("type", "Exception")), rank.text), []).append(rank)
    for (kind, text), ranks in together.items():
        when = min(float(rank.words["time"]) for rank in ranks) - _BEAT
        where = str(ranks[0].words.get("where", ""))
        at = ", ".join(filter(None, (where, f"at step {ranks[0].steps}" if ranks[0].steps else "")))
        found = [rank.number for rank in ranks]
        sentence = f"{named(ranks)} raised {kind}: {text}" + (f" ({at})" if at else "")
        if kind in ("NonFiniteError", "MismatchError"):
            named_there = set(re.findall(r"\brank (\d+)", text))
            found = [int(each) for each in named_there] if len(named_there) == 1 else []
            name = "nan" if kind == "NonFiniteError" else "mismatch"
            sentence = f"{text} ({at})" if at else text
            yield Cause(name, sentence, tuple(found), when)
        elif kind == "KeyboardInterrupt":
            yield Cause("interrupted", f"{named(ranks)} got Ctrl-C ({at})", (), when + _BEAT)
        elif "is taken" in text:
            yield Cause("port", f"{named(ranks)}: {text}", tuple(found), when)
        elif "did not come" in text:
            yield Cause("missing", f"{named(ranks)}: {text}", (), when, 1)
        elif kind == "DataError" and "worker died" in text:
            yield Cause("worker", f"{named(ranks)}: {text}", tuple(found), when, 0, (_memory(ranks[0]),))
        else:
            yield Cause("exception", sentence, tuple(found), when, 2 if _follows(kind, text) else 0)


def _follows(kind: str, text: str) -> bool:
    """Whether an exception is what a rank sees when another one has failed."""
    return kind in _CONSEQUENCES or bool(_SOCKETS.search(text))


def _ended_by_others(attempt: Attempt) -> Iterator[Cause]:
    """By whoever started the job, or stops it."""
    for kind in ("orphan", "preempted", "terminated"):
        ranks = [rank for rank in attempt.ranks if rank.said == kind]
        if not ranks:
            continue
        first = min(ranks, key=lambda rank: float(rank.words["time"]))
        when = float(first.words["time"])
        at = f"at step {first.steps}{_inside(first)}"
        text = {
            "orphan": first.text or f"the launcher of {named(ranks)} was gone (killed?), so they ended {at}",
            "preempted": f"{named(ranks)} got SIGTERM and ended {at}, after a checkpoint: start the job again to go on",
            "terminated": f"{named(ranks)} got SIGTERM and ended {at}, without a new checkpoint",
        }[kind]
        said = (first.text,) if first.text not in text else ()
        found = () if len(ranks) == len(attempt.ranks) else tuple(rank.number for rank in ranks)
        yield Cause(kind, text, found, when - _BEAT if kind == "orphan" else when, 0, said)


def _endings(attempt: Attempt, sentence: str) -> Iterator[str]:
    """How each rank ended, the same for several in one line."""
    together: dict[str, list[Rank]] = {}
    for rank in attempt.ranks:
        more = f": {rank.text}" if rank.said in _TOLD and rank.text not in sentence else ""
        together.setdefault(ending(rank) + more, []).append(rank)
    for text, ranks in together.items():
        yield f"{named(ranks)}: {text}  {clock(min(rank.seen for rank in ranks))}"


def ending(rank: Rank) -> str:
    """How it ended, as far as it said so."""
    if rank.said == "exception":
        where = rank.words.get("where")
        return f"{rank.words.get('type', 'Exception')}: {rank.text}{f' ({where})' if where else ''}"
    if rank.said == "ended":
        return "came to the end"
    if rank.said in _TOLD or rank.said == "orphan":
        return f"ended by the watch ({rank.said})"
    if rank.said:
        return f"{rank.said}{f': {rank.text}' if rank.text else ''}"
    return {"gone": "gone without a word", "stopped": "stopped", "running": "still running"}.get(rank.state, rank.state)


def _inside(rank: Rank) -> str:
    entry = rank.open
    if entry is None:
        return ""
    shown = (
        label(entry) if entry.kind == "step" else f"`{entry.what}`{f' #{entry.operation}' if entry.operation else ''}"
    )
    return f" (in {shown}{f', {entry.where}' if entry.where else ''})"


def _memory(rank: Rank | None) -> str:
    """What it used and what was left, when it was last seen."""
    if rank is None or not rank.record.pulse.time:
        return ""
    pulse = rank.record.pulse
    return f"{rank.name} used {size(pulse.memory)} of memory, {size(pulse.available)} were left on its host"
