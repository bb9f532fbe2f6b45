"""Certify a model repository from its TIPC text files: train, evaluate, export, infer; a status that can be red.

python -m ppfleet tipc run  test_tipc/configs/mobilenet_v3_small/train_infer_python.txt lite_train_lite_infer
python -m ppfleet tipc plan <config> <mode>      the commands, without starting one
python -m ppfleet tipc lint <config>             what is wrong with a file, and the likely fix

Exit codes: 0 all well, 1 something failed (lint: found), 2 the file or mode cannot be run, 128 + n after signal n.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentTypeError, Namespace

from ppfleet.cli import Parser, number
from ppfleet.cluster import hosts
from ppfleet.distributed.devices import GPU
from ppfleet.errors import ConfigError, FleetError, WorldError
from ppfleet.tipc import config as tipc
from ppfleet.tipc import lint, plan
from ppfleet.tipc.command import OUTPUT, TRAINERS, Here
from ppfleet.tipc.run import Runner


def main(arguments: list[str]) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        getattr(sys, name).reconfigure(errors="backslashreplace")
    o = options(arguments)
    try:
        return int({"run": run, "plan": show, "lint": explain}[o.what](o))
    except (ConfigError, WorldError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    except FleetError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, UnicodeError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def options(arguments: list[str]) -> Namespace:
    parser = Parser(__doc__)
    parser.prog = "python -m ppfleet tipc"
    add = parser.add_argument
    add("what", choices=["run", "plan", "lint"], help="what to do")
    add("config", help="the text file")
    add("mode", nargs="?", help=f"{', '.join(tipc.MODES)} (lint: may be left out)")
    add("--device", choices=["auto", "gpu", "cpu"], default="auto",
        help="cpu: the device map, which certifies files for cards on a machine without")  # fmt: skip
    add("--output", type=directory, default=OUTPUT, metavar="DIR", help="where <model>/<mode>/ is made")
    add("--trainers", type=names, default=",".join(TRAINERS), metavar="A,B",
        help="the trainers that this repository has; others are refused")  # fmt: skip
    add("--timeout", type=number(float, 1), metavar="SECONDS",
        help="limit for each command (default: 1 hour; whole_train: 30 days)")  # fmt: skip
    add("--wait", type=number(float, 1), default=600, metavar="SECONDS", help="how long to wait for the other nodes")
    add("--inputs", action="store_true", help="plan: fail if data, weights or scripts are not there, and name them")
    add("--json", action="store_true", help="plan, lint: as JSON")
    o = parser.parse_args(arguments)
    if o.json and o.what == "run":
        parser.error("run writes results.json; --json is for plan and lint")
    if not o.mode and o.what != "lint":
        parser.error(f"which mode? {', '.join(tipc.MODES)}")
    return o


def directory(text: str) -> str:
    if not text.strip("/"):
        raise ArgumentTypeError(f"{text!r} is no directory for results")
    return text.rstrip("/")


def names(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, text.replace("|", ",").split(",")))
    if not found:
        raise ArgumentTypeError("name at least one trainer")
    return found


def run(o: Namespace) -> int:
    config = tipc.parse(o.config)
    return Runner(plan.make(config, o.mode, here(o, config)), o.wait).run()


def show(o: Namespace) -> int:
    config = tipc.parse(o.config)
    try:
        made = plan.make(config, o.mode, here(o, config))
    except WorldError as failure:  # a plan for other machines
        print(f"# planned for the first node, since {failure}", file=sys.stderr)
        made = plan.make(config, o.mode, here(o, None))
    lacking = plan.missing(made) if o.inputs else []
    if lacking:
        raise FleetError(f"{o.config}, {o.mode}:\n  " + "\n  ".join(lacking))
    if o.json:
        print(json.dumps([command.to_json() for command in made.commands], indent=1, ensure_ascii=False))
        return 0
    for note in made.notes:
        print(f"# {note}")
    for command in made.commands:
        why = command.refused and f"refused: {command.refused}" or command.skip and f"skipped: {command.skip}"
        print(f"# {command.id}{f' ({why})' if why else ''}\n{command.text}\n  > {command.log}")
    return 0


def explain(o: Namespace) -> int:
    findings = lint.lint(o.config, o.mode or "")
    if o.json:
        print(json.dumps([vars(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        for finding in findings:
            print(f"{o.config}: {finding}")
        print(lint.summary(findings, o.config))
    return int(bool(findings))


def here(o: Namespace, config: tipc.Config | None) -> Here:
    """This machine, as far as the plan must know it."""
    nodes = config.nodes() if config and o.mode != "whole_infer" else ()
    address = hosts.own(nodes) if nodes else ""
    return Here(
        cards=o.device == "gpu" or (o.device == "auto" and GPU.files() > 0),
        why="--device cpu" if o.device == "cpu" else "no card here",
        address=address,
        interface=hosts.interface_of(address) if address else "",
        start_port=hosts.start_port(os.environ),
        output=o.output,
        trainers=o.trainers,
        limit=o.timeout or 0,
    )
