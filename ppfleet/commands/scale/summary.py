"""The table of a scaling series: time, metric, speed-up, efficiency, parity and a projection, from its results. Pure.

A result is what `trial.result` made of a run, the summary plain JSON data.
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
_UNSTEADY = 0.2  # spread of a point's times, as a share of their mean

Result = Mapping[str, Any]


def summary(
    series: Series,
    results: Sequence[Result],
    metric: str = "",
    tolerance: float = 0.01,
    measured: Network | None = None,
    given: Network | None = None,
) -> dict[str, Any]:
    """`tolerance` is a share of the smallest point's mean metric. `measured` is the network of the runs, `given` the
    one to project for."""
    metric = metric or _first_metric(results)
    if metric and not any(metric in result["metrics"] for result in results):
        known = sorted({name for result in results for name in result["metrics"]})
        raise FleetError(f"--metric={metric} is in no run's history.jsonl; there is {', '.join(known) or 'none'}")
    tables = {mode: _table(series.points(mode), results, metric, tolerance) for mode in series.modes}
    found: dict[str, Any] = {
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
    found["projection"], note = _projection(tables.get(RANK), measured, given)
    found["notes"] += [note] if note else []
    return found


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
    found = {int(r["seed"]): r["metrics"].get(metric) for r in results if metric in r["metrics"]}
    return {seed: math.nan if value is None else float(value) for seed, value in found.items()}


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


def _mean_parts(found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not found:
        return None
    means = {name: statistics.mean(each[name] for each in found) for name in ("span", *PARTS)}
    last = found[-1]
    whole = {name: last[name] for name in ("steps", "looked_at", "bytes", "overlapped")}
    return {**means, **whole}


def _unsteady(tables: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    times = [row["time"] for rows in tables.values() for row in rows if row["time"]]
    worst = max(((each["spread"] or 0.0) / each["mean"] for each in times if each["mean"]), default=0.0)
    if worst <= _UNSTEADY:
        return []
    return [
        f"times of the same point are up to {worst:.0%} apart: something else kept the machines busy, and speed-up, "
        f"efficiency and projection are as uncertain"
    ]


def _notes(results: Sequence[Result], metric: str) -> list[str]:
    notes = []
    resumed = [result for result in results if result["resumed"]]
    if resumed:
        names = "; ".join(f"{Point(r['machines'], r['ranks'], r['batch'])}, seed {r['seed']}" for r in resumed)
        notes.append(f"interrupted and gone on with, so its metric counts and its time does not: {names}")
    if not metric:
        notes.append("the script evaluates nothing (no eval/… in its history.jsonl): there is no metric to compare")
    parts = [result["parts"] for result in results if result["parts"]]
    long = [each for each in parts if each["bytes"] and each["looked_at"] < each["steps"]]
    if long:
        notes.append(
            f"the sums are of whole runs; communication and stragglers were told apart by the newest "
            f"{min(each['looked_at'] for each in long)} of up to {max(each['steps'] for each in long)} steps"
        )
    if any(each["overlapped"] for each in parts):
        notes.append("on cards gradients are exchanged during the backward pass: communication here is both")
    return notes


def _projection(
    rows: Sequence[dict[str, Any]] | None, measured: Network | None, given: Network | None
) -> tuple[dict[str, Any] | None, str]:
    """For more machines with as many ranks and the same batch a rank, from the largest point measured."""
    network = given or measured
    if network is None:
        return None, "no projection: it needs a network, measured (--ips) or given (--bandwidth, --latency)"
    if rows is None:
        return None, f"no projection: it is for an equal batch per rank, which --batch={RANK} measures"
    timed = [row for row in rows if row["parts"]]
    if not timed:
        return None, "no projection: no run's time is usable"
    row = max(timed, key=lambda each: (each["machines"], each["ranks"]))
    alone = next((each for each in timed if each["machines"] == 1 and each["ranks"] == row["ranks"]), None)
    parts = Parts(**row["parts"])
    if alone is None:
        return None, f"no projection: the time of 1 machine × {row['ranks']} is missing"
    if parts.overlapped:
        return None, "no projection: on cards the exchange is hidden in the backward pass, and was not measured apart"
    if not parts.bytes:
        return None, "no projection: one rank alone exchanges nothing; measure more ranks, or more machines"
    step = projection.Step(
        parts.a_step("compute", "stragglers", "data", "other"),
        parts.a_step("communication"),
        row["machines"] * row["ranks"],
        parts.bytes,
    )
    a_byte = projection.handling(step, measured if row["machines"] > 1 else None)
    before = Parts(**alone["parts"]).a_step("compute", "communication", "stragglers", "data", "other")
    points = []
    for machines in doubled(max(_MOST, row["machines"]))[1:]:
        seconds = projection.step_time(step, a_byte, machines * row["ranks"], network)
        points.append({"machines": machines, "step": seconds, "efficiency": before / seconds})
    return {
        "model": projection.model(step, network),
        "from": {"machines": row["machines"], "ranks": row["ranks"], "batch": row["batch"]},
        "network": vars(network),
        "network_is": "given" if given else "measured",
        "step": vars(step),
        "one_machine_step": before,
        "handling": a_byte,
        "points": points,
    }, ""
