"""The report: its JSON form, its lines in a terminal, and what was done so far when somebody presses Ctrl-C. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ppfleet.commands.check_cards.facts import SIMULATED_NOTE
from ppfleet.commands.check_cards.items import FAIL, ITEMS, NOT_RUN, PASS, Item, Result, not_run

FORMAT = 1
NO_CARD = 3  # exit code: nothing was checked
_WIDTH = 118


@dataclass
class Report:
    """What was found; items without a result were not reached."""

    facts: dict[str, str]
    simulated: bool
    quick: bool
    cards: int
    started: float
    results: dict[str, Result] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False

    def result(self, item: Item) -> Result:
        return self.results.get(item.key) or not_run("interrupted before it was reached", "run the command again")

    def count(self, status: str) -> int:
        return sum(self.result(item).status == status for item in ITEMS)

    @property
    def code(self) -> int:
        return int(self.count(FAIL) > 0)

    @property
    def summary(self) -> str:
        text = f"{self.count(PASS)} passed, {self.count(FAIL)} failed, {self.count(NOT_RUN)} not run"
        return f"{text} (interrupted)" if self.interrupted else text

    def as_json(self) -> dict[str, Any]:
        """Plain data; `format` changes when a program that reads it must."""
        return {
            "format": FORMAT,
            "simulated": self.simulated,
            "note": SIMULATED_NOTE if self.simulated else "",
            "quick": self.quick,
            "cards": self.cards,
            "started": self.started,
            "seconds": round(sum(self.seconds.values()), 1),
            "interrupted": self.interrupted,
            "passed": self.count(PASS),
            "failed": self.count(FAIL),
            "not_run": self.count(NOT_RUN),
            "facts": self.facts,
            "items": [
                {
                    "key": item.key,
                    "title": item.title,
                    "checks": item.checks,
                    **asdict(self.result(item)),
                    "seconds": round(self.seconds.get(item.key, 0.0), 1),
                }
                for item in ITEMS
            ],
        }


def line(item: Item, result: Result) -> str:
    """One item in a terminal."""
    rows = [f"{result.status:9}{item.title:21}{result.sentence}"]
    rows += [f"{'':30}-> {result.fix}"] if result.fix else []
    rows += [f"{'':30}log: {result.log}"] if result.log else []
    return "\n".join(rows)


def plan(reason: str, items: Iterable[Item] = ITEMS) -> str:
    """What would be checked on a machine with cards."""
    checks = [
        textwrap.fill(item.checks, _WIDTH, initial_indent=f"  {item.title:21}", subsequent_indent=" " * 23)
        for item in items
    ]
    return "\n".join(
        [
            f"nothing was checked: {reason}",
            "",
            "On a machine with cards this would be checked, in about 15 minutes (--quick: a few):",
            *checks,
        ]
    )
