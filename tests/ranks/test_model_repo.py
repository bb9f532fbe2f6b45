"""The tools as a user types them: under Paddle's launcher, killed and started again, evaluated, exported, deployed."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from tests.harness import ROOT, environment, free_ports, run, run_raising, wait_for

SMALL = ["--device=cpu", "--image-size=32", "--batch-size=16", "--crop=0.6", "--augment=none", "--workers=0"]


def command(ranks, log_dir, *arguments):
    made = [sys.executable]
    if ranks > 1:
        made += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks), "--log_dir", str(log_dir)]
        made += ["--start_port", str(free_ports(1)[0]), "--ips", "127.0.0.1"]
    return [*made, *(str(argument) for argument in arguments)]


def call(place, ranks, script, *arguments, code=0):
    """Run one of the repository's scripts from another directory; what it printed."""
    done = subprocess.run(
        command(ranks, place / "launch", ROOT / script, *arguments),
        cwd=place,
        env=environment(0, []),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(lite_data, tmp_path_factory):
    """Every tenth digit (144 to train on, 36 to evaluate with), and a run of two ranks and three epochs on them."""
    root = tmp_path_factory.mktemp("repo")
    for path in lite_data.glob("*/*/*.png"):
        if int(path.stem) // 5 % 10 == 0:
            (root / "data" / path.relative_to(lite_data).parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / "data" / path.relative_to(lite_data))
    shutil.copytree(lite_data / "test", root / "data/test")
    root.joinpath("said").write_text(
        call(root, 2, "tools/train.py", "--data-path=data", "--output-dir=run", "--epochs=3", *SMALL)
    )
    # Three epochs teach a network too little to tell pictures apart, so here are weights that do.
    (root / "spread").mkdir()
    run(write_spread_weights, 1, root / "out", str(root / "data"), str(root / "spread/latest.pdparams"))
    shutil.copy(root / "run/model.json", root / "spread/model.json")
    return root


def test_what_a_run_leaves(place):
    said = place.joinpath("said").read_text()
    assert "lr_rule=0.1 at a global batch of 256, so 0.0125 at 32; linear warm-up" in said
    assert len(re.findall(r"eval: top1: [\d.]+, top5: [\d.]+, loss: [\d.]+, samples: 36", said)) == 3
    settings = json.loads((place / "run/settings.json").read_text())
    assert settings["global_batch"] == 32 and settings["data"]["train"] == 144 and settings["options"]["epochs"] == 3
    assert settings["lr_rule"].startswith("0.1 at a global batch of 256, so 0.0125 at 32")
    card = json.loads((place / "run/model.json").read_text())
    assert card["classes"] == list("0123456789") and card["preprocess"]["crop"] == 32
    assert (place / "run/latest.pdparams").exists() and (place / "run/best.pdparams").exists()


def test_visualdl_holds_curves_and_pictures(place):
    from visualdl import LogReader

    (log,) = (place / "run/visualdl").glob("*.log")
    reader = LogReader(file_path=str(log))
    tags = reader.get_tags()
    assert {"train/loss", "train/lr", "train/ips", "eval/top1"} <= set(tags["scalar"])
    assert {"input", "confusion"} <= set(tags["image"])
    assert [record.id for record in reader.get_data("scalar", "eval/top1")] == [4, 8, 12]
    rates = [record.value for record in reader.get_data("scalar", "train/lr")]
    assert len(rates) == 3 and rates[0] > rates[1] > rates[2] and rates[2] < 0.1 * rates[0]


def write_spread_weights(root, path):
    import numpy as np
    import paddle

    from deploy.inference_python import preprocess
    from models.mobilenet_v3_small import data
    from tests import blocks

    pictures = [preprocess.prepare(file, preprocess.settings(32)) for file, _ in data.find(root).val]
    paddle.save(blocks.spread_network(10, np.stack(pictures)).state_dict(), path)


def evaluated(place, ranks, weights, *arguments):
    """The line that eval.py printed, its eval.json, and what it leaves for a page."""
    said = call(
        place, ranks, "tools/eval.py", "--device=cpu", "--data-path=data", f"--pretrained={weights}", *arguments
    )
    line = re.search(r"^top1: [\d.]+ top5: [\d.]+ samples: 36$", said, re.M).group()
    run = (place / weights).parent
    told, seen = (json.loads((run / name).read_text()) for name in ("eval.json", "eval/evaluation.json"))
    return line, told, {name: value for name, value in seen.items() if name != "time"}


def test_evaluation_is_the_same_on_any_number_of_ranks_and_in_deployment(place):
    shutil.copy(place / "run/settings.json", place / "spread/other things")
    results = [evaluated(place, ranks, "spread/latest.pdparams") for ranks in (1, 2, 3)]
    assert results[0] == results[1] == results[2]
    _, told, seen = results[0]
    right = sum(count for truth, guess, count in seen["pairs"] if truth == guess)
    assert sum(count for *_, count in seen["pairs"]) == 36 and right / 36 == told["top1"]
    worst = seen["mistakes"][0]
    assert worst["name"].startswith(f"val/{seen['classes'][worst['truth']]}/") and worst["picture"].startswith("/9j/")
    assert told["weights"] == "spread/latest.pdparams" and told["data"]["val"] == 36 and told["data"]["fingerprint"]
    _, other, _ = evaluated(place, 1, "spread/latest.pdparams", "--image-size=64")
    assert other["loss"] != told["loss"]  # model.json's own size was used before
    weights = ["--model=mobilenet_v3_small", "--pretrained=spread/latest.pdparams"]
    said = call(place, 1, "tools/export.py", *weights, "--save-inference-dir=spread")
    assert re.search(r"exported to spread: 10 classes, 32x32, static and dynamic outputs agree within [\d.e-]+", said)
    assert (place / "spread/other things").exists()
    images = ["--model-dir=spread", "--img-path=data/val", "--batch-size=5", "--json=out.json"]
    call(place, 1, "deploy/inference_python/infer.py", *images)
    deployed = json.loads((place / "out.json").read_text())
    assert len({answer["top"][0]["class"] for answer in deployed["images"]}) > 3
    assert deployed["accuracy"] == {name: told[name] for name in ("top1", "top5", "samples")}


def test_test_only_says_what_training_said(place):
    weights = ["--pretrained=spread/latest.pdparams", "--lr=0.001"]
    trained = call(place, 1, "tools/train.py", "--data-path=data", "--output-dir=tuned", "--epochs=1", *weights, *SMALL)
    arguments = ["--use-gpu=False", "--data-path=data", "--pretrained=tuned/latest.pdparams", "--output-dir=elsewhere"]
    said = call(place, 1, "tools/train.py", "--test-only", *arguments)
    assert re.search(r"^top1: [\d.]+ top5: [\d.]+ samples: 36$", said, re.M)
    last = re.findall(r"eval: (top1: \S+, top5: \S+, loss: \S+), samples", trained)[-1]
    told = json.loads((place / "elsewhere/eval.json").read_text())
    assert last == ", ".join(f"{name}: {told[name]:.6g}" for name in ("top1", "top5", "loss"))


def test_options_reach_the_training(place):
    broken = copy_with_a_bad_image(place)
    options = ["--epochs=1", "--skip-bad-images", "--accumulate=2", "--lr=0.2", *SMALL]
    said = call(place, 1, "tools/train.py", f"--data-path={broken}", "--output-dir=options", *options)
    assert "1 of 180 images cannot be read and are left out" in said
    assert "lr_rule=0.2 at a global batch of 256, so 0.025 at 32" in said
    assert re.search(r"saved \S+-step-4,", said)  # 8 batches of 16, two a step
    weights = set()
    for option in ("--seed=0", "--seed=7", "--mixup=0.2", "--augment=flip", "--crop=0.9"):
        options = ["--epochs=1", *SMALL, "--batch-size=72", option]
        call(place, 1, "tools/train.py", "--data-path=data", "--output-dir=varied", "--resume=none", *options)
        weights.add((place / "varied/latest.pdparams").read_bytes())
    assert len(weights) == 5


def copy_with_a_bad_image(place):
    if not (place / "broken").exists():
        shutil.copytree(place / "data", place / "broken")
        next((place / "broken/train/3").glob("*.png")).write_text("not an image")
    return "broken"


def split_files(directory, data):
    """Two ranks that evaluate with different files."""
    sys.path.insert(0, str(ROOT / "tools"))
    import os

    import train

    mine = f"{data}/rank{os.environ['PADDLE_TRAINER_ID']}"
    arguments = [f"--data-path={mine}", f"--pretrained={directory}/run/latest.pdparams", f"--output-dir={data}/out"]
    train.main(["--test-only", "--device=cpu", "--batch-size=16", *arguments])


def test_ranks_with_different_files_are_not_mixed(place):
    for rank in (0, 1):
        shutil.copytree(place / "data/val", place / f"split/rank{rank}/val", dirs_exist_ok=True)
    next((place / "split/rank1/val/4").glob("*.png")).rename(place / "split/rank1/val/4/other.png")
    for kind, message in run_raising(split_files, 2, place / "out", str(place), str(place / "split")):
        assert kind == "MismatchError" and "different weights or data" in message and "fingerprint" in message


def test_fine_tuning_replaces_the_classifier(place):
    for name in ("5", "6", "7", "8", "9"):
        for split in ("train", "val"):
            shutil.copytree(place / "data" / split / name, place / "half" / split / f"digit {name}", dirs_exist_ok=True)
    said = call(
        place,
        1,
        "tools/train.py",
        "--data-path=half",
        "--output-dir=fine",
        "--epochs=1",
        "--pretrained=run/best.pdparams",
        *SMALL,
    )
    assert "208 of 210 tensors loaded" in said and "classifier.3.bias has shape [10], the model's [5]" in said
    call(place, 1, "tools/export.py", "--pretrained=fine/latest.pdparams")
    stamp = json.loads((place / "fine/export/export.json").read_text())
    assert stamp["classes"] == [f"digit {name}" for name in "56789"] and stamp["preprocess"]["crop"] == 32


def steps_of(run):
    return [int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").glob("0*-step-*")]


def test_killed_and_started_again_it_goes_on(place):
    arguments = ["--data-path=data", "--output-dir=killed", "--epochs=3", "--save-every=1", *SMALL]
    launcher = subprocess.Popen(
        command(2, place / "launch", ROOT / "tools/train.py", *arguments),
        cwd=place,
        env=environment(0, []),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def in_the_second_epoch():
            assert launcher.poll() is None
            return any(step >= 6 for step in steps_of(place / "killed"))

        wait_for(in_the_second_epoch, 120, "a checkpoint of step 6")
        # Launcher and ranks, in the middle of the second epoch.
        everybody = psutil.Process(launcher.pid)
        for process in [everybody, *everybody.children(recursive=True)]:
            process.kill()
    finally:
        launcher.wait(30)
    reached = max(steps_of(place / "killed"))
    assert 6 <= reached < 12
    said = call(place, 2, "tools/train.py", *arguments)
    assert re.search(rf"resumed from \S+-step-{reached}: epoch \d, step {reached}, ", said), said[-3000:]
    whole, again = ((place / run / "latest.pdparams").read_bytes() for run in ("run", "killed"))
    assert whole == again  # as if nobody had killed it
    assert "nothing to do: 3 of 3 epochs are done" in call(place, 2, "tools/train.py", *arguments)


def test_resume_takes_the_directory_of_a_run(place):
    arguments = ["--data-path=data", "--output-dir=moved", "--epochs=3", *SMALL]
    said = call(place, 1, "tools/train.py", "--resume=run", *arguments)
    assert not (place / "moved/best.pdparams").exists() and "trained:" not in said
    assert re.search(r"resumed from \S+-step-12 \(written by 2 ranks\): epoch 3, step 12", said), said[-2000:]


def test_another_number_of_ranks_keeps_the_learning_rate(place):
    """Two epochs of six on two ranks, the rest on one: the rate goes on along the same curve, down to 0."""
    arguments = ["--data-path=data", "--output-dir=fewer", "--save-every=0", *SMALL]
    call(place, 2, "tools/train.py", "--epochs=2", *arguments)
    call(place, 1, "tools/train.py", "--epochs=6", *arguments)
    from visualdl import LogReader

    points = [
        (record.id, record.value)
        for log in sorted((place / "fewer/visualdl").glob("*.log"))
        for record in LogReader(file_path=str(log)).get_data("scalar", "train/lr")
    ]
    later = [rate for step, rate in points if step > 8]
    # 9 steps an epoch now; the last of each epoch is logged: at 3, 4, 5 and 6 of 6 epochs.
    peak, total, warm = 0.1 * 16 / 256, 54, 5
    expected = [peak * 0.5 * (1 + math.cos(math.pi * (e * 9 - 1 - warm) / (total - warm))) for e in (3, 4, 5, 6)]
    assert later == pytest.approx(expected, rel=1e-4)


def letters(place):
    """The same pictures, other names, in another order."""
    for split in ("train", "val"):
        for digit, letter in zip("0123456789", "jihgfedcba"):
            shutil.copytree(place / "data" / split / digit, place / "letters" / split / letter, dirs_exist_ok=True)


def test_a_new_beginning_puts_the_old_run_aside(place):
    arguments = ["--output-dir=again", "--epochs=1", *SMALL]
    call(place, 1, "tools/train.py", "--data-path=data", *arguments)
    letters(place)
    process = subprocess.Popen(
        command(1, None, ROOT / "tools/train.py", "--data-path=letters", "--resume=none", *arguments),
        cwd=place,
        env=environment(0, []),
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "settings:" in line:
            process.send_signal(signal.SIGINT)
            break
    process.stdout.read()
    assert process.wait(60) == 130
    aside = place / "again/previous-1"
    assert json.loads((aside / "model.json").read_text())["classes"] == list("0123456789")
    assert {"checkpoints", "latest.pdparams", "best.pdparams"} <= {path.name for path in aside.iterdir()}
    said = call(place, 1, "tools/train.py", "--data-path=letters", f"--resume={aside}", *arguments, code=1)
    assert "was trained with different classes" in said


def test_weights_know_how_their_images_are_prepared(place):
    figures = []
    for weights in ("run/best.pdparams", "run/checkpoints/best/model.safetensors"):
        call(
            place, 1, "tools/eval.py", "--device=cpu", "--data-path=data", f"--pretrained={weights}", "--output-dir=who"
        )
        figures.append({k: v for k, v in json.loads((place / "who/eval.json").read_text()).items() if k != "weights"})
    assert figures[0] == figures[1]
    (place / "lone").mkdir()
    shutil.copy(place / "run/best.pdparams", place / "lone/best.pdparams")
    said = call(place, 1, "tools/export.py", "--pretrained=lone/best.pdparams")
    assert "no model.json with preprocessing settings beside lone/best.pdparams: using 224x224" in said
    (place / "lone/model.json").write_text((place / "run/model.json").read_text().replace('"9"', '"9", "10"'))
    said = call(place, 1, "tools/export.py", "--pretrained=lone/best.pdparams", code=1)
    assert "has 10 classes, but model.json beside it names 11" in said


@pytest.mark.parametrize(
    ("script", "arguments", "code", "said"),
    [
        ("train", ["--data-path=nowhere"], 1, "error: no data set found at nowhere; expected one of:"),
        ("train", ["--data-path=nothing"], 1, "error: nothing has no train/ (it contains nothing)"),
        ("train", ["--data-path=data", "--batch-size=0"], 2, "must be an integer >= 1, got '0'"),
        ("train", ["--data-path=data", "--batch-size=1000"], 1, "error: "),
        ("train", ["--data-path=data", "--device=tpu"], 1, "error: device must be one of auto, cpu, gpu, xpu, "),
        ("train", ["--data-path=data", "--use-gpu=True"], 1, "error: device='gpu', but "),
        ("train", ["--data-path=data", "--use-gpu=True", "--device=cpu"], 2, "contradict each other"),
        ("train", ["--data-path=data", "--augment=blur"], 2, "expected none or a list of flip, jitter, rand"),
        ("train", ["--data-path=data", "--pretrained=gone.pdparams"], 1, "error: gone.pdparams does not exist"),
        (
            "train",
            ["--data-path=data", "--resume=gone"],
            1,
            "error: gone does not exist: give the directory of a checkpoint",
        ),
        ("train", ["--data-path=letters", "--resume=run"], 1, "was trained with different classes"),
        ("train", ["--data-path=broken"], 1, "not an image, or damaged"),
        (
            "train",
            ["--data-path=data", "--output-dir=run", "--image-size=64"],
            1,
            "was trained with different preprocess (resize_short was 37, is 73, crop was 32, is 64): use",
        ),
        ("eval", ["--data-path=data"], 1, "error: --pretrained=<run>/latest.pdparams is required"),
        ("eval", ["--data-path=half", "--pretrained=run/best.pdparams"], 1, "that are not in the training set"),
        (
            "eval",
            ["--data-path=half", "--pretrained=bare.pdparams"],
            1,
            "bare.pdparams has 10 classes, the data set has 5",
        ),
        ("export", [], 2, "--pretrained=<run>/latest.pdparams is required"),
        ("export", ["--pretrained=gone.pdparams"], 1, "error: gone.pdparams does not exist"),
        ("export", ["--pretrained=data/test/0.png"], 1, "is truncated or not a .pdparams file"),
        (
            "export",
            ["--pretrained=run/best.pdparams", "--save-inference-dir=data/test/0.png"],
            1,
            "error: cannot write",
        ),
        ("export", ["--pretrained=run/best.pdparams", "--model=resnet"], 2, "invalid choice: 'resnet'"),
    ],
)
def test_bad_input_is_one_sentence(place, script, arguments, code, said):
    (place / "nothing").mkdir(exist_ok=True)
    if not (place / "bare.pdparams").exists():
        shutil.copy(place / "run/best.pdparams", place / "bare.pdparams")
        copy_with_a_bad_image(place)
        letters(place)
        for split in ("train", "val"):
            for name in "56789":
                shutil.copytree(
                    place / "data" / split / name, place / "half" / split / f"digit {name}", dirs_exist_ok=True
                )
    output = ["--output-dir=bad"] if script == "train" and not any("output-dir" in a for a in arguments) else []
    small = ["--epochs=1", "--image-size=32", "--workers=0"] if script == "train" else []
    done = subprocess.run(
        command(1, None, ROOT / f"tools/{script}.py", *small, *output, *arguments),
        cwd=place,
        env=environment(0, []),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code and said in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  ") and "lite_data.py" not in line]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
