"""TIPC's text file: `key:value` lines whose meaning goes by line number, in two forms. Pure.

The key is data too: usually the exact flag to emit. Blank lines are dropped before lines are numbered; `=====name=====`
and `#` lines keep their number. Errors name the line as an editor shows it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ppfleet.errors import ConfigError

MODES = (
    "lite_train_lite_infer",
    "lite_train_whole_infer",
    "whole_train_whole_infer",
    "whole_infer",
    "benchmark_train",
)
OTHER_MODES = ("klquant_whole_infer",)  # known, of other scripts
SHORT, LONG = "short", "long"
TRAINER_AT = {13: SHORT, 15: LONG}

# Line number -> what stands there. A name in capitals is the exact key that every published file has in that line.
_SHORT = """
1 BANNER  2 MODEL_NAME  3 PYTHON  4 GPU_LIST  5 use_gpu  6 epochs  7 output_dir  8 batch_size  9 pretrained
10 train_model_name  11 data_path  12 ##  13 TRAINER  14 norm_train  15 ##  16 BANNER  17 EVAL  18 ##  19 BANNER
20 save_inference_dir  21 export_weight  22 norm_export  23 ##  24 infer_model  25 infer_export  26 ##  27 INFERENCE
28 infer_use_gpu  29 infer_batch_size  30 model_dir  31 image_dir  32 benchmark
"""
_LONG = """
1 BANNER  2 MODEL_NAME  3 PYTHON  4 GPU_LIST  5 use_gpu  6 autocast  7 epochs  8 output_dir  9 batch_size  10 pretrained
11 train_model_name  12 train_infer_img_dir  13 train_spare  14 ##  15 TRAINER  16 norm_train  17 pact_train
18 fpgm_train  19 distill_train  20 trainer1  21 trainer2  22 ##  23 BANNER  24 EVAL  25 eval_spare  26 ##  27 BANNER
28 save_inference_dir  29 export_weight  30 norm_export  31 pact_export  32 fpgm_export  33 distill_export  34 export1
35 export2  36 inference_dir  37 infer_model  38 infer_export  39 infer_quant  40 INFERENCE  41 infer_use_gpu  42 mkldnn
43 cpu_threads  44 infer_batch_size  45 tensorrt  46 precision  47 model_dir  48 image_dir  49 save_log_path
50 benchmark  51 infer_spare
"""


def _layout(table: str) -> dict[int, str]:
    words = table.split()
    return dict(zip(map(int, words[::2]), words[1::2]))


LAYOUTS = {SHORT: _layout(_SHORT), LONG: _layout(_LONG)}
LAST_REQUIRED = {SHORT: 31, LONG: 48}  # the lines after it may be missing: no benchmark, nothing spare
_MAY_SEPARATE = (36, 37, 38, 39)  # lines of the long form that some repositories leave as `##`
TRAIN_BENCHMARK = "train_benchmark_params"

# Banners of other families, and the script that each belongs to.
FAMILIES = {
    "ptq": "test_ptq_inference_python.sh",
    "kl_quant": "test_ptq_inference_python.sh",
    "serving": "test_serving.sh",
    "cpp_infer": "test_inference_cpp.sh",
    "inference_cpp": "test_inference_cpp.sh",
    "infer_cpp": "test_inference_cpp.sh",
    "paddle2onnx": "test_paddle2onnx.sh",
    "lite_arm": "test_lite_arm_cpp.sh",
    "lite": "test_lite_arm_cpp.sh",
    "js_infer": "test_inference_js.sh",
    "infer": "the inference-only runner of its own repository",
}


@dataclass(frozen=True)
class Line:
    """One line: `number` decides its meaning, `source` is where an editor shows it."""

    number: int
    source: int
    text: str

    @property
    def key(self) -> str:
        return self.text.partition(":")[0].strip()

    @property
    def value(self) -> str:
        return self.text.partition(":")[2].strip()

    @property
    def banner(self) -> str | None:
        """The name in `=====name=====`."""
        found = re.fullmatch(r"=+\s*(.*?)\s*=+", self.text.strip())
        return found.group(1) if found else None

    @property
    def separator(self) -> bool:
        return self.text.lstrip().startswith("#") or self.banner is not None

    def values(self) -> list[str]:
        """The alternatives between `|`."""
        return [part.strip() for part in self.value.split("|")]

    def fail(self, message: str) -> NoReturn:
        raise ConfigError(f"line {self.source} ({self.text.strip()!r}): {message}")


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

    def trainers(self) -> list[str]:
        line = self.lines["trainer"]
        named = ["norm_train" if name == "normal_train" else name for name in line.values()]
        if not all(map(present, named)):
            line.fail("names no trainer: norm_train, amp_train or fleet_train")
        return list(dict.fromkeys(named))


def present(text: str) -> str:
    """The text, or nothing where it says `null`."""
    return "" if text.strip() == "null" else text.strip()


def _by_mode(line: Line) -> bool:
    return any(part.partition("=")[0].strip() in (*MODES, *OTHER_MODES) and "=" in part for part in line.values())


def for_mode(line: Line, mode: str) -> str:
    """`mode=value|mode=value` picks by mode, a plain value serves every mode."""
    if not _by_mode(line):
        return present(line.value)
    choices = {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in line.values())}
    if mode not in choices:
        line.fail(f"no value for {mode}, only for {', '.join(choices)}; add `|{mode}=…`")
    return present(choices[mode])


def words(text: str, line: Line) -> list[str]:
    """Arguments as a shell would split them; nothing else of a shell's happens to them."""
    if not any(mark in text for mark in "\"'\\"):
        return text.split()  # nearly always, and forty times as fast
    try:
        return shlex.split(text)
    except ValueError as failure:
        line.fail(f"{failure}: a quotation mark is missing")


