"""One command of a plan, and what a plan must know about the machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

TRAINERS = ("norm_train", "amp_train", "fleet_train", "to_static_train")
OUTPUT = "./test_tipc/output"


@dataclass(frozen=True)
class LocalMachine:
    """What the plan must know about the machine it is for."""

    cards: bool = True
    why: str = "no card here"  # the reason, if no card is to be used
    address: str = ""  # this machine's address in the file's list of nodes; empty: that of the first node
    interface: str = ""  # the network interface with that address
    start_port: int = 0
    output: str = OUTPUT
    trainers: tuple[str, ...] = TRAINERS
    limit: float = 0  # seconds for each command; 0: by mode


@dataclass(frozen=True)
class Command:
    id: str
    stage: str  # train, eval, export or infer
    run: str  # the chain it belongs to; in training modes also the name of the run directory
    argv: tuple[str, ...]
    log: str
    needs: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    makes: tuple[tuple[str, str], ...] = ()  # (directory, patterns separated by `|`): each must match a new file
    reads: tuple[str, ...] = ()  # the user's files and directories that must exist
    shows: str = ""  # what its log must contain: "benchmark" or "ips"
    nodes: tuple[str, ...] = ()  # that take part, trainer 0's first; empty: this machine alone
    device: str = "cpu"
    batch_size: str = ""
    note: str = ""  # what the device map changed
    skip: str = ""  # why it is not run on this machine
    refused: str = ""  # why it is not run at all
    limit: float = 3600

    @property
    def text(self) -> str:
        """The command, ready to paste into a shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.env]
        return " ".join([*assignments, *map(shlex.quote, self.argv)])

    def to_json(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in ("id", "stage", "run", "log", "note", "skip", "refused")}
        lists = {name: list(getattr(self, name)) for name in ("argv", "needs", "reads", "nodes")}
        return {**shown, **lists, "env": dict(self.env)}
