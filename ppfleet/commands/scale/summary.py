"""Summarises the results of a scaling series: time, metric, speed-up, efficiency, parity and a projection. Pure.

A result is what `trial.result` returned for a run; the summary is plain JSON data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ppfleet.commands.scale import parity, projection
from ppfleet.commands.scale.projection import Network
from ppfleet.commands.scale.series import RANK, Point, Series, doubled
from ppfleet.commands.scale.time_breakdown import Parts
from ppfleet.errors import FleetError

PARTS = ("compute", "communication", "stragglers", "data", "evaluation", "saving", "other")
_MOST = 64  # machines in a projection
_UNSTEADY = 0.2  # spread of a point's times relative to their mean, above which a note is added

Result = Mapping[str, Any]


def summary(
    series: Series,
    results: Sequence[Result],
    metric: str = "",
    tolerance: float = 0.01,
    measured: Network | None = None,
    given: Network | None = None,
) -> dict[str, Any]:
    """The table and its notes. `tolerance` is relative to the smallest point's mean metric; `measured` is the network
    of the runs, `given` the one to project for."""
    metric = metric or _first_metric(results)
    if metric and not any(metric in result["metrics"] for result in results):
        known = sorted({name for result in results for name in result["metrics"]})
        raise FleetError(
            f"--metric={metric} is not in any run's history.jsonl, which has: {', '.join(known) or 'no metric'}"
        )
    tables = {mode: _table(series.points(mode), results, metric, tolerance) for mode in series.modes}
    table: dict[str, Any] = {
        "script": series.script,
        "arguments": list(series.arguments),
        "seeds": list(series.seeds),
        "metric": metric,
        "tolerance": tolerance,
        "confidence": parity.CONFIDENCE,
        "tables": tables,
        "network": vars(measured) if measured else None,
        "runs": list(results),
        "notes": [*_unsteady(tables), *_notes(results, metric)],
    }
    table["projection"], note = _projection(tables.get(RANK), measured, given)
    table["notes"] += [note] if note else []
    return table


def _first_metric(results: Sequence[Result]) -> str:
    return next((name for result in results for name in result["metrics"]), "")


def _table(points: Sequence[Point], results: Sequence[Result], metric: str, tolerance: float) -> list[dict[str, Any]]:
    rows = [_row(point, _of(point, results), metric) for point in points]
    base, first = rows[0], points[0]
    for row, point in zip(rows, points):
        if point == first:
            continue
        if base["time"] and row["time"]:
            row["speed_up"] = base["time"]["mean"] / row["time"]["mean"]
            row["efficiency"] = row["speed_up"] * first.total / point.total
        if base["metric"] and row["metric"]:
            limit = tolerance * abs(base["metric"]["mean"])
            samples = min((r["samples"] for r in _of(point, results) if r["samples"]), default=0)
            share = all(0 <= value <= 1 for value in base["metric"]["by_seed"].values())
            row["parity"] = vars(
                parity.compare(
                    _by_seed(_of(first, results), metric),
                    _by_seed(_of(point, results), metric),
                    limit,
                    1 / samples if samples and share else 0.0,
                )
            )
    return rows


def _of(point: Point, results: Sequence[Result]) -> list[Result]:
    return [r for r in results if (r["machines"], r["ranks"], r["batch"]) == (point.machines, point.ranks, point.batch)]


def _by_seed(results: Sequence[Result], metric: str) -> dict[int, float]:
    values = {int(r["seed"]): r["metrics"].get(metric) for r in results if metric in r["metrics"]}
    return {seed: math.nan if value is None else float(value) for seed, value in values.items()}


def _row(point: Point, results: Sequence[Result], metric: str) -> dict[str, Any]:
    timed = [result for result in results if result["parts"]]
    figures = {seed: value for seed, value in _by_seed(results, metric).items() if math.isfinite(value)}
    return {
        "machines": point.machines,
        "ranks": point.ranks,
        "batch": point.batch,
        "global_batch": point.batch * point.total,
        "runs": len(results),
        "time": _spread([result["parts"]["span"] for result in timed]),
        "start_up": _spread([result["wall"] - result["parts"]["span"] for result in timed]),
        "metric": {**(_spread(list(figures.values())) or {}), "by_seed": figures} if figures else None,
        "parts": _mean_parts([result["parts"] for result in timed]),
        "speed_up": None,
        "efficiency": None,
        "parity": None,
    }


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean and standard deviation over runs."""
    if not values:
        return None
    return {
        "mean": statistics.mean(values),
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "count": len(values),
    }


