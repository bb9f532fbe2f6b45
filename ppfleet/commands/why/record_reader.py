"""Finds the flight records of a job, converts their times to rank 0's clock, and groups them by start of the job."""

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
class FlightRecords:
    """The records in the directories, the newest start of the job first, and notes on what could not be read."""

    attempts: list[list[Record]]
    notes: list[str]
    logs: dict[Path, Path]  # ring -> the launcher's log directory that links to it
    now: float  # by rank 0's clock, if that is known


def collect(directories: Sequence[Path]) -> FlightRecords:
    records: dict[tuple[object, ...], Record] = {}
    notes: list[str] = []
    logs: dict[Path, Path] = {}
    dangling: list[Path] = []
    for path in _rings(directories):
        try:
            if path.is_symlink():
                logs[path.resolve()] = path.parent
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is not a file")
            record = read(path.resolve())
        except FileNotFoundError:
            dangling.append(path)
        except (OSError, ValueError, RuntimeError) as failure:  # RuntimeError: a cycle of links
            notes.append(f"skipped: {failure}")
        else:
            facts = record.facts
            key = (facts["rank"], facts.get("boot"), facts.get("pid"), facts.get("started"))
            if key not in records or records[key].pulse.time < record.pulse.time:  # of two copies, the newer one
                records[key] = record
    names = {record.path.name for record in records.values()}
    for link in dangling:
        target = link.readlink()
        if target.name not in names:
            notes.append(f"{link} points to {target}, which does not exist here: add the run directory")
    skews = _skews(list(records.values()))
    aligned = [_shifted(record, _skew(record, skews)) for record in records.values()]
    attempts = _attempts(aligned)
    own = next((skew for (_, boot), skew in reversed(skews.items()) if _is_here(boot)), 0.0)
    return FlightRecords(attempts, notes, logs, time.time() + own)


def attempt(flight: FlightRecords, back: int = 0) -> Attempt:
    """One start, with the current state of its processes."""
    records = sorted(flight.attempts[back], key=_number)
    newest = max(Rank(record, "").seen for record in records)
    kills: dict[str, int] = {}
    for record in records:
        boot = _boot(record)
        kills[boot] = max(kills.get(boot, 0), record.pulse.oom_kills, oom_kills() if _is_here(boot) else 0)
    ranks = []
    for record in records:
        state = _state(record, newest, flight.now)
        ranks.append(Rank(record, state, kills[_boot(record)], _log_tail(record, records, flight)))
    notes = list(flight.notes)
    unsynced = {
        rank.host for rank in ranks if _boot(rank.record) != _boot(records[0]) and "skew" not in rank.record.facts
    }
    if unsynced:
        notes.append(f"cannot compare the clock of {', '.join(sorted(unsynced))} with that of rank {ranks[0].number}")
    return Attempt(ranks, notes)


def looked_for(directory: Path) -> str:
    return f"{directory}/flight/*{SUFFIX} and {directory}/*{SUFFIX}"


def _rings(directories: Sequence[Path]) -> Iterator[Path]:
    seen = set()
    for given in directories:
        with suppress(OSError):  # it does not exist, or may not be read
            if given.is_file():
                yield given
                continue
            for directory in (given, *sorted(given.glob("restart_*"))):
                for path in (*sorted(directory.glob(f"*{SUFFIX}")), *sorted(directory.glob(f"flight/*{SUFFIX}"))):
                    if path not in seen:
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
    """The newest first. The ranks of a start share a token; ranks that failed before they had one are grouped by
    time."""
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

    A collective ends on all ranks at about the same time, so its end shows how far the clocks differ."""
    skews: dict[tuple[str, str], float] = {}
    tokens = {_token(record): _started(record) for record in records if _token(record)}
    for token in sorted(tokens, key=lambda token: tokens[token]):  # the newest last: records without a token use it
        ranks = sorted((record for record in records if _token(record) == token), key=_number)
        first = ranks[0]
        for other in ranks[1:]:
            if _boot(other) == _boot(first) or (token, _boot(other)) in skews:
                continue
            mine, theirs = _ends(first), _ends(other)
            differences = [mine[operation] - theirs[operation] for operation in mine.keys() & theirs.keys()]
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
    # A process on another host can only be judged by its last heartbeat.
    alive = Rank(record, "").seen > newest - limits.BEAT_LOST and newest > now - limits.BEAT_LOST
    return "running" if alive else "gone"


def _is_here(boot: str) -> bool:
    """Whether that is this host, with the same process numbers; its network namespace may be another."""
    parts = {part for part in boot.split() if not part.startswith("net:")}
    return bool(parts) and parts <= set(this_host().split())


def _log_tail(record: Record, records: list[Record], flight: FlightRecords) -> str:
    """What the log of a rank that recorded no end says about a crash. A host's logs are numbered as its ranks."""
    directory = flight.logs.get(record.path)
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
    return f"{log.name}: {telling[-1][:200]}" if telling else ""
