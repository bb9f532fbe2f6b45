"""One card against several: BatchNorm, gradients, accumulation, unused parameters, branches, two machines."""

from __future__ import annotations

from typing import Any

from ppfleet.commands.check_cards.items import Result, failed, not_run, passed
from ppfleet.commands.check_cards.lab import LAUNCHER, Lab, changes, difference
from ppfleet.commands.check_cards.ranks import Run
from ppfleet.commands.launch.command import this_machine

TOLERANCE = 1e-4
SEND = "please send us check-cards.json and the logs directory"
# One step from equal weights: later ones amplify rounding.
_GRADIENTS = {"task": "train", "batch_norm": False, "steps": 1}
_ALONE = "needs 2 cards, and --cards or this machine has 1"


def batch_norm(lab: Lab) -> Result:
    if lab.cards < 2:
        return not_run(_ALONE)
    task = {**_GRADIENTS, "batch_norm": True, "batch": 16 * lab.cards}
    one, many = lab.run("batch_norm_1", 1, task), lab.run("batch_norm_n", lab.cards, task)
    how = many.told[0]["batch_norm"]
    return _compared(lab, one, many, f"BatchNorm is {how or 'not synchronised'}; ", operator=how)


def gradients(lab: Lab) -> Result:
    if lab.cards < 2:
        return not_run(_ALONE)
    task = {**_GRADIENTS, "batch": 16 * lab.cards}
    one = lab.run("gradients_1", 1, task)
    many = lab.launch("gradients_n", task, [LAUNCHER, f"--devices={lab.card_list()}"])
    return _compared(lab, one, many, "gradients: ")


def accumulation(lab: Lab) -> Result:
    if lab.cards < 2:
        return not_run(_ALONE)
    task = {**_GRADIENTS, "batch": 8 * lab.cards, "options": {"accumulate": 2}}
    one, many = lab.run("accumulation_1", 1, task), lab.run("accumulation_n", lab.cards, task)
    return _compared(lab, one, many, "2 batches per step: ")


def unused(lab: Lab) -> Result:
    return _branches(lab, "unused", "a parameter that is never used: ")


def branch(lab: Lab) -> Result:
    return _branches(lab, "branch", "cards that take different branches: ")


def _branches(lab: Lab, name: str, before: str) -> Result:
    if lab.cards < 2:
        return not_run(_ALONE)
    task = {"task": "branch", "branch": name == "branch", "blocks": lab.cards, "steps": 1}
    one, many = lab.run(f"{name}_1", 1, task), lab.run(f"{name}_n", lab.cards, task)
    moved = max(float(abs(value).max()) for key, value in changes(many).items() if key.partition(".")[0] == "other")
    if moved:
        return failed(f"{before}it changed by {moved:.2g}", SEND, many.log)
    return _compared(lab, one, many, before)


def two_machines(lab: Lab) -> Result:
    if len(lab.nodes) < 2:
        return not_run("needs a second machine", "run ppfleet check-cards --ips=A,B on each machine")
    if this_machine().accelerator.name != lab.row.name:
        return not_run(f"ppfleet launch does not start processes on a {lab.row.title} yet")
    ranks = lab.cards * len(lab.nodes)
    task = {**_GRADIENTS, "batch": 16 * ranks}
    flags = ["ppfleet", "launch", f"--ips={','.join(lab.nodes)}", *lab.machine_flags, f"--devices={lab.card_list()}"]
    many = lab.launch("two_machines_n", task, flags)
    if lab.node:
        return passed(f"trained with {ranks} cards on {len(lab.nodes)} machines; the first machine compares")
    one = lab.run("two_machines_1", 1, task)
    return _compared(lab, one, many, f"{ranks} cards on {len(lab.nodes)} machines: ", cards=ranks)


def _compared(lab: Lab, one: Run, many: Run, before: str, **figures: Any) -> Result:
    """Whether all ranks have the same weights, and these are those of one card."""
    hashes = {told["sha256"] for told in many.told if told}
    if len(hashes) > 1:
        return failed(f"{before}the ranks have different weights after the same step", SEND, many.log, **figures)
    worst, name = difference(changes(one), changes(many))
    cards = figures.get("cards", lab.cards)
    figures = {"difference": worst, "parameter": name, "tolerance": TOLERANCE, **figures}
    if not worst <= TOLERANCE:
        by = f"{worst:.1e} of the largest change of {name}, more than {TOLERANCE:g}"
        return failed(f"{before}1 and {cards} cards differ by {by}", SEND, many.log, **figures)
    agree = f"agree within {worst:.1e}" if worst else "agree exactly"
    return passed(f"{before}1 and {cards} cards {agree}", **figures)
