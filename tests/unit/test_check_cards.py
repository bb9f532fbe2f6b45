"""check-cards without cards: what it says where there are none, its report as JSON and as a page, its comparisons."""

import json
import subprocess
import sys

import numpy as np
import pytest

from ppfleet.commands.check_cards import command, numeric, ranks, report_page
from ppfleet.commands.check_cards.facts import SIMULATED_NOTE
from ppfleet.commands.check_cards.items import FAIL, ITEMS, NOT_RUN, PASS, failed, not_run, passed
from ppfleet.commands.check_cards.lab import Lab, difference
from ppfleet.commands.check_cards.ranks import RunFailed
from ppfleet.commands.check_cards.report import NO_CARD, Report, line
from ppfleet.distributed import devices
from ppfleet.errors import FleetError
from tests.harness import ROOT

HOSTILE = '<script>alert("x")</script> & "quoted" \x07'


@pytest.fixture
def without_cards(monkeypatch):
    reason = "device='gpu', but paddlepaddle-gpu is not installed"
    monkeypatch.setattr(ranks, "ask", lambda task, directory, limit: {"device": "", "reason": reason})
    return reason


def report(**given):
    facts = {"cards": "2 × NVIDIA card: A100", "topology": "GPU0 GPU1\nX NV12"}
    return Report(**{"facts": facts, "simulated": False, "quick": False, "cards": 2, "started": 0.0, **given})


def lab(tmp_path, **given):
    found = {"device": "gpu", "count": 2, "tensorrt": ""}
    return Lab(**{"row": devices.GPU, "cards": 2, "output": tmp_path, "quick": True, "found": found, **given})


def test_without_a_card_it_says_what_it_would_check(without_cards, tmp_path, capsys):
    assert command.main([f"--output={tmp_path}/out"]) == NO_CARD == 3
    shown = capsys.readouterr().out
    assert without_cards in shown
    assert all(item.title in shown and item.checks.split()[0] in shown for item in ITEMS)
    assert not (tmp_path / "out").exists()  # nothing was run, nothing is left


def test_every_item_has_a_check():
    assert [item.key for item in ITEMS] == list(dict.fromkeys(item.key for item in ITEMS))
    assert {item.key for item in ITEMS} == {"facts", *command.CHECKS}


def test_the_command_does_not_load_paddle():
    """It would hold a card, of whose memory nothing may be left."""
    code = "import sys, ppfleet.commands.check_cards.command; sys.exit('paddle' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("wrong", [["--cards=0"], ["--ips=10.99.99.1,10.99.99.2"], ["--device"], ["--crads=2"]])