def read(path: str | Path) -> list[Line]:
    """The numbered lines of a file."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; give one of its .txt files") from None
    except OSError as failure:
        raise ConfigError(f"cannot read {path}: {failure.strerror}") from None
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{path} is no UTF-8 text (byte {failure.start}): save it as UTF-8") from None
    kept = [(source, line) for source, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [Line(number, source, line) for number, (source, line) in enumerate(kept, 1)]


def parse(path: str | Path) -> Config:
    """The file as a Config; a ConfigError says what is wrong with it, `lint` says it at length."""
    path = Path(path)
    lines = read(path)
    try:
        return _parse(path, lines)
    except ConfigError as failure:
        raise ConfigError(f"{path}: {failure}") from None


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
    check_anchors(lines[:tails_at], form)
    named = {
        name.lower(): lines[number - 1]
        for number, name in layout.items()
        if number <= tails_at and name not in ("BANNER", "##") and not lines[number - 1].separator
    }
    config = Config(path, form, named, _tails(lines[tails_at:]))
    if not re.fullmatch(r"[^/\s]+", config.model) or config.model in (".", ".."):
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


def check_family(lines: list[Line]) -> None:
    if not lines:
        raise ConfigError("the file is empty")
    banner = lines[0].banner
    if banner == "train_params":
        return
    if banner is not None:
        family = banner.removesuffix("_params")
        script = FAMILIES.get(family) or next(
            (s for f, s in FAMILIES.items() if family.startswith(f)), "another script"
        )
        lines[0].fail(f"a file of the {family} family, which belongs to {script}; this runner takes train_params")
    lines[0].fail("a TIPC training file begins with ======train_params======")


def find_form(lines: list[Line]) -> str:
    """Short or long: by where `trainer:` stands, never by counting lines."""
    at = [line for line in lines if line.key == "trainer"]
    if not at:
        raise ConfigError("no line `trainer:`; it is line 13 of the short form, 15 of the long form")
    if at[0].number not in TRAINER_AT:
        raise ConfigError(misplaced(lines, at[0]))
    return TRAINER_AT[at[0].number]


def misplaced(lines: list[Line], trainer: Line) -> str:
    """Why `trainer:` is in neither of its places: which line is missing or too many before it."""
    long = {line.key for line in lines} & {"train_infer_img_dir", "pact_train", "infer_quant"}
    form = next(at for at, name in TRAINER_AT.items() if name == (LONG if long else SHORT))
    shift = trainer.number - form
    said = (
        f"`trainer:` is line {trainer.source}, counted {trainer.number}; the {TRAINER_AT[form]} form has it in {form}"
    )
    suspect = _first_shifted(lines, TRAINER_AT[form], trainer.number)
    what = f"{abs(shift)} line{'s are' if abs(shift) > 1 else ' is'} {'too many' if shift > 0 else 'missing'} above"
    return f"{said}: {what}{suspect}, so that every line after has another meaning"


_LOOKS = {
    "use_gpu": r"use.?gpu|device",
    "autocast": r"auto.?cast|amp",
    "epochs": r"epoch|iter",
    "output_dir": r"output|save|dir",
    "batch_size": r"batch",
    "pretrained": r"pretrain|weight|resume|checkpoint",
    "train_model_name": r"train(ed)?_model_name",
    "data_path": r"data",
    "train_infer_img_dir": r"train_infer|img|image|dir",
}


def fits(line: Line, name: str) -> bool:
    """Whether a line may stand where the layout has that name, as far as its key tells."""
    if name == "BANNER":
        return line.banner is not None
    if name == "##":
        return line.separator
    if name in ("EVAL", "INFERENCE") and line.key == "null":
        return True
    if name.isupper():
        return line.key.lower() == name.lower()
    if line.separator:
        return False
    looks = _LOOKS.get(name)
    return looks is None or line.key in ("", "null") or re.search(looks, line.key, re.IGNORECASE) is not None


def _first_shifted(lines: list[Line], form: str, stop: int) -> str:
    for number, name in LAYOUTS[form].items():
        if number < stop and number <= len(lines) and not fits(lines[number - 1], name):
            return (
                f" (line {lines[number - 1].source} is {lines[number - 1].text.strip()!r}, expected is {name.lower()})"
            )
    return ""


def check_anchors(lines: list[Line], form: str) -> None:
    """The keys that every published file has in the same line; a line that is missing shifts all after it."""
    layout = LAYOUTS[form]
    for number, name in layout.items():
        if number > len(lines) or name == "##" or number in _MAY_SEPARATE and form == LONG:
            continue
        if fits(lines[number - 1], name) if name.isupper() else not lines[number - 1].separator:
            continue
        line, wanted = lines[number - 1], "a ======banner======" if name == "BANNER" else f"`{name.lower()}:`"
        near = [other for other in lines if number - 3 <= other.number <= number + 3]
        elsewhere = [other for other in near if name.isupper() and fits(other, name)]
        shift = elsewhere[0].number - number if elsewhere else 0
        hint = ""
        if shift:
            what = f"{abs(shift)} line{'s are' if abs(shift) > 1 else ' is'} {'too many' if shift > 0 else 'missing'}"
            before = max(n for n in layout if n < number and layout[n].isupper())
            hint = f"; it stands in line {elsewhere[0].source}: {what} after line {lines[before - 1].source}"
        line.fail(f"expected {wanted} here, as line {number} of the {form} form{hint}")


def parse_devices(line: Line, text: str) -> Fleet:
    """`-1`, `0`, `0,1`, or `ip,ip;0,1`: nodes are told by `;` and counted by `,`."""
    addresses, several, devices = text.rpartition(";")
    if several and ";" in addresses:
        line.fail(f"{text!r} has more than one `;`: expected is ip,ip;0,1")
    together = "".join(text.split())
    if together != text:
        line.fail(f"{text!r} holds a blank, where a shell would cut it in two: write {together}")
    nodes = tuple(addresses.split(",")) if several else ()
    for node in nodes:
        if not re.fullmatch(r"\[?[0-9A-Za-z_.:%-]+\]?", node):
            line.fail(f"{node!r} is no address or host name; expected is ip,ip;0,1")
    twice = {node for node in nodes if nodes.count(node) > 1}
    if twice:
        line.fail(f"{', '.join(sorted(twice))} is listed twice: each node once")
    ids = devices.split(",")
    if devices == "-1":
        return Fleet(nodes, (), devices)
    if not all(device.isdecimal() for device in ids) or len(set(ids)) < len(ids):
        expected = "-1 (CPU), 0, 0,1 or ip,ip;0,1, several runs separated by |"
        if re.search(r"[.:]|[A-Za-z]", text) and not several:
            line.fail(f"{text!r} lists addresses without devices: expected is {text};0,1")
        line.fail(f"{text!r} is no list of devices; expected is {expected}")
    return Fleet(nodes, tuple(ids), devices)
