"""The report as one HTML page, for a phone and without a network: what report_page.html.j2 shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppfleet.html.render import render

_WORDS = {"ok": "passed", "failed": "failed", "skipped": "skipped"}
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
_PLOTS = {"images_per_s": "images/s", "inference_ms": "inference, ms a batch"}


def html(facts: dict[str, Any], problems: list[str]) -> str:
    commands = facts["commands"]
    counted = {status: sum(c["status"] == status for c in commands) for status in _WORDS}
    runs = {run: [c for c in commands if c["run"] == run] for run in dict.fromkeys(c["run"] for c in commands)}
    state = "failed" if problems else "ok" if facts["finished"] else "skipped"
    return render(
        "tipc/report_page.html.j2",
        title=f"TIPC: {facts['model']}, {facts['mode']}, {Path(facts['config']).name}",
        facts=facts,
        problems=problems,
        state=state,
        word=_WORDS[state] if facts["finished"] or problems else "not finished",
        words=_WORDS,
        counts=", ".join(f"{count} {_WORDS[status]}" for status, count in counted.items() if count) or "nothing yet",
        nodes={name: _together(other) for name, other in facts["nodes"].items()},
        runs=runs,
        stages=_STAGES,
        measured={run: found for run, inside in runs.items() if (found := [c for c in inside if c["figures"]])},
        columns=_COLUMNS,
        plots=_PLOTS,
        label=_label,
        figure=_figure,
        time=_time,
    )


def _together(node: dict[str, Any] | None) -> dict[tuple[str, str], list[str]]:
    """Another node's commands that ended alike: (status, reason) -> their names."""
    together: dict[tuple[str, str], list[str]] = {}
    for command in node["commands"] if node else []:
        together.setdefault((command["status"], command["reason"]), []).append(command["id"])
    return together


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
