"""`python -m ppfleet why`: explain what happened to a job: the first cause in one sentence, then the timeline.

python -m ppfleet why output/run1                       the run directory, or the launcher's log directory
python -m ppfleet why output/run1 from-host-b/run1      with a copy of another host's directory

Reads the flight records of all ranks, also while the job runs. Exit code 0: records found; 2: no records, or a wrong
command line.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppfleet.cli import Parser, discard_output, number
from ppfleet.commands.why import cause, record_reader, sentences, timeline
from ppfleet.commands.why.cause import Answer
from ppfleet.commands.why.job_start import Rank, label
from ppfleet.commands.why.sentences import clock, span
from ppfleet.watchdog.events import Kind
from ppfleet.watchdog.recorder import Entry

_ENTRIES = 6  # of each rank in the text's timeline
_RANKS = 6  # in the text's timeline
_JSON_ENTRIES = 200  # of each rank


def main(arguments: list[str]) -> int:
    o = options(arguments)
    records = record_reader.collect(o.directories)
    if not records.attempts:
        patterns = "; ".join(map(record_reader.looked_for, o.directories))
        damaged = f" ({'; '.join(records.notes)})" if records.notes else ""
        print(f"why: no flight record found in {patterns}{damaged}", file=sys.stderr)
        return 2
    if o.back >= len(records.attempts):
        print(f"why: --back {o.back}: only {len(records.attempts)} starts, --back 0 is the newest", file=sys.stderr)
        return 2
    answer = cause.answer_from(records, o.back)
    if o.html:
        try:
            o.html.write_text(timeline.html(answer), encoding="utf-8")
        except OSError as failure:
            print(f"why: cannot write {o.html}: {failure.strerror}", file=sys.stderr)
            return 2
    try:
        print(json.dumps(as_json(answer), indent=1, ensure_ascii=False) if o.json else text(answer), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        discard_output()
    return 0


def options(arguments: list[str]) -> Namespace:
    parser = Parser(__doc__, "python -m ppfleet why")
    add = parser.add_argument
    add("directories", nargs="+", type=Path, metavar="DIR", help="a run or log directory; one for each host")
    add("--json", action="store_true", help="print JSON")
    add("--html", type=Path, metavar="FILE", help="write an HTML page that shows the timeline")
    add("--back", type=number(int, 0), default=0, metavar="N", help="the N-th start before the newest")
    return parser.parse_args(arguments)


def text(answer: Answer) -> str:
    lines = [f"why: {answer.sentence}", *(f"  {evidence}" for evidence in answer.evidence)]
    ranks = shown_ranks(answer)
    hidden = len(answer.attempt.ranks) - len(ranks)
    entries = recent(ranks, _ENTRIES)
    if entries:
        end = max(answer.attempt.last_seen, entries[-1][1].entered)
        lines.append(f"the last {span(end - entries[0][1].entered)}:")
        lines += _columns([_line(rank, entry) for rank, entry in entries])
    if hidden:
        lines.append(f"  ({hidden} more ranks: --html FILE shows all)")
    return "\n".join([*lines, *(f"note: {note}" for note in answer.notes)])


def shown_ranks(answer: Answer) -> list[Rank]:
    """The ranks responsible, then as many others as fit on a screen."""
    ranks = sorted(answer.attempt.ranks, key=lambda rank: (rank.number not in answer.ranks, rank.number))
    return ranks[:_RANKS]


def recent(ranks: Sequence[Rank], count: int) -> list[tuple[Rank, Entry]]:
    """The newest entries of each rank, in order of time."""
    pairs = [(rank, entry) for rank in ranks for entry in rank.record.entries[-count:]]
    for rank in ranks:  # the operation that it is still in may have begun long before
        pairs += [(rank, entry) for entry in rank.entries[:-count] if entry is rank.open]
    return sorted(pairs, key=lambda pair: (pair[1].entered, pair[0].number, pair[1].number))


def _line(rank: Rank, entry: Entry) -> tuple[str, ...]:
    if entry.kind == Kind.MARK:
        return clock(entry.entered, True), f"rank {rank.number}", f"{entry.what}: {entry.detail}", "", entry.where
    lasted = span(entry.left - entry.entered) if entry.left else "… not finished"
    return clock(entry.entered, True), f"rank {rank.number}", label(entry), lasted, entry.where


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer for a program. Times are seconds since 1970 by rank 0's clock."""
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
        "ranks": [_rank_json(rank) for rank in attempt.ranks],
        "timeline": [
            {"rank": rank.number, "label": label(entry), **vars(entry), "left": entry.left or None}
            for rank, entry in recent(attempt.ranks, _JSON_ENTRIES)
        ],
    }


def _rank_json(rank: Rank) -> dict[str, Any]:
    known = rank.record.facts
    return {
        "rank": rank.number,
        "name": rank.name,
        "host": known.get("host", ""),
        "address": known.get("address", ""),
        "pid": known.get("pid"),
        "state": rank.state,
        "ending": cause.ending(rank),
        "event": sentences.as_json(rank.event) if rank.event else None,
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
