"""A run as one HTML page without scripts, fonts or links to elsewhere."""

from __future__ import annotations

import base64
import json
import math
import shlex
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ppfleet._version import __version__
from ppfleet.checkpoint.history import RANKS, curves
from ppfleet.commands.report.run import Kept, Run, Start
from ppfleet.commands.why.cause import ending
from ppfleet.commands.why.job_start import size, span
from ppfleet.evaluation.confusion import Mistake, Seen
from ppfleet.html import page

_STYLE = Path(__file__).with_name("page.css")
# Which figures share a chart, by the last part of their names. Charts come in this order; all others are between.
_BEFORE = {"loss": "loss", "top1": "accuracy", "top5": "accuracy"}
_AFTER = {"lr": "learning rate", "ips": "samples a second", "batch_cost": "seconds a step"}
_AFTER["reader_cost"] = _AFTER["batch_cost"]
_NOT_DRAWN = (RANKS, "eval/samples")
_NAMED = 30  # classes up to which the whole matrix is shown
_PAIRS = 30  # that are shown otherwise
_ENVIRONMENT = ("ranks", "device", "paddle", "ppfleet", "python", "defaults")
_FORMS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


def html(run: Run) -> str:
    name = run.directories[0].resolve().name
    body = [
        f"<h1>Run {escape(name)} {_pill(run)}</h1>",
        f'<p class="soft">{escape(summary(run))}</p>',
        f'<p class="{"failed" if _state(run)[0] == "failed" else "soft"}">{escape(_telling(run).sentence)}</p>'
        if run.starts
        else "",
        _notes(run.notes),
        _charts(run),
        _starts(run),
        _evaluation(run.seen),
        _checkpoints(run.checkpoints),
        _ranks(run),
        _settings(run.settings),
        f'<p class="soft">Written {_when(time.time())} by ppfleet {__version__} from '
        f"{escape(', '.join(map(str, run.directories)))}. Times of day are this host’s.</p>",
    ]
    return page.document(f"Run {name}", body, _STYLE.read_text(encoding="utf-8"))


def summary(run: Run) -> str:
    """The run in a line."""
    parts = [_state(run)[1]]
    steps = [line.step for line in run.lines[-1:]] or [start.last for start in run.starts[-1:]]
    parts += [f"step {step}" for step in steps]
    for name, points in curves(run.lines).items():
        if name.startswith("eval/") and name not in _NOT_DRAWN:
            newest, best = points[-1][1], max(value for _, value in points)
            more = f" (best {page.number(best)})" if _title(name) == "accuracy" and best > newest else ""
            parts.append(f"{name} {page.number(newest)}{more}")
    if run.starts:
        parts.append(f"{len(run.starts)} start{'s' if len(run.starts) > 1 else ''}")
        until = time.time() if run.running else max(filter(math.isfinite, (each.ended for each in run.starts)))
        parts.append(f"{span(until - run.starts[0].time)} since {_when(run.starts[0].time)}")
    return ", ".join(parts)


def _state(run: Run) -> tuple[str, str]:
    """For the colour, and in a word."""
    if run.running:
        return "running", "running"
    if not run.answer:
        return "unknown", "without a flight record"
    if run.answer.kind in ("preempted", "interrupted"):
        return "stopped", "stopped"
    return ("ok", "finished") if _telling(run).well else ("failed", "failed")


def _telling(run: Run) -> Start:
    """The start that says how the run ended: one that was refused before it trained has changed nothing."""
    trained = (start for start in reversed(run.starts) if start.well or start.first is not None)
    return next(trained, run.starts[-1])


def _pill(run: Run) -> str:
    kind, word = _state(run)
    return f'<span class="pill {kind}">{word}</span>'


