"""The answer as one HTML page without scripts, fonts or links to elsewhere: what each rank did, in a drawing.

The drawing measures its width in percent, so that bars become as wide as the screen and letters stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

from ppfleet.commands.why.cause import Answer, ending
from ppfleet.commands.why.job_start import Rank, label, size, span
from ppfleet.html import page
from ppfleet.watchdog.recorder import Entry

_STYLE = Path(__file__).with_name("timeline.css")
_KINDS = {
    "step": "computing (a step)",
    "collective": "collective",
    "meeting": "meeting",
    "work": "rank 0's work",
    "data": "waiting for data",
    "save": "saving",
    "export": "export",
    "start": "starting",
    "evaluate": "evaluation",
}
_AROUND = ("step", "save", "export", "evaluate")  # these may have others inside of them
_ROW, _BAR = 66, 22  # pixels
_TOP = 26
_NARROW = 0.15  # percent of the width, below which a gap between two bars of a kind is not drawn
_LEAST = 0.3  # percent that a bar is wide at least
_BEFORE = 6  # entries of a rank that are shown before what it is in


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
    attempt = answer.attempt
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started))
    well = ' class="well"' if answer.kind in ("finished", "running") else ""
    body = [
        f"<h1{well}>{escape(answer.sentence)}</h1>",
        f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in answer.evidence)}</ul>",
        "<h2>The last moments of each rank</h2>",
        f'<div class="card">{_legend(attempt.ranks)}{_drawing(answer)}</div>',
        "<h2>The ranks</h2>",
        _table(answer),
        *(f'<p class="soft">Note: {escape(note)}</p>' for note in answer.notes),
        f'<p class="soft">Started {began}; {attempt.size} ranks{escape(f", run {attempt.run}" if attempt.run else "")}'
        ". All times by rank 0’s clock.</p>",
    ]
    return page.document(f"why: {answer.sentence}", body, _STYLE.read_text(encoding="utf-8"))


def _legend(ranks: Iterable[Rank]) -> str:
    used = {entry.kind for rank in ranks for entry in rank.entries}
    items = [f'<span><i class="{kind}"></i>{text}</span>' for kind, text in _KINDS.items() if kind in used]
    return f'<div class="legend">{"".join(items)}<span><i class="unfinished"></i>not left</span></div>'


def _drawing(answer: Answer) -> str:
    window = Window(answer)
    ranks = answer.attempt.ranks
    height = _TOP + _ROW * len(ranks)
    rows = [_row(rank, window, _TOP + _ROW * number, rank.number in answer.ranks) for number, rank in enumerate(ranks)]
    told = f"Timeline of {len(ranks)} ranks over the last {span(window.end - window.start)}. {answer.sentence}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" height="{height}" role="img" aria-label="{escape(told)}">'
        f"<title>{escape(told)}</title>"
        '<defs><pattern id="stripes" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="stripes" x1="0" y1="0" x2="0" y2="8"/></pattern></defs>'
        f"{_axis(window, height)}{''.join(rows)}</svg>"
    )


def _axis(window: Window, height: int) -> str:
    """Seconds before the end."""
    length = window.end - window.start
    tick = next((t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if length / t <= 5), length / 4)
    parts = []
    for number in range(int(length / tick) + 1):
        x = window.x(window.end - number * tick)
        if x < 3:
            break
        parts.append(f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="18" y2="{height}"/>')
        text = "end" if number == 0 else f"−{number * tick:g} s"
        anchor = "end" if number == 0 else "middle"
        parts.append(f'<text class="soft" x="{x:.2f}%" y="13" text-anchor="{anchor}">{text}</text>')
    return "".join(parts)


def _row(rank: Rank, window: Window, top: int, late: bool) -> str:
    bars = [_bar(*each, rank, window, top + 22) for each in _merged(rank, window)]
    if late and rank.open:
        x = window.x(rank.open.entered)
        width = max(window.x(_until(rank, window.end)) - x, _LEAST)
        bars.append(
            f'<rect class="outline" x="{x:.3f}%" y="{top + 21}" width="{width:.3f}%" height="{_BAR + 2}" rx="3"/>'
        )
    mark = ""
    if rank.state in ("said", "gone") and rank.said != "ended":
        x = window.x(rank.seen)
        mark = f'<line class="end" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top + 17}" y2="{top + 27 + _BAR}"/>'
    kind = ' class="late"' if late else ""
    return (
        f"<g><title>{escape(f'{rank.name}: {ending(rank)}; {_doing(rank, window.end)}')}</title>"
        f'<text{kind} x="0" y="{top + 15}">{escape(rank.name)}</text>{"".join(bars)}{mark}'
        f'<text class="soft" x="0" y="{top + 40 + _BAR - 3}">{escape(_doing(rank, window.end, where=False))}</text></g>'
    )


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


def _bar(entry: Entry, left: float, right: float, count: int, rank: Rank, window: Window, top: int) -> str:
    inset = 0 if entry.kind in _AROUND else 4
    width = max(right - left, _LEAST)
    shape = (
        f'x="{min(left, 100 - width):.3f}%" y="{top + inset}" width="{width:.3f}%" height="{_BAR - 2 * inset}" rx="2"'
    )
    if count > 1:
        told = f"{count} × {entry.what}"
    else:
        lasted = span(entry.left - entry.entered) if entry.left else "not left"
        told = ", ".join(filter(None, (label(entry), lasted, entry.where, entry.detail)))
    bar = f'<rect class="{entry.kind}" {shape}><title>{escape(f"rank {rank.number}: {told}")}</title></rect>'
    return bar if entry.left else f'{bar}<rect fill="url(#stripes)" pointer-events="none" {shape}/>'


def _table(answer: Answer) -> str:
    columns = ("rank", "host", "last operation", "how it ended", "memory", "steps")
    head = "".join(f'<th scope="col">{each}</th>' for each in columns)
    rows = []
    for rank in answer.attempt.ranks:
        last = rank.last
        doing = (
            f"{label(last)}{'' if last.left else ' … not left'}{f' ({last.where})' if last.where else ''}"
            if last
            else ""
        )
        pulse = rank.record.pulse
        memory = f"{size(pulse.memory)} ({size(pulse.available)} left on the host)" if pulse.time else ""
        late = ' class="late"' if rank.number in answer.ranks else ""
        host = " ".join(
            filter(None, (str(rank.record.facts.get("address", "")), str(rank.record.facts.get("host", ""))))
        )
        cells = zip(columns[1:], (host, doing, ending(rank), memory))
        rows.append(
            f'<tr{late}><th scope="row">rank {rank.number}</th>'
            + "".join(f'<td data-label="{name}">{escape(text)}</td>' for name, text in cells)
            + f'<td class="number" data-label="steps">{rank.steps}</td></tr>'
        )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
