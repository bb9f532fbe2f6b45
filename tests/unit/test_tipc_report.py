"""Figures from logs, and what the report makes of results."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ppfleet.tipc import figures, report, report_page
from ppfleet.tipc.command import Command
from ppfleet.tipc.execute import FAILED, OK, SKIPPED, Result

ROWS = [
    " ----- Perf info -----",
    " cpu_rss(MB): 288.957, gpu_rss(MB): None, gpu_util: None%",
    " total time spent(s): 0.4824",
    " preprocess_time(ms): 0.1136, inference_time(ms): 79.5877, postprocess_time(ms): 0.6945",
]


def found(tmp_path, lines, kind="benchmark"):
    (tmp_path / "log").write_text("\n".join(lines))
    return figures.read(kind, tmp_path / "log")


def test_the_benchmark_block(tmp_path):
    values = found(tmp_path, [" data_num: 6", *ROWS, " images/s: 1e2 (inference alone: 3)"])
    assert values == {
        "data_num": 6, "cpu_rss_mb": 288.957, "total_s": 0.4824, "preprocess_ms": 0.1136, "inference_ms": 79.5877,
        "postprocess_ms": 0.6945, "images_per_s": 100,
    }  # fmt: skip
    p = " inference_time(ms) p50: 3.1, p90: 3.3, p99: 3.5"
    assert found(tmp_path, [*ROWS, p])["inference_p99_ms"] == 3.5


@pytest.mark.parametrize("lines", [[], ROWS[1:], ROWS[:3], [ROWS[0], *ROWS[2:3]], [*ROWS[1:], ROWS[0]]])
def test_no_benchmark_block(tmp_path, lines):
    assert found(tmp_path, lines) is None


def test_training_speed(tmp_path):
    lines = ["ips: 1 samples/s", "loss: 2, ips: 20.5 samples/s, eta", "ips: 22.5", "ips: 30.5", "ips: 1e999", "tips: 7"]
    assert found(tmp_path, lines, "ips") == {"images_per_s": 22.5}
    assert found(tmp_path, ["ips: 4"], "ips") == {"images_per_s": 4} and found(tmp_path, ["ips:"], "ips") is None


def test_the_end_of_a_log():
    text = "first\n" * 100 + "10 %\r50 %\r100 %\n\x1b[31mred\x1b[0m \x00\n\n"
    assert report.end_of(text).endswith("first\n100 %\nred ?") and report.end_of(text).count("\n") < 70


def facts(*results, node=0, finished=True, nodes=None):
    return {
        "model": "m<b>", "mode": "mode", "config": "c<b>.txt", "finished": finished, "started": "now", "seconds": 1.0,
        "node": {"number": node, "address": "", "host": "h<b>"}, "token": "", "notes": ["note <b>"], "python": "3",
        "ppfleet": "0", "commands": [report.entry(result, Path()) for result in results], "planned": len(results) + 1,
        "nodes": nodes or {},
    }  # fmt: skip


def result(status, reason="", note="", tail="", stage="train"):
    command = Command(
        f"run<b>.{stage}<b>", stage, "run<b>", ("python", "<b>"), "logs/x<b>.log", note=note, device="<b>"
    )
    return Result(command, status, reason, 65.0, 0, {"images_per_s": 2.0} if status == OK else {}, tail)


def test_nothing_in_the_page_is_taken_for_markup():
    other = facts(result(FAILED, "reason <b>"), node=1)
    data = facts(
        result(OK, "why <b>", "mapped <b>", "tail <b>"), result(FAILED, "bad <b>"), nodes={"n<b>": other, "o<b>": None}
    )
    shown = report_page.html(data, report.problems(data))
    for words in ("m", "c", "h", "note ", "run", "why ", "mapped ", "tail ", "bad ", "reason ", "n", "o", "logs/x"):
        assert f"{words}&lt;b&gt;" in shown, words
    assert not re.search(r"<b>(?!train|eval|export|infer)", shown)


def test_what_is_no_certificate():
    good, bad, left = result(OK), result(FAILED, "why"), result(SKIPPED, "why")
    assert report.problems(facts(good, left)) == [] and report.problems(facts(left, node=1)) == []
    assert report.problems(facts(left)) == ["no command was run, all were skipped: this certifies nothing"]
    assert report.problems(facts(good, bad)) == ["run<b>.train<b>: why"]
    other = facts(bad, node=1)
    assert report.problems(facts(good, nodes={"b": other})) == ["b: run<b>.train<b>: why"]
    assert report.problems(facts(good, nodes={"b": None})) == []
    half = facts(good, node=1, finished=False)
    assert report.problems(facts(good, nodes={"b": half})) == ["b: did not finish"]


@pytest.mark.parametrize(
    ("finished", "status", "word"), [(True, OK, "passed"), (False, OK, "not finished"), (False, FAILED, "failed")]
)
def test_the_pages_verdict(finished, status, word):
    data = facts(result(status, "why"), finished=finished)
    shown = report_page.html(data, report.problems(data))
    assert f"{word}</span></h1>" in shown and ("<details open>" in shown) == (status == FAILED)
    assert "1 min 5 s" in shown and ("remaining" in shown)


def test_junit():
    tree = ElementTree.fromstring(report.junit(facts(result(OK), result(FAILED, "a \x01 <b>"), result(SKIPPED, "s"))))
    (suite,) = tree
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["3", "1", "1"]
    assert [case.find("failure") is not None for case in suite] == [False, True, False]
    assert next(tree.iter("failure")).get("message") == "a ? <b>" and suite.get("name") == "run<b>"
