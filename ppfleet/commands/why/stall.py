"""Diagnoses a stall from flight records, for jobs without a watchdog's diagnosis. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from ppfleet import limits
from ppfleet.commands.why.job_start import Rank
from ppfleet.watchdog.diagnosis import Beat, Limits, diagnose
from ppfleet.watchdog.events import Code, Event, Kind
from ppfleet.watchdog.recorder import Entry

_STEPS = 10.0  # steps without progress that count as a stall, if longer than limits.WAIT_ALWAYS


def find_stall(ranks: Sequence[Rank], until: float) -> Event | None:
    """Why there is no progress at that time: a rank is stopped, late or in another operation, or the network fails."""
    beats = [_beat(rank, rank.open, until) for rank in ranks]
    waits = [beat.waited(until) for beat in beats if beat.waits]
    lasted = max(waits) if waits else min(beat.idled(until) for beat in beats)
    timeout = max(limits.WAIT_ALWAYS, _STEPS * _step_time(ranks))
    if lasted < timeout and not any(beat.stopped for beat in beats):
        return None
    return diagnose(beats, until, Limits(timeout, timeout, stopped=0.0, outside=True))


def uneven(ranks: Sequence[Rank], until: float) -> Event | None:
    """A rank has left its loop while others waited for it in a step, or failed there because of that."""
    beats = []
    for rank in ranks:
        event, entry = rank.event, rank.open
        if event and event.code == Code.EXCEPTION and event.fields.get("error") == "peer_lost":
            number = event.fields["fields"].get("operation", 0)
            failed_in = [entry for entry in rank.entries if entry.operation == number and number]
            entry = replace(failed_in[-1], left=0.0) if failed_in else None
        if rank.state == "running" or rank.said == Code.ENDED or (entry and entry.waits):
            beats.append(_beat(rank, entry, until))
    diagnosis = diagnose(beats, until, Limits(0.0, 0.0, outside=True))
    return diagnosis if diagnosis and diagnosis.code == Code.UNEVEN else None


def _beat(rank: Rank, entry: Entry | None, until: float) -> Beat:
    """The heartbeat that its watchdog would send; for a rank that is gone, the last one."""
    heard = rank.seen if rank.state in ("gone", "stopped") else until
    numbered = [entry.as_operation() for entry in rank.entries if entry.operation]
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
    """Median seconds of a step; 0 if none has finished."""
    entries = [entry for rank in ranks for entry in rank.entries]
    taken = [entry.left - entry.entered for entry in entries if entry.kind == Kind.STEP and entry.left]
    return statistics.median(taken) if taken else 0.0
