"""A scaling series as text and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from ppfleet.commands.scale.series import MODES
from ppfleet.commands.scale.summary import PARTS
from ppfleet.commands.why.sentences import span

NONE = "–"


def text(results: dict[str, Any]) -> str:
    lines = []
    for mode, rows in results["tables"].items():
        lines += [f"{title(mode, rows)}", *_columns([head(results), *(cells(row) for row in rows)]), ""]
        lines += ["  where the time went, averaged over ranks:", *_columns([PARTS_HEAD, *map(part_cells, rows)]), ""]
        lines += [f"  {line}" for line in verdicts(results, rows)] + [""]
    if results["projection"]:
        lines += projection(results["projection"])
    return "\n".join([*lines, *(f"note: {note}" for note in results["notes"])])


def title(mode: str, rows: Sequence[dict[str, Any]]) -> str:
    size = rows[0]["batch"] if mode == "rank" else rows[0]["global_batch"]
    return f"{MODES[mode].capitalize()} ({size})"


def head(results: dict[str, Any]) -> list[str]:
    return [
        "machines",
        "ranks per machine",
        "batch per rank",
        "time",
        results["metric"] or "metric",
        "speed-up",
        "efficiency",
    ]


def cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["machines"]),
        str(row["ranks"]),
        str(row["batch"]),
        with_spread(row["time"], seconds),
        with_spread(row["metric"], lambda value: f"{value:.4f}"),
        NONE if row["speed_up"] is None else f"{row['speed_up']:.2f}",
        NONE if row["efficiency"] is None else f"{row['efficiency']:.0%}",
    ]


PARTS_HEAD = ["machines × ranks", *PARTS, "start-up (before)"]


def part_cells(row: dict[str, Any]) -> list[str]:
    point, parts = f"{row['machines']} × {row['ranks']}", row["parts"]
    if parts is None:
        return [point, *[NONE] * (len(PARTS_HEAD) - 1)]
    shares = [f"{seconds(parts[name])} ({_share(parts, name):.0%})" for name in PARTS]
    return [point, *shares, with_spread(row["start_up"], seconds)]


def _share(parts: dict[str, Any], name: str) -> float:
    return float(parts[name] / parts["span"]) if parts["span"] else 0.0


def verdicts(results: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    base = rows[0]
    against = f"{base['machines']} × {base['ranks']}"
    return [
        f"{results['metric']} of {row['machines']} × {row['ranks']} against {against}: {row['parity']['sentence']}"
        for row in rows
        if row["parity"]
    ]


def projection(results: dict[str, Any]) -> list[str]:
    points = " ".join(f"{point['machines']}: {point['efficiency']:.0%}" for point in results["points"])
    ranks = results["from"]["ranks"]
    return [
        f"Projection, not measured: efficiency of N machines × {ranks} against 1 × {ranks}, at a batch of "
        f"{results['from']['batch']} per rank",
        f"  {points}",
        f"  {results['model']}; the network is {results['network_is']}.",
        "",
    ]


def with_spread(values: dict[str, Any] | None, shown: Callable[[float], str]) -> str:
    """Mean ± standard deviation over seeds; for a single run the value alone."""
    if values is None:
        return NONE
    return shown(values["mean"]) + (f" ± {shown(values['spread'])}" if values["spread"] is not None else "")


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 600 else span(value)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def curves(results: dict[str, Any], name: str) -> dict[str, list[tuple[int, float, float]]]:
    """Time or efficiency over ranks with its spread, a line for each batch mode and number of machines."""
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for mode, rows in results["tables"].items():
        for row in rows:
            if name == "time" and row["time"]:
                value, spread = row["time"]["mean"], row["time"]["spread"] or 0.0
            elif name == "efficiency" and (row["efficiency"] is not None or (row is rows[0] and row["time"])):
                value, spread = 100 * (1.0 if row["efficiency"] is None else row["efficiency"]), 0.0
            else:
                continue
            machines = f"{row['machines']} machine{'s' if row['machines'] > 1 else ''}"
            line = lines.setdefault(f"{MODES[mode]}, {machines}", [])
            line.append((row["machines"] * row["ranks"], value, spread))
    return lines


def picture(results: dict[str, Any], path: Path) -> None:
    """Plot time and efficiency over ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "time"), (right, "efficiency")):
        for label, points in curves(results, name).items():
            ranks, values, spreads = zip(*points)
            axes.errorbar(ranks, values, spreads, marker="o", capsize=3, label=label)
    if results["projection"]:
        points, ranks = results["projection"]["points"], results["projection"]["from"]["ranks"]
        total_ranks = [point["machines"] * ranks for point in points]
        projected = [100 * point["efficiency"] for point in points]
        label = f"projection against 1 × {ranks}, not measured"
        right.plot(total_ranks, projected, linestyle="--", color="gray", label=label)
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter("{x:.0f}")
    for axes in (left,) if results["projection"] else (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set(title="Training time", xlabel="ranks", ylabel="seconds")
    right.set(title="Efficiency", xlabel="ranks", ylabel="%")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
