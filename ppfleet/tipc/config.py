"""TIPC's text file: `key:value` lines whose meaning goes by line number, in two forms. Pure.

The key is data too: usually the exact flag to emit. Blank lines are dropped before lines are numbered; `=====name=====`
and `#` lines keep their number. Errors name the line as an editor shows it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ppfleet.cluster import hosts
from ppfleet.errors import ConfigError
from ppfleet.tipc.layout import LAST_REQUIRED, LAYOUTS, check_family, check_places, find_form
from ppfleet.tipc.lines import Line, present, read

MODES = (
    "lite_train_lite_infer",
    "lite_train_whole_infer",
    "whole_train_whole_infer",
    "whole_infer",
    "benchmark_train",
)
OTHER_MODES = ("klquant_whole_infer",)  # known, of other scripts
TRAIN_BENCHMARK = "train_benchmark_params"


@dataclass(frozen=True)
class Fleet:
    """One run's devices: `nodes` is empty for this machine alone, `devices` for a CPU."""

    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    text: str  # the devices as written, for names


@dataclass(frozen=True)
class Config:
    path: Path
    form: str
    lines: dict[str, Line]  # by name in the layout
    tails: dict[str, dict[str, Line]]  # by banner, then by key

    @property
    def model(self) -> str:
        return self.lines["model_name"].value

    def line(self, name: str) -> Line | None:
        return self.lines.get(name)

    def value(self, name: str, mode: str = "") -> str:
        """What that line says, for that mode; nothing for `null`, an empty value, or a line this form lacks."""
        line = self.lines.get(name)
        return for_mode(line, mode) if line else ""

    def values(self, name: str, mode: str) -> list[str]:
        """The alternatives of that line; one empty one where there is nothing."""
        line = self.lines.get(name)
        if line is None or present(line.key) == "":
            return [""]
        if _by_mode(line):
            return [for_mode(line, mode)]
        return [present(part) for part in line.values()]

    def fleets(self) -> list[Fleet]:
        line = self.lines["gpu_list"]
        return [parse_devices(line, part) for part in line.values()]

    def nodes(self) -> tuple[str, ...]:
        """All nodes of the file, trainer 0's first."""
        lists = [fleet.nodes for fleet in self.fleets() if fleet.nodes]
        if len({nodes[0] for nodes in lists}) > 1:
            self.lines["gpu_list"].fail("every list of nodes must begin with the same one, trainer 0's")
        return tuple(dict.fromkeys(node for nodes in lists for node in nodes))

    def trainers(self) -> list[str]:
        line = self.lines["trainer"]
        named = [trainer_name(name) for name in line.values()]
        if not all(present(name) and re.fullmatch(r"\w+", name) for name in named):
            line.fail("names no trainer: norm_train, amp_train or fleet_train")
        return list(dict.fromkeys(named))


def trainer_name(text: str) -> str:
    """As it is usually spelt."""
    return "norm_train" if text == "normal_train" else text


def _by_mode(line: Line) -> bool:
    return any(re.match(r"(lite|whole|klquant)_\w+\s*=|benchmark_train\s*=", part) for part in line.values())


def for_mode(line: Line, mode: str) -> str:
    """`mode=value|mode=value` picks by mode, a plain value serves every mode."""
    if not _by_mode(line):
        return present(line.value)
    choices = {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in line.values())}
    for name in choices:
        if name not in (*MODES, *OTHER_MODES):
            near = difflib.get_close_matches(name, MODES, 1, 0.7)
            line.fail(f"{name!r} is no mode" + (f": {near[0]} was probably meant" if near else ""))
    if mode not in choices:
        line.fail(f"no value for {mode}, only for {', '.join(choices)}; add `|{mode}=…`")
    return present(choices[mode])


def parse(path: str | Path) -> Config:
    """The file as a Config; a ConfigError says what is wrong with it, `lint` says it at length."""
    path = Path(path)
    lines = read(path)
    try:
        return _parse(path, lines)
    except ConfigError as failure:
        raise ConfigError(f"{path}: {failure}", **failure.fields) from None


def _parse(path: Path, lines: list[Line]) -> Config:
    check_family(lines)
    form = find_form(lines)
    layout = LAYOUTS[form]
    missing = [number for number in layout if number > len(lines) and number <= LAST_REQUIRED[form]]
    if missing:
        raise ConfigError(
            f"the file ends after line {lines[-1].source}; the {form} form goes on with {layout[missing[0]].lower()}"
        )
    tails_at = next((n for n, line in enumerate(lines) if n >= LAST_REQUIRED[form] and line.banner), len(lines))
    check_places(lines[:tails_at], form)
    named = {
        name.lower(): lines[number - 1]
        for number, name in layout.items()
        if number <= tails_at and name not in ("BANNER", "##") and not lines[number - 1].separator
    }
    config = Config(path, form, named, _tails(lines[tails_at:]))
    if not re.fullmatch(r"[^/\s]+", config.model) or config.model in (".", "..", "null"):
        config.lines["model_name"].fail("names no model; it becomes a directory: one word without slashes")
    config.fleets()
    return config


def _tails(lines: list[Line]) -> dict[str, dict[str, Line]]:
    tails: dict[str, dict[str, Line]] = {}
    for line in lines:
        if line.banner is not None:
            tails[line.banner] = {}
        elif tails and not line.separator:
            tails[list(tails)[-1]][line.key] = line
    return tails


def parse_devices(line: Line, text: str) -> Fleet:
    """`-1`, `0`, `0,1`, or `ip,ip;0,1`: nodes are told by `;` and counted by `,`."""
    addresses, several, devices = text.rpartition(";")
    if several and ";" in addresses:
        line.fail(f"{text!r} has more than one `;`: expected is ip,ip;0,1")
    if wide := re.findall("[\uff0c\uff1b\uff5c\uff10-\uff19]", text):
        line.fail(f"{text!r} holds the full-width {wide[0]!r}: write it with an English keyboard")
    together = ",".join(re.sub(r"\s*([,;])\s*", r"\1", text).split())
    if together != text:
        line.fail(f"{text!r} holds a blank, where a shell would cut it in two: write {together}")
    nodes = tuple(addresses.split(",")) if several else ()
    for node in nodes:
        if not hosts.is_host(node):
            line.fail(f"{node!r} is no address or host name; expected is ip,ip;0,1")
    twice = {node for node in nodes if nodes.count(node) > 1}
    if twice:
        line.fail(f"{', '.join(sorted(twice))} is listed twice: each node once")
    ids = devices.split(",")
    if devices == "-1":
        return Fleet(nodes, (), devices)
    if not all(re.fullmatch("0|[1-9][0-9]{0,3}", device) for device in ids) or len(set(ids)) < len(ids):
        expected = "-1 (CPU), 0, 0,1 or ip,ip;0,1, several runs separated by |"
        if not several and all(map(hosts.is_host, ids)) and re.search("[.:]", text):
            line.fail(f"{text!r} lists addresses without devices: expected is {text};0,1")
        line.fail(f"{text!r} is no list of devices; expected is {expected}")
    return Fleet(nodes, tuple(ids), devices)
