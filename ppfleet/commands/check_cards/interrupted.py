"""What goes wrong in a job: kill and resume in each precision, and faults of a rank."""

from __future__ import annotations

import time
from typing import Any

from ppfleet import limits
from ppfleet.commands.check_cards import facts, ranks
from ppfleet.commands.check_cards.items import FAULTS, Result, amp_key, failed, not_run, passed
from ppfleet.commands.check_cards.lab import Lab
from ppfleet.commands.check_cards.numeric import SEND
from ppfleet.commands.check_cards.ranks import Run, RunFailed
from ppfleet.commands.why import cause

STALL = 8.0  # seconds that the jobs here let a rank keep others waiting
_PAUSE = 0.3  # seconds a step, so that the other ranks know where a rank is when something happens to it
_MARGIN = 20.0  # for the watchdog to tell everybody, and for the processes to end
_MEMORY_MARGIN, _MEMORY_WAIT = 64, 15.0  # MB; seconds for the driver to free what a dead process held


def resume(lab: Lab, level: str, dtype: str) -> Result:
    """Train; train again and kill a rank in the middle; resume, and compare the weights."""
    name, shown = amp_key(level, dtype), f"{level} {dtype}".strip()
    options: dict[str, Any] = {"amp": level, "save_every": 2, "stall": STALL, **({"amp_dtype": dtype} if dtype else {})}
    if lab.row.deterministic:
        options["deterministic"] = True
    task = {"task": "train", "batch_norm": True, "dropout": 0.1, "resume": True, "options": options,
            "batch": 16 * lab.cards, "steps": 2 * lab.steps}  # fmt: skip
    whole = lab.run(f"{name}_whole", lab.cards, task)
    used = whole.told[0]["amp"]
    if used != shown:
        return not_run(f"this card computes {shown} as {used}: Paddle has no {dtype} on it", used=used)
    losses = whole.told[0]["losses"]
    if not all(abs(loss) < 1e4 for loss in losses):  # also where one is not a number
        return failed(f"{shown}: the loss is {losses[-1]} after {len(losses)} steps", SEND, whole.log)
    fault = {"kind": "kill", "rank": lab.cards - 1, "step": lab.steps + 1}
    killed = lab.start(f"{name}_killed", lab.cards, {**task, "fault": fault})
    if not killed.fault() or not any(killed.codes):
        reason = ranks.reason(killed, lab.run_directory(f"{name}_killed"))
        raise RunFailed(f"{shown}: the job ended before its rank was killed: {reason}", killed.log)
    again = lab.run(f"{name}_killed", lab.cards, task)
    return _same_bits(lab, name, shown, task, whole, again)


def _same_bits(lab: Lab, name: str, shown: str, task: dict[str, Any], whole: Run, again: Run) -> Result:
    expected, found = whole.told[0]["sha256"], {told["sha256"] for told in again.told}
    resumed = len(again.told[0]["losses"])
    figures = {
        "sha256": expected,
        "resumed": sorted(found),
        "steps": whole.told[0]["step"],
        "steps_after_resume": resumed,
    }
    if found == {expected}:
        sentence = (
            f"{shown}: killed with kill -9 and resumed for the last {resumed} steps: the same SHA-256 {expected[:12]}"
        )
        return passed(sentence, **figures)
    repeated = lab.run(f"{name}_repeated", lab.cards, task)
    if repeated.told[0]["sha256"] != expected:
        sentence = f"{shown}: two undisturbed runs differ, so this card does not compute the same bits twice"
        return not_run(sentence, "look for a deterministic setting of your device's library", **figures)
    return failed(
        f"{shown}: the resumed run ends with other weights than the undisturbed one", SEND, again.log, **figures
    )


def fault(lab: Lab, kind: str) -> Result:
    """Something happens to the last rank; how long until all ranks have ended, and who is named."""
    if lab.cards < 2:
        return not_run("needs 2 cards, and --cards or this machine has 1")
    before = facts.card_memory(lab.row.name)
    task = {"task": "train", "batch_norm": True, "batch": 16 * lab.cards, "steps": 200, "pause": _PAUSE,
            "options": {"stall": STALL}, "fault": {"kind": kind, "rank": lab.cards - 1, "step": 5}}  # fmt: skip
    run, directory = lab.start(f"fault_{kind}", lab.cards, task), lab.run_directory(f"fault_{kind}")
    happened = run.fault()
    if not happened:
        raise RunFailed(f"the job ended before the fault was made: {ranks.reason(run, directory)}", run.log)
    seconds, answer = run.ended - happened, cause.answer([directory])
    sentence = answer.sentence if answer else "no record tells why"
    memory = _memory_left(lab, before)
    figures = {"seconds": seconds, "exit_codes": list(run.codes), "said": sentence, "card_memory_mb": memory}
    shown = f"{FAULTS[kind]}: all ranks ended after {seconds:.1f} s with exit codes {', '.join(map(str, run.codes))}"
    if not all(run.codes):
        return failed(f"{shown}: a rank ended as if all was well", SEND, run.log, **figures)
    if answer is None or lab.cards - 1 not in answer.ranks:
        return failed(f"{shown}, but rank {lab.cards - 1} is not named: {sentence}", SEND, run.log, **figures)
    if seconds > STALL + _MARGIN:
        return failed(f"{shown}, later than {STALL + _MARGIN:.0f} s", SEND, run.log, **figures)
    if memory is not None and max(memory) > _MEMORY_MARGIN:
        advice = "look for processes with nvidia-smi; " + SEND
        return failed(f"{shown}, but {max(memory)} MB of card memory were not freed", advice, run.log, **figures)
    freed = "card memory: not checked" if memory is None else "no card memory is left"
    return passed(f"{shown}; {freed}; {sentence}", **figures)


def _memory_left(lab: Lab, before: list[int] | None) -> list[int] | None:
    """MB more in use on each card than before, once the driver had time; None where nobody can be asked."""
    deadline = time.monotonic() + _MEMORY_WAIT
    while before is not None:
        after = facts.card_memory(lab.row.name)
        if after is None or len(after) != len(before):
            return None
        left = [now - then for now, then in zip(after, before)]
        if max(left) <= _MEMORY_MARGIN or time.monotonic() > deadline:
            return left
        time.sleep(limits.BEAT)
    return None
