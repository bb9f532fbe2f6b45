"""Finds the flight records of a job, sets their clocks by rank 0's, and sorts them into the starts of the job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ppfleet import foreign, limits
from ppfleet.commands.why.job_start import Attempt, Rank
from ppfleet.watchdog.process import oom_kills, process_state, this_host
from ppfleet.watchdog.recorder import SUFFIX, Record, read


@dataclass
class Found:
    """What the directories hold: the newest start of the job first, and what could not be read."""

    attempts: list[list[Record]]
    notes: list[str]
    logs: dict[Path, Path]  # ring -> the launcher's log directory that has a link to it
    now: float  # by rank 0's clock, where it is known


def collect(directories: Sequence[Path]) -> Found:
    records: dict[tuple[object, ...], Record] = {}
    notes: list[str] = []
    logs: dict[Path, Path] = {}
    dangling: list[Path] = []
    for path in _rings(directories):
        try:
            if path.is_symlink():
                logs[path.resolve()] = path.parent
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is no file")
            record = read(path.resolve())
        except FileNotFoundError:
            dangling.append(path)
        except (OSError, ValueError, RuntimeError) as failure:  # the last one: links that lead to each other
            notes.append(f"not read: {failure}")
        else:
            facts = record.facts
            key = (facts["rank"], facts.get("boot"), facts.get("pid"), facts.get("started"))
            if key not in records or records[key].pulse.time < record.pulse.time:  # a copy may be older
                records[key] = record
    here = {record.path.name for record in records.values()}
    for link in dangling:
        target = link.readlink()
        if target.name not in here:
            notes.append(f"{link} points to {target}, which is not here: give the run directory too")
    skews = _skews(list(records.values()))
    aligned = [_shifted(record, _skew(record, skews)) for record in records.values()]
    attempts = _attempts(aligned)
    own = next((skew for (_, boot), skew in reversed(skews.items()) if _is_here(boot)), 0.0)
    return Found(attempts, notes, logs, time.time() + own)


def attempt(found: Found, back: int = 0) -> Attempt:
    """One start, with what is known about its processes now."""
    records = sorted(found.attempts[back], key=_number)
    newest = max(Rank(record, "").seen for record in records)
    kills: dict[str, int] = {}
    for record in records:
        boot = _boot(record)
        kills[boot] = max(kills.get(boot, 0), record.pulse.oom_kills, oom_kills() if _is_here(boot) else 0)
    ranks = []
    for record in records:
        state = _state(record, newest, found.now)
        ranks.append(Rank(record, state, kills[_boot(record)], _log_tail(record, records, found)))
    notes = list(found.notes)
    apart = {rank.host for rank in ranks if _boot(rank.record) != _boot(records[0]) and "skew" not in rank.record.facts}
    if apart:
        notes.append(f"the clock of {', '.join(sorted(apart))} could not be compared with rank {ranks[0].number}'s")
    return Attempt(ranks, notes)


def looked_for(directory: Path) -> str:
    return f"{directory}/flight/*{SUFFIX} and {directory}/*{SUFFIX}"


def _rings(directories: Sequence[Path]) -> Iterator[Path]:
    seen = set()
    for given in directories:
        with suppress(OSError):  # no such name, no permission: there is nothing to be found
            if given.is_file():
                yield given
                continue
            for directory in (given, *sorted(given.glob("restart_*"))):
                for path in (*sorted(directory.glob(f"*{SUFFIX}")), *sorted(directory.glob(f"flight/*{SUFFIX}"))):
                    if path not in seen:  # the same ring by another name is one record all the same
                        seen.add(path)
                        yield path


def _number(record: Record) -> int:
    return int(record.facts["rank"])


def _boot(record: Record) -> str:
    return str(record.facts.get("boot", ""))


def _started(record: Record) -> float:
    return float(record.facts.get("started", 0.0))


def _token(record: Record) -> str:
    return str(record.facts.get("run", ""))


def _attempts(records: Iterable[Record]) -> list[list[Record]]:
    """The newest first. The ranks of a start share a token; what failed before it had one is told apart by the time."""
    left = sorted(records, key=_started, reverse=True)
    attempts = []
    while left:
        token = _token(left[0])
        if token:
            chosen = [record for record in left if _token(record) == token]
        else:
            before = next((_token(record) for record in left if _token(record)), "")
            since = min((_started(record) for record in left if before and _token(record) == before), default=0.0)
            newest: dict[int, Record] = {}
            for record in left:
                if not _token(record) and _started(record) > since:
                    newest.setdefault(_number(record), record)
            chosen = list(newest.values()) or [left[0]]
        attempts.append(chosen)
        left = [record for record in left if not any(record is other for other in chosen)]
    return attempts


def _skews(records: list[Record]) -> dict[tuple[str, str], float]:
    """(token, boot) and ("", boot) -> seconds to add to that host's times to get rank 0's.

    A collective ends everywhere at about the same time, so the ends of the same ones tell how far clocks are apart."""
    skews: dict[tuple[str, str], float] = {}
    tokens = {_token(record): _started(record) for record in records if _token(record)}
    for token in sorted(tokens, key=lambda each: tokens[each]):  # the newest last: it counts where there is no token
        together = sorted((record for record in records if _token(record) == token), key=_number)
        first = together[0]
        for other in together[1:]:
            if _boot(other) == _boot(first) or (token, _boot(other)) in skews:
                continue
            mine, theirs = _ends(first), _ends(other)
            differences = [mine[each] - theirs[each] for each in mine.keys() & theirs.keys()]
            if differences:
                skews[token, _boot(other)] = skews["", _boot(other)] = statistics.median(differences)
    return skews


def _ends(record: Record) -> dict[tuple[int, str], float]:
    return {(e.operation, e.kind): e.left for e in record.entries if e.operation and e.waits and e.left}


def _skew(record: Record, skews: dict[tuple[str, str], float]) -> float | None:
    return skews.get((_token(record), _boot(record)), skews.get(("", _boot(record))))


def _shifted(record: Record, skew: float | None) -> Record:
    if skew is None:
        return record
    entries = [replace(e, entered=e.entered + skew, left=e.left and e.left + skew) for e in record.entries]
    pulse = replace(record.pulse, time=record.pulse.time and record.pulse.time + skew)
    event = replace(record.event, time=record.event.time + skew) if record.event else None
    facts = dict(record.facts, started=_started(record) + skew, skew=skew)
    return replace(record, facts=facts, pulse=pulse, event=event, entries=entries)


def _state(record: Record, newest: float, now: float) -> str:
    if record.event:
        return "said"
    if _is_here(_boot(record)):
        began = _started(record) - float(record.facts.get("skew", 0.0))
        return process_state(int(record.facts.get("pid", 0)), began)[0]
    # Another host's process: its pulse is all there is to judge by.
    lives = Rank(record, "").seen > newest - limits.BEAT_LOST and newest > now - limits.BEAT_LOST
    return "running" if lives else "gone"


def _is_here(boot: str) -> bool:
    """Whether that host is this one, and its numbers of processes mean the same here; its network may be another."""
    words = {word for word in boot.split() if not word.startswith("net:")}
    return bool(words) and words <= set(this_host().split())


def _log_tail(record: Record, records: list[Record], found: Found) -> str:
    """What the log of a rank that recorded no end says of a crash. A host's ranks have its logs in their order."""
    directory = found.logs.get(record.path)
    if directory is None or record.event:
        return ""
    same_host = [
        r for r in records if (_boot(r), r.facts.get("address")) == (_boot(record), record.facts.get("address"))
    ]
    log = directory / f"workerlog.{[_number(r) for r in same_host].index(_number(record))}"
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 8192))
            lines = stream.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    telling = foreign.telling_lines(lines)
    return f"{log.name} says: {telling[-1][:200]}" if telling else ""
