"""A run as one HTML page: the values that run_page.html.j2 shows."""

from __future__ import annotations

import base64
import json
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ppfleet._version import __version__
from ppfleet.checkpoint.history import RANKS, curves
from ppfleet.commands.report.run import CheckpointInfo, RunData, Start
from ppfleet.commands.why.cause import Answer, ending
from ppfleet.commands.why.job_start import size
from ppfleet.commands.why.sentences import span
from ppfleet.evaluation.confusion import Seen
from ppfleet.html.chart import Chart, Points, line_chart
from ppfleet.html.render import number, render, when

# Name of a metric (its last part) -> title of its chart. The charts of other metrics come between these two groups.
_BEFORE = {"loss": "loss", "top1": "accuracy", "top5": "accuracy"}
_AFTER = {"lr": "learning rate", "ips": "samples per second", "batch_cost": "seconds per step"}
_AFTER["reader_cost"] = _AFTER["batch_cost"]
_NOT_DRAWN = (RANKS, "eval/samples")
_MATRIX = 30  # classes up to which the whole confusion matrix is shown
_PAIRS = 30  # most confused pairs that are shown instead
_ENVIRONMENT = ("ranks", "device", "paddle", "ppfleet", "python", "defaults")
_FORMS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


def html(run: RunData) -> str:
    state, word = _state(run)
    figures = {name: points for name, points in curves(run.lines).items() if name not in _NOT_DRAWN}
    ended = run.starts if run.starts and not (run.starts[-1].well or run.running) else run.starts[:-1]
    settings = run.settings
    environment = {name: settings[name] for name in _ENVIRONMENT if name in settings}
    defaults = environment.pop("defaults", {})
    environment.update(defaults if isinstance(defaults, dict) else {"defaults": defaults})
    groups = {name: value for name, value in settings.items() if isinstance(value, dict) and name != "defaults"}
    rest = {name: value for name, value in settings.items() if name not in (*groups, *_ENVIRONMENT)}
    return render(
        "commands/report/run_page.html.j2",
        title=f"Run {run.directories[0].resolve().name}",
        run=run,
        state=state,
        word=word,
        summary=summary(run),
        telling=_telling(run) if run.starts else None,
        not_finite=list(filter(None, (_not_finite(name, points) for name, points in figures.items()))),
        charts=_charts(run, figures, ended) if figures else [],
        marked=bool(ended),
        figures=[_figure(name, figures[name]) for name in sorted(figures, key=_order)],
        directories=shlex.join(map(str, run.directories)),
        seen=run.seen,
        right=sum(count for (truth, guess), count in run.seen.pairs.items() if truth == guess) if run.seen else 0,
        pairs=_pairs(run.seen) if run.seen and len(run.seen.classes) > _MATRIX else None,
        shown_pairs=_PAIRS,
        picture_source=_picture_source,
        checkpoints=map(_checkpoint, run.checkpoints),
        bad=sum(bool(checkpoint.problem) for checkpoint in run.checkpoints),
        ranks=_ranks(run.answer) if run.answer else [],
        script=run.answer.attempt.ranks[0].record.facts.get("script", "") if run.answer else "",
        environment=_rows(environment),
        settings=_rows(rest),
        groups={name: _rows(group) for name, group in groups.items()},
        span=span,
        now=time.time(),
        version=__version__,
    )


def summary(run: RunData) -> str:
    """The run in a line."""
    parts = [_state(run)[1]]
    steps = [line.step for line in run.lines[-1:]] or [start.last for start in run.starts[-1:]]
    parts += [f"step {step}" for step in steps]
    for name, points in curves(run.lines).items():
        if name.startswith("eval/") and name not in _NOT_DRAWN:
            newest, best = points[-1][1], max(value for _, value in points)
            more = f" (best {number(best)})" if _title(name) == "accuracy" and best > newest else ""
            parts.append(f"{name} {number(newest)}{more}")
    if run.starts:
        parts.append(f"{len(run.starts)} start{'s' if len(run.starts) > 1 else ''}")
        until = time.time() if run.running else max(filter(math.isfinite, (start.ended for start in run.starts)))
        parts.append(f"{span(until - run.starts[0].time)} since {when(run.starts[0].time)}")
    return ", ".join(parts)


def _state(run: RunData) -> tuple[str, str]:
    """The state's CSS class, and how it is shown."""
    if run.running:
        return "running", "running"
    if not run.answer:
        return "unknown", "no flight record"
    if run.answer.kind in ("preempted", "interrupted"):
        return "stopped", "stopped"
    return ("ok", "finished") if _telling(run).well else ("failed", "failed")


def _telling(run: RunData) -> Start:
    """The start that shows how the run ended: the last one that trained, if any did."""
    trained = (start for start in reversed(run.starts) if start.well or start.first is not None)
    return next(trained, run.starts[-1])


