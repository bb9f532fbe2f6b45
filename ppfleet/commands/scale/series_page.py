"""A scaling series as one HTML page: the values that series_page.html.j2 shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppfleet.commands.scale import table
from ppfleet.commands.scale.summary import PARTS
from ppfleet.html.chart import Chart, line_chart
from ppfleet.html.render import number, render


def html(results: dict[str, Any]) -> str:
    modes = [
        {
            "title": table.title(mode, rows),
            "rows": rows,
            "cells": [table.cells(row) for row in rows],
            "part_cells": [table.part_cells(row) for row in rows],
        }
        for mode, rows in results["tables"].items()
    ]
    projected = results["projection"]
    return render(
        "commands/scale/series_page.html.j2",
        title=f"Scaling of {Path(results['script']).name}",
        results=results,
        modes=modes,
        head=table.head(results),
        parts=PARTS,
        parts_head=table.PARTS_HEAD,
        charts=_charts(results),
        projected=_projected(projected) if projected else None,
        projected_cells=[
            (point["machines"], number(1e3 * point["step"]), f"{point['efficiency']:.0%}")
            for point in (projected["points"] if projected else ())
        ],
    )


def _charts(results: dict[str, Any]) -> list[Chart]:
    charts = []
    for name, title in (("time", "time, seconds"), ("efficiency", "efficiency, %")):
        lines = {label: [point[:2] for point in points] for label, points in table.curves(results, name).items()}
        charts.append(line_chart(title, lines, "ranks"))
    return [chart for chart in charts if chart.svg]


def _projected(results: dict[str, Any]) -> Chart:
    points = [(1, 100), *((point["machines"], 100 * point["efficiency"]) for point in results["points"])]
    return line_chart("projected efficiency, %", {f"machines × {results['from']['ranks']}": points}, "machines")
