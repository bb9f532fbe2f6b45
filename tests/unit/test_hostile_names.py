"""Names and messages are anybody's: on every page they stay text. Each was seen to fail with autoescape off."""

from pathlib import Path

import pytest

from ppfleet.__main__ import main
from ppfleet.commands.scale import series_page
from ppfleet.commands.scale.projection import Network
from ppfleet.commands.scale.series import GLOBAL, RANK, Series
from ppfleet.commands.scale.summary import summary
from ppfleet.tipc import report, report_page
from ppfleet.tipc.command import Command
from ppfleet.tipc.execute import FAILED, OK, Result
from tests.story import Story
from tests.unit.test_report import HOSTILE, Page, write_history
from tests.unit.test_scale import made


def failed_job(directory, monkeypatch):
    story = Story(directory, monkeypatch)
    story.directory.mkdir()
    story.now = story.began + 0.01
    write_history(story, ranks=1, steps=[2, 4], **{HOSTILE: 0.5})
    rank = story.rank(0, 1, run=HOSTILE, address=HOSTILE)
    rank.flight.describe(script=HOSTILE, host=HOSTILE)
    rank.enter(0.5, "collective", HOSTILE, detail=HOSTILE)
    rank.say(1, "exception", HOSTILE, type="ValueError", where=HOSTILE)
    return story.directory


def run_page(place, monkeypatch):
    directory = failed_job(place / HOSTILE.replace("/", "_"), monkeypatch)
    assert main(["report", str(directory), "--output", str(place / "page.html")]) == 0
    return (place / "page.html").read_text(encoding="utf-8")


def timeline(place, monkeypatch):
    directory = failed_job(place / "run", monkeypatch)
    assert main(["why", str(directory), "--html", str(place / "page.html")]) == 0
    return (place / "page.html").read_text(encoding="utf-8")


def series(place, monkeypatch):
    plan = Series(f"train{HOSTILE}.py", (HOSTILE,), 16, (GLOBAL, RANK), (1, 2), (1, 2), (0, 1))
    results = [made(run.point, run.seed, 9.0, 0.9) for run in plan.runs()]
    for each in results:
        each["metrics"] = {HOSTILE: 0.9}
    facts = summary(plan, results, measured=Network(1e6, 0.0))
    facts["notes"].append(HOSTILE)
    return series_page.html(facts)


def certificate(place, monkeypatch):
    def result(status, stage):
        words = ("python", HOSTILE)
        command = Command(f"{HOSTILE}.{stage}", stage, HOSTILE, words, f"logs/{HOSTILE}", note=HOSTILE, device=HOSTILE)
        return Result(command, status, HOSTILE, 65.0, 0, {"images_per_s": 2.0}, HOSTILE)

    facts = {
        "model": HOSTILE, "mode": HOSTILE, "config": HOSTILE, "finished": True, "started": HOSTILE, "seconds": 1.0,
        "node": {"number": 0, "address": HOSTILE, "host": HOSTILE}, "notes": [HOSTILE], "python": "3", "ppfleet": "0",
        "commands": [report.entry(result(status, "train"), Path()) for status in (OK, FAILED)], "planned": 2,
    }  # fmt: skip
    facts["nodes"] = {HOSTILE: {**facts, "nodes": {}}, f"other {HOSTILE}": None}
    return report_page.html(facts, [HOSTILE])


@pytest.mark.parametrize("make", [run_page, timeline, series, certificate])
def test_hostile_names_stay_text(make, tmp_path, monkeypatch):
    page = Page(make(tmp_path, monkeypatch))  # which refuses whatever could run or load
    shown = " ".join(HOSTILE.replace("\x1b", "\ufffd").split())
    assert page.text.count(shown) >= 3 and page.count("img") == 0
