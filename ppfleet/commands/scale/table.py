"""A scaling series as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from ppfleet.commands.scale.series import MODES
from ppfleet.commands.scale.summary import PARTS
from ppfleet.watchdog.render import span

NONE = "–"


def text(facts: dict[str, Any]) -> str:
    lines = []
    for mode, rows in facts["tables"].items():
        lines += [f"{title(mode, rows)}", *_columns([head(facts), *(cells(row) for row in rows)]), ""]
        lines += ["  where the time went, the mean over ranks:", *_columns([PARTS_HEAD, *map(part_cells, rows)]), ""]
        lines += [f"  {line}" for line in verdicts(facts, rows)] + [""]
    if facts["projection"]:
        lines += projection(facts["projection"])
    return "\n".join([*lines, *(f"note: {note}" for note in facts["notes"])])


def title(mode: str, rows: Sequence[dict[str, Any]]) -> str:
    size = rows[0]["batch"] if mode == "rank" else rows[0]["global_batch"]
    return f"{MODES[mode].capitalize()} ({size})"


def head(facts: dict[str, Any]) -> list[str]:
    return [
        "machines",
        "ranks a machine",
        "batch a rank",
        "time",
        facts["metric"] or "metric",
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


PARTS_HEAD = ["machines × ranks", *PARTS, "before (start-up)"]


def part_cells(row: dict[str, Any]) -> list[str]:
    where, parts = f"{row['machines']} × {row['ranks']}", row["parts"]
    if parts is None:
        return [where, *[NONE] * (len(PARTS_HEAD) - 1)]
    shares = [f"{seconds(parts[name])} ({_share(parts, name):.0%})" for name in PARTS]
    return [where, *shares, with_spread(row["start_up"], seconds)]


def _share(parts: dict[str, Any], name: str) -> float:
    return float(parts[name] / parts["span"]) if parts["span"] else 0.0


def verdicts(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    base = rows[0]
    against = f"{base['machines']} × {base['ranks']}"
    return [
        f"{facts['metric']} of {row['machines']} × {row['ranks']} against {against}: {row['parity']['sentence']}"
        for row in rows
        if row["parity"]
    ]


def projection(facts: dict[str, Any]) -> list[str]:
    told = " ".join(f"{point['machines']}: {point['efficiency']:.0%}" for point in facts["points"])
    ranks = facts["from"]["ranks"]
    return [
        f"Projection, not measured: efficiency on so many machines × {ranks} against 1 × {ranks}, at a batch of "
        f"{facts['from']['batch']} a rank",
        f"  {told}",
        f"  {facts['model']}; the network is {facts['network_is']}.",
        "",
    ]


def with_spread(found: dict[str, Any] | None, shown: Callable[[float], str]) -> str:
    """Mean ± standard deviation over seeds; of one run without."""
    if found is None:
        return NONE
    return shown(found["mean"]) + (f" ± {shown(found['spread'])}" if found["spread"] is not None else "")


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 600 else span(value)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def curves(facts: dict[str, Any], name: str) -> dict[str, list[tuple[int, float, float]]]:
    """Time or efficiency over ranks with its spread, a line for each kind of batch and number of machines."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for mode, rows in facts["tables"].items():
        for row in rows:
            if name == "time" and row["time"]:
                value, spread = row["time"]["mean"], row["time"]["spread"] or 0.0
            elif name == "efficiency" and (row["efficiency"] is not None or (row is rows[0] and row["time"])):
                value, spread = 100 * (1.0 if row["efficiency"] is None else row["efficiency"]), 0.0
            else:
                continue
            machines = f"{row['machines']} machine{'s' if row['machines'] > 1 else ''}"
            line = found.setdefault(f"{MODES[mode]}, {machines}", [])
            line.append((row["machines"] * row["ranks"], value, spread))
    return found


def picture(facts: dict[str, Any], path: Path) -> None:
    """Draw time and efficiency over ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "time"), (right, "efficiency")):
        for label, points in curves(facts, name).items():
            ranks, values, spreads = zip(*points)
            axes.errorbar(ranks, values, spreads, marker="o", capsize=3, label=label)
    if facts["projection"]:
        points, ranks = facts["projection"]["points"], facts["projection"]["from"]["ranks"]
        over = [point["machines"] * ranks for point in points]
        projected = [100 * point["efficiency"] for point in points]
        label = f"projection against 1 × {ranks}, not measured"
        right.plot(over, projected, linestyle="--", color="gray", label=label)
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter("{x:.0f}")
    for axes in (left,) if facts["projection"] else (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set(title="Training time", xlabel="ranks", ylabel="seconds")
    right.set(title="Efficiency", xlabel="ranks", ylabel="%")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
