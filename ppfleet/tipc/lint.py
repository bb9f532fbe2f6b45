"""Explains what is wrong with a TIPC file: the line, its content, what was expected, the likely fix."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ppfleet.errors import ConfigError
from ppfleet.tipc import config as tipc
from ppfleet.tipc import plan
from ppfleet.tipc.command import TRAINERS, LocalMachine
from ppfleet.tipc.config import Config
from ppfleet.tipc.reader import ConfigLine, read

# A warning is about something that this runner accepts and others may not.
ERROR, WARNING = "error", "warning"
_TRUTH = ("true", "false", "null", "")
_TRAINERS = (*TRAINERS, "pact_train", "fpgm_train", "distill_train", "quant_train", "ptq_train")


@dataclass(frozen=True)
class LintProblem:
    level: str
    line: int  # the number that an editor shows; 0: the whole file
    text: str

    def __str__(self) -> str:
        return f"{f'line {self.line}: ' if self.line else ''}{self.level}: {self.text}"


def lint(path: str | Path, mode: str = "") -> list[LintProblem]:
    """All problems of that file, for one mode or for all modes that it has values for.

    >>> [str(problem) for problem in lint("train_infer_python.txt")]
    ["line 5: warning: 'Ture' looks like a misspelt True"]
    """
    lines = read(path)
    problems = _bytes(Path(path).read_bytes())
    for check in (_spelling, _normal_train, _addresses):
        problems += check(lines)
    known = {(f.level, f.line) for f in problems}
    try:
        config = tipc.parse(path)
        for name in ("epochs", "batch_size"):
            if not config.lines[name].value:
                text = f"{config.lines[name].key!r} has no value, so it is not passed; write `null` if that is intended"
                problems.append(LintProblem(WARNING, config.lines[name].source, text))
        trains = mode != "whole_infer" and config.value("trainer")
        problems += _trainers(config) if trains else []
        for wanted in [mode] if mode else _modes(config) if trains else []:
            plan.make(config, wanted, LocalMachine())
    except ConfigError as failure:
        located = _located(failure, path)
        problems += [located] if (located.level, located.line) not in known else []
    return sorted(set(problems), key=lambda f: (f.line, f.level, f.text))


def _located(failure: ConfigError, path: str | Path) -> LintProblem:
    """A ConfigError as a problem of its line, or of the whole file."""
    fields = failure.fields
    if "problem" in fields:
        return LintProblem(ERROR, fields["line"], f"{fields['content']}: {fields['problem']}")
    return LintProblem(ERROR, fields.get("line", 0), str(failure).removeprefix(f"{path}: "))


def _modes(config: Config) -> list[str]:
    """The training modes that the file has values for."""
    line = config.lines["epochs"]
    known = [mode for mode in tipc.MODES if any(part.startswith(f"{mode}=") for part in line.values())]
    return known or [tipc.MODES[0]]


def _bytes(data: bytes) -> list[LintProblem]:
    rows = data.split(b"\n")
    ends = [number for number, row in enumerate(rows, 1) if row.endswith(b"\r")]
    problems = []
    if ends:
        subject = f"{len(ends)} lines end" if len(ends) > 1 else "the line ends"
        text = (
            f"{subject} with \\r\\n, as on Windows; a shell reads the \\r as part of the value "
            f"(`latest.pdparams\\r`): sed -i 's/\\r$//' <file>"
        )
        problems.append(LintProblem(WARNING, ends[0], text))
    if data.startswith(b"\xef\xbb\xbf"):
        problems.append(
            LintProblem(WARNING, 1, "a byte order mark before the first `=`: save the file as UTF-8 without BOM")
        )
    return problems


def _spelling(lines: list[ConfigLine]) -> list[LintProblem]:
    """Misspelt True and False."""
    problems = []
    for line in lines:
        if line.separator:
            continue
        for part in line.values():
            near = difflib.get_close_matches(part.lower(), ("true", "false"), 1, 0.75)
            if near and part.lower() not in _TRUTH and part.isalpha():
                problems.append(LintProblem(WARNING, line.source, f"{part!r} looks like a misspelt {near[0].title()}"))
    return problems


def _normal_train(lines: list[ConfigLine]) -> list[LintProblem]:
    return [
        LintProblem(WARNING, line.source, "`normal_train` should be `norm_train`, here and as the key of its command")
        for line in lines
        if line.key == "normal_train" or (line.key == "trainer" and "normal_train" in line.values())
    ]


def _addresses(lines: list[ConfigLine]) -> list[LintProblem]:
    line = next((line for line in lines if line.key == "gpu_list"), None)
    problems = []
    for part in line.values() if line else []:
        try:
            tipc.parse_devices(line, part)  # type: ignore[arg-type]
        except ConfigError as failure:
            problems.append(_located(failure, ""))
    return problems


def _trainers(config: Config) -> list[LintProblem]:
    line = config.lines["trainer"]
    problems = []
    for name in config.trainers():
        if name not in _TRAINERS:
            text = f"TIPC knows no trainer {name!r}{tipc.did_you_mean(name, _TRAINERS)}"
            problems.append(LintProblem(WARNING, line.source, text))
        elif name not in TRAINERS:
            problems.append(LintProblem(WARNING, line.source, f"{name} runs only if --trainers lists it"))
    return problems


def summary(problems: list[LintProblem], path: str | Path) -> str:
    if not problems:
        return f"{path}: no problems"
    errors = sum(problem.level == ERROR for problem in problems)
    return f"{path}: {errors} error(s), {len(problems) - errors} warning(s)"
