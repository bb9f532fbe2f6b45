"""The meaning of each line in both forms of the file, and checks for missing and extra lines. Pure."""

from __future__ import annotations

import re

from ppfleet.errors import ConfigError
from ppfleet.tipc.reader import ConfigLine

SHORT, LONG = "short", "long"
TRAINER_AT = {13: SHORT, 15: LONG}

# ConfigLine number -> its meaning. A name in capitals is the exact key that every published file has in that line.
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
LAST_REQUIRED = {SHORT: 31, LONG: 48}  # the lines after it are optional: benchmark and spare lines
_MAY_SEPARATE = (36, 37, 38, 39)  # lines of the long form that are `##` in some repositories
# Banners of other families of TIPC files, and the script that runs each.
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
    "infer": "the inference-only runner of its repository",
}


def check_family(lines: list[ConfigLine]) -> None:
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
        lines[0].fail(f"this file is of the {family} family, which {script} runs; this runner expects train_params")
    lines[0].fail("a TIPC training file must begin with ======train_params======")


def find_form(lines: list[ConfigLine]) -> str:
    """Short or long, decided by the position of `trainer:`, not by the number of lines."""
    at = [line for line in lines if line.key == "trainer"]
    if not at:
        raise ConfigError("no line `trainer:`; it must be line 13 of the short form or line 15 of the long form")
    if at[0].number not in TRAINER_AT:
        raise ConfigError(misplaced(lines, at[0]), line=at[0].source)
    return TRAINER_AT[at[0].number]


def misplaced(lines: list[ConfigLine], trainer: ConfigLine) -> str:
    """Why `trainer:` is in the wrong line: which line before it is missing or extra."""
    long = {line.key for line in lines} & {"train_infer_img_dir", "pact_train", "infer_quant"}
    form = next(at for at, name in TRAINER_AT.items() if name == (LONG if long else SHORT))
    shift = trainer.number - form
    counted = "" if trainer.source == trainer.number else f" ({trainer.number} without blank lines)"
    position = f"`trainer:` is line {trainer.source}{counted}, but must be line {form} of the {TRAINER_AT[form]} form"
    suspect = _first_shifted(lines, TRAINER_AT[form], trainer.number)
    return f"{position}: {_count(abs(shift), extra=shift > 0)} above it{suspect}"


# What a key looks like, where published files agree; keys of lines that are not listed can be anything.
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
    "norm_train": r"train",
    "pact_train": r"train",
    "fpgm_train": r"train",
    "distill_train": r"train",
    "save_inference_dir": r"save|inference|output|dir",
    "export_weight": r"pretrain|weight|checkpoint|model",
    "norm_export": r"export",
    "pact_export": r"export|quant",
    "fpgm_export": r"export",
    "distill_export": r"export",
    "infer_model": r"model",
    "infer_export": r"export|infer_mode",
    "infer_quant": r"quant",
    "infer_use_gpu": r"use.?gpu|device",
    "mkldnn": r"mkldnn|onednn",
    "cpu_threads": r"thread",
    "infer_batch_size": r"batch",
    "tensorrt": r"tensorrt|trt",
    "precision": r"precision|fp16|mode",
    "model_dir": r"model",
    "image_dir": r"image|img|input|data|path|file|source",
    "save_log_path": r"log",
    "benchmark": r"benchmark",
}


def fits(line: ConfigLine, name: str) -> bool:
    """Whether a line, judged by its key, can be the one that the layout has under that name."""
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


def _first_shifted(lines: list[ConfigLine], form: str, stop: int) -> str:
    for number, name in LAYOUTS[form].items():
        if number < stop and number <= len(lines) and not fits(lines[number - 1], name):
            return f" (line {lines[number - 1].source} is {lines[number - 1].text.strip()!r}, expected {name.lower()})"
    return ""


# Keys that are in the same line in every published file.
_PLACES = {
    "model_name": "MODEL_NAME", "python": "PYTHON", "gpu_list": "GPU_LIST", "trainer": "TRAINER", "eval": "EVAL",
    "inference": "INFERENCE", "train_model_name": "train_model_name", "trained_model_name": "train_model_name",
    "train_infer_img_dir": "train_infer_img_dir", "norm_export": "norm_export", "quant_export": "pact_export",
    "pact_export": "pact_export", "fpgm_export": "fpgm_export", "distill_export": "distill_export",
    "inference_dir": "inference_dir", "train_model": "infer_model", "infer_model": "infer_model",
    "infer_export": "infer_export", "infer_quant": "infer_quant",
}  # fmt: skip
_BANNERS = {1: "train_params", 16: "eval_params", 19: "infer_params", 23: "eval_params", 27: "infer_params"}


def check_places(lines: list[ConfigLine], form: str) -> None:
    """Check by its key that every line is where the form has it: a missing line shifts all lines after it."""
    layout = LAYOUTS[form]
    for line in lines:
        name = layout.get(line.number, "")
        if not name or (form == LONG and line.number in _MAY_SEPARATE and line.separator):
            continue
        if not line.separator and ":" not in line.text:
            wide = " (it has a full-width one)" if "\uff1a" in line.text else ""
            line.fail(f"no colon{wide}: expected `key:value` with {_shown(name)}")
        elsewhere = _PLACES.get(line.key, name) != name
        if fits(line, name) and not elsewhere:
            continue
        step = next((step for step in (1, -1, 2, -2, 3, -3) if _belongs(line, layout, line.number + step)), 0)
        strict = name.isupper() or name in ("##", "train_model_name")
        if elsewhere or step or strict or line.separator:
            line.fail(f"expected {_shown(name)} as line {line.number} of the {form} form{_hint(line, step)}")


def _shown(name: str) -> str:
    return {"BANNER": "a ======banner======", "##": "`##`"}.get(name, f"`{name.lower()}:`" if name.isupper() else name)


def _belongs(line: ConfigLine, layout: dict[int, str], number: int) -> bool:
    """Whether a line certainly is the one that the form has at that number."""
    name = layout.get(number, "")
    if line.banner is not None:
        return name == "BANNER" and line.banner == _BANNERS.get(number)
    if line.separator:
        return name == "##"
    if line.key in _PLACES:
        return _PLACES[line.key] == name
    return name in _LOOKS and line.key not in ("", "null") and fits(line, name)


def _hint(line: ConfigLine, step: int) -> str:
    """What probably happened, if a line belongs that many lines further down."""
    if not step:
        return "; a line is missing before this one" if line.separator else ""
    count = _count(abs(step), extra=step < 0)
    return f"; it belongs in line {line.number + step}: {count} before it, or the order is wrong"


def _count(lines: int, extra: bool) -> str:
    return f"{lines} line{'s are' if lines > 1 else ' is'} {'too many' if extra else 'missing'}"
