"""One start of a job as its flight records tell it: the ranks, what each was in, and how it ended. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ppfleet.watchdog.diagnosis import listed
from ppfleet.watchdog.recorder import Entry, Record


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank of a job. All its times are by rank 0's clock."""

    record: Record
    state: str  # "said": it left last words; without any: "running", "stopped" or "gone"
    oom_kills: int = 0  # on its host, as far as is known now
    log_tail: str = ""  # what its workerlog says of a crash

    @property
    def number(self) -> int:
        return int(self.record.facts.get("rank", 0))

    @property
    def host(self) -> str:
        """Its address in the job's list; the host's own name where there is none."""
        return str(self.record.facts.get("address") or self.record.facts.get("host") or "")

    @property
    def name(self) -> str:
        """As `World.name` says it."""
        address = self.record.facts.get("address")
        return f"rank {self.number} on {address}" if address else f"rank {self.number}"

    @property
    def words(self) -> dict[str, Any]:
        return self.record.words

    @property
    def said(self) -> str:
        """The kind of its last words."""
        return str(self.words.get("kind", ""))

    @property
    def text(self) -> str:
        """The first line of its last words, with the list that it announces."""
        lines = str(self.words.get("text", "")).strip().splitlines() or [""]
        return " ".join(line.strip() for line in lines)[:500] if lines[0].endswith(":") else lines[0]

    @cached_property
    def entries(self) -> list[Entry]:
        return [entry for entry in self.record.entries if entry.kind != "mark"]

    @cached_property
    def open(self) -> Entry | None:
        """The innermost operation that it has not left."""
        return next((entry for entry in reversed(self.entries) if not entry.left), None)

    @property
    def last(self) -> Entry | None:
        """What it was in, or did last."""
        return self.open or (self.entries[-1] if self.entries else None)

    @property
    def waits(self) -> bool:
        return self.open is not None and self.open.waits

    @cached_property
    def progress(self) -> float:
        """When it last entered or left anything."""
        times = [max(entry.entered, entry.left) for entry in self.entries]
        return max(times, default=float(self.record.facts.get("started", 0.0)))

    @property
    def seen(self) -> float:
        """Its last sign of life."""
        return max(self.progress, self.record.pulse.time, float(self.words.get("time", 0.0)))

    @property
    def steps(self) -> int:
        return max((entry.step for entry in self.entries), default=0)


@dataclass(frozen=True)
class Attempt:
    """All ranks of one start whose records are at hand, in the order of their numbers."""

    ranks: Sequence[Rank]
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return max(int(rank.record.facts.get("size", 1)) for rank in self.ranks)

    @property
    def run(self) -> str:
        return str(self.ranks[0].record.facts.get("run", ""))

    @property
    def started(self) -> float:
        return min(float(rank.record.facts.get("started", 0.0)) for rank in self.ranks)

    @property
    def last_seen(self) -> float:
        return max(rank.seen for rank in self.ranks)

    @property
    def missing(self) -> list[int]:
        """The ranks of which there is no record."""
        return sorted(set(range(self.size)) - {rank.number for rank in self.ranks})

    def rank(self, number: int) -> Rank | None:
        return next((rank for rank in self.ranks if rank.number == number), None)


@dataclass(frozen=True)
class Cause:
    """What happened first, in one sentence."""

    kind: str
    sentence: str
    ranks: tuple[int, ...] = ()  # whose doing it was; nobody's in particular: none
    time: float = 0.0
    level: int = 0  # 0: a cause; 1: perhaps the consequence of another; 2: a consequence
    evidence: tuple[str, ...] = ()


def label(entry: Entry) -> str:
    """An operation as a person names it: `all-reduce of gradients #1284`, `step 640`."""
    return f"{entry.what} #{entry.operation}" if entry.operation else entry.what


def place(entry: Entry) -> str:
    """Operation, step and source line, for a sentence."""
    if entry.kind == "step":
        return entry.what + (f" ({entry.where})" if entry.where else "")
    shown = f"`{entry.what}`" + (f" #{entry.operation}" if entry.operation else "")
    return f"{shown} (step {entry.step}{f', {entry.where}' if entry.where else ''})"


def named(ranks: Sequence[Rank]) -> str:
    """`rank 3 on 192.168.0.2`, or `ranks 0–2`."""
    return ranks[0].name if len(ranks) == 1 else listed([rank.number for rank in ranks])


def span(seconds: float) -> str:
    """`81 ms`, `3.2 s`, `31 s`, `4 min 10 s`."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1e3:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def clock(when: float, fine: bool = False) -> str:
    """The time of day here."""
    shown = time.strftime("%H:%M:%S", time.localtime(when))
    return f"{shown}.{int(when % 1 * 1000):03d}" if fine else shown


def size(count: float) -> str:
    """Bytes for a person."""
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"
