"""The answer as one HTML page: what each rank did, as bars in timeline.html.j2.

Bars measure their width in percent, so that they become as wide as the screen and letters stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ppfleet.commands.why.cause import Answer, ending
from ppfleet.commands.why.job_start import Rank, label, size
from ppfleet.html.render import render
from ppfleet.watchdog.recorder import Entry
from ppfleet.watchdog.render import span


class Kind(NamedTuple):
    """How a kind of entry is called and drawn."""

    name: str
    light: str
    dark: str


_KINDS = {
    "step": Kind("computing (a step)", "#b9c4d0", "#4a5561"),
    "collective": Kind("collective", "#3b76c4", "#6ea3ea"),
    "meeting": Kind("meeting", "#7a5cc0", "#a78bea"),
    "work": Kind("rank 0's work", "#b0761b", "#dba650"),
    "data": Kind("waiting for data", "#2a9d8f", "#4cc7b8"),
    "save": Kind("saving", "#c2577f", "#e586a8"),
    "export": Kind("export", "#8a6d3b", "#c4a36a"),
    "start": Kind("starting", "#7d8894", "#8d97a3"),
    "evaluate": Kind("evaluation", "#5f8f2f", "#96c45f"),
}
_AROUND = ("step", "save", "export", "evaluate")  # these may have others inside of them
_NARROW = 0.15  # percent of the width, below which a gap between two bars of a kind is not drawn
_LEAST = 0.3  # percent that a bar is wide at least
_BEFORE = 6  # entries of a rank that are shown before what it is in
_COLUMNS = ("rank", "host", "last operation", "how it ended", "memory", "steps")


@dataclass(frozen=True)
class Bar:
    """A part of a rank's time, in percent of the width. `kinds` are its classes in the page."""

    kinds: str
    left: float
    width: float
    title: str = ""


class Window:
    """The time that is drawn: what lasted at the end, and enough before it to see how it was when all was well."""

    def __init__(self, answer: Answer) -> None:
        ranks = answer.attempt.ranks
        alive = any(rank.state in ("running", "stopped") for rank in ranks)
        self.end = max(answer.attempt.last_seen, answer.now) if alive else answer.attempt.last_seen
        begins = [rank.entries[-_BEFORE:][0].entered for rank in ranks if rank.entries]
        held = [rank.open.entered for rank in ranks if rank.open]
        self.start = min([*begins, *held, self.end - 1])
        self.start -= 0.1 * (self.end - self.start)

    def x(self, when: float) -> float:
        """Percent of the width."""
        return max(0.0, min(100.0, 100 * (when - self.start) / (self.end - self.start)))


def html(answer: Answer) -> str:
    window, ranks = Window(answer), answer.attempt.ranks
    return render(
        "commands/why/timeline.html.j2",
        title=f"why: {answer.sentence}",
        answer=answer,
        attempt=answer.attempt,
        window=window,
        kinds=_KINDS,
        used={entry.kind for rank in ranks for entry in rank.entries},
        ticks=_ticks(window),
        rows=[_row(rank, window, rank.number in answer.ranks) for rank in ranks],
        columns=_COLUMNS,
        span=span,
    )


def _ticks(window: Window) -> list[tuple[float, str]]:
    """Where, in percent, and how long before the end."""
    length = window.end - window.start
    tick = next((t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if length / t <= 5), length / 4)
    places = [(n * tick, round(window.x(window.end - n * tick), 2)) for n in range(int(length / tick) + 1)]
    return [(x, f"−{before:g} s" if before else "end") for before, x in places if x >= 3]


def _row(rank: Rank, window: Window, late: bool) -> dict[str, object]:
    doing = _doing(rank, window.end)
    return {
        "rank": rank,
        "late": late,
        "title": f"{rank.name}: {ending(rank)}; {doing}",
        "doing": _doing(rank, window.end, where=False),
        "bars": _bars(rank, window, late),
        "cells": _cells(rank),
    }


def _bars(rank: Rank, window: Window, late: bool) -> list[Bar]:
    bars = [_bar(*each, rank) for each in _merged(rank, window)]
    if late and rank.open:
        left = window.x(rank.open.entered)
        bars.append(_placed("outline", left, window.x(_until(rank, window.end))))
    if rank.state in ("said", "gone") and rank.said != "ended":
        bars.append(Bar("died", round(window.x(rank.seen), 3), 0))
    return bars


def _bar(entry: Entry, left: float, right: float, count: int, rank: Rank) -> Bar:
    if count > 1:
        told = f"{count} × {entry.what}"
    else:
        lasted = span(entry.left - entry.entered) if entry.left else "not left"
        told = ", ".join(filter(None, (label(entry), lasted, entry.where, entry.detail)))
    inside = "" if entry.kind in _AROUND else " inside"
    return _placed(f"{entry.kind}{inside}{'' if entry.left else ' open'}", left, right, f"rank {rank.number}: {told}")


def _placed(kinds: str, left: float, right: float, title: str = "") -> Bar:
    width = max(right - left, _LEAST)
    return Bar(kinds, round(min(left, 100 - width), 3), round(width, 3), title)


def _cells(rank: Rank) -> list[object]:
    last, pulse, facts = rank.last, rank.record.pulse, rank.record.facts
    doing = label(last) + ("" if last.left else " … not left") if last else ""
    where = f" ({last.where})" if last and last.where else ""
    memory = f"{size(pulse.memory)} ({size(pulse.available)} left on the host)" if pulse.time else ""
    host = " ".join(str(facts[name]) for name in ("address", "host") if facts.get(name))
    return [host, f"{doing}{where}", ending(rank), memory, rank.steps]


def _doing(rank: Rank, end: float, where: bool = True) -> str:
    """What it was in at its end."""
    entry = rank.last
    if entry is None:
        return "nothing recorded"
    lasted = "" if entry.left else f", not left for {span(_until(rank, end) - entry.entered)}"
    line = f" · {entry.where}" if where and entry.where else ""
    return f"{'last: ' if entry.left else 'in '}{label(entry)}{lasted}{line}"


def _until(rank: Rank, end: float) -> float:
    """When it stopped doing anything."""
    return rank.seen if rank.state in ("said", "gone") else end


def _merged(rank: Rank, window: Window) -> list[tuple[Entry, float, float, int]]:
    """entry, from, to, and how many it stands for: what would be narrower than a line is drawn together."""
    until = _until(rank, window.end)
    drawn: list[tuple[Entry, float, float, int]] = []
    newest: dict[str, int] = {}  # kind -> where in `drawn`
    for entry in rank.entries:
        left, right = window.x(entry.entered), window.x(entry.left or until)
        inside = entry.kind not in _AROUND
        if right <= 0 or (inside and entry.left and right - left < _NARROW):
            continue
        before = newest.get(entry.kind, -1)
        if before >= 0 and entry.left and left - drawn[before][2] < _NARROW and right - left < _LEAST:
            first, began, _, count = drawn[before]
            drawn[before] = (first, began, max(right, drawn[before][2]), count + 1)
        else:
            newest[entry.kind] = len(drawn)
            drawn.append((entry, left, right, 1))
    return sorted(drawn, key=lambda each: each[0].kind not in _AROUND)  # what lies inside is drawn over it
