"""`python -m ppfleet report`: a run on one page: curves, starts and faults, mistakes, checkpoints, settings.

python -m ppfleet report output/run1                       writes output/run1/report.html
python -m ppfleet report output/run1 from-host-b/run1      with what was copied from the other hosts

Reads files only, also while the job runs. The page is one file that needs no network. Exit code 0: it was written; 2:
there was no run to read, or a wrong command.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ppfleet.cli import Parser
from ppfleet.commands.report import run, run_page


def main(words: list[str]) -> int:
    parser = Parser(__doc__)
    parser.prog = "python -m ppfleet report"
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a run's; rank 0's host first")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: report.html in the first directory)")
    o = parser.parse_args(words)
    found = run.collect(o.directories)
    if found.empty:
        damaged = f" ({'; '.join(found.notes)})" if found.notes else ""
        print(f"report: no run: looked for {run.looked_for(o.directories)}{damaged}", file=sys.stderr)
        return 2
    output = o.output or o.directories[0] / "report.html"
    try:
        output.write_text(run_page.html(found), encoding="utf-8")
    except OSError as failure:
        print(f"report: cannot write {output}: {failure.strerror} (--output FILE)", file=sys.stderr)
        return 2
    print(f"report: {output}: {run_page.summary(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
