"""Where no watchdog has spoken: what `diagnose` says of the ranks as their flight records show them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from ppfleet import limits
from ppfleet.commands.why.job_start import Rank
from ppfleet.watchdog.diagnosis import Beat, Limits, diagnose
from ppfleet.watchdog.events import Code, Event, Kind
from ppfleet.watchdog.recorder import Entry

_STEPS = 10.0  # … or this many steps


def standstill(ranks: Sequence[Rank], until: float) -> Event | None:
    """Why nothing goes on at that time: somebody is stopped, late, in another operation, or the network fails."""
    beats = [_beat(rank, rank.open, until) for rank in ranks]
    waits = [beat.waited(until) for beat in beats if beat.waits]
    lasted = max(waits) if waits else min(beat.idled(until) for beat in beats)
    patience = max(limits.WAIT_ALWAYS, _STEPS * _step_time(ranks))
    if lasted < patience and not any(beat.stopped for beat in beats):
        return None
    return diagnose(beats, until, Limits(patience, patience, stopped=0.0, outside=True))


def uneven(ranks: Sequence[Rank], until: float) -> Event | None:
    """A rank has left its loop, and others waited for it in a step, or failed there because it did not come."""
    beats = []
    for rank in ranks:
        event, entry = rank.event, rank.open
        if event and event.code == Code.EXCEPTION and event.fields.get("error") == "peer_lost":
            number = event.fields["fields"].get("operation", 0)
            failed_in = [each for each in rank.entries if each.operation == number and number]
            entry = replace(failed_in[-1], left=0.0) if failed_in else None
        if rank.state == "running" or rank.said == Code.ENDED or (entry and entry.waits):
            beats.append(_beat(rank, entry, until))
    found = diagnose(beats, until, Limits(0.0, 0.0, outside=True))
    return found if found and found.code == Code.UNEVEN else None


def _beat(rank: Rank, entry: Entry | None, until: float) -> Beat:
    """What its watchdog would say; of a rank that is gone, what it said last."""
    heard = rank.seen if rank.state in ("gone", "stopped") else until
    numbered = [each.as_operation() for each in rank.entries if each.operation]
    newest = numbered[-1].number if numbered else 0
    return Beat(
        rank.number, heard, rank.address, entry.operation or newest if entry else newest,
        inside=replace(entry.as_operation(), step=rank.steps) if entry else rank.inside,
        waits=bool(entry and entry.waits) and rank.said != Code.ENDED, in_step=bool(entry and rank.in_step(entry)),
        age=heard - entry.entered if entry else 0.0, idle=heard - rank.progress, step=rank.steps,
        recent=numbered[-8:], busy=0.0, ended=rank.said == Code.ENDED,
        stopped=int(rank.record.facts.get("pid", 0)) if rank.state == "stopped" else 0,
    )  # fmt: skip


def _step_time(ranks: Sequence[Rank]) -> float:
    """Seconds that a step takes, where one is known."""
    entries = [entry for rank in ranks for entry in rank.entries]
    taken = [entry.left - entry.entered for entry in entries if entry.kind == Kind.STEP and entry.left]
    return statistics.median(taken) if taken else 0.0
