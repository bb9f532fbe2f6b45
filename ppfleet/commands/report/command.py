"""`python -m ppfleet report`: write one page about a run: curves, starts and failures, mistakes, checkpoints, settings.

python -m ppfleet report output/run1                       writes output/run1/report.html
python -m ppfleet report output/run1 from-host-b/run1      with a copy of another host's directory

Only reads files of the run, also while the job runs. The page is a single file and needs no network. Exit code 0: page
written; 2: no run found, or a wrong command line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ppfleet.cli import Parser
from ppfleet.commands.report import run, run_page


def main(arguments: list[str]) -> int:
    parser = Parser(__doc__, "python -m ppfleet report")
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="run directories, rank 0's host first")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="the page to write (default: report.html in the first directory)")  # fmt: skip
    o = parser.parse_args(arguments)
    data = run.collect(o.directories)
    if data.empty:
        damaged = f" ({'; '.join(data.notes)})" if data.notes else ""
        print(f"report: no run found: looked for {run.looked_for(o.directories)}{damaged}", file=sys.stderr)
        return 2
    output = o.output or o.directories[0] / "report.html"
    try:
        output.write_text(run_page.html(data), encoding="utf-8")
    except OSError as failure:
        reason = failure.strerror
        print(f"report: cannot write {output}: {reason}; choose another file with --output", file=sys.stderr)
        return 2
    print(f"report: {output}: {run_page.summary(data)}")
    return 0
