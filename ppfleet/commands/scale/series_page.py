"""A scaling series as one HTML page: what series_page.html.j2 shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppfleet.commands.scale import table
from ppfleet.commands.scale.summary import PARTS
from ppfleet.html.chart import Chart, line_chart
from ppfleet.html.render import number, render


def html(facts: dict[str, Any]) -> str:
    modes = [
        {
            "title": table.title(mode, rows),
            "rows": rows,
            "cells": [table.cells(row) for row in rows],
            "part_cells": [table.part_cells(row) for row in rows],
        }
        for mode, rows in facts["tables"].items()
    ]
    projected = facts["projection"]
    return render(
        "commands/scale/series_page.html.j2",
        title=f"Scaling of {Path(facts['script']).name}",
        facts=facts,
        modes=modes,
        head=table.head(facts),
        parts=PARTS,
        parts_head=table.PARTS_HEAD,
        charts=_charts(facts),
        projected=_projected(projected) if projected else None,
        projected_cells=[
            (point["machines"], number(1e3 * point["step"]), f"{point['efficiency']:.0%}")
            for point in (projected["points"] if projected else ())
        ],
    )


def _charts(facts: dict[str, Any]) -> list[Chart]:
    charts = []
    for name, title in (("time", "time, seconds"), ("efficiency", "efficiency, %")):
        lines = {label: [point[:2] for point in points] for label, points in table.curves(facts, name).items()}
        charts.append(line_chart(title, lines, "ranks"))
    return [chart for chart in charts if chart.svg]


def _projected(facts: dict[str, Any]) -> Chart:
    points = [(1, 100), *((point["machines"], 100 * point["efficiency"]) for point in facts["points"])]
    return line_chart("projected efficiency, %", {f"machines × {facts['from']['ranks']}": points}, "machines")
