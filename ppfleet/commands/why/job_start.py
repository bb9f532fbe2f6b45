"""One start of a job, from its flight records: its ranks, what each was doing, and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ppfleet.watchdog import render
from ppfleet.watchdog.events import Event, Kind, Operation
from ppfleet.watchdog.recorder import Entry, Record


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank of a job. All times are by rank 0's clock."""

    record: Record
    state: str  # "said": it recorded why it ended; otherwise "running", "stopped" or "gone"
    oom_kills: int = 0  # on its host until now, as far as is known
    log_tail: str = ""  # what its workerlog says about a crash

    @property
    def number(self) -> int:
        return int(self.record.facts.get("rank", 0))

    @property
    def host(self) -> str:
        """Its address in the job's list of hosts; without one, the host's name."""
        return self.address or str(self.record.facts.get("host") or "")

    @property
    def name(self) -> str:
        """The same as `World.name`."""
        return render.name(self.number, self.address)

    @property
    def address(self) -> str:
        return str(self.record.facts.get("address") or "")

    @property
    def event(self) -> Event | None:
        """Why it ended, from its own record."""
        return self.record.event

    @property
    def said(self) -> str:
        """The code of `event`."""
        return str(self.event.code) if self.event else ""

    @cached_property
    def entries(self) -> list[Entry]:
        return [entry for entry in self.record.entries if entry.kind != Kind.MARK]

    @cached_property
    def open(self) -> Entry | None:
        """The innermost operation that it has not left."""
        return next((entry for entry in reversed(self.entries) if not entry.left), None)

    @property
    def last(self) -> Entry | None:
        """The operation that it is in; if none, the last one that it left."""
        return self.open or (self.entries[-1] if self.entries else None)

    @property
    def inside(self) -> Operation:
        return self.record.position()

    def in_step(self, entry: Entry) -> bool:
        """Whether the entry is a step or lies inside one."""
        steps = [each for each in self.entries if each.kind == Kind.STEP and each.number <= entry.number]
        return bool(steps) and (not steps[-1].left or steps[-1].left > entry.entered)

    @cached_property
    def progress(self) -> float:
        """When it last entered or left anything."""
        times = [max(entry.entered, entry.left) for entry in self.entries]
        return max(times, default=float(self.record.facts.get("started", 0.0)))

    @property
    def seen(self) -> float:
        """Its last sign of life."""
        return max(self.progress, self.record.pulse.time, self.event.time if self.event else 0.0)

    @property
    def steps(self) -> int:
        return max((entry.step for entry in self.entries), default=0)


@dataclass(frozen=True)
class Attempt:
    """All ranks of one start that have a record, ordered by number."""

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
        """The ranks without a record."""
        return sorted(set(range(self.size)) - {rank.number for rank in self.ranks})

    def rank(self, number: int) -> Rank | None:
        return next((rank for rank in self.ranks if rank.number == number), None)


def label(entry: Entry) -> str:
    """An operation for a reader: `all-reduce of gradients #1284`, `step 640`."""
    return render.label(entry.as_operation())


def named(ranks: Sequence[Rank]) -> str:
    """`rank 3 on 192.168.0.2`, or `ranks 0–2`."""
    return render.ranks([rank.number for rank in ranks], ranks[0].address)


def size(count: float) -> str:
    """Bytes for a reader."""
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"
