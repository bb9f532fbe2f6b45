"""What the benchmarks conclude from their figures: who computes the same, what was met, what goes into the page."""

import json
import xml.dom.minidom

import numpy as np
import pytest

from benchmarks import common, report
from benchmarks.report import Row


class Contender:
    def __init__(self, name, **arrays):
        self.name, self.arrays = name, {key.replace("_", ": "): np.array(value) for key, value in arrays.items()}

    def check(self):
        return self.arrays


TRUTH = Contender("truth", scores=[1.0, 2.0], gradient_a=[3.0, 4.0], gradient_b=[3.0, 4.0], gradient_zero=[0.0, 0.0])


def close_to(truth, **changes):
    arrays = {key.replace(": ", "_"): value for key, value in truth.arrays.items()}
    return Contender("it", **{**arrays, **changes})


def test_rounding_is_no_difference():
    it = close_to(TRUTH, gradient_a=[3.0, 4.0004], gradient_zero=[1e-4, 0.0])
    errors = common.same([it], TRUTH, {"": 1e-3})
    assert errors == pytest.approx({"it, scores": 0, "it, gradient": 8e-5}, rel=1e-6)


@pytest.mark.parametrize(
    "changes", [{"gradient_b": [3.0, 4.1]}, {"scores": [1.0, np.nan]}, {"gradient_zero": [0.1, 0]}]
)
def test_another_result_ends_the_benchmark(changes):
    with pytest.raises(SystemExit, match=f"it has another {next(iter(changes)).replace('_', ': ')} than truth"):
        common.same([close_to(TRUTH, **changes)], TRUTH, {"": 1e-3})


def test_each_kind_has_its_tolerance():
    it = close_to(TRUTH, gradient_b=[3.0, 4.1])
    assert common.same([it], TRUTH, {"": 1e-3, "gradient": 0.1})
    with pytest.raises(SystemExit, match="arrays of the same names"):
        common.same([close_to(TRUTH, more=[1.0])], TRUTH, {"": 1.0})


def test_a_ratio_above_one_is_faster_than_the_peer():
    told = common.ratio([1.0, 2.0, 1.0], [3.0, 4.0, 2.0])
    assert told["value"] == 2 and told["low"] <= 2 <= told["high"]


@pytest.mark.parametrize(
    ("value", "met"),
    [(1.5, "goal"), (1.3, "floor"), (1.1, "no"), (float("nan"), "no")],
)
def test_what_was_met(value, met):
    assert Row("work", "1", "2", value, goal=1.5, floor=1.2).met == met


def test_less_can_be_better():
    assert [Row("memory", "", "", value, 1, 1, most=True).met for value in (0.9, 1.0, 1.1)] == ["goal", "goal", "no"]


def test_files_and_pages(tmp_path, capsys):
    rows = [Row("a <step>", "10 images/s", "peer: 5", 2.0, 1.5, 1.2, 1.9, 2.1)]
    cases = [{"title": "a <step>", "unit": "images/s", "values": {"ours": 10.0, "peer": 5.0}}]
    machine = {"cpu": "one", "date": "today", "load": 0.1, "versions": {"torch": "2"}}
    report.write("train", str(tmp_path), rows, cases, machine)
    line = "| a <step> | 10 images/s | peer: 5 | 2.00 (1.90 to 2.10) | ≥ 1.5 | ≥ 1.2 | goal |"
    assert line in capsys.readouterr().out and line in (tmp_path / "train.md").read_text()
    assert json.loads((tmp_path / "train.json").read_text())["rows"][0]["met"] == "goal"
    xml.dom.minidom.parse(str(tmp_path / "train.svg"))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- machine -->\nold\n<!-- /machine -->\n<!-- train -->\n<!-- /train -->\nafter\n")
    for _ in range(2):
        report.write_pages(tmp_path, [page])
    text = page.read_text()
    assert text.count(line) == 1 and "| cpu | one |" in text and "today" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n") and (tmp_path / "performance/train.svg").exists()
