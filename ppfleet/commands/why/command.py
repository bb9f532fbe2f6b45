"""`python -m ppfleet why`: what happened to a job: the first cause in one sentence, then the timeline around it.

python -m ppfleet why output/run1                       the run directory, or the launcher's log directory
python -m ppfleet why output/run1 from-host-b/run1      with what was copied from the other hosts

Reads the flight records of all ranks, also while the job runs. Exit code 0: there was something to read; 2: there was
not, or a wrong command.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppfleet.cli import Parser, number
from ppfleet.commands.why import cause, record_reader, timeline
from ppfleet.commands.why.cause import Answer
from ppfleet.commands.why.job_start import Rank, label
from ppfleet.watchdog import render
from ppfleet.watchdog.events import Kind
from ppfleet.watchdog.recorder import Entry
from ppfleet.watchdog.render import clock, span

_ENTRIES = 6  # of each rank in the timeline
_RANKS = 6  # in the timeline of the text
_KEPT = 200  # entries of each rank in JSON


def main(words: list[str]) -> int:
    o = options(words)
    found = record_reader.collect(o.directories)
    if not found.attempts:
        shown = "; ".join(map(record_reader.looked_for, o.directories))
        damaged = f" ({'; '.join(found.notes)})" if found.notes else ""
        print(f"why: no flight record: looked for {shown}{damaged}", file=sys.stderr)
        return 2
    if o.back >= len(found.attempts):
        print(f"why: --back {o.back}: there are {len(found.attempts)} starts, --back 0 is the newest", file=sys.stderr)
        return 2
    answer = cause.of(found, o.back)
    if o.html:
        try:
            o.html.write_text(timeline.html(answer), encoding="utf-8")
        except OSError as failure:
            print(f"why: cannot write {o.html}: {failure.strerror}", file=sys.stderr)
            return 2
    _print(json.dumps(facts(answer), indent=1, ensure_ascii=False) if o.json else text(answer))
    return 0


def _print(shown: str) -> None:
    with contextlib.suppress(AttributeError):  # a terminal that knows no dashes is shown escapes
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        print(shown, flush=True)
    except BrokenPipeError:  # whoever read it, as `head` does, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def options(words: list[str]) -> Namespace:
    parser = Parser(__doc__)
    parser.prog = "python -m ppfleet why"
    add = parser.add_argument
    add("directories", nargs="+", type=Path, metavar="DIR", help="a run or log directory; one for each host")
    add("--json", action="store_true", help="as JSON")
    add("--html", type=Path, metavar="FILE", help="write a page with a drawing of the timeline")
    add("--back", type=number(int, 0), default=0, metavar="N", help="the N-th start before the newest")
    return parser.parse_args(words)


def text(answer: Answer) -> str:
    lines = [f"why: {answer.sentence}", *(f"  {each}" for each in answer.evidence)]
    ranks = shown_ranks(answer)
    left_out = len(answer.attempt.ranks) - len(ranks)
    entries = recent(ranks, _ENTRIES)
    if entries:
        end = max(answer.attempt.last_seen, entries[-1][1].entered)
        lines.append(f"the last {span(end - entries[0][1].entered)}:")
        lines += _columns([_line(rank, entry) for rank, entry in entries])
    if left_out:
        lines.append(f"  ({left_out} more ranks: --html FILE shows all)")
    return "\n".join([*lines, *(f"note: {note}" for note in answer.notes)])


def shown_ranks(answer: Answer) -> list[Rank]:
    """Those whose doing it was, and as many others as can be read."""
    ranks = sorted(answer.attempt.ranks, key=lambda rank: (rank.number not in answer.ranks, rank.number))
    return ranks[:_RANKS]


def recent(ranks: Sequence[Rank], count: int) -> list[tuple[Rank, Entry]]:
    """The newest entries of each, by time."""
    found = [(rank, entry) for rank in ranks for entry in rank.record.entries[-count:]]
    for rank in ranks:  # what it was in may have begun long before
        found += [(rank, entry) for entry in rank.entries[:-count] if entry is rank.open]
    return sorted(found, key=lambda pair: (pair[1].entered, pair[0].number, pair[1].number))


def _line(rank: Rank, entry: Entry) -> tuple[str, ...]:
    if entry.kind == Kind.MARK:
        return clock(entry.entered, True), f"rank {rank.number}", f"{entry.what}: {entry.detail}", "", entry.where
    lasted = span(entry.left - entry.entered) if entry.left else "… not left"
    return clock(entry.entered, True), f"rank {rank.number}", label(entry), lasted, entry.where


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def facts(answer: Answer) -> dict[str, Any]:
    """The same for a program. Times are seconds since 1970 by rank 0's clock."""
    attempt = answer.attempt
    return {
        "sentence": answer.sentence,
        "kind": answer.kind,
        "event": answer.event.to_json(),
        "culprits": list(answer.ranks),
        "time": answer.time,
        "evidence": list(answer.evidence),
        "notes": list(answer.notes),
        "run": attempt.run,
        "started": attempt.started,
        "size": attempt.size,
        "missing": attempt.missing,
        "earlier": answer.earlier,
        "ranks": [_rank_facts(rank) for rank in attempt.ranks],
        "timeline": [
            {"rank": rank.number, "label": label(entry), **vars(entry), "left": entry.left or None}
            for rank, entry in recent(attempt.ranks, _KEPT)
        ],
    }


def _rank_facts(rank: Rank) -> dict[str, Any]:
    known = rank.record.facts
    return {
        "rank": rank.number,
        "name": rank.name,
        "host": known.get("host", ""),
        "address": known.get("address", ""),
        "pid": known.get("pid"),
        "state": rank.state,
        "ending": cause.ending(rank),
        "event": render.as_json(rank.event) if rank.event else None,
        "steps": rank.steps,
        "last": label(rank.last) if rank.last else "",
        "where": rank.last.where if rank.last else "",
        "left": bool(rank.last and rank.last.left),
        "last_seen": rank.seen,
        "clock_skew": known.get("skew", 0.0),
        "memory": rank.record.pulse.memory,
        "available": rank.record.pulse.available,
        "ring": str(rank.record.path),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
