"""The answer as one HTML page: what each rank did, as bars in timeline.html.j2.

The widths of bars are in percent: they adapt to the screen, while the size of the text stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ppfleet.commands.why.cause import Answer, ending
from ppfleet.commands.why.job_start import Rank, label, size
from ppfleet.commands.why.sentences import span
from ppfleet.html.render import render
from ppfleet.watchdog.recorder import Entry


class BarStyle(NamedTuple):
    """The name and the colors of a kind of entry."""

    name: str
    light: str
    dark: str


_KINDS = {
    "step": BarStyle("computing (a step)", "#b9c4d0", "#4a5561"),
    "collective": BarStyle("collective", "#3b76c4", "#6ea3ea"),
    "meeting": BarStyle("waiting for all ranks", "#7a5cc0", "#a78bea"),
    "work": BarStyle("rank 0's work", "#b0761b", "#dba650"),
    "data": BarStyle("waiting for data", "#2a9d8f", "#4cc7b8"),
    "save": BarStyle("saving", "#c2577f", "#e586a8"),
    "export": BarStyle("export", "#8a6d3b", "#c4a36a"),
    "start": BarStyle("starting", "#7d8894", "#8d97a3"),
    "evaluate": BarStyle("evaluation", "#5f8f2f", "#96c45f"),
}
_OUTER = ("step", "save", "export", "evaluate")  # kinds that may contain others
_NARROW = 0.15  # percent of the width: smaller gaps between two bars of a kind are not drawn
_MIN_WIDTH = 0.3  # of a bar, in percent
_BEFORE = 6  # entries of each rank that are shown before its last one
_COLUMNS = ("rank", "host", "last operation", "how it ended", "memory", "steps")


@dataclass(frozen=True)
class Bar:
    """A part of a rank's time, in percent of the width. `kinds` are its CSS classes."""

    kinds: str
    left: float
    width: float
    title: str = ""


class Window:
    """The time span shown: the last operations, and enough before them to see normal progress."""

    def __init__(self, answer: Answer) -> None:
        ranks = answer.attempt.ranks
        alive = any(rank.state in ("running", "stopped") for rank in ranks)
        self.end = max(answer.attempt.last_seen, answer.now) if alive else answer.attempt.last_seen
        recent = [rank.entries[-_BEFORE:][0].entered for rank in ranks if rank.entries]
        open_since = [rank.open.entered for rank in ranks if rank.open]
        self.start = min([*recent, *open_since, self.end - 1])
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
    """The position of each tick in percent, and its label."""
    length = window.end - window.start
    tick = next((t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if length / t <= 5), length / 4)
    ticks = [(n * tick, round(window.x(window.end - n * tick), 2)) for n in range(int(length / tick) + 1)]
    return [(x, f"−{before:g} s" if before else "end") for before, x in ticks if x >= 3]


def _row(rank: Rank, window: Window, late: bool) -> dict[str, object]:
    doing = _doing(rank, window.end)
    return {
        "rank": rank,
        "late": late,
        "title": f"{rank.name}: {ending(rank)}; {doing}",
        "doing": _doing(rank, window.end, with_line=False),
        "bars": _bars(rank, window, late),
        "cells": _cells(rank),
    }


def _bars(rank: Rank, window: Window, late: bool) -> list[Bar]:
    bars = [_bar(*merged, rank) for merged in _merged(rank, window)]
    if late and rank.open:
        left = window.x(rank.open.entered)
        bars.append(_placed("outline", left, window.x(_until(rank, window.end))))
    if rank.state in ("said", "gone") and rank.said != "ended":
        bars.append(Bar("died", round(window.x(rank.seen), 3), 0))
    return bars


def _bar(entry: Entry, left: float, right: float, count: int, rank: Rank) -> Bar:
    if count > 1:
        text = f"{count} × {entry.what}"
    else:
        lasted = span(entry.left - entry.entered) if entry.left else "not finished"
        text = ", ".join(filter(None, (label(entry), lasted, entry.where, entry.detail)))
    inside = "" if entry.kind in _OUTER else " inside"
    return _placed(f"{entry.kind}{inside}{'' if entry.left else ' open'}", left, right, f"rank {rank.number}: {text}")


def _placed(kinds: str, left: float, right: float, title: str = "") -> Bar:
    width = max(right - left, _MIN_WIDTH)
    return Bar(kinds, round(min(left, 100 - width), 3), round(width, 3), title)


def _cells(rank: Rank) -> list[object]:
    last, pulse, facts = rank.last, rank.record.pulse, rank.record.facts
    doing = label(last) + ("" if last.left else " … not finished") if last else ""
    line = f" ({last.where})" if last and last.where else ""
    memory = f"{size(pulse.memory)} ({size(pulse.available)} available on the host)" if pulse.time else ""
    host = " ".join(str(facts[name]) for name in ("address", "host") if facts.get(name))
    return [host, f"{doing}{line}", ending(rank), memory, rank.steps]


def _doing(rank: Rank, end: float, with_line: bool = True) -> str:
    """What the rank was doing at its end."""
    entry = rank.last
    if entry is None:
        return "nothing recorded"
    lasted = "" if entry.left else f", not finished after {span(_until(rank, end) - entry.entered)}"
    line = f" · {entry.where}" if with_line and entry.where else ""
    return f"{'last: ' if entry.left else 'in '}{label(entry)}{lasted}{line}"


def _until(rank: Rank, end: float) -> float:
    """The end of the rank's last activity."""
    return rank.seen if rank.state in ("said", "gone") else end


def _merged(rank: Rank, window: Window) -> list[tuple[Entry, float, float, int]]:
    """(entry, left, right, count): neighbours that would be too narrow to see are merged into one bar."""
    until = _until(rank, window.end)
    drawn: list[tuple[Entry, float, float, int]] = []
    newest: dict[str, int] = {}  # kind -> index in `drawn`
    for entry in rank.entries:
        left, right = window.x(entry.entered), window.x(entry.left or until)
        inside = entry.kind not in _OUTER
        if right <= 0 or (inside and entry.left and right - left < _NARROW):
            continue
        before = newest.get(entry.kind, -1)
        if before >= 0 and entry.left and left - drawn[before][2] < _NARROW and right - left < _MIN_WIDTH:
            first, began, _, count = drawn[before]
            drawn[before] = (first, began, max(right, drawn[before][2]), count + 1)
        else:
            newest[entry.kind] = len(drawn)
            drawn.append((entry, left, right, 1))
    return sorted(drawn, key=lambda bar: bar[0].kind not in _OUTER)  # inner operations are drawn on top
