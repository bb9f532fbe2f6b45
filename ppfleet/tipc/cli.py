"""Certify a model repository from its TIPC text files: train, evaluate, export, infer.

python -m ppfleet tipc run  test_tipc/configs/mobilenet_v3_small/train_infer_python.txt lite_train_lite_infer
python -m ppfleet tipc plan <config> <mode>      print the commands without running them
python -m ppfleet tipc lint <config>             list the problems of a file with the likely fixes

Exit codes: 0 success, 1 something failed (lint: problems found), 2 wrong file or mode, 128 + n after signal n.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentTypeError, Namespace

from ppfleet import limits
from ppfleet.cli import Parser, number
from ppfleet.cluster import hosts
from ppfleet.distributed.devices import GPU
from ppfleet.errors import ConfigError, FleetError, WorldError
from ppfleet.tipc import config as tipc
from ppfleet.tipc import lint, plan
from ppfleet.tipc.command import OUTPUT, TRAINERS, LocalMachine
from ppfleet.tipc.run import Runner


def main(arguments: list[str]) -> int:
    o = options(arguments)
    try:
        return int({"run": run, "plan": show, "lint": explain}[o.action](o))
    except (ConfigError, WorldError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except (OSError, UnicodeError) as failure:
        raise FleetError(str(failure)) from None


def options(arguments: list[str]) -> Namespace:
    parser = Parser(__doc__, "python -m ppfleet tipc")
    add = parser.add_argument
    add("action", choices=["run", "plan", "lint"], help="what to do")
    add("config", help="the text file")
    add("mode", nargs="?", help=f"{', '.join(tipc.MODES)} (optional for lint)")
    add("--device", choices=["auto", "gpu", "cpu"], default="auto",
        help="cpu: the device map, which certifies files for cards on a machine without cards")  # fmt: skip
    add("--output", type=directory, default=OUTPUT, metavar="DIR", help="directory for <model>/<mode>/")
    add("--trainers", type=names, default=",".join(TRAINERS), metavar="A,B",
        help="the trainers of this repository; others are refused")  # fmt: skip
    add("--timeout", type=number(float, 1), metavar="SECONDS",
        help="time limit of each command (default: 1 hour; whole_train: 30 days)")  # fmt: skip
    add(
        "--wait",
        type=number(float, 1),
        default=limits.MACHINES_TIPC,
        metavar="SECONDS",
        help="how long to wait for the other nodes",
    )
    add("--inputs", action="store_true", help="plan: fail if data, weights or scripts are missing, and list them")
    add("--json", action="store_true", help="plan, lint: print JSON")
    o = parser.parse_args(arguments)
    if o.json and o.action == "run":
        parser.error("--json is for plan and lint; run always writes results.json")
    if not o.mode and o.action != "lint":
        parser.error(f"a mode is required: {', '.join(tipc.MODES)}")
    return o


def directory(text: str) -> str:
    if not text.strip("/"):
        raise ArgumentTypeError(f"must be a directory for results, got {text!r}")
    return text.rstrip("/")


def names(text: str) -> tuple[str, ...]:
    trainers = tuple(filter(None, text.replace("|", ",").split(",")))
    if not trainers:
        raise ArgumentTypeError("must list at least one trainer")
    return trainers


def run(o: Namespace) -> int:
    config = tipc.parse(o.config)
    return Runner(plan.make(config, o.mode, local_machine(o, config)), o.wait).run()


def show(o: Namespace) -> int:
    config = tipc.parse(o.config)
    try:
        made = plan.make(config, o.mode, local_machine(o, config))
    except WorldError as failure:  # a plan for other machines
        print(f"# planned for the first node, because {failure}", file=sys.stderr)
        made = plan.make(config, o.mode, local_machine(o, None))
    missing = plan.missing(made) if o.inputs else []
    if missing:
        raise FleetError(f"{o.config}, {o.mode}:\n  " + "\n  ".join(missing))
    if o.json:
        print(json.dumps([command.to_json() for command in made.commands], indent=1, ensure_ascii=False))
        return 0
    for note in made.notes:
        print(f"# {note}")
    for command in made.commands:
        reason = command.refused and f"refused: {command.refused}" or command.skip and f"skipped: {command.skip}"
        print(f"# {command.id}{f' ({reason})' if reason else ''}\n{command.text}\n  > {command.log}")
    return 0


def explain(o: Namespace) -> int:
    problems = lint.lint(o.config, o.mode or "")
    if o.json:
        print(json.dumps([vars(problem) for problem in problems], indent=1, ensure_ascii=False))
    else:
        for problem in problems:
            print(f"{o.config}: {problem}")
        print(lint.summary(problems, o.config))
    return int(bool(problems))


def local_machine(o: Namespace, config: tipc.Config | None) -> LocalMachine:
    """What the plan must know about this machine."""
    nodes = config.nodes() if config and o.mode != "whole_infer" else ()
    address = hosts.own(nodes) if nodes else ""
    return LocalMachine(
        cards=o.device == "gpu" or (o.device == "auto" and GPU.files() > 0),
        why="--device cpu" if o.device == "cpu" else "no card here",
        address=address,
        interface=hosts.interface_of(address) if address else "",
        start_port=hosts.start_port(os.environ),
        output=o.output,
        trainers=o.trainers,
        limit=o.timeout or 0,
    )
