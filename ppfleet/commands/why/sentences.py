"""Events as sentences for `why`: those of the watchdog, and what only the records of all ranks tell. Pure."""

from __future__ import annotations

import time
from typing import Any, Callable

from ppfleet.watchdog import render
from ppfleet.watchdog.events import Code, Event
from ppfleet.watchdog.render import at_step, ranks, who


def text(event: Event) -> str:
    """One sentence: what happened, on which rank, where, and who waits for it."""
    told = event.fields.get("text")
    if told and event.code not in _OF_TEXT and "type" not in event.fields:  # by version 0.1.0
        return str(told)
    return _SENTENCES.get(event.code, render.text)(event)


def as_json(event: Event) -> dict[str, Any]:
    """The event for a program, with its sentence."""
    return {**event.to_json(), "sentence": text(event)}


def clock(when: float, fine: bool = False) -> str:
    """The time of day here."""
    shown = time.strftime("%H:%M:%S", time.localtime(when))
    return f"{shown}.{int(when % 1 * 1000):03d}" if fine else shown


def span(seconds: float) -> str:
    """`81 ms`, `3.2 s`, `31 s`, `4 min 10 s`."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1e3:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def ending(event: Event) -> str:
    """How a rank ended, by its own word, for a list of all ranks."""
    if event.code == Code.EXCEPTION:
        where = event.fields.get("where")
        return f"{_raised(event)}{f' ({where})' if where else ''}"
    if event.code == Code.ENDED:
        return "finished"
    told = event.fields.get("text", "")
    if event.code in (Code.PREEMPTED, Code.TERMINATED):
        return f"{event.code}{f': {told}' if told else ''}"
    return f"ended by the watchdog ({event.code})"


def first_line(told: str) -> str:
    """The first line of a message, with the list that it announces."""
    lines = told.strip().splitlines() or [""]
    return " ".join(line.strip() for line in lines)[:500] if lines[0].endswith(":") else lines[0]


def _raised(event: Event) -> str:
    return f"{event.fields.get('type', 'Exception')}: {first_line(str(event.fields.get('text', '')))}"


def _gone(event: Event) -> str:
    told = f"all {event.fields['count']} ranks were gone at once, without reporting a reason, {at_step(event)}"
    return f"{told}: {f'{event.host} went down, or' if event.host else 'the power failed, or'} all were killed"


def _host(event: Event) -> str:
    lost = event.fields.get("ranks")
    if not lost:
        return render.text(event)
    return f"host {event.host} was lost with {ranks(lost)} {at_step(event)}: it went down, or lost its network"


def _stopped(event: Event) -> str:
    if "since" not in event.fields:
        return render.text(event)
    since = f"gave no sign of life from {clock(event.fields['since'])} on, {at_step(event)}"
    return f"{who(event)} {since}: it was stopped, or its Python blocked"


def _mismatch(event: Event) -> str:
    return _message(event) if "type" in event.fields else render.text(event)  # an exception has its own message


def _straggler(event: Event) -> str:
    f = event.fields
    return (
        f"{who(event)} is {f['percent']:.0f} % slower than the others: its {f['part']} takes {f['mine']:.0f} ms of a "
        f"step's {f['step']:.0f} (others {f['others']:.0f})"
    )


def _where(event: Event) -> str:
    at = [event.fields.get("where"), f"at step {event.operation.step}" if event.operation.step else ""]
    shown = ", ".join(filter(None, at))
    return f" ({shown})" if shown else ""


def _message(event: Event) -> str:
    return f"{first_line(event.fields['text'])}{_where(event)}"


def _said(event: Event) -> str:
    return f"{who(event)}: {first_line(event.fields['text'])}"


def _preempted(event: Event) -> str:
    return f"{who(event)} got SIGTERM and ended {at_step(event)}, after a checkpoint: start the job again to go on"


def _terminated(event: Event) -> str:
    if "unsaved_for" in event.fields:
        at = f"was killed after {event.fields['unsaved_for']:.0f} s without a step boundary {at_step(event)}"
        return f"{who(event)} got SIGTERM and {at}: nothing was saved since the last checkpoint"
    return f"{who(event)} got SIGTERM and ended {at_step(event)}, without a new checkpoint"


def _running(event: Event) -> str:
    still = "runs" if len(event.fields["ranks"]) == 1 else "run"
    return f"nothing failed: {who(event)} still {still}, at step {event.operation.step}"


def _finished(event: Event) -> str:
    all_ranks = who(event) if len(event.fields["ranks"]) == 1 else f"all {len(event.fields['ranks'])} ranks"
    return f"nothing failed: {all_ranks} finished, after {event.operation.step} steps"


_SENTENCES: dict[Code, Callable[[Event], str]] = {
    Code.HOST: _host, Code.GONE: _gone, Code.STOPPED: _stopped, Code.MISMATCH: _mismatch, Code.STRAGGLER: _straggler,
    Code.NAN: _message, Code.PORT: _said, Code.MISSING: _said, Code.WORKER: _said,
    Code.EXCEPTION: lambda event: f"{who(event)} raised {_raised(event)}{_where(event)}",
    Code.INTERRUPTED: lambda event: f"{who(event)} got Ctrl-C{_where(event)}",
    Code.PREEMPTED: _preempted, Code.TERMINATED: _terminated,
    Code.ENDED: lambda event: f"{who(event)} finished", Code.FINISHED: _finished, Code.RUNNING: _running,
}  # fmt: skip
# The text of these is part of their sentence, or beside it.
_OF_TEXT = (
    Code.EXCEPTION, Code.NAN, Code.PORT, Code.MISSING, Code.WORKER, Code.INTERRUPTED, Code.PREEMPTED, Code.TERMINATED,
)  # fmt: skip
