"""TIPC text files in both forms, and a small repository whose scripts do what they are told, for tests of the runner.

The scripts are real processes that end in the way a test asks for; the real model repository is run in tests/hosts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness import ROOT, environment

SHORT = """\
===========================train_params===========================
model_name:toy
python:python3.7
gpu_list:0|0,1
use-gpu:True
--epochs:lite_train_lite_infer=5|whole_train_whole_infer=90
--output-dir:./output/
--batch-size:lite_train_lite_infer=4|whole_train_whole_infer=64
--pretrained:null
train_model_name:latest.pdparams
--data-path:./data
##
trainer:norm_train
norm_train:train.py
##
===========================eval_params===========================
eval:eval.py
##
===========================infer_params===========================
--save-inference-dir:./exported
--pretrained:
norm_export:export.py
##
train_model:./weights.pdparams
infer_export:export.py
##
inference:infer.py
--use-gpu:True|False
--batch-size:1|4
--model-dir:
--img-path:./images
--benchmark:True
"""

LONG = """\
===========================train_params===========================
model_name:rec
python:python3.7
gpu_list:0|0,1
Global.use_gpu:True|True
Global.auto_cast:null
Global.epoch_num:lite_train_lite_infer=2|whole_train_whole_infer=300
Global.save_model_dir:./output/
Train.loader.batch_size_per_card:lite_train_lite_infer=16|whole_train_whole_infer=128
Global.pretrained_model:null
train_model_name:latest
train_infer_img_dir:./inference/images
null:null
##
trainer:norm_train
norm_train:tools/train.py -c configs/rec.yml -o Global.print_batch_step=1
pact_train:null
fpgm_train:null
distill_train:null
null:null
null:null
##
===========================eval_params===========================
eval:tools/eval.py -c configs/rec.yml -o
null:null
##
===========================infer_params===========================
Global.save_inference_dir:./output/
Global.checkpoints:
norm_export:tools/export_model.py -c configs/rec.yml -o
quant_export:null
fpgm_export:null
distill_export:null
export1:null
export2:null
inference_dir:Student
infer_model:./inference/rec/
infer_export:null
infer_quant:Fasle
inference:tools/infer/predict_rec.py --rec_image_shape="3,48,320"
--use_gpu:True|False
--enable_mkldnn:True|False
--cpu_threads:1|6
--rec_batch_num:1|6
--use_tensorrt:False|True
--precision:fp32
--rec_model_dir:
--image_dir:./inference/images
--save_log_path:null
--benchmark:True
null:null
"""

FILE = "test_tipc/configs/mobilenet_v3_small/train_infer_python.txt"
FLEET_FILE = "test_tipc/configs/mobilenet_v3_small/train_fleet_infer_python.txt"

_COMMON = """
import os, pathlib, signal, sys, time
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:] if "=" in word)
def end(how):
    if how == "fail": sys.exit(3)
    if how == "255": sys.exit(255)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang": print("now I hang", flush=True); time.sleep(600)
print(pathlib.Path(sys.argv[0]).name, "runs", flush=True)
end(options.get("break"))
"""
SCRIPTS = {
    "train.py": """
out = pathlib.Path(options["output-dir"])
out.mkdir(parents=True, exist_ok=True)
print("ips: 1.0 samples/s"); print("ips: 20.5 samples/s")
if options.get("break") != "nothing": (out / "latest.pdparams").write_text("weights")
""",
    "eval.py": "assert pathlib.Path(options['pretrained']).exists()",
    "export.py": """
out = pathlib.Path(options["save-inference-dir"])
out.mkdir(parents=True, exist_ok=True)
if options.get("break") != "nothing":
    (out / "inference.pdiparams").write_text("p"); (out / "inference.json").write_text("{}")
""",
    "infer.py": """
assert (pathlib.Path(options["model-dir"]) / "inference.pdiparams").exists()
if options.get("break") != "nothing":
    say = lambda text: print("[2026/11/17 00:00:00] infer INFO: " + text)
    say("----------------------- Perf info -----------------------")
    say(" cpu_rss(MB): 288.957, gpu_rss(MB): None, gpu_util: None%")
    say(" total time spent(s): 0.4824")
    say(" preprocess_time(ms): 0.1136, inference_time(ms): 79.5877, postprocess_time(ms): 0.6945")
    say(" images/s: 12.5 (inference alone: 13)")
""",
}


def edited(text: str, *changes: tuple[str, str]) -> str:
    """The text with each (line as it is, line as it shall be) changed; an unknown line is the test's mistake."""
    for before, after in changes:
        assert f"{before}\n" in text, before
        text = text.replace(f"{before}\n", f"{after}\n" if after else "", 1)
    return text


def repository(directory: Path) -> Path:
    """A repository for SHORT: scripts, data, images, weights."""
    for name, body in SCRIPTS.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(_COMMON + body)
    for name in ("data", "images"):
        (directory / name).mkdir()
    (directory / "weights.pdparams").write_text("w")
    return directory


def model_repository(directory: Path) -> Path:
    """A copy of what the commands of the documents need, its files at a size that CI can afford."""
    for name in ("ppfleet", "models", "tools", "deploy", "test_tipc/configs"):
        ignored = shutil.ignore_patterns("__pycache__", "output")
        shutil.copytree(ROOT / name, directory / name, ignore=ignored)
    for path in (ROOT / "test_tipc").glob("*.sh"):
        shutil.copy(path, directory / "test_tipc")
    for name, trainer in ((FILE, "norm_train"), (FLEET_FILE, "fleet_train")):
        small = (f"{trainer}:tools/train.py", f"{trainer}:tools/train.py --image-size=32 --workers=0")
        (directory / name).write_text(edited((ROOT / name).read_text(), small))
    return directory


def tipc(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m ppfleet tipc …` in that directory."""
    command = [sys.executable, "-m", "ppfleet", "tipc", *arguments]
    return subprocess.run(
        command, cwd=directory, env=surroundings(env), capture_output=True, text=True, timeout=120, check=False
    )


def surroundings(env: dict[str, str] | None = None) -> dict[str, str]:
    return environment(0, [], {"PYTHONPATH": str(ROOT), **(env or {})})
