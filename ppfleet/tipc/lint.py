"""Explains what is wrong with a TIPC file: where, what stands there, what was expected, the likely fix."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ppfleet.errors import ConfigError
from ppfleet.tipc import config as tipc
from ppfleet.tipc import plan
from ppfleet.tipc.command import TRAINERS, Here
from ppfleet.tipc.config import Config
from ppfleet.tipc.lines import Line, read

# A warning is about what this runner gets over, and another may not.
ERROR, WARNING = "error", "warning"
_TRUTH = ("true", "false", "null", "")
_TRAINERS = (*TRAINERS, "pact_train", "fpgm_train", "distill_train", "quant_train", "ptq_train")


@dataclass(frozen=True)
class Finding:
    level: str
    line: int  # as an editor counts; 0: the whole file
    text: str

    def __str__(self) -> str:
        return f"{f'line {self.line}: ' if self.line else ''}{self.level}: {self.text}"


def lint(path: str | Path, mode: str = "") -> list[Finding]:
    """Everything worth saying about that file, for a mode if one is given."""
    lines = read(path)
    findings = _bytes(Path(path).read_bytes())
    for check in (_spelling, _normal_train, _addresses):
        findings += check(lines)
    known = {(f.level, f.line) for f in findings}
    try:
        config = tipc.parse(path)
        for name in ("epochs", "batch_size"):
            if not config.lines[name].value:
                text = f"{config.lines[name].key!r} has no value, so it is not given; `null` says that this is meant"
                findings.append(Finding(WARNING, config.lines[name].source, text))
        trains = mode != "whole_infer" and config.value("trainer")
        findings += _trainers(config) if trains else []
        for wanted in [mode] if mode else _modes(config) if trains else []:
            plan.make(config, wanted, Here())
    except ConfigError as failure:
        found = _located(failure, path)
        findings += [found] if (found.level, found.line) not in known else []
    return sorted(set(findings), key=lambda f: (f.line, f.level, f.text))


def _located(failure: ConfigError, path: str | Path) -> Finding:
    """A ConfigError as a finding; it knows its line, or tells of the whole file."""
    fields = failure.fields
    if "stands" in fields:
        return Finding(ERROR, fields["line"], f"{fields['stands']} stands here: {fields['problem']}")
    return Finding(ERROR, fields.get("line", 0), str(failure).removeprefix(f"{path}: "))


def _modes(config: Config) -> list[str]:
    """The training modes that the file has values for: without a mode to look at, all of those."""
    line = config.lines["epochs"]
    known = [mode for mode in tipc.MODES if any(part.startswith(f"{mode}=") for part in line.values())]
    return known or [tipc.MODES[0]]


def _bytes(data: bytes) -> list[Finding]:
    rows = data.split(b"\n")
    ends = [number for number, row in enumerate(rows, 1) if row.endswith(b"\r")]
    found = []
    if ends:
        many = f"{len(ends)} lines end" if len(ends) > 1 else "the line ends"
        found.append(
            Finding(
                WARNING,
                ends[0],
                f"{many} in \\r\\n, as Windows writes them; a shell reads the \\r as part of the value "
                f"(`latest.pdparams\\r`): sed -i 's/\\r$//' <file>",
            )
        )
    if data.startswith(b"\xef\xbb\xbf"):
        found.append(Finding(WARNING, 1, "a byte order mark before the first `=`: save as UTF-8 without BOM"))
    return found


def _spelling(lines: list[Line]) -> list[Finding]:
    """Values that are nearly True or False."""
    found = []
    for line in lines:
        if line.separator:
            continue
        for part in line.values():
            near = difflib.get_close_matches(part.lower(), ("true", "false"), 1, 0.75)
            if near and part.lower() not in _TRUTH and part.isalpha():
                found.append(Finding(WARNING, line.source, f"{part!r} stands where {near[0].title()} was meant"))
    return found


def _normal_train(lines: list[Line]) -> list[Finding]:
    return [
        Finding(WARNING, line.source, "`normal_train` is spelt `norm_train`, here and as the key of its command")
        for line in lines
        if line.key == "normal_train" or (line.key == "trainer" and "normal_train" in line.values())
    ]


def _addresses(lines: list[Line]) -> list[Finding]:
    line = next((line for line in lines if line.key == "gpu_list"), None)
    found = []
    for part in line.values() if line else []:
        try:
            tipc.parse_devices(line, part)  # type: ignore[arg-type]
        except ConfigError as failure:
            found.append(_located(failure, ""))
    return found


def _trainers(config: Config) -> list[Finding]:
    line = config.lines["trainer"]
    found = []
    for name in config.trainers():
        if name not in _TRAINERS:
            near = difflib.get_close_matches(name, _TRAINERS, 1, 0.7)
            text = f"{name!r} is no trainer that TIPC knows" + (f": {near[0]} was probably meant" if near else "")
            found.append(Finding(WARNING, line.source, text))
        elif name not in TRAINERS:
            found.append(
                Finding(WARNING, line.source, f"{name} is run only where --trainers says that the repository has it")
            )
    return found


def summary(findings: list[Finding], path: str | Path) -> str:
    if not findings:
        return f"{path}: nothing to find fault with"
    errors = sum(finding.level == ERROR for finding in findings)
    return f"{path}: {errors} error(s), {len(findings) - errors} warning(s)"
