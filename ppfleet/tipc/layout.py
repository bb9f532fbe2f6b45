"""What stands in which line, in both forms, and how to tell that a line is missing or too many. Pure."""

from __future__ import annotations

import re

from ppfleet.errors import ConfigError
from ppfleet.tipc.lines import Line

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
    counted = "" if trainer.source == trainer.number else f", or {trainer.number} without blank ones"
    said = f"`trainer:` is line {trainer.source}{counted}; the {TRAINER_AT[form]} form has it in {form}"
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
        hint = "; a line is missing before this one" if line.separator else ""
        if shift:
            what = f"{abs(shift)} line{'s are' if abs(shift) > 1 else ' is'} {'too many' if shift > 0 else 'missing'}"
            before = max(n for n in layout if n < number and layout[n].isupper())
            hint = f"; it stands in line {elsewhere[0].source}: {what} after line {lines[before - 1].source}"
        line.fail(f"expected {wanted} here, as line {number} of the {form} form{hint}")
