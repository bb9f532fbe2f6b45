"""What a benchmark leaves: a table on the screen and in markdown, the figures as JSON, a plot as SVG.

python benchmarks/report.py         # the last run of each into docs/performance.md and _cn, with the plots beside
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

BENCHMARKS = ("train", "scale", "input", "infer", "memory")
HEAD = ("work", "ours", "peer", "ratio", "goal", "floor", "met")


@dataclass
class Row:
    """A line of the table. `value` is to be at least `goal`, or `floor`; with `most`, at most."""

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


_STYLE = """text{font:12px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600}.b{fill:#8c959f}.o{fill:#0969da}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.b{fill:#6e7681}.o{fill:#4493f8}}"""


def plot(cases: list[dict[str, Any]]) -> str:
    """Bars, a group for each case; readable on light and dark pages."""
    left, width, height = 210, 380, 18
    parts, y = [], 0
    for case in cases:
        y += 24
        parts.append(f'<text class="t" x="4" y="{y}">{escape(case["title"])} ({escape(case["unit"])})</text>')
        most = max(case["values"].values())
        y += 8
        for name, value in case["values"].items():
            kind = "o" if name.startswith("ours") else "b"
            length = max(1, round(width * value / most))
            parts.append(
                f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
                f'<rect class="{kind}" x="{left}" y="{y + 2}" width="{length}" height="{height - 4}" rx="2"/>'
                f'<text x="{left + length + 6}" y="{y + 13}">{number(value)}</text>'
            )
            y += height
    size = f'viewBox="0 0 {left + width + 70} {y + 12}" width="{left + width + 70}" height="{y + 12}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"


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