def _mean_parts(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not runs:
        return None
    means = {name: statistics.mean(parts[name] for parts in runs) for name in ("span", *PARTS)}
    counts = {name: runs[-1][name] for name in ("steps", "looked_at", "bytes", "overlapped")}
    return {**means, **counts}


def _unsteady(tables: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    times = [row["time"] for rows in tables.values() for row in rows if row["time"]]
    worst = max(((each["spread"] or 0.0) / each["mean"] for each in times if each["mean"]), default=0.0)
    if worst <= _UNSTEADY:
        return []
    return [
        f"the times of one point vary by up to {worst:.0%}: something else kept the machines busy, so speed-up, "
        f"efficiency and projection are equally uncertain"
    ]


def _notes(results: Sequence[Result], metric: str) -> list[str]:
    notes = []
    resumed = [result for result in results if result["resumed"]]
    if resumed:
        names = "; ".join(f"{Point(r['machines'], r['ranks'], r['batch'])}, seed {r['seed']}" for r in resumed)
        notes.append(f"interrupted and resumed, so the metric counts but the time does not: {names}")
    if not metric:
        notes.append("no metric to compare: the script evaluates nothing (no eval/… in its history.jsonl)")
    parts = [result["parts"] for result in results if result["parts"]]
    long = [each for each in parts if each["bytes"] and each["looked_at"] < each["steps"]]
    if long:
        notes.append(
            f"sums cover whole runs; communication and stragglers were separated using the newest "
            f"{min(each['looked_at'] for each in long)} of up to {max(each['steps'] for each in long)} steps"
        )
    if any(each["overlapped"] for each in parts):
        notes.append("on cards gradients are exchanged during the backward pass: communication includes both")
    return notes


def _projection(
    rows: Sequence[dict[str, Any]] | None, measured: Network | None, given: Network | None
) -> tuple[dict[str, Any] | None, str]:
    """For more machines with the same ranks per machine and batch per rank, from the largest measured point."""
    network = given or measured
    if network is None:
        return None, "no projection: the network must be measured (--ips) or given (--bandwidth, --latency)"
    if rows is None:
        return None, f"no projection: it needs an equal batch per rank (--batch={RANK})"
    timed = [row for row in rows if row["parts"]]
    if not timed:
        return None, "no projection: no run has a valid time"
    row = max(timed, key=lambda each: (each["machines"], each["ranks"]))
    alone = next((each for each in timed if each["machines"] == 1 and each["ranks"] == row["ranks"]), None)
    parts = Parts(**row["parts"])
    if alone is None:
        return None, f"no projection: the time of 1 machine × {row['ranks']} is missing"
    if parts.overlapped:
        return None, "no projection: on cards the exchange overlaps the backward pass and was not measured separately"
    if not parts.bytes:
        return None, "no projection: a single rank exchanges nothing; measure more ranks or machines"
    step = projection.Step(
        parts.per_step("compute", "stragglers", "data", "other"),
        parts.per_step("communication"),
        row["machines"] * row["ranks"],
        parts.bytes,
    )
    per_byte = projection.handling(step, measured if row["machines"] > 1 else None)
    before = Parts(**alone["parts"]).per_step("compute", "communication", "stragglers", "data", "other")
    points = []
    for machines in doubled(max(_MOST, row["machines"]))[1:]:
        seconds = projection.step_time(step, per_byte, machines * row["ranks"], network)
        points.append({"machines": machines, "step": seconds, "efficiency": before / seconds})
    return {
        "model": projection.model(step, network),
        "from": {"machines": row["machines"], "ranks": row["ranks"], "batch": row["batch"]},
        "network": vars(network),
        "network_is": "given" if given else "measured",
        "step": vars(step),
        "one_machine_step": before,
        "handling": per_byte,
        "points": points,
    }, ""
