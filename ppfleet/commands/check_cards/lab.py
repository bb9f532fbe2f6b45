"""What every check needs: the device, how many cards, where to write, and how long a job may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppfleet.commands.check_cards import ranks
from ppfleet.commands.check_cards.facts import SIMULATED
from ppfleet.commands.check_cards.ranks import Run
from ppfleet.distributed.devices import Device

LAUNCHER = "paddle.distributed.launch"


@dataclass(frozen=True)
class Lab:
    row: Device
    cards: int  # to use on this machine
    output: Path  # for runs and logs of this start alone
    quick: bool
    found: Mapping[str, Any]  # what the probe found of the cards
    nodes: tuple[str, ...] = ()  # of --ips
    node: int = 0  # which of them this machine is
    machine_flags: tuple[str, ...] = ()  # for `ppfleet launch`

    @property
    def simulated(self) -> bool:
        return self.row.name == SIMULATED

    @property
    def steps(self) -> int:
        return 4 if self.quick else 20

    @property
    def limit(self) -> float:
        """Seconds for one job: the first one on a card may compile kernels for minutes."""
        return 240.0 if self.quick else 600.0

    def place(self, *parts: str) -> Path:
        return self.output.joinpath("logs", *parts)

    def run(self, name: str, count: int, task: Mapping[str, Any], **env: str) -> Run:
        """Run a task to its end on `count` cards; a failure is raised with its reason."""
        return ranks.succeed(self.start(name, count, task, **env), self.run_directory(name))

    def start(self, name: str, count: int, task: Mapping[str, Any], **env: str) -> Run:
        """As `run`, but however it ends."""
        task = {**task, "run": str(self.run_directory(name))}
        return ranks.start(self.row, count, task, self.place(name), self.limit, env)

    def launch(self, name: str, task: Mapping[str, Any], arguments: Sequence[str]) -> Run:
        """The same under a launcher."""
        task = {**task, "run": str(self.run_directory(name)), "device": self.row.name}
        directory = self.place(name)
        arguments = [*arguments, f"--log_dir={directory}/launcher"]
        here = range(self.node * self.cards, (self.node + 1) * self.cards)
        run = ranks.start_launcher(arguments, here, task, directory, self.limit)
        return ranks.succeed(run, self.run_directory(name))

    def run_directory(self, name: str) -> Path:
        return self.output / "runs" / name

    def card_list(self) -> str:
        return ",".join(map(str, range(self.cards)))


def changes(run: Run) -> dict[str, Any]:
    """What the run did to each parameter, as rank 0 wrote it."""
    with np.load(run.directory / "changes.npz") as stored:
        return {name: stored[name] for name in stored.files}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, str]:
    """The largest difference of a parameter's changes, relative to its largest change, and that parameter's name.

    A parameter that hardly changes is compared with the others: the rest of it is noise.
    """
    largest = max((float(np.abs(value).max()) for value in one.values()), default=0.0)
    worst, name = 0.0, ""
    for key, value in one.items():
        scale = max(float(np.abs(value).max()), 1e-3 * largest) or 1.0
        found = float(np.abs(value - other[key]).max()) / scale
        if not found <= worst:  # also where it is not a number
            worst, name = found, key
        if math.isnan(worst):
            break
    return worst, name