def test_a_wrong_command_line_is_code_2(wrong, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(wrong)
    assert end.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_the_json_has_every_item_and_counts_them():
    made = report(
        simulated=True, results={"facts": passed("found", number=1), "branch": failed("differs", "send", "a.log")}
    )
    told = json.loads(json.dumps(made.as_json()))
    assert told["format"] == 1 and told["simulated"] and told["note"] == SIMULATED_NOTE
    assert [item["key"] for item in told["items"]] == [item.key for item in ITEMS]
    assert (told["passed"], told["failed"], told["not_run"]) == (1, 1, len(ITEMS) - 2) and made.code == 1
    items = {item["key"]: item for item in told["items"]}
    assert items["facts"]["status"] == PASS and items["facts"]["figures"] == {"number": 1}
    assert (items["branch"]["status"], items["branch"]["fix"], items["branch"]["log"]) == (FAIL, "send", "a.log")
    assert items["speed"]["status"] == NOT_RUN and items["speed"]["sentence"]
    fields = {"key", "title", "checks", "status", "sentence", "fix", "figures", "log", "seconds"}
    assert all(set(item) == fields for item in told["items"])


def test_items_that_were_not_run_do_not_fail_the_report():
    assert report(results={"facts": passed("found"), "speed": not_run("no")}).code == 0


def test_the_page_shows_failures_first_and_the_simulation():
    made = report(
        simulated=True, results={"facts": passed("found"), "branch": failed("it differs", "send it", "a.log")}
    )
    page = report_page.html(made)
    assert page.index("It differs.") < page.index("Found.") and "What to do:</b> send it." in page
    assert SIMULATED_NOTE.capitalize() in page and "<pre>GPU0 GPU1" in page
    assert SIMULATED_NOTE.capitalize() not in report_page.html(report())


def test_hostile_text_stays_text():
    results = {"facts": failed(HOSTILE, HOSTILE, HOSTILE, name=HOSTILE)}
    made = report(facts={HOSTILE: HOSTILE, "long": f"{HOSTILE}\n{HOSTILE}"}, results=results)
    page = report_page.html(made)
    assert "<script" not in page and "\x07" not in page and page.count("&lt;script&gt;") >= 6
    assert json.loads(json.dumps(made.as_json()))["facts"][HOSTILE] == HOSTILE


def test_a_line_names_what_to_do_and_the_log():
    shown = line(ITEMS[0], failed("broken", "mend it", "/tmp/a.log")).splitlines()
    assert shown[0].startswith("fail") and "-> mend it" in shown[1] and shown[2].endswith("log: /tmp/a.log")


def test_difference_is_relative_to_each_parameter():
    one = {"a": np.array([1.0, -2.0]), "b": np.array([1e-9]), "c": np.array([0.5])}
    assert difference(one, {**one, "a": np.array([1.0, -2.002])})[1] == "a"
    assert abs(difference(one, {**one, "a": np.array([1.0, -2.002])})[0] - 1e-3) < 1e-9
    assert difference(one, {**one, "b": np.array([3e-9])})[0] < 1e-5  # noise of a parameter that hardly moves
    assert np.isnan(difference(one, {**one, "c": np.array([np.nan])})[0])
    assert difference(one, one) == (0.0, "")


@pytest.mark.parametrize("failure", [RunFailed("rank 1 raised ValueError", "/x/rank1.log"), ZeroDivisionError("oops")])
def test_a_failure_is_a_sentence_and_a_file(tmp_path, failure):
    def check(lab):
        raise failure

    result = command._guarded(check, lab(tmp_path), "branch")
    assert result.status == FAIL and str(failure) in result.sentence and "Traceback" not in result.sentence
    assert result.fix and result.log
    if isinstance(failure, ZeroDivisionError):
        assert "Traceback" in (tmp_path / "logs/branch/check.log").read_text()


def test_after_ctrl_c_there_is_a_report(tmp_path, monkeypatch):
    def stop(lab):
        raise command.Stopped(2)

    checks = {key: (lambda lab: passed("well")) for key in command.CHECKS}
    monkeypatch.setattr(command, "CHECKS", {**checks, "gradients": stop})
    found = {"device": "sim", "title": "sim card", "count": 2, "names": ["sim:0"], "versions": {}, "hardware": {},
             "tensorrt": "", "paddle": "3", "paddle_commit": "0" * 40}  # fmt: skip
    monkeypatch.setattr(ranks, "ask", lambda task, directory, limit: found)
    assert command.main([f"--output={tmp_path}"]) == 130
    told = json.loads((tmp_path / "check-cards.json").read_text())
    assert told["interrupted"] and told["passed"] == 3 and told["failed"] == 0
    assert "(interrupted)" in (tmp_path / "check-cards.html").read_text()


def test_one_card_leaves_out_what_needs_two(tmp_path):
    for check in (numeric.batch_norm, numeric.gradients, numeric.unused, numeric.branch):
        assert check(lab(tmp_path, cards=1)).status == NOT_RUN


def test_paddle_that_cannot_be_asked_is_an_error_with_its_log(tmp_path, monkeypatch):
    def ask(task, directory, limit):
        raise RunFailed("exit codes 1: ModuleNotFoundError: No module named 'paddle'", directory / "rank0.log")

    monkeypatch.setattr(ranks, "ask", ask)
    with pytest.raises(FleetError, match="cannot ask Paddle for its cards: .*rank0.log"):
        command.main([f"--output={tmp_path}"])
