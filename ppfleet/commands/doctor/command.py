"""`python -m ppfleet doctor`: what would go wrong, before a launch. On one host, or on all of them at the same time.

python -m ppfleet doctor                                                       this machine alone
python -m ppfleet doctor --ips=192.168.0.1,192.168.0.2 --gpus=0,1              on each machine, within --wait seconds

Plain sockets bound to the listed address, a token for each examination, bounded messages of JSON. Exit code 0: nothing
stands in the way; 1: something does; 2: a wrong command.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from dataclasses import asdict

from ppfleet.cli import Parser, number
from ppfleet.cluster import hosts
from ppfleet.commands.doctor import checks
from ppfleet.commands.doctor.checks import ERROR, Finding
from ppfleet.commands.doctor.examine import Examination
from ppfleet.errors import CommError, WorldError


def main(words: list[str]) -> int:
    o = options(words)
    findings = examine(o)
    if o.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        print(table(findings))
    return int(any(finding.level == ERROR for finding in findings))


def options(words: list[str]) -> Namespace:
    parser = Parser(__doc__)
    parser.prog = "python -m ppfleet doctor"
    add = parser.add_argument
    add("--ips", metavar="A,B", help="all machines, rank 0's first")
    add("--host", metavar="A", help="this machine's address in --ips (default: by the interfaces)")
    add("--gpus", metavar="0,1", help="the cards to be used, a process each")
    add("--nproc_per_node", type=number(int, 1, 64), metavar="N", help="processes on each machine, without cards")
    add("--start_port", type=number(int, 1025, 64999), metavar="P", help="(default: FLAGS_START_PORT, else 6070)")
    add("--data-path", metavar="DIR", help="a data set that all machines should have alike")
    add("--config", metavar="FILE", help="a file that all machines should have alike")
    add("--wait", type=number(float, 1, 600), default=15.0, metavar="SECONDS", help="for the other machines to come")
    add("--json", action="store_true", help="as JSON")
    o = parser.parse_args(words)
    try:
        o.start_port = o.start_port or hosts.start_port(os.environ) or hosts.DEFAULT_PORT
    except WorldError as failure:
        parser.error(str(failure))
    o.processes = len(o.gpus.split(",")) if o.gpus else o.nproc_per_node or 1
    for name in o.ips.split(",") if o.ips else ():
        if not hosts.is_host(name):
            parser.error(f"--ips={o.ips}: {name!r} is no address or host name; expected is A,B without blanks")
    return o


def examine(o: Namespace) -> list[Finding]:
    """Everything found, here and between the hosts; after a finding that makes the rest impossible, what there is."""
    nodes = o.ips.split(",") if o.ips else []
    try:
        host = o.host or (hosts.own(nodes) if nodes else "")
        if o.host and (o.host not in nodes or not hosts.interface_of(o.host)):
            raise WorldError(f"--host={o.host} is not in --ips, or no address of this machine")
    except WorldError as failure:
        return [Finding(ERROR, "own address", "", str(failure), "correct --ips, or give --host"), *checks.local("", o)]
    findings = checks.local(host, o)
    taken = any(finding.check == "ports" and finding.level == ERROR for finding in findings)
    if len(nodes) < 2 or taken:
        return findings
    try:
        return Examination(nodes, host, o).run(findings)
    except CommError as failure:
        fix = (
            "run the doctor there too, within --wait seconds; if it runs, the port is blocked: open it in the firewall"
        )
        return [*findings, Finding(ERROR, "peers", host, str(failure), fix)]


def table(findings: list[Finding]) -> str:
    """A line for each finding, the fix below what needs one; the worst last, where the eye is."""
    order = {"ok": 0, "warning": 1, "error": 2}
    rows = []
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        where = f"{finding.host}: " if finding.host else ""
        rows.append(f"{finding.level:8}{finding.check:16}{where}{finding.text}")
        if finding.fix and finding.level != "ok":
            rows.append(f"{'':8}{'':16}-> {finding.fix}")
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    rows.append(f"{errors} error(s), {warnings} warning(s)" if errors or warnings else "all well")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
