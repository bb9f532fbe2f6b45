"""The runs of a scaling series: on how many machines and ranks, with which batch and seed, by which command. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from ppfleet.errors import FleetError

GLOBAL, RANK = "global", "rank"
MODES = {GLOBAL: "equal global batch", RANK: "equal batch per rank"}


@dataclass(frozen=True, order=True)
class Point:
    """Where the same training is run with several seeds."""

    machines: int
    ranks: int  # on each machine
    batch: int  # of a rank

    @property
    def total(self) -> int:
        return self.machines * self.ranks

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{self.machines} machine{'s' if self.machines > 1 else ''} × {ranks}"


@dataclass(frozen=True)
class Run:
    point: Point
    seed: int

    def __str__(self) -> str:
        return f"{self.point}, batch {self.point.batch} a rank, seed {self.seed}"


@dataclass(frozen=True)
class Flags:
    """By which options the script takes what differs from run to run."""

    batch: str = "--batch-size"
    seed: str = "--seed"
    output: str = "--output-dir"


@dataclass(frozen=True)
class Series:
    """The same training everywhere; `batch` is that of a rank of the smallest point."""

    script: str
    arguments: tuple[str, ...]  # of the script, without those that differ from run to run
    batch: int
    modes: tuple[str, ...]
    machines: tuple[int, ...]
    ranks: tuple[int, ...]  # on each machine
    seeds: tuple[int, ...]
    flags: Flags = Flags()
    hosts: tuple[str, ...] = ()
    threads: str = ""  # of a rank, where that is decided

    def points(self, mode: str) -> list[Point]:
        """From the smallest on, which the others are compared with."""
        least = min(self.machines) * min(self.ranks)
        found = []
        for machines in sorted(self.machines):
            for ranks in sorted(self.ranks):
                batch, rest = self.batch, 0
                if mode == GLOBAL:
                    batch, rest = divmod(self.batch * least, machines * ranks)
                if rest or not batch:
                    raise FleetError(
                        f"a global batch of {self.batch * least} cannot be shared by {machines * ranks} ranks: "
                        f"give another {self.flags.batch}, or --batch={RANK}"
                    )
                found.append(Point(machines, ranks, batch))
        return sorted(found, key=lambda point: (point.total, point))

    def runs(self) -> list[Run]:
        """Each once. A seed goes through all points before the next: what disturbs a machine for a while disturbs all
        of them, and a series that is interrupted has something to compare."""
        points = dict.fromkeys(point for mode in self.modes for point in self.points(mode))
        return [Run(point, seed) for seed in self.seeds for point in points]

    def words(self, run: Run) -> list[str]:
        """Script and arguments, all but where to write."""
        flags = self.flags
        return [self.script, *self.arguments, f"{flags.batch}={run.point.batch}", f"{flags.seed}={run.seed}"]

    def name(self, run: Run) -> str:
        """Of the run's directory: another command has another."""
        hosts = self.hosts[: run.point.machines] if run.point.machines > 1 else ()
        text = json.dumps([self.words(run), run.point.ranks, hosts, self.threads])
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
        return f"{run.point.machines}x{run.point.ranks}-batch{run.point.batch}-seed{run.seed}-{digest}"


def take_out(arguments: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """Arguments without an option, and its value: the last one counts, as in argparse."""
    left, value, words = [], None, iter(arguments)
    for word in words:
        if word == flag:
            value = next(words, "")
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        else:
            left.append(word)
    return left, value


def doubled(most: int) -> tuple[int, ...]:
    """1, 2, 4 … and the whole."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return tuple(dict.fromkeys([*found, most]))
