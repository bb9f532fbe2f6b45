"""One HTML page without scripts, fonts or links to elsewhere: the frame that ppfleet's pages share, charts, tables.

A chart measures its width in percent, so that lines become as wide as the screen and letters stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

_STYLE = Path(__file__).with_name("page.css")
_PLOT, _AXIS = 180, 22  # pixels: the height of the lines' area, and of the figures below it
_FEW = 60  # points up to which each is shown as a dot, with its figures when it is pointed at
_MANY = 600  # parts of the width within which no more than a line's lowest and highest point can be told apart
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # in no page: a name that somebody chose may have them

Points = Sequence[tuple[float, float]]


def document(title: str, body: Iterable[str], style: str = "", language: str = "en") -> str:
    """The whole page; `body` is HTML, `title` is not. `style` adds to the rules that all pages share."""
    css = _STYLE.read_text(encoding="utf-8") + style
    text = (
        f'<!DOCTYPE html>\n<html lang="{language}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, body))
        + "\n</main></body></html>\n"
    )
    # File names need not be text: what is none is shown with escapes.
    return _CONTROL.sub("\ufffd", text).encode(errors="backslashreplace").decode()


def chart(title: str, series: Mapping[str, Points], x_name: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Lines over a common x. `marks` are (x, what happened there), drawn across and numbered from 1. Nothing to draw:
    an empty string.

    Values that are not finite leave a gap. A screen reader is told where each line begins and ends, and its range.
    """
    pieces = {name: found for name, points in series.items() if (found := _pieces(points))}
    if not pieces:
        return ""
    drawn = {name: [point for piece in found for point in piece] for name, found in pieces.items()}
    xs = [x for points in drawn.values() for x, _ in points] + [x for x, _ in marks]
    ys = ticks(*_range(y for points in drawn.values() for _, y in points))
    left, right = _range(xs)
    low, high = ys[0], ys[-1]

    def at_x(x: float) -> float:
        return 8 + 90 * (x - left) / (right - left)  # room for the figures on the left, for half a dot on the right

    def at_y(y: float) -> float:
        return 14 + (_PLOT - 20) * (high - y) / (high - low)

    parts = [
        f'<line x1="0" x2="100%" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>'
        f'<text class="soft" x="0" y="{at_y(y) - 3:.1f}">{number(y)}</text>'
        for y in ys
    ]
    for x in ticks(left, right):
        if left <= x <= right:
            anchor = "end" if at_x(x) > 94 else "middle"
            parts.append(
                f'<text class="soft" x="{at_x(x):.2f}%" y="{_PLOT + 14}" text-anchor="{anchor}">{number(x)}</text>'
            )
    for n, (x, what) in enumerate(marks, 1):
        parts.append(
            f'<line class="mark" x1="{at_x(x):.2f}%" x2="{at_x(x):.2f}%" y1="0" y2="{_PLOT}">'
            f"<title>{escape(what)}</title></line>"
            f'<text class="marked" x="{at_x(x):.2f}%" dx="-4" y="10" text-anchor="end">{n}</text>'
        )
    lines = "".join(
        f'<polyline class="c{n % 6}" points="{" ".join(f"{at_x(x):.3f},{at_y(y):.2f}" for x, y in thinned(piece))}"/>'
        for n, found in enumerate(pieces.values())
        for piece in found
    )
    # Stretched to the width of the screen, while letters and dots are not.
    parts.append(f'<svg viewBox="0 0 100 {_PLOT}" preserveAspectRatio="none" height="{_PLOT}">{lines}</svg>')
    for n, (name, points) in enumerate(drawn.items()):
        if len(points) <= _FEW:
            parts += [
                f'<circle class="c{n % 6}" cx="{at_x(x):.3f}%" cy="{at_y(y):.2f}" r="3">'
                f"<title>{escape(name)}: {number(y)} at {escape(x_name)} {number(x)}</title></circle>"
                for x, y in points
            ]
    told = f"{title}, over {x_name}. " + " ".join(_spoken(name, points, x_name) for name, points in drawn.items())
    told += "".join(f" Mark {n} at {x_name} {number(x)}: {what}." for n, (x, what) in enumerate(marks, 1))
    legend = "".join(
        f'<span><i class="c{n % 6}"></i>{escape(name)} {number(points[-1][1])}</span>'
        for n, (name, points) in enumerate(drawn.items())
    )
    return (
        f'<figure class="chart card"><figcaption><b>{escape(title)}</b>'
        f'<div class="legend">{legend}<span class="soft">over {escape(x_name)}</span></div></figcaption>'
        f'<svg height="{_PLOT + _AXIS}" role="img" aria-label="{escape(told)}">{"".join(parts)}</svg></figure>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Cells are text; numbers stand right. Wide ones scroll by themselves."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="number">{number(cell)}</td>'
            if isinstance(cell, (int, float))
            else f"<td>{escape(str(cell))}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def matrix(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Which class (row) was taken for which (column), each row in shades by the share of its class."""
    head = "".join(f'<th scope="col"><span title="{escape(name)}">{escape(name)}</span></th>' for name in names)
    rows = []
    for n, (name, row) in enumerate(zip(names, counts)):
        total = sum(row) or 1
        cells = "".join(
            f'<td class="{"right" if n == column else "wrong"}{" deep" if count > total / 2 else ""}" '
            f'style="--share:{count / total:.3f}">{count}</td>'
            if count
            else "<td></td>"
            for column, count in enumerate(row)
        )
        title = f'<th scope="row"><span title="{escape(name)}">{escape(name)}</span></th>'
        rows.append(f"<tr>{title}{cells}<td>{100 * row[n] / total:.1f} %</td></tr>")
    return (
        '<div class="scroll"><table class="matrix"><caption>Row: the true class. Column: the guess.</caption>'
        f'<thead><tr><td></td>{head}<th scope="col"><span>right</span></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def thinned(points: Points) -> Points:
    """As many as can be told apart on a screen: of each part of the width the first, lowest, highest and last."""
    if len(points) <= 4 * _MANY:
        return points
    left, right = points[0][0], points[-1][0]
    parts: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        parts.setdefault(int(_MANY * (x - left) / ((right - left) or 1)), []).append((x, y))
    kept = []
    for part in parts.values():
        by_height = sorted(range(len(part)), key=lambda n: part[n][1])
        kept += [part[n] for n in sorted({0, by_height[0], by_height[-1], len(part) - 1})]
    return kept


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round figures from at most `low` to at least `high`, about as many as asked for."""
    rough = (high - low) / about or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def number(value: float) -> str:
    """As short as it is readable."""
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def _pieces(points: Points) -> list[Points]:
    """The stretches of finite values."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    low, high = min(found), max(found)
    return (low, high) if high > low else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _spoken(name: str, points: Points, x_name: str) -> str:
    (first_x, first), (last_x, last) = points[0], points[-1]
    values = [y for _, y in points]
    return (
        f"{name}: from {number(first)} at {x_name} {number(first_x)} to {number(last)} at {number(last_x)}, "
        f"between {number(min(values))} and {number(max(values))}."
    )
