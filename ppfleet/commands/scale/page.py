"""A scaling series as one HTML page: tables, charts, verdicts and the projection."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ppfleet.commands.scale import table
from ppfleet.commands.scale.summary import PARTS
from ppfleet.html.page import chart, document, number
from ppfleet.html.page import table as html_table

_STYLE = Path(__file__).with_name("page.css")


def html(facts: dict[str, Any]) -> str:
    title = f"Scaling of {Path(facts['script']).name}"
    seeds = ", ".join(map(str, facts["seeds"]))
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(" ".join([facts["script"], *facts["arguments"]]))}; seeds {seeds}; ± is the standard '
        f"deviation over them. Time is from the first batch to the end of the last step, evaluation or save.</p>",
        *(part for mode, rows in facts["tables"].items() for part in _mode(facts, mode, rows)),
        *_charts(facts),
        *_projection(facts["projection"]),
        _notes(facts),
    ]
    return document(title, body, _STYLE.read_text(encoding="utf-8"))


def _mode(facts: dict[str, Any], mode: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"<h2>{escape(table.title(mode, rows))}</h2>",
        html_table(table.head(facts), [table.cells(row) for row in rows]),
        *(_verdict(facts, rows[0], row) for row in rows if row["parity"]),
        "<h3>Where the time went</h3>",
        _bars(rows),
        html_table(table.PARTS_HEAD, [table.part_cells(row) for row in rows]),
    ]


def _verdict(facts: dict[str, Any], base: dict[str, Any], row: dict[str, Any]) -> str:
    word, sentence = str(row["parity"]["word"]), str(row["parity"]["sentence"])
    where = f"{row['machines']} × {row['ranks']} against {base['machines']} × {base['ranks']}"
    return (
        f'<p class="verdict {word.split()[0]}">{escape(facts["metric"])} of {where}: '
        f"<b>{escape(word)}</b>{escape(sentence[len(word) :])}</p>"
    )


def _bars(rows: Sequence[dict[str, Any]]) -> str:
    """The shares of the time, a bar for each point."""
    drawn = []
    for row in rows:
        where = f"{row['machines']} × {row['ranks']}"
        if row["parts"] is None:
            continue
        shares = {name: 100 * row["parts"][name] / (row["parts"]["span"] or 1) for name in PARTS}
        told = ", ".join(f"{name} {share:.0f} %" for name, share in shares.items())
        pieces = "".join(
            f'<i class="c{n}" style="width:{share:.2f}%" title="{name} {share:.0f} %"></i>'
            for n, (name, share) in enumerate(shares.items())
        )
        drawn.append(f'<span>{where}</span><div class="bar" role="img" aria-label="{escape(told)}">{pieces}</div>')
    legend = "".join(f'<span><i class="c{n}"></i>{name}</span>' for n, name in enumerate(PARTS))
    return f'<div class="legend">{legend}</div><div class="bars">{"".join(drawn)}</div>' if drawn else ""


def _charts(facts: dict[str, Any]) -> list[str]:
    drawn = []
    for name, title in (("time", "time, seconds"), ("efficiency", "efficiency, %")):
        lines = {label: [point[:2] for point in points] for label, points in table.curves(facts, name).items()}
        drawn.append(chart(title, lines, "ranks"))
    return ["<h2>Over ranks</h2>", *drawn] if any(drawn) else []


def _projection(facts: dict[str, Any] | None) -> list[str]:
    if facts is None:
        return []
    ranks, batch = facts["from"]["ranks"], facts["from"]["batch"]
    return [
        "<h2>Projection to more machines</h2>",
        f"<p><b>Not measured.</b> {escape(facts['model'])}; the network is {facts['network_is']}. Efficiency is "
        f"against 1 × {ranks} at the same batch of {batch} a rank.</p>",
        chart(
            "projected efficiency, %",
            {f"machines × {ranks}": [(1, 100), *((p["machines"], 100 * p["efficiency"]) for p in facts["points"])]},
            "machines",
        ),
        html_table(
            ["machines", "step, ms", "efficiency"],
            [(p["machines"], number(1e3 * p["step"]), f"{p['efficiency']:.0%}") for p in facts["points"]],
        ),
    ]


def _notes(facts: dict[str, Any]) -> str:
    told = [
        *facts["notes"],
        f"parity: runs of the same seed are compared in pairs, and the mean difference gets a "
        f"{facts['confidence']:.0%} t interval; parity is said where it lies within ±{facts['tolerance']:.2%} of the "
        f"smallest point's metric, a difference where it leaves out 0, else it cannot be told",
        "communication is the shortest time any rank spent in an exchange, stragglers what the others waited besides",
    ]
    return f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in told)}</ul>"
