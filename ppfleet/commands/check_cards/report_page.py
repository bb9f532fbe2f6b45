"""The report as one HTML page: the values that report_page.html.j2 shows."""

from __future__ import annotations

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
        minutes=sum(report.seconds.values()) / 60,
        short={name: value for name, value in report.facts.items() if "\n" not in value},
        long={name: value for name, value in report.facts.items() if "\n" in value},
    )
