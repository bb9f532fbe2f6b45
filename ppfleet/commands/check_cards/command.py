"""`python -m ppfleet check-cards`: check on this machine's cards what ppfleet promises, and write a report to send.

python -m ppfleet check-cards                                        two cards, about 15 minutes
python -m ppfleet check-cards --cards=4 --quick                      a few minutes
python -m ppfleet check-cards --ips=192.168.0.1,192.168.0.2          on each machine

It writes check-cards.json and check-cards.html to --output, after Ctrl-C with what was found so far.
Exit code 0: nothing failed; 1: something failed; 2: a wrong command line; 3: no card, nothing was checked; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Callable

from ppfleet import limits
from ppfleet.checkpoint.files import disk_message, json_bytes, replace_file
from ppfleet.cli import Parser, Stopped, number, stoppable
from ppfleet.cluster import hosts
from ppfleet.commands.check_cards import deployed, facts, interrupted, numeric, ranks, report_page
from ppfleet.commands.check_cards.items import AMP, FAULTS, ITEMS, Result, amp_key, failed, passed
from ppfleet.commands.check_cards.lab import Lab
from ppfleet.commands.check_cards.ranks import RunFailed
from ppfleet.commands.check_cards.report import NO_CARD, Report, line, plan
from ppfleet.commands.launch import flags
from ppfleet.distributed import devices
from ppfleet.errors import FleetError, WorldError

Check = Callable[[Lab], Result]
CHECKS: dict[str, Check] = {
    "two_machines": numeric.two_machines,
    "batch_norm": numeric.batch_norm,
    "gradients": numeric.gradients,
    "accumulation": numeric.accumulation,
    "unused": numeric.unused,
    "branch": numeric.branch,
    **{amp_key(level, dtype): partial(interrupted.resume, level=level, dtype=dtype) for level, dtype in AMP},
    **{f"fault_{kind}": partial(interrupted.fault, kind=kind) for kind in FAULTS},
    "export": deployed.export,
    "inference": deployed.inference,
    "tensorrt": deployed.tensorrt,
    "speed": deployed.speed,
}


def main(arguments: list[str]) -> int:
    o = options(arguments)
    output = o.output.absolute()
    work = output / time.strftime("%Y%m%d-%H%M%S")
    try:
        with stoppable():
            work.mkdir(parents=True)
            found = ranks.ask({"task": "facts", "device": o.device}, work / "logs" / "facts", limit=180.0)
            if not found["device"]:
                _remove(work)
                print(plan(found["reason"]))
                return NO_CARD
            return _check(o, output, _lab(o, work, found))
    except OSError as failure:
        raise FleetError(disk_message(failure, output)) from None
    except RunFailed as failure:
        raise FleetError(f"cannot ask Paddle for its cards: {failure} (log: {failure.log})") from None
    except Stopped as stop:
        return 128 + stop.number


def _remove(work: Path) -> None:
    """Leave no trace where nothing was checked."""
    shutil.rmtree(work, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: there is an older report
        work.parent.rmdir()


def options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, "python -m ppfleet check-cards")
    add = parser.add_argument
    add("--device", default=devices.AUTO, help="gpu, xpu, npu or another kind of card that Paddle knows")
    add("--cards", type=number(int, 1, 64), default=2, metavar="N", help="cards to use on each machine")
    add("--output", type=Path, default=Path("output/check-cards"), metavar="DIR", help="directory for report and logs")
    add("--quick", action="store_true", help="fewer steps, and a small network for the speed")
    flags.add_machine_flags(parser, wait=limits.MACHINES)
    o = parser.parse_args(arguments)
    try:
        o.nodes = flags.host_list(o.ips)
        o.host = o.host or (hosts.own(list(o.nodes)) if o.nodes else "")
        if o.nodes and o.host not in o.nodes:
            raise WorldError(f"--host={o.host} is not in --ips")
    except WorldError as failure:
        parser.error(str(failure))
    return o


def _lab(o: argparse.Namespace, work: Path, found: dict[str, object]) -> Lab:
    name = str(found["device"])
    given = [f"--host={o.host}"] if o.host else []
    given += [f"--start_port={o.start_port}"] if o.start_port else []
    return Lab(
        row=devices.DEVICES.get(name) or devices.custom(name),
        cards=min(o.cards, int(str(found["count"]))),
        output=work,
        quick=o.quick,
        found=found,
        nodes=o.nodes,
        node=o.nodes.index(o.host) if o.nodes else 0,
        machine_flags=(*given, f"--wait={o.wait:g}"),
    )


def _check(o: argparse.Namespace, output: Path, lab: Lab) -> int:
    known = {**facts.of_machine(), **facts.of_cards(dict(lab.found))}
    report = Report(known, lab.simulated, lab.quick, lab.cards, time.time())
    if lab.simulated:
        print(facts.SIMULATED_NOTE, flush=True)
    checks: dict[str, Check] = {"facts": partial(_facts, known=known, wanted=o.cards), **CHECKS}
    if lab.node:  # the first machine makes the report
        result = _guarded(CHECKS["two_machines"], lab, "two_machines")
        print(line(next(item for item in ITEMS if item.key == "two_machines"), result), flush=True)
        return int(bool(result.log))
    try:
        for item in ITEMS:
            began = time.monotonic()
            report.results[item.key] = _guarded(checks[item.key], lab, item.key)
            report.seconds[item.key] = time.monotonic() - began
            print(line(item, report.results[item.key]), flush=True)
    except Stopped:
        report.interrupted = True
        raise
    finally:
        replace_file(output / "check-cards.json", json_bytes(report.as_json()))
        replace_file(output / "check-cards.html", report_page.html(report).encode())
        print(f"{report.summary}; wrote {output}/check-cards.json and check-cards.html", flush=True)
    return report.code


def _facts(lab: Lab, known: dict[str, str], wanted: int) -> Result:
    fewer = f"; --cards={wanted}, but {lab.cards} can be used" if lab.cards < wanted else ""
    return passed(
        f"{known['cards']}; Paddle {known['paddle']}, ppfleet {known['ppfleet']}, commit {known['commit']}{fewer}"
    )


def _guarded(check: Check, lab: Lab, key: str) -> Result:
    """A failure of any kind is a sentence and a file, never a stack trace."""
    try:
        return check(lab)
    except RunFailed as failure:
        return failed(str(failure), numeric.SEND, failure.log)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the other items are still worth checking
        log = lab.place(key, "check.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
        return failed(f"the check itself failed with {type(failure).__name__}: {failure}", numeric.SEND, log)
