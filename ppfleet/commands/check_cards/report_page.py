"""The report as one HTML page: the values that report_page.html.j2 shows."""

from __future__ import annotations

import re

from ppfleet.commands.check_cards.facts import SIMULATED_NOTE
from ppfleet.commands.check_cards.items import FAIL, ITEMS, NOT_RUN, PASS
from ppfleet.commands.check_cards.report import Report
from ppfleet.html.render import render

_PILLS = {PASS: "ok", FAIL: "failed", NOT_RUN: "skipped"}


def html(report: Report) -> str:
    rows = [(item, report.result(item), report.seconds.get(item.key, 0.0)) for item in ITEMS]
    return render(
        "commands/check_cards/report_page.html.j2",
        title=f"Cards checked: {report.summary}",
        report=report,
        note=SIMULATED_NOTE if report.simulated else "",
        rows=[row for row in rows if row[1].status == FAIL] + [row for row in rows if row[1].status != FAIL],
        pills=_PILLS,
        shown=_shown,
        unbroken=_unbroken,
        minutes=sum(report.seconds.values()) / 60,
        short={name: value for name, value in report.facts.items() if "\n" not in value},
        long={name: value for name, value in report.facts.items() if "\n" in value},
    )


def _shown(sentence: str) -> str:
    return _unbroken(sentence[:1].upper() + sentence[1:].rstrip("."))


def _unbroken(text: str) -> str:
    """Numbers such as 1e-4, dates and SHA-256 stay on one line: a browser breaks after a hyphen."""
    return re.sub(r"(?<=[\deA])-(?=\d)", "\N{NON-BREAKING HYPHEN}", text)
