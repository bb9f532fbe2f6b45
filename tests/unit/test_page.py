"""The frame that ppfleet's pages share, and its charts: well-formed, nothing from elsewhere, told in words too."""

import re
from xml.etree import ElementTree

import pytest

from ppfleet.html import page


def drawn(html):
    return ElementTree.fromstring(html.replace('class="', 'kind="'))  # raises where it is not well-formed


def test_a_document_is_whole_and_needs_nothing_from_elsewhere():
    text = page.document("a <b> & c", ["<p>one</p>", "", "<p>two</p>"], ".x{color:red}")
    assert "<title>a &lt;b&gt; &amp; c</title>" in text and ".x{color:red}" in text
    assert text.count("<p>") == 2 and text.rstrip().endswith("</html>")
    assert not re.search(r"https?://|<script|@import|url\(", text)


def test_a_chart_draws_every_line_where_it_belongs():
    html = page.chart(
        "loss", {"train": [(0, 4), (50, 2), (100, 0)], "val": [(0, 4), (100, 4)]}, "step", [(50, "resumed")]
    )
    first, second = (each.get("points").split() for each in drawn(html).iter("polyline"))
    x, y = zip(*(map(float, pair.split(",")) for pair in first))
    assert x[1] - x[0] == x[2] - x[1] and 0 < x[0] < x[2] < 100
    assert y[0] < y[1] < y[2] and y[1] == pytest.approx((y[0] + y[2]) / 2, abs=0.02)  # downwards is more
    assert float(second[0].split(",")[1]) == float(second[1].split(",")[1]) == y[0]
    mark = next(line for line in drawn(html).iter("line") if line.get("kind") == "mark")
    assert float(mark.get("x1").rstrip("%")) == x[1] and mark.find("title").text == "resumed"
    assert len(list(drawn(html).iter("circle"))) == 5


def test_a_chart_is_told_in_words():
    told = next(
        each.get("aria-label")
        for each in drawn(page.chart("top1", {"a & b": [(1, 0.5), (3, 0.25)]}, "epoch")).iter()
        if each.get("role")
    )
    assert told == "top1, over epoch. a & b: from 0.5 at epoch 1 to 0.25 at 3, between 0.25 and 0.5."
    marked = page.chart("top1", {"a": [(1, 0.5)]}, "epoch", [(1, "started"), (2, "killed")])
    assert "Mark 1 at epoch 1: started. Mark 2 at epoch 2: killed." in marked
    assert [each.text for each in drawn(marked).iter("text") if each.get("kind") == "marked"] == ["1", "2"]


def test_what_is_not_finite_leaves_a_gap():
    nan = float("nan")
    points = [(0, 1.0), (1, nan), (2, float("inf")), (3, 2.0), (4, 3.0)]
    html = page.chart("loss", {"a": points, "b": [(0, nan)]}, "step")
    assert "nan" not in html and "inf" not in html
    assert [len(line.get("points").split()) for line in drawn(html).iter("polyline")] == [1, 2]
    assert page.chart("loss", {"b": [(0, nan)]}, "step") == page.chart("loss", {}, "step") == ""


@pytest.mark.parametrize(
    "points", [[(7, 3.5)], [(0, 2), (1, 2)], [(0, 0), (1, 0)], [(0, -1), (5, 1e-9)], [(0, 1e12), (1, 3e12)]]
)
def test_any_figures_stay_inside(points):
    html = page.chart("x", {"a": points}, "step")
    for circle in drawn(html).iter("circle"):
        assert 0 <= float(circle.get("cx").rstrip("%")) <= 100 and 0 <= float(circle.get("cy")) <= 180


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1]), (0, 10, [0, 5, 10]), (3, 17, [0, 5, 10, 15, 20]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_reach_beyond(low, high, expected):
    assert page.ticks(low, high) == pytest.approx(expected)


def test_many_points_have_no_dots():
    html = page.chart("x", {"a": [(n, n % 7) for n in range(500)]}, "step")
    assert not list(drawn(html).iter("circle")) and len(next(drawn(html).iter("polyline")).get("points").split()) == 500


def test_a_long_line_keeps_its_peaks():
    points = [(n, 100.0 if n == 12345 else -100.0 if n == 23456 else n % 7) for n in range(100_000)]
    kept = page.thinned(points)
    assert len(kept) <= 2400 and (12345, 100.0) in kept and (23456, -100.0) in kept
    assert kept[0] == points[0] and kept[-1] == points[-1] and kept == sorted(kept)
    assert page.thinned(points[:2400]) == points[:2400]
    assert page.thinned([(1.0, 1.0)] * 5000)  # all at one place


def test_a_matrix_is_a_table_with_heads():
    html = page.matrix(["ant", "<b>"], [[3, 1], [0, 0]])
    tree = drawn(html)
    assert [each.text for each in tree.iter("span")] == ["ant", "<b>", "right", "ant", "<b>"]
    assert [each.get("scope") for each in tree.iter("th")] == ["col", "col", "col", "row", "row"]
    cells = [(each.get("kind"), each.get("style"), each.text) for each in tree.find(".//tbody").iter("td")]
    assert cells == [
        ("right deep", "--share:0.750", "3"),
        ("wrong", "--share:0.250", "1"),
        (None, None, "75.0 %"),
        (None, None, None),
        (None, None, None),
        (None, None, "0.0 %"),
    ]


def test_names_that_are_no_text_are_shown_with_escapes():
    text = page.document("a\x00b", ["<p>\udcff\x1b</p>"])
    assert text.encode() and "a\ufffdb" in text and "<p>\\udcff\ufffd</p>" in text


def test_a_table_holds_text_and_figures():
    html = page.table(["name", "value"], [["<i>", 0.123456], ["b", 3], ["c", float("nan")]])
    assert "not finite" in html
    assert "&lt;i&gt;" in html and '<td class="number">0.1235</td>' in html and '<td class="number">3</td>' in html
