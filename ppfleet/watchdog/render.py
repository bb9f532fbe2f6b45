"""An event as a sentence: made last, for people; no program reads it. Pure."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any, Callable

from ppfleet.watchdog.events import Code, Event, Kind, Operation, Waiting

_HINTS = {Kind.DATA: "a slow disk or data set", **dict.fromkeys((Kind.SAVE, Kind.EXPORT, Kind.WORK), "a slow disk")}


def text(event: Event) -> str:
    """One sentence: what happened, on which rank, where, and who waits for it."""
    told = event.fields.get("text")
    if told and event.code not in _OF_TEXT and "type" not in event.fields:  # by version 0.1.0
        return str(told)
    return _SENTENCES[event.code](event)


def name(rank: int, host: str = "") -> str:
    """`rank 3 on 192.168.0.2`."""
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def ranks(numbers: Sequence[int], host: str = "") -> str:
    """`rank 1 on 192.168.0.2`; `ranks 0–2 and 5`."""
    if len(numbers) == 1:
        return name(numbers[0], host)
    runs: list[list[int]] = []
    for rank in sorted(numbers):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs]
    return "ranks " + (" and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0])


def label(operation: Operation) -> str:
    """`all-reduce of gradients #1284`, `step 640`."""
    return f"{operation.name} #{operation.number}" if operation.number else operation.name


def full(operation: Operation) -> str:
    """`all-reduce of gradients #1284 ([1519906] float32, step 640, tools/train.py:66)`."""
    facts = [operation.detail, f"step {operation.step}", operation.where]
    return f"{label(operation)} ({', '.join(filter(None, facts))})"


def place(operation: Operation) -> str:
    """Where a rank is: the library's word for it, and the line of the user's code."""
    line = operation.at or operation.where
    if not operation.kind:
        return operation.at or (f"its own code after {label(operation)}" if operation.name else "the script")
    if operation.kind == Kind.STEP and operation.at:
        return operation.at
    return f"{label(operation)} ({line})" if line else label(operation)


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


def death(event: Event) -> str:
    """How a process ended, without its name."""
    number = event.fields.get("signal")
    if event.code == Code.OOM and not event.fields.get("probably"):
        return "was killed by the OOM killer (SIGKILL)"
    if event.code == Code.EXIT:
        return f"exited with code {event.fields.get('exit_code')} without reporting a reason"
    if number:
        known = number in signal.valid_signals()
        return f"was killed by {signal.Signals(number).name if known else f'signal {number}'}"
    return "exited without reporting a reason (SIGKILL?)"


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


def reason(event: Event) -> str:
    """Why a rank left in order, for those who would have waited for it."""
    if event.code == Code.EXCEPTION:
        return f"{event.fields['type']}: {event.fields['text']}"[:500]
    return str(event.fields.get("text") or "it finished")


def first_line(told: str) -> str:
    """The first line of a message, with the list that it announces."""
    lines = told.strip().splitlines() or [""]
    return " ".join(line.strip() for line in lines)[:500] if lines[0].endswith(":") else lines[0]


def _raised(event: Event) -> str:
    return f"{event.fields.get('type', 'Exception')}: {first_line(str(event.fields.get('text', '')))}"


def _who(event: Event) -> str:
    found = event.fields.get("ranks")
    return ranks(found, event.host) if found else name(event.rank, event.host)


def _at(event: Event) -> str:
    """At step 3 (in all-reduce of gradients #4, tools/train.py:66)."""
    step, inside = f"at step {event.operation.step}", event.operation
    if not inside.kind:
        return step
    return f"{step} (in {', '.join(filter(None, (inside.at or label(inside), '' if inside.at else inside.where)))})"


def _while(waiting: Sequence[Waiting]) -> str:
    for each in waiting:
        return f" while {_wait(each)} in {full(each.operation)}"
    return ""


def _wait(waiting: Waiting) -> str:
    return f"{ranks(waiting.ranks, waiting.host)} wait{'s' if len(waiting.ranks) == 1 else ''}"


def _lost(event: Event) -> str:
    at = f" {_at(event)}" if event.operation.step or event.operation.kind else ""
    likely = ", probably by the OOM killer" if event.fields.get("probably") else ""
    early = " right after the roll call" if event.fields.get("early") else ""
    guess = event.fields.get("guess", "")
    return f"{_who(event)} {death(event)}{likely}{early}{at}{f': {guess}' if guess else ''}"


def _host(event: Event) -> str:
    lost = event.fields.get("ranks")
    if not lost:
        return f"the host of {name(event.rank, event.host)} does not answer any more"
    return f"host {event.host} was lost with {ranks(lost, '')} {_at(event)}: it went down, or lost its network"


def _gone(event: Event) -> str:
    told = f"all {event.fields['count']} ranks were gone at once, without reporting a reason, {_at(event)}"
    return f"{told}: {f'{event.host} went down, or' if event.host else 'the power failed, or'} all were killed"


def _stall(event: Event) -> str:
    inside, fields = event.operation, event.fields
    if event.rank < 0:
        return f"all ranks have waited in {full(inside)} for {event.seconds:.0f} s: the network between them fails"
    if fields.get("since"):
        at = f"gave no sign of life from {clock(fields['since'])} on, {_at(event)}"
        return f"{_who(event)} {at}: it was stopped, or its Python blocked"
    if fields.get("ended"):
        did = "has finished"
    elif fields.get("silent"):
        pid = fields.get("pid")
        how = f"its process {pid} is stopped by SIGSTOP" if pid else "its process is stopped, or its Python is blocked"
        seen = f"; last seen in {place(inside)}" if inside.kind or inside.name else ""
        did = f"has not answered for {event.seconds:.0f} s ({how}{seen})"
    else:
        did = (
            f"has been in {place(inside)} for {event.seconds:.0f} s{' and does nothing' if fields.get('idle') else ''}"
        )
    hint = _HINTS.get(inside.kind)  # type: ignore[call-overload]
    more = f"; `kill -CONT {fields['pid']}` lets it go on" if fields.get("alive") else f": {hint}?" if hint else ""
    return f"{_who(event)} {did}{_while(event.waiting)}{more}"


def _diverged(event: Event) -> str:
    if "type" in event.fields:  # an exception that says it all
        return _message(event)
    after = f" after step {event.fields['step']}" if "step" in event.fields else ""
    one, two = (
        f"{full(side.operation)}{f', after {label(side.after)}' if side.after else ''}" for side in event.waiting
    )
    first, second = event.waiting
    told = (
        f"the ranks diverged{after}: {name(first.ranks[0], first.host)} waits in {one}, "
        f"{name(second.ranks[0], second.host)} in {two}; every rank must make the same calls in the same order"
    )
    out = event.fields.get("left_loop")
    if not out:
        return told
    return f"{told}; {ranks(out, event.host)} had left the training loop: fewer batches, or a break on that rank only"


def _uneven(event: Event) -> str:
    if len(event.waiting) > 1:
        return _diverged(event)
    now = "it has finished" if event.fields.get("ended") else f"it is in {place(event.operation)}"
    return (
        f"{_who(event)} left its loop after step {event.operation.step} ({now}){_while(event.waiting)}: it had fewer "
        f"batches; every rank needs the same number, as `job.loader` gives"
    )


def _straggler(event: Event) -> str:
    f = event.fields
    return (
        f"{_who(event)} is {f['percent']:.0f} % slower than the others: its {f['part']} takes {f['mine']:.0f} ms of a "
        f"step's {f['step']:.0f} (others {f['others']:.0f})"
    )


def _where(event: Event) -> str:
    at = [event.fields.get("where"), f"at step {event.operation.step}" if event.operation.step else ""]
    shown = ", ".join(filter(None, at))
    return f" ({shown})" if shown else ""


def _message(event: Event) -> str:
    return f"{first_line(event.fields['text'])}{_where(event)}"


def _said(event: Event) -> str:
    return f"{_who(event)}: {first_line(event.fields['text'])}"


def _orphan(event: Event) -> str:
    return f"{_who(event)} is an orphan: its launcher (process {event.fields.get('launcher')}) is gone"


def _preempted(event: Event) -> str:
    return f"{_who(event)} got SIGTERM and ended {_at(event)}, after a checkpoint: start the job again to go on"


def _terminated(event: Event) -> str:
    if "unsaved_for" in event.fields:
        at = f"was killed after {event.fields['unsaved_for']:.0f} s without a step boundary {_at(event)}"
        return f"{_who(event)} got SIGTERM and {at}: nothing was saved since the last checkpoint"
    return f"{_who(event)} got SIGTERM and ended {_at(event)}, without a new checkpoint"


def _running(event: Event) -> str:
    still = "runs" if len(event.fields["ranks"]) == 1 else "run"
    return f"nothing failed: {_who(event)} still {still}, at step {event.operation.step}"


def _finished(event: Event) -> str:
    all_ranks = _who(event) if len(event.fields["ranks"]) == 1 else f"all {len(event.fields['ranks'])} ranks"
    return f"nothing failed: {all_ranks} finished, after {event.operation.step} steps"


_SENTENCES: dict[Code, Callable[[Event], str]] = {
    Code.KILLED: _lost, Code.OOM: _lost, Code.EXIT: _lost, Code.HOST: _host, Code.GONE: _gone,
    Code.STALL: _stall, Code.STOPPED: _stall, Code.MISMATCH: _diverged, Code.UNEVEN: _uneven,
    Code.STRAGGLER: _straggler, Code.NAN: _message, Code.PORT: _said, Code.MISSING: _said, Code.WORKER: _said,
    Code.EXCEPTION: lambda event: f"{_who(event)} raised {_raised(event)}{_where(event)}",
    Code.INTERRUPTED: lambda event: f"{_who(event)} got Ctrl-C{_where(event)}",
    Code.ORPHAN: _orphan, Code.PREEMPTED: _preempted, Code.TERMINATED: _terminated,
    Code.ENDED: lambda event: f"{_who(event)} finished", Code.FINISHED: _finished, Code.RUNNING: _running,
}  # fmt: skip
# What these were told in a text is part of their sentence, or beside it.
_OF_TEXT = (
    Code.EXCEPTION, Code.NAN, Code.PORT, Code.MISSING, Code.WORKER, Code.INTERRUPTED, Code.PREEMPTED, Code.TERMINATED,
)  # fmt: skip


def as_json(event: Event) -> dict[str, Any]:
    """The event for a program, with its sentence."""
    return {**event.to_json(), "sentence": text(event)}