def _notes(notes: Sequence[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


# Curves


def _charts(run: Run) -> str:
    found = {name: points for name, points in curves(run.lines).items() if name not in _NOT_DRAWN}
    if not found:
        return ""
    groups: dict[str, dict[str, page.Points]] = {}
    for name in sorted(found, key=_order):
        groups.setdefault(_title(name), {})[name] = found[name]
    ended = run.starts if run.starts and not (run.starts[-1].well or run.running) else run.starts[:-1]
    marks = [(start.last, f"the end of start {n}: {start.sentence}") for n, start in enumerate(ended, 1)]
    charts = [page.chart(title, series, "step", marks) for title, series in groups.items()]
    odd = [_not_finite(name, points) for name, points in found.items()]
    seen = '<p class="soft">Marks are the ends of starts, numbered as <a href="#starts">below</a>.</p>' if marks else ""
    return (
        f'<h2>Curves</h2>{_notes(list(filter(None, odd)))}<div class="charts">{"".join(charts)}'
        f"{_progress(run, ended)}</div>{seen}{_figures(found)}"
    )


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
    return f"{name} was not finite (NaN or infinite) at step {shown}" if steps else ""


def _progress(run: Run, ended: Sequence[Start]) -> str:
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
    # Before the first line, where a start came to none.
    marks = [(max(0.0, (start.ended - first) / unit), f"the end of start {n}") for n, start in enumerate(ended, 1)]
    return page.chart("steps over time", {"step": points}, name, marks)


def _figures(found: dict[str, list[tuple[int, float]]]) -> str:
    rows: list[list[object]] = []
    for name in sorted(found, key=_order):
        points = [(value, step) for step, value in found[name] if math.isfinite(value)]
        step, value = found[name][-1]
        if points:
            low, high = min(points), max(points, key=lambda point: (point[0], -point[1]))
            rows.append([name, value, step, low[0], low[1], high[0], high[1]])
        else:
            rows.append([name, value, step, "", "", "", ""])
    head = ["figure", "last", "at step", "lowest", "at step", "highest", "at step"]
    return f"<details><summary>The figures as a table</summary>{page.table(head, rows)}</details>"


# Starts and faults


def _starts(run: Run) -> str:
    if not run.starts:
        return ""
    directories = shlex.join(map(str, run.directories))
    items = "".join(_start(start, directories) for start in run.starts)
    return f'<h2 id="starts">Starts and faults</h2><ol class="starts">{items}</ol>'


def _start(start: Start, directories: str) -> str:
    lasted = "runs" if math.isnan(start.ended) else span(start.ended - start.time)
    steps = "no step" if start.first is None else f"from step {start.first} to step {start.last}"
    back = f" --back {start.back}" if start.back else ""
    more = f"<p><code>python -m ppfleet why {escape(directories)}{back}</code></p>" if start.back is not None else ""
    evidence = "".join(f"<li>{escape(each)}</li>" for each in start.evidence)
    details = f"<details><summary>how each rank ended</summary><ul>{evidence}</ul>{more}</details>" if evidence else ""
    ranks = f"{start.ranks} rank{'s' if start.ranks > 1 else ''}"
    return (
        f'<li class="card {"ok" if start.well else "failed"}"><p class="soft">{_when(start.time)} · {lasted} · {ranks} '
        f"· {steps}</p><p>{escape(start.sentence)}</p>{details}</li>"
    )


# Evaluation


def _evaluation(seen: Seen | None) -> str:
    if seen is None:
        return ""
    right = sum(count for (truth, guess), count in seen.pairs.items() if truth == guess)
    share = f"{100 * right / seen.samples:.2f} %" if seen.samples else "none"
    told = f"{escape(seen.of)}, {_when(seen.time)}: {right} of {seen.samples} samples right ({share})"
    if len(seen.classes) <= _NAMED:
        shown = page.matrix(seen.classes, seen.matrix().tolist())
    else:
        shown = _pairs(seen)
    return f'<h2>What is taken for what</h2><p class="soft">{told}</p>{shown}{_mistakes(seen)}'


def _pairs(seen: Seen) -> str:
    """The most confused of many classes."""
    of_class: dict[int, int] = {}
    for (truth, _), count in seen.pairs.items():
        of_class[truth] = of_class.get(truth, 0) + count
    wrong = [(count, truth, guess) for (truth, guess), count in seen.pairs.items() if truth != guess and count]
    wrong.sort(key=lambda each: (-each[0], -each[0] / of_class[each[1]], each[1:]))
    rows = [
        [seen.classes[truth], seen.classes[guess], count, f"{100 * count / of_class[truth]:.1f} %"]
        for count, truth, guess in wrong[:_PAIRS]
    ]
    more = f"the {_PAIRS} most confused pairs of {len(wrong)}" if len(wrong) > _PAIRS else "all confused pairs"
    head = ["true class", "taken for", "samples", "of its class"]
    return f'<p class="soft">{len(seen.classes)} classes; {more}:</p>{page.table(head, rows)}'


def _mistakes(seen: Seen) -> str:
    shown = "".join(_mistake(mistake, seen.classes) for mistake in seen.mistakes)
    return f'<h3>The worst mistakes</h3><div class="mistakes">{shown}</div>' if shown else ""


def _mistake(mistake: Mistake, classes: Sequence[str]) -> str:
    truth, guess, sure = classes[mistake.truth], classes[mistake.guess], f"{100 * mistake.probability:.1f} %"
    name = mistake.name or f"sample {mistake.sample}"
    source = _source(mistake.picture)
    told = escape(f"{name}: {truth}, taken for {guess} ({sure})")
    picture = f'<img src="{source}" alt="{told}">' if source else '<div class="none">no picture</div>'
    return (
        f"<figure>{picture}<figcaption><b><bdi>{escape(truth)}</bdi></b> taken for <b><bdi>{escape(guess)}</bdi></b>, "
        f'{sure} sure<br><span class="soft"><bdi>{escape(name)}</bdi></span></figcaption></figure>'
    )


def _source(picture: str) -> str:
    """A PNG or JPEG as the page holds it; empty for anything else."""
    try:
        data = base64.b64decode(picture, validate=True)
    except ValueError:
        return ""
    form = next((form for magic, form in _FORMS.items() if data.startswith(magic)), "")
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}" if form else ""


# Checkpoints, ranks, settings


def _checkpoints(kept: Sequence[Kept]) -> str:
    if not kept:
        return ""
    head = ["checkpoint", "step", "epoch", "verifies", "size", "metrics", "SHA-256 of model.safetensors"]
    rows = []
    for each in kept:
        metrics = each.facts.get("metrics")
        shown = [f"{name} {_value(value)}" for name, value in metrics.items()] if isinstance(metrics, dict) else []
        size_of = sum(int(part["bytes"]) for part in each.files.values())
        digest = str(each.files.get("model.safetensors", {}).get("sha256", ""))
        facts = [_value(each.facts.get(name, "")) for name in ("step", "epoch")]
        verifies = f"no: {each.problem}" if each.problem else "yes"
        name = each.name + (f" ({', '.join(each.links)})" if each.links else "")
        rows.append([name, *facts, verifies, size(size_of) if size_of else "", ", ".join(shown), digest])
    bad = sum(bool(each.problem) for each in kept)
    told = (
        f"{bad} of {len(kept)} do not verify" if bad else f"all {len(kept)} verify: every file has its manifest’s hash"
    )
    kind = "failed" if bad else "soft"
    return f'<h2>Checkpoints</h2><p class="{kind}">{told}</p><div class="checkpoints">{page.table(head, rows)}</div>'


def _ranks(run: Run) -> str:
    if run.answer is None:
        return ""
    head = ["rank", "host", "address", "steps", "how it ended", "memory", "left on the host"]
    rows = []
    for rank in run.answer.attempt.ranks:
        facts, pulse = rank.record.facts, rank.record.pulse
        memory = [size(pulse.memory), size(pulse.available)] if pulse.time else ["", ""]
        rows.append([rank.number, facts.get("host", ""), facts.get("address", ""), rank.steps, ending(rank), *memory])
    script = str(run.answer.attempt.ranks[0].record.facts.get("script", ""))
    command = f'<p class="soft"><code>{escape(script)}</code></p>' if script else ""
    return f'<h2>Ranks of the newest start</h2><div class="ranks">{page.table(head, rows)}</div>{command}'


def _settings(settings: dict[str, Any]) -> str:
    """The environment at a glance; of the settings, groups are folded."""
    if not settings:
        return ""
    environment = {name: settings[name] for name in _ENVIRONMENT if name in settings}
    defaults = environment.pop("defaults", {})
    environment.update(defaults if isinstance(defaults, dict) else {"defaults": defaults})
    groups = {name: value for name, value in settings.items() if isinstance(value, dict) and name != "defaults"}
    rest = {name: value for name, value in settings.items() if name not in (*groups, *_ENVIRONMENT)}
    folded = [f"<details><summary>{escape(name)}</summary>{_facts(each)}</details>" for name, each in groups.items()]
    shown = f"<h2>Environment</h2>{_facts(environment)}" if environment else ""
    return f"{shown}<h2>Settings</h2>{_facts(rest) if rest else ''}{''.join(folded)}"


def _facts(facts: dict[str, Any]) -> str:
    return page.table(["name", "value"], ([name, _value(value)] for name, value in facts.items()))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return page.number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged file may say any time
        return "at an unknown time"
