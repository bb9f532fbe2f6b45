"""After training: export, inference on the card, and how fast training is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ppfleet import foreign
from ppfleet.commands.check_cards.facts import ROOT
from ppfleet.commands.check_cards.items import Result, failed, not_run, passed
from ppfleet.commands.check_cards.lab import Lab
from ppfleet.commands.check_cards.numeric import SEND
from ppfleet.commands.check_cards.ranks import RunFailed
from ppfleet.distributed.devices import GPU

_INFER = ROOT / "deploy" / "inference_python" / "infer.py"
_SCORES = 1e-2  # by how much a probability may differ between CPU and card
_SLOWEST = 0.9  # of a plain loop's images/s


def export(lab: Lab) -> Result:
    run = lab.run("export", lab.cards, {"task": "export"})
    told = run.told[0]
    worst = told["parity"]["largest_error"]
    sentence = (
        f"exported after training on {lab.cards} card(s), and trained on; the static model agrees within {worst:.1e}"
    )
    return passed(sentence, parity=told["parity"])


def inference(lab: Lab) -> Result:
    return _infer(lab, "inference", [])


def tensorrt(lab: Lab) -> Result:
    if lab.row.name == GPU.name and not lab.found["tensorrt"]:
        return not_run("this Paddle was built without TensorRT, or the library is not installed")
    return _infer(lab, "tensorrt", ["--use-tensorrt=True"])


def _infer(lab: Lab, name: str, flags: list[str]) -> Result:
    model = lab.run_directory("export") / "export"
    if lab.row.name != GPU.name:
        return not_run(f"the script infer.py runs on CPUs and {GPU.title}s, not on a {lab.row.title}")
    if not _INFER.is_file():
        return not_run("needs deploy/inference_python, which an installed ppfleet does not have", "run it in a clone")
    if not (model / "export.json").is_file():
        return not_run("needs the exported model, which was not made")
    images = _images(lab.place(name))
    on_cpu = _predictions(lab, name, "cpu", model, images, [])
    on_card = _predictions(lab, name, "card", model, images, ["--use-gpu=True", *flags])
    worst = max(
        abs(one["score"] - other["score"])
        for mine, theirs in zip(on_cpu, on_card)
        for one, other in zip(sorted(mine, key=_label), sorted(theirs, key=_label))
    )
    if not worst <= _SCORES:
        return failed(
            f"the card's probabilities differ from the CPU's by {worst:.1e}", SEND, lab.place(name), difference=worst
        )
    return passed(f"{len(on_cpu)} images: the card's probabilities are the CPU's within {worst:.1e}", difference=worst)


def _label(one: dict[str, Any]) -> int:
    return int(one["label"])


def _images(directory: Path) -> Path:
    from matplotlib.image import imsave

    folder = directory / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        imsave(folder / f"{number}.png", np.random.RandomState(number).randint(0, 255, (48, 48, 3)).astype("uint8"))
    return folder


def _predictions(
    lab: Lab, name: str, place: str, model: Path, images: Path, flags: list[str]
) -> list[list[dict[str, Any]]]:
    """All classes of each image, as infer.py writes them."""
    out, log = lab.place(name, f"{place}.json"), lab.place(name, f"{place}.log")
    command = [sys.executable, str(_INFER), f"--model-dir={model}", f"--img-path={images}", f"--json={out}",
               "--backend=paddle", "--topk=10", *flags]  # fmt: skip
    with log.open("wb") as stream:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, timeout=lab.limit, check=False
        )
    if done.returncode:
        words = foreign.telling_line(log.read_text(errors="replace"), last=True)[:300]
        raise RunFailed(f"infer.py on the {place} ended with exit code {done.returncode}: {words}", log)
    told = json.loads(out.read_text(encoding="utf-8"))
    return [one["top"] for one in told["images"]]


def speed(lab: Lab) -> Result:
    large = not lab.quick and not lab.simulated
    task = {
        "task": "speed",
        "large": large,
        "batch": 32 if large else 16,
        "block": 10 if large else 5,
        "rounds": 12 if large else 5,
    }
    run = lab.run("speed", lab.cards, task, NVIDIA_TF32_OVERRIDE="", FLAGS_cudnn_deterministic="")  # as users train
    told = run.told[0]
    low, high = told["ratios"][0], told["ratios"][-1]
    sentence = (
        f"{told['network']} at {told['size']}×{told['size']}, batch {told['batch']} on each of {lab.cards} card(s): "
        f"{told['job']:.1f} images/s by Job, {told['plain']:.1f} by a plain loop, ratio {told['ratio']:.3f} "
        f"({low:.3f} to {high:.3f}); "
        + (f"{told['copies']:g} device-to-host copies a step of Job" if told["copies"] else "copies were not counted")
    )
    figures = {name: told[name] for name in ("job", "plain", "ratio", "network", "size", "batch", "copies")}
    if lab.simulated or lab.quick:
        why = "a simulated card has no speed" if lab.simulated else "--quick uses a network that is too small"
        return passed(f"{sentence}; not judged: {why}", **figures, judged=False)
    if told["ratio"] < _SLOWEST:
        return failed(f"{sentence}: Job is more than 10 % slower", SEND, run.log, **figures, judged=True)
    return passed(sentence, **figures, judged=True)
