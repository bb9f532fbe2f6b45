"""The results of a benchmark: a table on the screen and in markdown, the figures as JSON, a plot as SVG.

python benchmarks/report.py         # the last run of each into docs/performance.md and _cn, with the plots beside
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = ("train", "scale", "input", "infer", "memory")
HEAD = ("work", "ours", "peer", "ratio", "goal", "floor", "met")


@dataclass
class Row:
    """A line of the table. `value` should be at least `goal` and must be at least `floor`; with `most`, at most."""

    work: str
    ours: str
    peer: str
    value: float
    goal: float
    floor: float
    low: float | None = None  # quartiles of `value`
    high: float | None = None
    most: bool = False
    unit: str = ""

    @property
    def met(self) -> str:
        sign = -1 if self.most else 1
        if sign * self.value >= sign * self.goal:
            return "goal"
        return "floor" if sign * self.value >= sign * self.floor else "no"

    def cells(self) -> list[str]:
        limit = "≤" if self.most else "≥"
        spread = f" ({self.low:.2f} to {self.high:.2f})" if self.low is not None else ""
        value = f"{self.value:.2f}{self.unit}{spread}"
        limits = [f"{limit} {number:g}{self.unit}" for number in (self.goal, self.floor)]
        return [self.work, self.ours, self.peer, value, *limits, self.met]


def table(rows: list[Row]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write(name: str, output: str, rows: list[Row], cases: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    """Print the table, and leave it with figures and plot in the directory `output`. A case is a title, a unit and the
    values of the contenders: {"title": …, "unit": "images/s", "values": {"ours": …}}."""
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    text = table(rows)
    told = {"rows": [{**asdict(row), "met": row.met} for row in rows], "cases": cases, "machine": machine}
    (directory / f"{name}.json").write_text(json.dumps(told, indent=1))
    (directory / f"{name}.md").write_text(text + "\n")
    (directory / f"{name}.svg").write_text(plot(cases))
    print(f"\n{text}\n\nfigures, table and plot: {directory}/{name}.json, .md, .svg", flush=True)


_STYLE = """text{font-family:system-ui,sans-serif!important}:root{--soft:#1f2328;--c0:#0969da;--line:#8c959f}
@media(prefers-color-scheme:dark){:root{--soft:#e6edf3;--c0:#4493f8;--line:#6e7681}}"""


def plot(cases: list[dict[str, Any]]) -> str:
    """Bars, a group for each case; readable on light and dark pages."""
    from matplotlib.figure import Figure

    from ppfleet.html.chart import COLORS, style, svg

    rows = [len(case["values"]) for case in cases]
    width, height = 660, sum(18 * count + 42 for count in rows)
    with style("benchmark"):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        figure.get_layout_engine().set(h_pad=8 / 72)
        groups = figure.subplots(len(cases), squeeze=False, height_ratios=rows)[:, 0]
        for axes, case in zip(groups, cases):
            names, values = list(case["values"]), list(case["values"].values())
            colors = [COLORS["c0" if name.startswith("ours") else "line"] for name in names]
            bars = axes.barh(range(len(names)), values, color=colors)
            axes.bar_label(bars, [number(value) for value in values], padding=5, color=COLORS["soft"], size=12)
            axes.set_yticks(range(len(names)), names)
            axes.set(xlim=(0, 1.15 * max(values)), ylim=(len(names) - 0.5, -0.5), xticks=[])
            axes.tick_params(length=0, labelsize=12, labelcolor=COLORS["soft"])
            axes.spines[:].set_visible(False)
            axes.set_title(
                f"{case['title']} ({case['unit']})", loc="left", color=COLORS["soft"], size=12, weight="bold"
            )
        drawn = svg(figure)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    return drawn.replace("<svg ", opening, 1).replace(">", f"><style>{_STYLE}</style>", 1) + "\n"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def describe(machine: dict[str, Any]) -> str:
    facts = {**machine, "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items())}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])


def write_pages(results: Path, pages: list[Path]) -> None:
    """Put what the last runs gave into the pages, between the marks, and the plots beside them."""
    for name in BENCHMARKS:
        path = results / f"{name}.json"
        if not path.exists():
            continue
        for page in pages:
            told = json.loads(path.read_text())
            for row in told["rows"]:
                row.pop("met")
            plots = page.parent / "performance"
            plots.mkdir(exist_ok=True)
            shutil.copy(results / f"{name}.svg", plots)
            text = page.read_text()
            lines = table([Row(**row) for row in told["rows"]])
            run = f"(`benchmarks/{name}.py`, {told['machine'].pop('date')}, load before: {told['machine'].pop('load')})"
            text = _between(text, name, f"{lines}\n\n{run}\n\n![](performance/{name}.svg)")
            page.write_text(_between(text, "machine", describe(told["machine"])))


def _between(text: str, name: str, block: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    return f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}" if found else text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("output/bench"), help="(default: %(default)s)")
    root = Path(__file__).resolve().parent.parent
    pages = [root / "docs/performance.md", root / "docs/performance_cn.md"]
    parser.add_argument("pages", nargs="*", type=Path, default=pages, help="(default: docs/performance*.md)")
    options = parser.parse_args()
    write_pages(options.results, options.pages)
