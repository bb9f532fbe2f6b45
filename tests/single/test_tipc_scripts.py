"""test_tipc/*.sh as the documents have them: names, arguments, exit codes; the real chain on one machine."""

import json
import subprocess
import sys

import pytest

from tests.tipc_files import FILE, edited, model_repository, surroundings

LITE = "lite_train_lite_infer"


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    return model_repository(tmp_path_factory.mktemp("with a blank") / "repo")


def sh(repo, script, *arguments, where=None, python=sys.executable):
    command = ["bash", str(repo / "test_tipc" / script) if where else f"test_tipc/{script}", *arguments]
    env = surroundings({"PYTHON": python, "PYTHONPATH": ""})
    return subprocess.run(command, cwd=where or repo, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_prepare(repo):
    for _ in range(2):  # it may run twice
        done = sh(repo, "prepare.sh", FILE, LITE)
        assert done.returncode == 0 and "ready: bash test_tipc/test_train_inference_python.sh" in done.stdout
    assert len(list((repo / "lite_data/test").iterdir())) == 10
    done = sh(repo, "prepare.sh", FILE, "whole_train_whole_infer")
    assert done.returncode == 1 and "data/ILSVRC2012 does not exist; train needs it (line 11)" in done.stderr
    assert "train/<class>/" in done.stderr
    done = sh(repo, "prepare.sh", FILE, "whole_infer")
    assert done.returncode == 1 and "latest.pdparams does not exist" in done.stderr and "train first" in done.stderr


def test_wrong_arguments(repo, tmp_path):
    for script in ("prepare.sh", "test_train_inference_python.sh"):
        assert sh(repo, script, FILE).returncode == 2
        assert "usage: " in sh(repo, script).stderr
        assert sh(repo, script, FILE, "nonsense").returncode == 2
        missing = sh(repo, script, "nothing.txt", LITE)
        assert missing.returncode == 2 and "nothing.txt: no such file" in missing.stderr
        for python in ("/nowhere/python", "/bin/true", "/bin/echo"):
            wrong = sh(repo, script, FILE, LITE, python=python)
            assert wrong.returncode == 2 and "make .venv/.ready" in wrong.stderr, python
    (tmp_path / "mine.txt").write_text("=====serving_params=====\n")
    elsewhere = sh(repo, "test_train_inference_python.sh", "mine.txt", LITE, where=tmp_path)
    assert elsewhere.returncode == 2 and "serving family" in elsewhere.stderr


def test_the_real_chain(repo):
    """Alone and on two processes, in three modes; the exported model answers with the accuracy of the evaluation."""
    sh(repo, "prepare.sh", FILE, LITE)
    (repo / FILE).write_text(edited((repo / FILE).read_text(), ("--batch-size:1|4", "--batch-size:4")))
    done = sh(repo, "test_train_inference_python.sh", FILE, "lite_train_whole_infer")
    assert done.returncode == 0, done.stdout[-3000:]
    root = repo / "test_tipc/output/mobilenet_v3_small/lite_train_whole_infer"
    commands = json.loads((root / "results.json").read_text())["commands"]
    assert [c["status"] for c in commands] == ["ok"] * 10
    assert "--gpus=0,1" in commands[5]["command"] and "2 CPU processes" in commands[5]["note"]
    for run in (commands[:5], commands[5:]):
        scores = {word for word in run[1]["tail"].split("\n") if word.startswith("top1: ")}
        assert scores and all(scores & set((root / c["log"]).read_text().split("\n")) for c in run[3:])

    weights = f"{commands[0]['run']}/latest.pdparams"
    line = "train_model:./output/mobilenet_v3_small/latest.pdparams"
    (repo / "whole.txt").write_text(edited((repo / FILE).read_text(), (line, f"train_model:{root}/{weights}")))
    done = sh(repo, "test_train_inference_python.sh", "whole.txt", "whole_infer")
    assert done.returncode == 0 and "3 ok, 0 failed, 0 skipped" in done.stdout, done.stdout[-3000:]
    assert (repo / "output/mobilenet_v3_small/inference/export.json").exists()


@pytest.mark.slow
def test_training_speed(repo):
    sh(repo, "prepare.sh", FILE, "benchmark_train")
    done = sh(repo, "test_train_inference_python.sh", FILE, "benchmark_train")
    assert done.returncode == 0, done.stdout[-3000:]
    path = repo / "test_tipc/output/mobilenet_v3_small/benchmark_train/results.json"
    commands = json.loads(path.read_text())["commands"]
    assert len(commands) == 4 and all(c["figures"]["images_per_s"] > 0 for c in commands)
