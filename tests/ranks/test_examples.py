"""The examples under Paddle's own launcher and ours. (The parameter server's are in tests/hosts.)"""

import difflib
import gzip
import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from ppfleet.__main__ import main
from tests.harness import ROOT, environment, free_ports, run, watch
from tests.single.test_like_plain_paddle import on_amd


def launch(tmp_path, ranks, script, *arguments, env=None, ours=False):
    command = [sys.executable]
    if ours:
        command += ["-m", "ppfleet", "launch", "--nproc_per_node", str(ranks), "--log_dir", str(tmp_path / "launch")]
    elif ranks > 1:
        command += [
            "-m",
            "paddle.distributed.launch",
            "--nproc_per_node",
            str(ranks),
            "--log_dir",
            str(tmp_path / "launch"),
        ]
        command += ["--start_port", str(free_ports(1)[0]), "--ips", "127.0.0.1"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments],
        cwd=tmp_path,
        env=environment(0, ["alone"], env),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def changed_lines():
    plain, fleet = (
        (ROOT / "examples" / name).read_text().splitlines()[1:] for name in ("single_card.py", "many_cards.py")
    )
    return [line[2:].strip() for line in difflib.ndiff(plain, fleet) if line.startswith("+ ") and line[2:].strip()]


def test_at_most_six_lines_change_and_the_readme_shows_them():
    lines = changed_lines()
    assert len(lines) == 6, lines
    for page in ("README.md", "README_cn.md"):
        readme = (ROOT / page).read_text(encoding="utf-8")
        for line in lines:
            assert f"`{line}`" in readme, f"{page} does not show: {line}"


def test_single_card_runs(tmp_path):
    assert "epoch 3: the last loss was" in launch(tmp_path, 1, "single_card.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_cards_runs_and_learns(tmp_path, ranks):
    output = launch(tmp_path, ranks, "many_cards.py")
    losses = [float(loss) for loss in re.findall(r"epoch \d: the last loss was ([\d.]+)", output)]
    assert len(losses) == 4 and losses[-1] < 0.5, output[-2000:]
    settings = json.loads((tmp_path / "output/many_cards/settings.json").read_text())
    assert settings["ranks"] == ranks and settings["global_batch"] == 16 * ranks
    assert (tmp_path / f"output/many_cards/logs/rank{ranks - 1}.log").exists()
    assert main(["report", str(tmp_path / "output/many_cards")]) == 0  # which knows nothing of this script
    assert "train/loss: from" in (tmp_path / "output/many_cards/report.html").read_text()


def test_a_bar_is_drawn_where_a_person_watches(tmp_path):
    code, text = watch([sys.executable, str(ROOT / "examples" / "many_cards.py")], tmp_path)
    assert code == 0, text[-2000:]
    assert re.search(r"epoch: \[4/\?\]: 100%\|.*89/89", text), text[-2000:]
    assert "batch_cost" not in text


def test_static_graph_learns_the_same_on_one_and_two_processes(tmp_path):
    outputs, results = [], []
    for ranks in (1, 2):
        options = ["--epochs=4", f"--save={tmp_path}/{ranks}.npz"]
        outputs.append(launch(tmp_path, ranks, "mnist_static.py", *options, ours=ranks > 1))
        results.append(np.load(tmp_path / f"{ranks}.npz"))
    assert "process 0 of 1 on Place(cpu): alone" in outputs[0]
    assert "process 0 of 2 on Place(cpu): an explicit all-reduce of gradients" in outputs[1]
    (first, second), right = (result["losses"] for result in results), [result["accuracy"] for result in results]
    assert len(first) == len(second) == 4 * 14 and np.mean(first[-14:]) < 0.3
    np.testing.assert_allclose(second, first, rtol=0, atol=1e-5)
    assert right[0] == right[1] > 0.9


def through_job(path, ranks, epochs):
    """What mnist_fleet.py does, with the same samples in the same order."""
    from types import SimpleNamespace

    sys.path.insert(0, str(ROOT / "examples"))
    import mnist
    import paddle
    import paddle.nn.functional as F

    import ppfleet

    class Ordered(paddle.io.Dataset):
        def __init__(self):
            self.pictures, self.digits = mnist.load(None, train=True)
            whole = SimpleNamespace(global_batch=100, rank=0, size=1)
            parts = [part for epoch in range(epochs) for part in mnist.batches(len(self.digits), epoch, whole)]
            self.order = np.concatenate(parts)

        def __getitem__(self, place):
            return self.pictures[self.order[place]], self.digits[self.order[place]]

        def __len__(self):
            return len(self.order)

    job = ppfleet.Job(path, device="cpu")
    paddle.seed(0)
    net = mnist.network()
    sgd = paddle.optimizer.SGD(0.2, parameters=net.parameters())
    wrapped, _ = job.prepare(net, sgd, fast_cpu=False)
    for pictures, digits in job.steps(job.loader(Ordered(), 100 // ranks)):
        job.backward(F.cross_entropy(wrapped(pictures), digits))
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_fleet_api_and_job_arrive_at_the_same_weights(tmp_path, ranks):

    # Job lets MKL take AVX2 on AMD (ppfleet/cpu/tuning.py): for the same bits Fleet must do so too.
    env = {"MKL_DEBUG_CPU_TYPE": "5"} if on_amd() else None
    output = launch(tmp_path, ranks, "mnist_fleet.py", "--epochs=2", f"--save={tmp_path}/fleet.npz", env=env)
    assert float(re.findall("([0-9.]+) % of 360 test images", output)[0]) > 80
    weights = np.load(tmp_path / "fleet.npz")
    fleet = {name: hashlib.sha256(weights[name].tobytes()).hexdigest() for name in weights.files}
    assert len(fleet) == 6
    for job in run(through_job, ranks, tmp_path / "job", str(tmp_path / "run"), ranks, 2):
        assert job == fleet


def read_idx(path):
    sys.path.insert(0, str(ROOT / "examples"))
    import mnist

    return [[each.shape, float(each.max()), each[1].tolist()] for train in (1, 0) for each in mnist.load(path, train)]


def test_the_files_of_mnist(tmp_path):
    for name, count in (("train", 3), ("t10k", 2)):
        pixels = np.zeros((count, 28, 28), np.uint8)
        pixels[1, 0, 1], pixels[1, 27, 27] = 51, 255
        for kind, array in (("images-idx3", pixels), ("labels-idx1", np.arange(7, 7 + count, dtype=np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (tmp_path / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    (told,) = run(read_idx, 1, tmp_path / "out", str(tmp_path))
    images = [0, float(np.float32(0.2)), *[0] * 781, 1]
    assert told == [[[3, 784], 1, images], [[3], 9, 8], [[2, 784], 1, images], [[2], 8, 8]]


def test_wrong_options_of_the_examples(tmp_path):
    for options, said in (
        (["--data-path=."], "holds no train-images-idx3"),
        (["--global-batch=0"], "cannot be shared"),
    ):
        command = [sys.executable, str(ROOT / "examples/mnist_fleet.py"), *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and said in done.stderr
