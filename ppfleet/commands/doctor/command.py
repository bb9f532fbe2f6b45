"""`python -m ppfleet doctor`: find problems before a launch, on one machine or between all of them.

python -m ppfleet doctor                                                       this machine alone
python -m ppfleet doctor --ips=192.168.0.1,192.168.0.2 --gpus=0,1              on each machine, within --wait seconds

Exit code 0: no errors; 1: errors found; 2: a wrong command line.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import asdict

from ppfleet import limits
from ppfleet.cli import Parser
from ppfleet.cluster import hosts
from ppfleet.commands.doctor import checks
from ppfleet.commands.doctor.checks import ERROR, Finding
from ppfleet.commands.doctor.examine import Examination
from ppfleet.commands.launch import flags
from ppfleet.errors import CommError, WorldError


def main(arguments: list[str]) -> int:
    o = options(arguments)
    findings = examine(o)
    if o.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        print(table(findings))
    return int(any(finding.level == ERROR for finding in findings))


def options(arguments: list[str]) -> Namespace:
    parser = Parser(__doc__, "python -m ppfleet doctor")
    flags.add_machine_flags(parser, wait=limits.MACHINES_DOCTOR)
    flags.add_process_flags(parser)
    add = parser.add_argument
    add("--data-path", metavar="DIR", help="a data set that must be the same on all machines")
    add("--config", metavar="FILE", help="a file that must be the same on all machines")
    add("--json", action="store_true", help="print JSON")
    o = parser.parse_args(arguments)
    try:
        o.nodes = flags.host_list(o.ips)
        o.start_port = o.start_port or hosts.start_port(os.environ) or hosts.DEFAULT_PORT
        o.processes = len(flags.card_list(o.gpus)) or o.nproc_per_node or 1
    except WorldError as failure:
        parser.error(str(failure))
    return o


def examine(o: Namespace) -> list[Finding]:
    """All findings, on this host and between hosts; only those of this host where the others cannot be reached."""
    nodes = list(o.nodes)
    try:
        host = o.host or (hosts.own(nodes) if nodes else "")
        if o.host and (o.host not in nodes or not hosts.interface_of(o.host)):
            raise WorldError(f"--host={o.host} is not in --ips, or not an address of this machine")
    except WorldError as failure:
        return [Finding(ERROR, "own address", "", str(failure), "correct --ips, or add --host"), *checks.local("", o)]
    findings = checks.local(host, o)
    taken = any(finding.check == "ports" and finding.level == ERROR for finding in findings)
    if len(nodes) < 2 or taken:
        return findings
    try:
        return Examination(nodes, host, o).run(findings)
    except CommError as failure:
        fix = "run doctor there too, within --wait seconds; if it is running, open the port in the firewall"
        return [*findings, Finding(ERROR, "peers", host, str(failure), fix)]


def table(findings: list[Finding]) -> str:
    """A line for each finding and its fix, errors last, where they are seen."""
    order = {"ok": 0, "warning": 1, "error": 2}
    rows = []
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        host = f"{finding.host}: " if finding.host else ""
        rows.append(f"{finding.level:8}{finding.check:16}{host}{finding.text}")
        if finding.fix and finding.level != "ok":
            rows.append(f"{'':8}{'':16}-> {finding.fix}")
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    rows.append(f"{errors} error(s), {warnings} warning(s)" if errors or warnings else "all checks passed")
    return "\n".join(rows)
