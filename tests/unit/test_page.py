"""What ppfleet's pages share: one frame, tables, charts: well-formed, nothing from elsewhere, told in words too."""

import re
from xml.etree import ElementTree

import pytest

from ppfleet.html.chart import line_chart
from ppfleet.html.render import environment, printable, when

NAN = float("nan")


def shown(template, **values):
    """What a template that uses the shared parts makes of `values`; raises where it is not well-formed."""
    parts = "{% from 'html/templates/parts.html.j2' import chart, table, matrix, pill %}"
    return ElementTree.fromstring(rendered(f"<div>{parts}{template}</div>", **values))


def rendered(text, **values):
    return printable(environment().from_string(text).render(values))


def path(line):
    """The points of a line of a chart."""
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", line.find("path").get("d"))]


def groups(chart, kind):
    return [each for each in ElementTree.fromstring(chart.svg).iter("g") if each.get("class") == kind]


def test_a_page_is_whole_and_needs_nothing_from_elsewhere():
    frame = "{% extends 'html/templates/base.html.j2' %}{% block style %}.x{color:red}{% endblock %}"
    text = rendered(frame + "{% block main %}<p>{{ it }}</p>{% endblock %}", title="a <b> & c", it="<i>")
    assert "<title>a &lt;b&gt; &amp; c</title>" in text and ".x{color:red}" in text and "prefers-color-scheme" in text
    assert "<p>&lt;i&gt;</p>" in text and text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    assert not re.search(r"https?://|<script|@import|url\(", text)


def test_a_value_that_is_missing_is_no_empty_page():
    with pytest.raises(Exception, match="'it' is undefined"):
        rendered("{{ it }}")


def test_a_chart_draws_every_line_where_it_belongs():
    lines = {"train": [(0, 4), (50, 2), (100, 0)], "val": [(0, 4), (100, 4)]}
    chart = line_chart("loss", lines, "step", [(50, "resumed")])
    first, second = groups(chart, "line")
    x, y = zip(*path(first))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1]) and 0 < x[0] < x[2] < 470
    assert y[0] < y[1] < y[2] and y[1] == pytest.approx((y[0] + y[2]) / 2)  # downwards is more
    assert [point[1] for point in path(second)] == [y[0], y[0]]
    (mark,) = groups(chart, "mark")
    assert path(mark)[0][0] == pytest.approx(x[1]) and mark.find("title").text == "resumed"
    dots = [each.text for line in (first, second) for each in line.iter("title")]
    assert len(dots) == 5 and dots[0] == "train: 4 at step 0"
    assert chart.legend == {"train": 0, "val": 4}


def test_a_chart_has_the_colors_of_the_page_and_is_the_same_every_time():
    chart = line_chart("loss", {"a": [(0, 1), (1, 2)], "b": [(0, 1)]}, "step", [(0, "x")])
    assert {"var(--c0)", "var(--c1)", "var(--failed)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", chart.svg))
    assert not re.search(r"#[0-9a-f]{6}\b|url\(|http|<style|<metadata", chart.svg)
    assert chart == line_chart("loss", {"a": [(0, 1), (1, 2)], "b": [(0, 1)]}, "step", [(0, "x")])
    ids = [re.findall(r'id="(.*?)"', each.svg) for each in (chart, line_chart("top1", {"a": [(0, 1)]}, "step"))]
    assert ids[0] and ids[1] and not set(ids[0]) & set(ids[1])  # they may stand in one page


def test_a_chart_does_not_depend_on_the_users_style():
    import matplotlib

    lines = {"a $x$": [(0, 1), (1, 2)]}
    with matplotlib.rc_context({"text.usetex": True, "lines.linestyle": ":", "font.size": 30, "axes.grid": True}):
        changed, size = line_chart("loss", lines, "step"), matplotlib.rcParams["font.size"]
    assert changed == line_chart("loss", lines, "step") and size == 30


