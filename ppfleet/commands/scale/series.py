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
    """A size to train at, with several seeds."""

    machines: int
    ranks: int  # on each machine
    batch: int  # per rank

    @property
    def total(self) -> int:
        return self.machines * self.ranks

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{self.machines} machine{'s' if self.machines > 1 else ''} × {ranks}"


@dataclass(frozen=True)
class Trial:
    """One training of the series."""

    point: Point
    seed: int

    def __str__(self) -> str:
        return f"{self.point}, batch {self.point.batch} per rank, seed {self.seed}"


@dataclass(frozen=True)
class Flags:
    """The script's options for what differs from run to run."""

    batch: str = "--batch-size"
    seed: str = "--seed"
    output: str = "--output-dir"


@dataclass(frozen=True)
class Series:
    """The same training at several points; `batch` is per rank, at the smallest point."""

    script: str
    arguments: tuple[str, ...]  # of the script, without those that differ from run to run
    batch: int
    modes: tuple[str, ...]
    machines: tuple[int, ...]
    ranks: tuple[int, ...]  # on each machine
    seeds: tuple[int, ...]
    flags: Flags = Flags()
    hosts: tuple[str, ...] = ()
    threads: str = ""  # per rank, if set

    def points(self, mode: str) -> list[Point]:
        """The smallest first: the others are compared with it."""
        least = min(self.machines) * min(self.ranks)
        points = []
        for machines in sorted(self.machines):
            for ranks in sorted(self.ranks):
                batch, rest = self.batch, 0
                if mode == GLOBAL:
                    batch, rest = divmod(self.batch * least, machines * ranks)
                if rest or not batch:
                    raise FleetError(
                        f"a global batch of {self.batch * least} cannot be divided by {machines * ranks} ranks: "
                        f"change {self.flags.batch}, or use --batch={RANK}"
                    )
                points.append(Point(machines, ranks, batch))
        return sorted(points, key=lambda point: (point.total, point))

    def runs(self) -> list[Trial]:
        """Each training once. A seed visits all points before the next seed starts: a temporary disturbance of a
        machine then affects all points, and an interrupted series already has something to compare."""
        points = dict.fromkeys(point for mode in self.modes for point in self.points(mode))
        return [Trial(point, seed) for seed in self.seeds for point in points]

    def command(self, run: Trial) -> list[str]:
        """The script and its arguments, without the output directory."""
        flags = self.flags
        return [self.script, *self.arguments, f"{flags.batch}={run.point.batch}", f"{flags.seed}={run.seed}"]

    def name(self, run: Trial) -> str:
        """The name of the run's directory, which is different for a different command."""
        hosts = self.hosts[: run.point.machines] if run.point.machines > 1 else ()
        text = json.dumps([self.command(run), run.point.ranks, hosts, self.threads])
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
        return f"{run.point.machines}x{run.point.ranks}-batch{run.point.batch}-seed{run.seed}-{digest}"


def take_out(arguments: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """The arguments without an option, and the option's value: the last one counts, as in argparse."""
    others, value, remaining = [], None, iter(arguments)
    for argument in remaining:
        if argument == flag:
            value = next(remaining, "")
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
        else:
            others.append(argument)
    return others, value


def doubled(most: int) -> tuple[int, ...]:
    """1, 2, 4 … and `most` itself."""
    values = [1]
    while values[-1] * 2 < most:
        values.append(values[-1] * 2)
    return tuple(dict.fromkeys([*values, most]))