# Curves


def _charts(run: RunData, figures: Mapping[str, Points], ended: Sequence[Start]) -> list[Chart]:
    groups: dict[str, dict[str, Points]] = {}
    for name in sorted(figures, key=_order):
        groups.setdefault(_title(name), {})[name] = figures[name]
    marks = [(start.last, f"end of start {n}: {start.sentence}") for n, start in enumerate(ended, 1)]
    return [*(line_chart(title, series, "step", marks) for title, series in groups.items()), _progress(run, ended)]


def _key(name: str) -> str:
    return name.rpartition("/")[2]


def _title(name: str) -> str:
    return {**_BEFORE, **_AFTER}.get(_key(name), _key(name))


def _order(name: str) -> tuple[int, str]:
    key = _key(name)
    keys = [*_BEFORE, "", *_AFTER]
    return keys.index(key if key in keys else ""), "" if key in keys else key


def _not_finite(name: str, points: Sequence[tuple[int, float]]) -> str:
    steps = [str(step) for step, value in points if not math.isfinite(value)]
    shown = ", ".join(steps[:10]) + (f" and {len(steps) - 10} more" if len(steps) > 10 else "")
    return f"{name} was NaN or infinite at step {shown}" if steps else ""


def _progress(run: RunData, ended: Sequence[Start]) -> Chart:
    """Steps over time, a line for each start."""
    first = min(line.time for line in run.lines)
    last = max(line.time for line in run.lines)
    limits = ((300, 1, "seconds"), (3 * 3600, 60, "minutes"), (4 * 86400, 3600, "hours"), (math.inf, 86400, "days"))
    unit, name = next((unit, name) for most, unit, name in limits if last - first < most)
    points: list[tuple[float, float]] = []
    for line in run.lines:
        if RANKS in line.values:
            points.append(((line.time - first) / unit, math.nan))
        points.append(((line.time - first) / unit, line.step))
    # At 0 for a start that ended before the first line.
    marks = [(max(0.0, (start.ended - first) / unit), f"end of start {n}") for n, start in enumerate(ended, 1)]
    return line_chart("steps over time", {"step": points}, name, marks)


def _figure(name: str, points: Points) -> list[object]:
    """A row of the table: last, lowest and highest value, each with its step."""
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    step, value = points[-1]
    if not finite:
        return [name, value, step, "", "", "", ""]
    return [name, value, step, *min(finite), *max(finite, key=lambda point: (point[0], -point[1]))]


# Evaluation


def _pairs(seen: Seen) -> list[list[object]]:
    """The confused pairs of classes, the most frequent first."""
    of_class: dict[int, int] = {}
    for (truth, _), count in seen.pairs.items():
        of_class[truth] = of_class.get(truth, 0) + count
    wrong = [(count, truth, guess) for (truth, guess), count in seen.pairs.items() if truth != guess and count]
    wrong.sort(key=lambda pair: (-pair[0], -pair[0] / of_class[pair[1]], pair[1:]))
    return [
        [seen.classes[truth], seen.classes[guess], count, f"{100 * count / of_class[truth]:.1f} %"]
        for count, truth, guess in wrong
    ]


def _picture_source(picture: str) -> str:
    """A PNG or JPEG as a data URL; empty for anything else."""
    try:
        data = base64.b64decode(picture, validate=True)
    except ValueError:
        return ""
    form = next((form for magic, form in _FORMS.items() if data.startswith(magic)), "")
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}" if form else ""


# Checkpoints, ranks, settings


def _checkpoint(checkpoint: CheckpointInfo) -> list[object]:
    metrics = checkpoint.state.get("metrics")
    shown = [f"{name} {_value(value)}" for name, value in metrics.items()] if isinstance(metrics, dict) else []
    size_of = sum(int(part["bytes"]) for part in checkpoint.files.values())
    digest = str(checkpoint.files.get("model.safetensors", {}).get("sha256", ""))
    progress = [_value(checkpoint.state.get(name, "")) for name in ("step", "epoch")]
    verifies = f"no: {checkpoint.problem}" if checkpoint.problem else "yes"
    name = checkpoint.name + (f" ({', '.join(checkpoint.links)})" if checkpoint.links else "")
    return [name, *progress, verifies, size(size_of) if size_of else "", ", ".join(shown), digest]


def _ranks(answer: Answer) -> Iterable[list[object]]:
    for rank in answer.attempt.ranks:
        facts, pulse = rank.record.facts, rank.record.pulse
        memory = [size(pulse.memory), size(pulse.available)] if pulse.time else ["", ""]
        yield [rank.number, facts.get("host", ""), facts.get("address", ""), rank.steps, ending(rank), *memory]


def _rows(values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, _value(value)] for name, value in values.items()]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