def test_a_chart_is_told_in_words():
    chart = line_chart("top1", {"a & b": [(1, 0.5), (3, 0.25)]}, "epoch")
    assert chart.description == "top1, over epoch. a & b: from 0.5 at epoch 1 to 0.25 at 3, between 0.25 and 0.5."
    figure = shown("{{ chart(it) }}", it=chart).find("figure")
    assert figure.find("div").get("aria-label") == chart.description and figure.find("div").get("role") == "img"
    assert [each.text or each.find("i").tail for each in figure.iter("span")] == ["a & b 0.25", "over epoch"]
    marked = line_chart("top1", {"a": [(1, 0.5)]}, "epoch", [(1, "started"), (2, "killed"), (2, "again")])
    assert "Mark 1 at epoch 1: started. Mark 2 at epoch 2: killed. Mark 3 at epoch 2: again." in marked.description
    texts = [each.text for each in ElementTree.fromstring(marked.svg).iter("text")]
    assert texts[-2:] == ["1", "2, 3"]


def test_what_is_not_finite_leaves_a_gap():
    points = [(0, 1.0), (1, NAN), (2, float("inf")), (3, 2.0), (4, 3.0)]
    chart = line_chart("loss", {"a": points, "b": [(0, NAN)]}, "step")
    assert "nan" not in chart.svg and "inf" not in chart.svg and list(chart.legend) == ["a"]
    (line,) = groups(chart, "line")
    assert line.find("path").get("d").count("M") == 2 and len(list(line.iter("use"))) == 3
    assert line_chart("loss", {"b": [(0, NAN)]}, "step").svg == line_chart("loss", {}, "step").svg == ""
    assert shown("{{ chart(it) }}", it=line_chart("loss", {}, "step")).find("figure") is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "points",
    [
        [(7, 3.5)],
        [(0, 2), (1, 2)],
        [(0, 0), (1, 0)],
        [(0, -1), (5, 1e-9)],
        [(0, 1e12), (1, 3e12)],
        [(0, 3e38), (1, -3e38)],
        [(0, 1.7e308), (1, -1.7e308), (-1.7e308, 1), (1.7e308, 1), (2, 1)],
    ],
)
def test_any_figures_stay_inside(points):
    (line,) = groups(line_chart("x", {"a": points}, "step"), "line")
    dots = list(line.iter("use"))
    assert dots
    for dot in dots:
        assert 0 <= float(dot.get("x")) <= 470 and 0 <= float(dot.get("y")) <= 200


def test_there_are_no_one_and_a_half_ranks():
    svg = line_chart("time", {"a": [(1, 10.0), (2, 11.0)]}, "ranks").svg
    assert [each.text for each in ElementTree.fromstring(svg).iter("text")][:2] == ["1", "2"]


def test_a_long_line_has_no_dots_and_keeps_its_peaks():
    points = [(n, 100.0 if n == 12345 else -100.0 if n == 23456 else n % 7) for n in range(100_000)]
    chart = line_chart("x", {"a": points}, "step")
    (line,) = groups(chart, "line")
    heights = [y for _, y in path(line)]
    assert not list(line.iter("use")) and len(heights) < 4000 and len(chart.svg) < 100_000
    middle = sorted(heights)[len(heights) // 2]
    assert middle - min(heights) > 70 and max(heights) - middle > 70


def test_a_matrix_is_a_table_with_heads():
    tree = shown("{{ matrix(names, counts) }}", names=["ant", "<b>"], counts=[[3, 1], [0, 0]])
    assert [each.text for each in tree.iter("span")] == ["ant", "<b>", "correct", "ant", "<b>"]
    assert [each.get("scope") for each in tree.iter("th")] == ["col", "col", "col", "row", "row"]
    cells = [(each.get("class"), each.get("style"), each.text) for each in tree.find(".//tbody").iter("td")]
    assert cells == [
        ("right deep", "--share:0.750", "3"),
        ("wrong", "--share:0.250", "1"),
        (None, None, "75.0 %"),
        (None, None, None),
        (None, None, None),
        (None, None, "0.0 %"),
    ]


def test_names_that_are_no_text_are_shown_with_escapes():
    text = rendered("<p>{{ it }}</p>", it="a\x00b \udcff\x1b")
    assert text.encode() and text == "<p>a\ufffdb \\udcff\ufffd</p>"


def test_a_table_holds_text_and_figures():
    tree = shown("{{ table(head, rows) }}", head=["name", "value"], rows=[["<i>", 0.123456], ["b", 3], ["c", NAN]])
    assert [(each.get("class"), each.text) for each in tree.iter("td")] == [
        (None, "<i>"), ("number", "0.1235"), (None, "b"), ("number", "3"), (None, "c"), ("number", "not finite"),
    ]  # fmt: skip


def test_any_time_can_be_shown():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", when(0))
    assert when(1e300) == when(NAN) == "at an unknown time"
