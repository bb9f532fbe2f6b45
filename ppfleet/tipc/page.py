"""The report as one HTML page without scripts, fonts or links to elsewhere: for a phone, and without a network."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from ppfleet.html.page import document

_STYLE = Path(__file__).with_name("page.css")
_WORDS = {"ok": "passed", "failed": "failed", "skipped": "skipped"}
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
    title = f"TIPC: {facts['model']}, {facts['mode']}, {Path(facts['config']).name}"
    body = [
        _head(title, facts, problems),
        *(f'<p class="note">{escape(note)}</p>' for note in facts["notes"]),
        _nodes(facts),
        "<h2>The chain</h2>",
        *(_chain(run, [c for c in commands if c["run"] == run]) for run in _runs(commands)),
        _benchmarks(commands),
        "<h2>Commands</h2>",
        *map(_command, commands),
        f'<p class="soft">{escape(facts["config"])}; Python {facts["python"]}, ppfleet {facts["ppfleet"]}</p>',
    ]
    return document(title, body, _STYLE.read_text(encoding="utf-8"))


def _runs(commands: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(command["run"] for command in commands))


def _counts(facts: dict[str, Any]) -> str:
    counted = {status: sum(c["status"] == status for c in facts["commands"]) for status in _WORDS}
    return ", ".join(f"{count} {_WORDS[status]}" for status, count in counted.items() if count) or "nothing yet"


def _pill(status: str, text: str = "") -> str:
    return f'<span class="pill {status}">{escape(text or _WORDS[status])}</span>'


def _head(title: str, facts: dict[str, Any], problems: list[str]) -> str:
    state = "failed" if problems else "ok" if facts["finished"] else "skipped"
    word = _WORDS[state] if facts["finished"] or problems else "not finished"
    node = facts["node"]
    where = f"{node['host']}" + (f" ({node['address']}, node {node['number']})" if node["address"] else "")
    left = facts["planned"] - len(facts["commands"])
    return (
        f"<h1>{escape(title)} {_pill(state, word)}</h1>"
        f'<p class="soft">{_counts(facts)}{f", {left} to do" if left else ""}; {facts["started"]}, '
        f"{_time(facts['seconds'])}, on {escape(where)}</p>"
        + "".join(f'<p class="failed">{escape(problem)}</p>' for problem in problems)
    )


def _nodes(facts: dict[str, Any]) -> str:
    parts = []
    for name, other in facts["nodes"].items():
        host = f" ({other['node']['host']})" if other else ""
        parts.append(f"<h3>{escape(name + host)}</h3>")
        if other is None:
            parts.append("<p>its results are on that machine, or did not come in time</p>")
        together: dict[tuple[str, str], list[str]] = {}
        for command in other["commands"] if other else []:
            together.setdefault((command["status"], command["reason"]), []).append(command["id"])
        for (status, reason), names in together.items():
            what = names[0] if len(names) == 1 else f"{len(names)} commands"
            parts.append(f"<p>{_pill(status)} {escape(f'{what}: {reason}' if reason else ', '.join(names))}</p>")
    return f"<h2>Other nodes</h2>{''.join(parts)}" if parts else ""


def _chain(run: str, commands: list[dict[str, Any]]) -> str:
    stages = []
    for stage in (("train", "eval"), ("export",), ("infer",)):
        boxes = [_box(command) for command in commands if command["stage"] in stage]
        if boxes:
            stages.append(f'<div class="stage">{"".join(boxes)}</div>')
    return f'<h3>{escape(run)}</h3><div class="chain">{"".join(stages)}</div>'


def _box(command: dict[str, Any]) -> str:
    details = [command["device"], f"batch {command['batch_size']}" if command["batch_size"] else ""]
    details += [_time(command["seconds"]) if command["seconds"] else "", command["note"]]
    shown = " · ".join(filter(None, details))
    return (
        f'<a class="box {command["status"]}" href="#{escape(command["id"])}"><b>{escape(_label(command))} '
        f"{_WORDS[command['status']]}</b> {escape(shown)}</a>"
    )


def _command(command: dict[str, Any]) -> str:
    opened = " open" if command["status"] == "failed" else ""
    parts = [
        f"<p>{escape(command['reason'])}</p>" if command["reason"] else "",
        f'<p class="soft">device map: {escape(command["note"])}</p>' if command["note"] else "",
        f"<pre>{escape(command['command'])}</pre>",
        f'<p class="soft">the end of <a href="{escape(command["log"])}">{escape(command["log"])}</a></p>'
        if command["log"]
        else "",
        f"<pre>{escape(command['tail'])}</pre>" if command["tail"] else "",
    ]
    took = f' <span class="soft">{_time(command["seconds"])}</span>' if command["log"] else ""
    # The id is inside: a browser that follows a link to it opens what is closed.
    return (
        f"<details{opened}><summary>{_pill(command['status'])} {escape(command['id'])}{took}</summary>"
        f'<div id="{escape(command["id"])}">{"".join(parts)}</div></details>'
    )


def _benchmarks(commands: list[dict[str, Any]]) -> str:
    """For each chain its figures, as bars and as a table."""
    parts = []
    for run in _runs(commands):
        measured = [c for c in commands if c["run"] == run and c["figures"]]
        if measured:
            columns = {key: text for key, text in _COLUMNS.items() if any(key in c["figures"] for c in measured)}
            head = "".join(f'<th scope="col">{text}</th>' for text in columns.values())
            rows = "".join(
                f"<tr><td>{escape(_label(c))}</td>"
                + "".join(f"<td>{_figure(c['figures'].get(key))}</td>" for key in columns)
                + "</tr>"
                for c in measured
            )
            table = f'<div class="scroll"><table><tr><th scope="col">command</th>{head}</tr>{rows}</table></div>'
            plots = "".join(_plot(measured, key, text) for key, text in _PLOTS.items())
            parts.append(f"<h3>{escape(run)}</h3>{plots}{table}")
    return f"<h2>Benchmark</h2>{''.join(parts)}" if parts else ""


def _label(command: dict[str, Any]) -> str:
    """A command's name within its chain."""
    return str(command["id"]).removeprefix(f"{command['run']}.")


def _plot(measured: list[dict[str, Any]], key: str, title: str) -> str:
    """Horizontal bars, one a command, in a drawing as wide as a phone."""
    bars = [(_label(command), float(command["figures"][key])) for command in measured if key in command["figures"]]
    if not bars:
        return ""
    most = max(value for _, value in bars) or 1.0
    width, row = 360, 34
    drawn = []
    for number, (name, value) in enumerate(bars):
        top = 22 + number * row
        long = max(1.0, value / most * (width - 70))
        shown = name if len(name) <= 52 else f"…{name[-51:]}"
        drawn.append(
            f'<text x="0" y="{top + 9}" style="font-size:10.5px">{escape(shown)}</text>'
            f'<rect x="0" y="{top + 13}" width="{long:.1f}" height="13" rx="2"><title>{escape(name)}</title></rect>'
            f'<text x="{long + 5:.1f}" y="{top + 24}">{_figure(value)}</text>'
        )
    height = 22 + len(bars) * row
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f'<text x="0" y="13" style="font-weight:600">{escape(title)}</text>{"".join(drawn)}</svg>'
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value == int(value) or value >= 1000 else f"{value:.2f}"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
