"""Charts as inline SVG, drawn by matplotlib: text stays text, and the page sets the colors, light or dark."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ppfleet.html.render import number

if TYPE_CHECKING:  # matplotlib takes half a second to import
    from matplotlib.figure import Figure

# Name of a CSS variable of the page -> the placeholder color that matplotlib draws with. `cN` are the lines' colors.
COLORS = {f"c{n}": f"#c0ffe{n}" for n in range(6)} | {"soft": "#c0ffea", "line": "#c0ffeb", "failed": "#c0ffec"}
_WIDTH, _HEIGHT = 470, 200  # pixels, where a page shows two charts side by side
_DOTS = 60  # up to so many points, each is a dot with a tooltip
_MAX = 1e300  # larger values count as infinite: no axis can show them

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over a common x axis, for the macro `chart` of templates/parts.html.j2."""

    title: str
    x_name: str
    legend: Mapping[str, float]  # name of a line -> its last value
    description: str  # for a screen reader
    svg: str


def line_chart(title: str, series: Mapping[str, Points], x_name: str, marks: Sequence[tuple[float, str]] = ()) -> Chart:
    """Draw a chart. `marks` are (x, text): vertical lines, numbered from 1. Values that are not finite leave a gap;
    without any finite value `svg` is empty.

    >>> line_chart("loss", {"train": [(0, 2.3), (100, 0.7)]}, "step", [(60, "restarted")])
    """
    lines = {
        name: [(x, y if abs(y) < _MAX else math.nan) for x, y in points if abs(x) < _MAX]
        for name, points in series.items()
    }
    without_gaps = {name: [(x, y) for x, y in points if y == y] for name, points in lines.items()}
    finite = {name: points for name, points in without_gaps.items() if points}
    spoken = [_spoken(name, points, x_name) for name, points in finite.items()]
    spoken += [f"Mark {n} at {x_name} {number(x)}: {text}." for n, (x, text) in enumerate(marks, 1)]
    svg = ""
    if finite:
        with style(title):
            svg = _draw({name: lines[name] for name in finite}, x_name, marks)
    legend = {name: points[-1][1] for name, points in finite.items()}
    return Chart(title, x_name, legend, " ".join([f"{title}, over {x_name}.", *spoken]), svg)


def _draw(lines: Mapping[str, Points], x_name: str, marks: Sequence[tuple[float, str]]) -> str:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), layout="constrained")
    axes = figure.add_subplot()
    tooltips: dict[str, list[str]] = {}
    for n, (name, points) in enumerate(lines.items()):
        texts = [f"{name}: {number(y)} at {x_name} {number(x)}" for x, y in points if math.isfinite(y)]
        color, dots = COLORS[f"c{n % 6}"], "o" if len(texts) <= _DOTS else ""
        axes.plot(*zip(*points), color=color, linewidth=2, marker=dots, markersize=5, gid=f"line{n}", clip_on=False)
        tooltips[f"line{n}"] = texts if dots else [name]
    for n, (x, text) in enumerate(marks, 1):
        axes.axvline(x, color=COLORS["failed"], linewidth=2, linestyle="--", gid=f"mark{n}")
        tooltips[f"mark{n}"] = [text]
    for x in sorted({x for x, _ in marks}):
        numbers = ", ".join(str(n) for n, (other, _) in enumerate(marks, 1) if other == x)
        axes.annotate(
            numbers, (x, 1), (0, 3), axes.get_xaxis_transform(), "offset points",
            ha="center", va="bottom", color=COLORS["failed"], size=13, weight="bold",
        )  # fmt: skip
    whole = all(float(x).is_integer() for points in lines.values() for x, _ in points)  # there are no 1.5 ranks
    for axis, integer in ((axes.xaxis, whole), (axes.yaxis, False)):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=integer))
        axis.set_major_formatter(lambda value, _: number(value))
    axes.tick_params(length=0, labelcolor=COLORS["soft"], labelsize=13)
    axes.grid(axis="y", color=COLORS["line"], linewidth=1)
    axes.spines[:].set_visible(False)
    return svg(figure, tooltips)


@contextmanager
def style(name: str) -> Iterator[None]:
    """Fixed settings, independent of the user's matplotlibrc. `name` makes the ids of several figures distinct."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = name.encode(errors="backslashreplace").decode()
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans"]
        matplotlib.rcParams["text.parse_math"] = False
        matplotlib.rcParams["path.simplify_threshold"] = 0.5  # pixels: fewer points for a long line, with its peaks
        yield


def svg(figure: Figure, tooltips: Mapping[str, Sequence[str]] | None = None) -> str:
    """A figure as an SVG element, reproducible byte by byte. `tooltips` maps the `gid` of a line to the texts of its
    dots, or to one text for the whole line. Call it within `style`."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    root.attrib = {"viewBox": root.attrib["viewBox"]}
    for element in root.iter():
        for child in list(element):  # metadata, and style rules that would apply to the whole page
            if child.tag.endswith(("}metadata", "}style", "}clipPath")):
                element.remove(child)
        element.tag = element.tag.rpartition("}")[2]
        element.attrib.pop("clip-path", None)
        element.attrib = {key.rpartition("}")[2]: _colored(value) for key, value in element.attrib.items()}
    for group in list(root.iter("g")):
        gid = group.attrib.pop("id", "")
        if tooltips and gid in tooltips:
            group.set("class", gid.rstrip("0123456789"))
            for target, text in zip(list(group.iter("use")) or [group], tooltips[gid]):
                ElementTree.SubElement(target, "title").text = text
    return ElementTree.tostring(root, encoding="unicode")


def _colored(style: str) -> str:
    for name, color in COLORS.items():
        style = style.replace(color, f"var(--{name})")
    return style


def _spoken(name: str, points: Points, x_name: str) -> str:
    (first_x, first), (last_x, last) = points[0], points[-1]
    values = [y for _, y in points]
    return (
        f"{name}: from {number(first)} at {x_name} {number(first_x)} to {number(last)} at {number(last_x)}, "
        f"between {number(min(values))} and {number(max(values))}."
    )
