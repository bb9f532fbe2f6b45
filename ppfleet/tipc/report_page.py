"""The report as one HTML page that needs no network: the values that report_page.html.j2 shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppfleet.html.render import render

_STATUS = {"ok": "passed", "failed": "failed", "skipped": "skipped"}
_STAGES = (("train", "eval"), ("export",), ("infer",))
_COLUMNS = {
    "preprocess_ms": "preprocess ms",
    "inference_ms": "inference ms",
    "postprocess_ms": "postprocess ms",
    "inference_p50_ms": "p50 ms",
    "inference_p99_ms": "p99 ms",
    "images_per_s": "images/s",
    "cpu_rss_mb": "memory MB",
    "data_num": "images",
}
_PLOTS = {"images_per_s": "images/s", "inference_ms": "inference, ms per batch"}


def html(results: dict[str, Any], problems: list[str]) -> str:
    commands = results["commands"]
    counted = {status: sum(c["status"] == status for c in commands) for status in _STATUS}
    runs = {run: [c for c in commands if c["run"] == run] for run in dict.fromkeys(c["run"] for c in commands)}
    state = "failed" if problems else "ok" if results["finished"] else "skipped"
    return render(
        "tipc/report_page.html.j2",
        title=f"TIPC: {results['model']}, {results['mode']}, {Path(results['config']).name}",
        results=results,
        problems=problems,
        state=state,
        outcome=_STATUS[state] if results["finished"] or problems else "not finished",
        status_text=_STATUS,
        counts=", ".join(f"{count} {_STATUS[status]}" for status, count in counted.items() if count) or "nothing yet",
        nodes={name: _by_outcome(other) for name, other in results["nodes"].items()},
        runs=runs,
        stages=_STAGES,
        measured={run: timed for run, chain in runs.items() if (timed := [c for c in chain if c["figures"]])},
        columns=_COLUMNS,
        plots=_PLOTS,
        label=_label,
        figure=_figure,
        time=_time,
    )


def _by_outcome(node: dict[str, Any] | None) -> dict[tuple[str, str], list[str]]:
    """(status, reason) -> the commands of another node that ended so."""
    groups: dict[tuple[str, str], list[str]] = {}
    for command in node["commands"] if node else []:
        groups.setdefault((command["status"], command["reason"]), []).append(command["id"])
    return groups


def _label(command: dict[str, Any]) -> str:
    """A command's name within its chain."""
    return str(command["id"]).removeprefix(f"{command['run']}.")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value == int(value) or value >= 1000 else f"{value:.2f}"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
