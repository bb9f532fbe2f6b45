"""An event as a sentence: made last, for people; no program reads it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Callable

from ppfleet.watchdog.events import Code, Event, Kind, Operation, Waiting

_HINTS = {Kind.DATA: "a slow disk or data set", **dict.fromkeys((Kind.SAVE, Kind.EXPORT, Kind.WORK), "a slow disk")}


def text(event: Event) -> str:
    """One sentence about what a watchdog found: what happened, on which rank, where, and who waits for it."""
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


def reason(event: Event) -> str:
    """Why a rank left in order, for those who would have waited for it."""
    if event.code == Code.EXCEPTION:
        return f"{event.fields['type']}: {event.fields['text']}"[:500]
    return str(event.fields.get("text") or "it finished")


def who(event: Event) -> str:
    found = event.fields.get("ranks")
    return ranks(found, event.host) if found else name(event.rank, event.host)


def at_step(event: Event) -> str:
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
    if event.fields.get("judge"):
        return f"the watchdog process of {name(event.rank, event.host)} was killed, so nobody would notice a stall"
    at = f" {at_step(event)}" if event.operation.step or event.operation.kind else ""
    likely = ", probably by the OOM killer" if event.fields.get("probably") else ""
    early = " right after the roll call" if event.fields.get("early") else ""
    guess = event.fields.get("guess", "")
    return f"{who(event)} {death(event)}{likely}{early}{at}{f': {guess}' if guess else ''}"


def _host(event: Event) -> str:
    return f"the host of {name(event.rank, event.host)} no longer answers"


def _stall(event: Event) -> str:
    inside, fields = event.operation, event.fields
    if event.rank < 0:
        fails = (
            "a card or the network between them fails" if event.fields.get("card") else "the network between them fails"
        )
        return f"all ranks have waited in {full(inside)} for {event.seconds:.0f} s: {fails}"
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
    return f"{who(event)} {did}{_while(event.waiting)}{more}"


def _diverged(event: Event) -> str:
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
        f"{who(event)} left its loop after step {event.operation.step} ({now}){_while(event.waiting)}: it had fewer "
        f"batches; every rank needs the same number, as `job.loader` gives"
    )


def _orphan(event: Event) -> str:
    return f"{who(event)} is an orphan: its launcher (process {event.fields.get('launcher')}) is gone"


_SENTENCES: dict[Code, Callable[[Event], str]] = {
    Code.KILLED: _lost, Code.OOM: _lost, Code.EXIT: _lost, Code.HOST: _host, Code.STALL: _stall, Code.STOPPED: _stall,
    Code.MISMATCH: _diverged, Code.UNEVEN: _uneven, Code.ORPHAN: _orphan,
}  # fmt: skip
