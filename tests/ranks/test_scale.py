"""`python -m ppfleet scale` with real runs on 1 and 2 ranks: the table, a series that goes on, Ctrl-C, a failure."""

import json
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.harness import wait_for, wait_for_the_end_of
from tests.tipc_files import surroundings

SCRIPT = """
import argparse, os, time
import numpy as np, paddle
import ppfleet
from ppfleet import metrics

parser = argparse.ArgumentParser()
for name, kind in (("rows", int), ("seed", int), ("where", str), ("nap", float), ("fail", int), ("width", int)):
    parser.add_argument(f"--{name}", type=kind, default=0)
o = parser.parse_args()
job = ppfleet.Job(o.where, device="cpu", seed=o.seed, save_every=4, log_every=5)
points = np.random.RandomState(1).rand(128, 3).astype("float32")
labels = (points.sum(1) > 1.5).astype("int64")
wide = o.width or 4
net = paddle.nn.Sequential(paddle.nn.Linear(3, wide), paddle.nn.Linear(wide, wide), paddle.nn.Linear(wide, 2))
net, sgd = job.prepare(net, paddle.optimizer.SGD(0.5, parameters=net.parameters()))
train = job.loader(list(zip(points, labels)), batch_size=o.rows, shuffle=True)
val = job.loader(list(zip(points, labels)), batch_size=32)
job.resume()
for epoch in job.epochs(int(os.environ.get("EPOCHS", 2))):
    for x, y in job.steps(train):
        time.sleep(o.nap)
        if o.fail and job.step == 3 and job.world.size > 1:
            raise RuntimeError("this goes wrong")
        job.backward(paddle.nn.functional.cross_entropy(net(x), y))
    job.save(**job.evaluate(net, val, top1=metrics.top1))
"""


def start(place, *words, script=(), before=(), env=None):
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(SCRIPT)
    flags = ["--batch-flag=--rows", "--output-flag=--where", "--output=out", *words]
    command = [sys.executable, "-m", "ppfleet", "scale", *flags, "train.py", "--", "--rows=16", *script]
    with (place / "told").open("w") as told:
        loopback = {"GLOO_SOCKET_IFNAME": ""} if before else {}
        env = surroundings({"PPFLEET_THREADS": "", **loopback, **(env or {})})
        return subprocess.Popen([*before, *command], cwd=place, env=env, stdout=told, stderr=subprocess.STDOUT)


def end(process, place):
    try:
        return process.wait(300), (place / "told").read_text()
    finally:
        process.kill()


def facts(place):
    return json.loads((place / "out/scale.json").read_text())


def test_a_series_and_one_that_goes_on_with_more_seeds(tmp_path):
    code, told = end(start(tmp_path, "--ranks=1,2", "--seeds=0", "--batch=global"), tmp_path)
    assert code == 0, told
    one, two = facts(tmp_path)["tables"]["global"]
    assert (one["ranks"], one["batch"], two["ranks"], two["batch"]) == (1, 16, 2, 8)
    assert one["metric"]["mean"] == two["metric"]["mean"] > 0.6  # no BatchNorm: the same numbers on 1 and 2 ranks
    assert two["speed_up"] == one["time"]["mean"] / two["time"]["mean"] == 2 * two["efficiency"]
    assert two["parity"]["word"] == "cannot tell" and "one seed shows no spread" in told
    parts = two["parts"]
    assert parts["steps"] == 16 and parts["bytes"] > 4 * 8 and parts["communication"] > 0 and parts["compute"] > 0
    assert one["parts"]["communication"] == one["parts"]["bytes"] == 0 and one["start_up"]["mean"] > 0
    assert {path.name for path in (tmp_path / "out").glob("scale.*")} == {"scale.json", "scale.html", "scale.png"}
    assert re.search(r"machines +ranks per machine +batch per rank +time +top1 +speed-up +efficiency", told)

    code, told = end(start(tmp_path, "--ranks=1", "--seeds=0,1", "--batch=global"), tmp_path)
    assert code == 0 and told.count("already done") == 1 and told.count("; log: ") == 1, told
    (row,) = facts(tmp_path)["tables"]["global"]
    assert row["runs"] == row["time"]["count"] == 2 and row["time"]["spread"] > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_series_that_is_stopped_leaves_nothing_running_and_goes_on(tmp_path, number):
    words = ("--ranks=1", "--seeds=0", "--batch=rank")
    series = start(tmp_path, *words, script=["--nap=0.2"], env={"EPOCHS": "500"})
    wait_for(lambda: list(tmp_path.glob("out/1x1-*/run/checkpoints/*/manifest.json")), 60, "a checkpoint")
    below = psutil.Process(series.pid).children(recursive=True)
    series.send_signal(number)
    code, told = end(series, tmp_path)
    assert code == (130 if number == signal.SIGINT else -9) and below, told
    wait_for_the_end_of(below)
    assert number == signal.SIGKILL or "run the same command again to continue" in told
    assert not list(tmp_path.glob("out/*/result.json"))
    code, told = end(start(tmp_path, *words, script=["--nap=0.2"]), tmp_path)
    assert code == 0 and "resumed; its time will not count" in told, told
    (row,) = facts(tmp_path)["tables"]["rank"]
    assert row["time"] is None and row["metric"]["mean"] > 0.6
    assert any("the time does not: 1 machine × 1 rank, seed 0" in note for note in facts(tmp_path)["notes"])


def test_a_run_that_fails_ends_the_series_with_its_reason(tmp_path):
    code, told = end(start(tmp_path, "--ranks=2", "--seeds=0", "--batch=rank", script=["--fail=1"]), tmp_path)
    assert code == 1 and "error: 1 machine × 2 ranks, batch 16 per rank, seed 0: rank" in told, told
    assert "raised RuntimeError: this goes wrong (train.py:24, at step 3)" in told
    assert not (tmp_path / "out/scale.json").exists()
    code, told = end(start(tmp_path, "--ranks=1", "--batch-flag=--fail", script=["--fail=1"]), tmp_path)
    assert code == 1 and "trained with batch_size=16 instead of 1" in told and "--batch-flag" in told, told
