"""TIPC's text file: `key:value` lines whose meaning depends on the line number, in two forms. Pure.

The key is data too: usually the exact flag to emit. Blank lines are dropped before lines are numbered; `=====name=====`
and `#` lines count. Errors name the line number that an editor shows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleet.cluster import hosts
from ppfleet.errors import ConfigError
from ppfleet.tipc.line_table import LAST_REQUIRED, LAYOUTS, check_family, check_places, find_form
from ppfleet.tipc.reader import ConfigLine, present, read

MODES = (
    "lite_train_lite_infer",
    "lite_train_whole_infer",
    "whole_train_whole_infer",
    "whole_infer",
    "benchmark_train",
)
OTHER_MODES = ("klquant_whole_infer",)  # of other scripts
TRAIN_BENCHMARK = "train_benchmark_params"


@dataclass(frozen=True)
class Fleet:
    """The devices of one run: `nodes` is empty for this machine alone, `devices` for a CPU."""

    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    text: str  # the devices as written, for names


@dataclass(frozen=True)
class Config:
    path: Path
    form: str
    lines: dict[str, ConfigLine]  # by name in the layout
    tails: dict[str, dict[str, ConfigLine]]  # by banner, then by key

    @property
    def model(self) -> str:
        return self.lines["model_name"].value

    def line(self, name: str) -> ConfigLine | None:
        return self.lines.get(name)

    def value(self, name: str, mode: str = "") -> str:
        """The value of that line for that mode; "" for `null`, an empty value, or a line that this form lacks."""
        line = self.lines.get(name)
        return for_mode(line, mode) if line else ""

    def values(self, name: str, mode: str) -> list[str]:
        """The alternatives of that line; [""] if it has no value."""
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
        """All nodes of the file, that of trainer 0 first."""
        lists = [fleet.nodes for fleet in self.fleets() if fleet.nodes]
        if len({nodes[0] for nodes in lists}) > 1:
            self.lines["gpu_list"].fail("every list of nodes must begin with the same node, that of trainer 0")
        return tuple(dict.fromkeys(node for nodes in lists for node in nodes))

    def trainers(self) -> list[str]:
        line = self.lines["trainer"]
        named = [trainer_name(name) for name in line.values()]
        if not all(present(name) and re.fullmatch(r"\w+", name) for name in named):
            line.fail("must name a trainer: norm_train, amp_train or fleet_train")
        return list(dict.fromkeys(named))


def trainer_name(text: str) -> str:
    """The trainer's usual spelling."""
    return "norm_train" if text == "normal_train" else text


def _by_mode(line: ConfigLine) -> bool:
    return any(re.match(r"(lite|whole|klquant)_\w+\s*=|benchmark_train\s*=", part) for part in line.values())


def for_mode(line: ConfigLine, mode: str) -> str:
    """`mode=value|mode=value` depends on the mode, a plain value is for every mode."""
    if not _by_mode(line):
        return present(line.value)
    choices = {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in line.values())}
    for name in choices:
        if name not in (*MODES, *OTHER_MODES):
            line.fail(f"unknown mode {name!r}{did_you_mean(name, MODES)}")
    if mode not in choices:
        line.fail(f"no value for {mode}, only for {', '.join(choices)}; add `|{mode}=…`")
    return present(choices[mode])


def did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.7)
    return f": did you mean {near[0]}?" if near else ""


def parse(path: str | Path) -> Config:
    """The file as a Config; a ConfigError names the first problem, `lint` reports all of them.

    >>> parse("test_tipc/configs/mobilenet_v3_small/train_infer_python.txt").model
    'mobilenet_v3_small'
    """
    path = Path(path)
    lines = read(path)
    try:
        return _parse(path, lines)
    except ConfigError as failure:
        raise ConfigError(f"{path}: {failure}", **failure.fields) from None


def _parse(path: Path, lines: list[ConfigLine]) -> Config:
    check_family(lines)
    form = find_form(lines)
    layout = LAYOUTS[form]
    missing = [number for number in layout if number > len(lines) and number <= LAST_REQUIRED[form]]
    if missing:
        raise ConfigError(
            f"the file ends after line {lines[-1].source}; the {form} form continues with {layout[missing[0]].lower()}"
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
        config.lines["model_name"].fail("must name the model in one word without slashes; it becomes a directory")
    config.fleets()
    return config


def _tails(lines: list[ConfigLine]) -> dict[str, dict[str, ConfigLine]]:
    tails: dict[str, dict[str, ConfigLine]] = {}
    for line in lines:
        if line.banner is not None:
            tails[line.banner] = {}
        elif tails and not line.separator:
            tails[list(tails)[-1]][line.key] = line
    return tails


def parse_devices(line: ConfigLine, text: str) -> Fleet:
    """`-1`, `0`, `0,1`, or `ip,ip;0,1`: nodes before `;`, devices after it."""
    addresses, several, devices = text.rpartition(";")
    if several and ";" in addresses:
        line.fail(f"{text!r} has more than one `;`: expected ip,ip;0,1")
    if wide := re.findall("[\uff0c\uff1b\uff5c\uff10-\uff19]", text):
        line.fail(f"{text!r} contains the full-width character {wide[0]!r}: use its ASCII form")
    compact = ",".join(re.sub(r"\s*([,;])\s*", r"\1", text).split())
    if compact != text:
        line.fail(f"{text!r} contains a space, where a shell would split it: write {compact}")
    nodes = tuple(addresses.split(",")) if several else ()
    for node in nodes:
        if not hosts.is_host(node):
            line.fail(f"{node!r} is not an address or host name; expected ip,ip;0,1")
    repeated = {node for node in nodes if nodes.count(node) > 1}
    if repeated:
        line.fail(f"{', '.join(sorted(repeated))} is listed twice: list each node once")
    ids = devices.split(",")
    if devices == "-1":
        return Fleet(nodes, (), devices)
    if not all(re.fullmatch("0|[1-9][0-9]{0,3}", device) for device in ids) or len(set(ids)) < len(ids):
        expected = "-1 (CPU), 0, 0,1 or ip,ip;0,1; separate several runs by |"
        if not several and all(map(hosts.is_host, ids)) and re.search("[.:]", text):
            line.fail(f"{text!r} lists addresses without devices: expected {text};0,1")
        line.fail(f"{text!r} is not a list of devices; expected {expected}")
    return Fleet(nodes, tuple(ids), devices)
