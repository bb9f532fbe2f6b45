"""The deployed script: as a user types it, with the repository out of reach."""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.fork_server import paddle_version
from tests.harness import ROOT, environment, run

CLASSES = ["ant", "bee", "cow", "dog", "elk", "fox"]
ONNX = find_spec("paddle2onnx") and find_spec("onnxruntime")
FORMATS = ["paddle", "pdmodel", "onnx"] if ONNX else ["paddle", "pdmodel"]
with_onnx = pytest.mark.skipif(not ONNX, reason="paddle2onnx or onnxruntime is not installed")
with_both = pytest.mark.skipif(not ONNX or not find_spec("openvino"), reason="onnxruntime or openvino is not installed")
BACKENDS = [
    "paddle",
    pytest.param("onnxruntime", marks=with_onnx),
    pytest.param("openvino", marks=pytest.mark.skipif(not find_spec("openvino"), reason="openvino is not installed")),
]


def exported(directory):
    import paddle

    from deploy.inference_python import preprocess
    from ppfleet.export.static_model import export
    from tests import blocks

    coarse = np.random.RandomState(1).standard_normal((16, 3, 4, 4)).astype("float32")
    net = blocks.spread_network(len(CLASSES), coarse.repeat(16, 2).repeat(16, 3))
    paddle.save(net.state_dict(), f"{directory}/weights.pdparams")
    about = {"model": "a_model", "classes": CLASSES, "preprocess": preprocess.settings(64)}
    export(net, [None, 3, 64, 64], Path(directory) / "model", formats=FORMATS, **about)
    net.classifier[3].bias.set_value(net.classifier[3].bias + 1)
    export(net, [None, 3, 64, 64], Path(directory) / "other", formats=FORMATS, **about)


def logits(directory, paths, backend):
    """What the dynamic model answers through evaluation's data set, and the static one through the deployed code."""
    import argparse

    import paddle

    sys.path.insert(0, f"{directory}/deployed")
    from infer import Classifier
    from preprocess import prepare

    from deploy.inference_python import preprocess
    from models.mobilenet_v3_small.data import Images
    from models.mobilenet_v3_small.net import MobileNetV3Small, load_weights

    net = MobileNetV3Small(len(CLASSES))
    load_weights(net, f"{directory}/weights.pdparams")
    net.eval()
    images = Images([(path, 0) for path in paths], preprocess.settings(64))
    options = argparse.Namespace(
        backend=backend, use_gpu=False, use_tensorrt=False, enable_mkldnn=None, cpu_threads=1, workers=0
    )
    model = Classifier(f"{directory}/model", options)
    found = []
    for index, path in enumerate(paths):
        mine, theirs = images[index][0][None], prepare(path, model.stamp["preprocess"])[None]
        dynamic, static = net(paddle.to_tensor(mine)).numpy()[0], model.scores(theirs)[0]
        found.append(
            {"same_input": bool((mine == theirs).all()), "dynamic": dynamic.tolist(), "static": static.tolist()}
        )
    huge = model.top(np.float32([[1000, 0, 0, 0, 0, 0]]), 1)[0][0]
    return [*found, huge]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, ten pictures of many kinds, and a copy of the deployed directory alone."""
    root = tmp_path_factory.mktemp("infer")
    run(exported, 1, root / "out", str(root))
    shutil.copytree(ROOT / "deploy/inference_python", root / "deployed", ignore=shutil.ignore_patterns("__pycache__"))
    random = np.random.RandomState(0)
    for number, name in enumerate(CLASSES + CLASSES[:4]):
        pixels = cv2.resize(random.randint(0, 256, (5, 5, 3)).astype(np.uint8), (40 + 20 * number, 90))
        path = root / f"pictures/{name}/{number}.{'png' if number % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(path.suffix, pixels)[1].tobytes())
    return root


@pytest.mark.parametrize(
    ("use_gpu", "precision", "off", "accepted"),
    [
        (False, "fp32", 0.0005, True),
        (False, "fp32", 0.01, False),
        (True, "fp32", 0.01, True),  # TF32
        (True, "fp32", 0.05, False),
        (True, "fp16", 0.05, True),
        (True, "fp16", 0.5, False),
    ],
)
def test_every_device_must_reproduce_the_stored_outputs(tmp_path, monkeypatch, use_gpu, precision, off, accepted):
    monkeypatch.syspath_prepend(str(ROOT / "deploy/inference_python"))
    import backends

    inputs = np.ones((1, 3, 2, 2), np.float32)
    np.savez(tmp_path / "parity.npz", input0_1=inputs, output0_1=np.float32([[1, -2]]))

    def backend(images):
        return np.float32([[1, -2 - 2 * off]])

    backend.version = "1"
    monkeypatch.setattr(backends, "_find", lambda *_: lambda: backend)
    options = argparse.Namespace(use_gpu=use_gpu, precision=precision)
    stamp = {"parity": {"tolerance": 1e-3}, "sha256": {}}
    if accepted:
        assert backends.load("paddle", tmp_path, stamp, options) is backend
    else:
        with pytest.raises(backends.UserError, match="the outputs of paddle 1 differ"):
            backends.load("paddle", tmp_path, stamp, options)


def infer(place, *arguments, model="model", without=()):
    """The script's end; `without` packages, as if they were not installed."""
    extra = {}
    if without:
        extra = {"PYTHONPATH": str(place / "without")}
        (place / "without").mkdir(exist_ok=True)
        lines = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
        (place / "without/sitecustomize.py").write_text(f"import sys\n{lines}")
    command = [sys.executable, str(place / "deployed/infer.py"), f"--model-dir={place / model}", *arguments]
    return subprocess.run(
        command, cwd=place / "deployed", env=environment(0, [], extra), capture_output=True, text=True, timeout=120
    )


def answers(place, *arguments, said="", **more):
    out = place / "answers.json"
    done = infer(place, f"--json={out}", *arguments, **more)
    assert done.returncode == 0 and said in done.stderr and len(done.stderr.splitlines()) == bool(said), done.stderr
    return json.loads(out.read_text())


def same(one, other):
    """The same classes in the same order, with the same scores but for rounding that the last layer magnified."""
    assert [a["path"] for a in one] == [a["path"] for a in other]
    for a, b in zip(one, other):
        assert [t["class"] for t in a["top"]] == [t["class"] for t in b["top"]]
        np.testing.assert_allclose([t["score"] for t in a["top"]], [t["score"] for t in b["top"]], rtol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_logits_as_the_dynamic_model(place, backend):
    told = answers(place, f"--img-path={place}/pictures", "--batch-size=4", "--topk=6", f"--backend={backend}")
    assert told["backend"]["name"] == backend and told["backend"]["threads"] >= 1
    got = told["images"]
    paths = [answer["path"] for answer in got]
    assert len(paths) == 10 and paths == sorted(paths)
    ((*found, huge),) = run(logits, 1, place / "out", str(place), paths, backend)
    assert huge == {"label": 0, "class": "ant", "score": 1.0}
    assert all(one["same_input"] for one in found)
    dynamic, static = (np.array([one[kind] for one in found]) for kind in ("dynamic", "static"))
    assert np.abs(dynamic - static).max() < 2e-3  # the last layer was magnified 500 times, and rounding with it
    assert dynamic.std(0).min() > 0.1  # the pictures do matter
    for answer, row in zip(got, dynamic):
        shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        order = np.argsort(-shares)
        assert [best["label"] for best in answer["top"]] == order.tolist()
        assert [best["class"] for best in answer["top"]] == [CLASSES[i] for i in order]
        np.testing.assert_allclose([best["score"] for best in answer["top"]], shares[order], rtol=2e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size=3"],
        ["--enable-mkldnn=False"],
        ["--workers=0"],
        ["--workers=5", "--batch-size=2"],
        pytest.param(["--batch-size=64"], marks=pytest.mark.slow),
        pytest.param(["--workers=1", "--batch-size=4"], marks=pytest.mark.slow),
        pytest.param(["--workers=64", "--cpu-threads=3"], marks=pytest.mark.slow),
    ],
)
def test_any_batch_size_and_any_number_of_workers_answer_alike(place, arguments):
    one = answers(place, f"--img-path={place}/pictures", "--batch-size=1")["images"]
    same(one, answers(place, f"--img-path={place}/pictures", *arguments)["images"])


def at_once(directory, backend, workers, fail):
    """The script, where each call of the network waits for another one to begin, or all fail from the third on; which
    threads call it, and which are left."""
    import threading

    sys.path.insert(0, f"{directory}/deployed")
    import infer

    begun, calls, scores = threading.Barrier(2), [], infer.Classifier.scores

    def together(self, batch):
        calls.append(threading.current_thread() is threading.main_thread())
        if fail and len(calls) > 2:
            raise infer.UserError("no more")
        if workers and not fail:
            begun.wait(60)
        return scores(self, batch)

    infer.Classifier.scores = together
    arguments = [f"--img-path={directory}/pictures", f"--backend={backend}", f"--workers={workers}", "--cpu-threads=2"]
    code = infer.main([f"--model-dir={directory}/model", f"--json={directory}/at_once.json", *arguments])
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("prepare", "network"))]
    return code, calls, left


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_with_workers_two_batches_are_in_the_network_at_once(place, backend):
    ((code, calls, left),) = run(at_once, 1, place / "out", str(place), backend, 2, False)
    assert (code, calls, left) == (0, [False] * 10, [])
    got = json.loads((place / "at_once.json").read_text())["images"]
    same(answers(place, f"--img-path={place}/pictures", f"--backend={backend}", "--workers=0")["images"], got)
    assert run(at_once, 1, place / "out", str(place), backend, 0, False) == [[0, [True] * 10, []]]


@with_onnx
def test_a_failure_in_one_of_them_ends_the_run(place):
    ((code, calls, left),) = run(at_once, 1, place / "out", str(place), "onnxruntime", 2, True)
    assert code == 1 and 2 < len(calls) < 10 and left == []


def prepared(directory, streams):
    """How many images are prepared, and how many handed to the network, when the first answer is all that is wanted."""
    sys.path.insert(0, f"{directory}/deployed")
    import images

    done, asked, prepare = [], [], images.prepare
    images.prepare = lambda *arguments: done.append(prepare(*arguments))
    paths = images.find_images(f"{directory}/pictures") * 10

    def network(batch):
        asked.append(len(batch))
        return np.zeros((len(batch), 1))

    how = {"resize_short": 36, "crop": 32, "mean": [0, 0, 0], "std": [1, 1, 1]}
    answers = images.answered(paths, 4, how, 2, network, streams)
    next(answers)
    answers.close()
    return len(done), sum(asked)


@pytest.mark.parametrize("streams, batches", [(1, 2), (2, 4)])
def test_only_so_many_images_are_in_memory(place, streams, batches):
    ((done, asked),) = run(prepared, 1, place / "out", str(place), streams)
    assert 4 <= asked <= done <= 4 * batches


LIGHT = ("onnxruntime", "openvino")


@with_both
def test_auto_takes_one_that_needs_no_paddle(place):
    plain = answers(place, f"--img-path={place}/pictures", "--backend=paddle")["images"]
    for without in [(), *((name,) for name in LIGHT)]:
        told = answers(place, f"--img-path={place}/pictures", without=("paddle", *without))
        assert told["backend"]["name"] in set(LIGHT) - set(without)
        same(plain, told["images"])


def test_auto_without_them_is_paddle(place):
    told = answers(place, f"--img-path={place}/pictures", without=LIGHT)
    paddle = paddle_version()
    assert told["backend"]["version"] in (paddle, f"of paddle {paddle}")
    same(told["images"], answers(place, f"--img-path={place}/pictures", "--backend=paddle")["images"])
    done = infer(place, f"--img-path={place}/pictures", "--backend=openvino", f"--json={place}/own.json", without=LIGHT)
    if int(paddle[0]) >= 3:  # which brings an OpenVINO of its own
        own = json.loads((place / "own.json").read_text())
        assert own["backend"]["name"] == "openvino"
        same(own["images"], told["images"])
        assert not (place / "deployed/__cache__").exists()  # its own choice of a place
        arguments = ["--backend=openvino", "--benchmark=True", "--warmup=1"]
        assert answers(place, f"--img-path={place}/pictures", *arguments, without=LIGHT)["benchmark"]["Conf"][
            "enable_mkldnn"
        ] is False  # fmt: skip
    else:
        assert done.returncode == 1 and "contains no OpenVINO: pip install openvino" in done.stderr
    told = answers(place, f"--img-path={place}/pictures", "--enable-mkldnn=True")  # which only Paddle knows
    assert told["backend"]["name"] == "paddle"


def test_nothing_that_could_run_it(place):
    for backend, package in (("paddle", "paddlepaddle"), ("openvino", "openvino"), ("auto", "paddlepaddle")):
        arguments = [f"--img-path={place}/pictures", f"--backend={backend}"]
        done = infer(place, *arguments, without=("paddle", *LIGHT))
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert f"pip install {package}\n" in done.stderr


@with_both
def test_benchmark_without_paddle(place):
    arguments = [f"--img-path={place}/pictures", "--benchmark=True", "--backend=onnxruntime", "--cpu-threads=2"]
    told = answers(place, *arguments, "--workers=2", without=("paddle",))["benchmark"]
    assert told["Paddle"]["paddle_version"] == paddle_version() and told["Env"]["CUDA_version"] is None
    assert re.fullmatch("[0-9a-f]{40}", told["Paddle"]["paddle_commit"])  # of the export
    assert told["Conf"]["enable_mkldnn"] is False and told["Conf"]["cpu_math_library_num_threads"] == 2
    used = {"name": "onnxruntime", "version": version("onnxruntime"), "threads": 2, "workers": 2}
    assert told["More"]["backend"] == used


def restamped(place, tmp_path, **parts):
    """The model with other bytes in some of its files, and a stamp that says they belong there."""
    shutil.copytree(place / "model", tmp_path / "model")
    stamp = json.loads((tmp_path / "model/export.json").read_text())
    for suffix, content in parts.items():
        (tmp_path / f"model/inference.{suffix}").write_bytes(content)
        stamp["sha256"][f"inference.{suffix}"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "model/export.json").write_text(json.dumps(stamp))
    return tmp_path / "model"


@with_both
def test_a_backend_that_answers_differently_is_not_taken(place, tmp_path):
    pictures = f"--img-path={place}/pictures"
    model = restamped(place, tmp_path, onnx=(place / "other/inference.onnx").read_bytes())
    told = answers(place, pictures, model=model, said="infer.py: not used: the outputs of onnxruntime ")
    assert told["backend"]["name"] == "openvino"  # which reads the .pdmodel
    same(told["images"], answers(place, pictures, "--backend=paddle")["images"])
    done = infer(place, pictures, "--backend=onnxruntime", model=model)
    assert done.returncode == 1 and "differ from those of the exported model" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    told = answers(place, pictures, "--backend=paddle", model=model)
    assert told["backend"]["name"] == "paddle"


@with_both
def test_a_file_that_a_backend_cannot_read(place, tmp_path):
    paddle3 = (place / "model/inference.json").exists()  # Paddle 2 crashes on a program that is none
    parts = {"onnx": b"no model at all", **({"pdmodel": b"nor this"} if paddle3 else {})}
    model = restamped(place, tmp_path, **parts)
    done = infer(place, f"--img-path={place}/pictures", model=model)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == len(parts), done.stderr
    assert all(f"not used: {name} cannot run" in line for name, line in zip(LIGHT, lines))
    if paddle3:
        shutil.rmtree(model)
        model = restamped(place, tmp_path, **parts, json=b"x", pdiparams=b"x")
        done = infer(place, f"--img-path={place}/pictures", model=model)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "paddle cannot run" in done.stderr


@with_onnx
def test_a_form_that_was_not_exported(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    stamp = json.loads((tmp_path / "model/export.json").read_text())
    del stamp["sha256"]["inference.onnx"]
    (tmp_path / "model/inference.onnx").unlink()
    (tmp_path / "model/export.json").write_text(json.dumps(stamp))
    done = infer(place, f"--img-path={place}/pictures", "--backend=onnxruntime", model=tmp_path / "model")
    assert done.returncode == 1 and "has no inference.onnx, which --backend=onnxruntime needs" in done.stderr
    assert "--formats=onnx" in done.stderr and len(done.stderr.splitlines()) == 1
    told = answers(place, f"--img-path={place}/pictures", model=tmp_path / "model")
    assert told["backend"]["name"] != "onnxruntime"


def test_threads_that_a_container_may_use(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'deploy/inference_python')!r})\n"
        "import os, infer; from pathlib import Path\n"
        "os.sched_getaffinity = lambda pid: range(64)\n"
        "print(*(infer.cores(Path(share)) for share in sys.argv[1:]))"
    )
    shares = {"two": "200000 100000", "half": "50000 100000", "whole": "max 100000", "many": "9900000 100000"}
    for name, text in shares.items():
        (tmp_path / name).write_text(f"{text}\n")
    paths = [str(tmp_path / name) for name in (*shares, "none")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "1", "64", "64", "64"], done.stderr


def best(directory, count):
    """The labels that the deployed code calls the best of scores with ties, those of a plain sort, and the shares."""
    sys.path.insert(0, directory)
    from infer import Classifier

    model = Classifier.__new__(Classifier)
    model.classes = [str(number) for number in range(40)]
    scores = np.random.RandomState(5).randint(-12, -3, (7, 40)).astype("float32")
    told = model.top(scores, count)
    sorted_ones = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
    return (
        [[one["label"] for one in row] for row in told],
        sorted_ones.tolist(),
        [sum(one["score"] for one in row) for row in told],
        [[one["class"] == str(one["label"]) for one in row] for row in told],
    )


@pytest.mark.parametrize("count", [1, 5, 10, 11, 40, 99])
def test_the_best_classes_are_those_of_a_sort(tmp_path, count):
    ((ours, expected, shares, named),) = run(best, 1, tmp_path, str(ROOT / "deploy/inference_python"), count)
    assert ours == expected and all(map(all, named))
    assert all(abs(share - 1) < 1e-5 for share in shares) == (count >= 40)


def test_file_folder_and_pattern(place):
    file = sorted((place / "pictures/ant").iterdir())[0]
    assert [a["path"] for a in answers(place, f"--img-path={file}")["images"]] == [str(file)]
    assert len(answers(place, f"--img-path={place}/pictures/ant")["images"]) == 2
    assert len(answers(place, f"--img-path={place}/pictures/*/*.png")["images"]) == 5
    (top,) = answers(place, f"--img-path={file}", "--topk=2")["images"]
    assert len(top["top"]) == 2


def test_links_and_odd_names(place, tmp_path):
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/ant").symlink_to(place / "pictures/ant")
    (tmp_path / "tree/deep/up").symlink_to(tmp_path / "tree")
    (tmp_path / "tree/.hidden").mkdir()
    for name in (".hidden/a.png", "deep/._b.jpg"):
        (tmp_path / "tree" / name).write_text("evaluation does not look at it either")
    assert len(answers(place, f"--img-path={tmp_path}/tree")["images"]) == 2
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    Path(os.fsdecode(odd)).write_bytes(next((place / "pictures/bee").iterdir()).read_bytes())
    (answer,) = answers(place, b"--img-path=" + odd)["images"]
    assert os.fsencode(answer["path"]) == odd


def test_a_reader_that_has_enough(place):
    arguments = f"{sys.executable} {place}/deployed/infer.py --model-dir={place}/model --img-path={place}/pictures"
    command = f"{arguments} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment(0, []), capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1


def test_accuracy_where_folders_are_called_like_classes(place):
    told = answers(place, f"--img-path={place}/pictures")
    right = sum(a["top"][0]["class"] == a["path"].split("/")[-2] for a in told["images"])
    among = sum(a["path"].split("/")[-2] in [t["class"] for t in a["top"]] for a in told["images"])
    assert told["accuracy"] == {"top1": right / 10, "top5": among / 10, "samples": 10} and right < among
    shutil.copytree(place / "pictures/ant", place / "unsorted", dirs_exist_ok=True)
    assert answers(place, f"--img-path={place}/unsorted")["accuracy"] is None


ROWS = r"""
---------------------- Env info ----------------------
 OS_version: .+
 CUDA_version: .+
 CUDNN_version: .+
 drivier_version: .+
---------------------- Paddle info ----------------------
 paddle_version: [\d.]+
 paddle_commit: [0-9a-f]{40}
 log_api_version: 1.0
----------------------- Conf info -----------------------
 runtime_device: cpu
 ir_optim: True
 enable_memory_optim: True
 enable_tensorrt: False
 enable_mkldnn: False
 cpu_math_library_num_threads: 3
----------------------- Model info ----------------------
 model_name: a_model
 precision: fp32
----------------------- Data info -----------------------
 batch_size: 4
 input_shape: \[3, 64, 64\]
 data_num: 10
----------------------- Perf info -----------------------
 cpu_rss\(MB\): [\d.]+, gpu_rss\(MB\): None, gpu_util: None%
 total time spent\(s\): [\d.]+
 preprocess_time\(ms\): [\d.]+, inference_time\(ms\): [\d.]+, postprocess_time\(ms\): [\d.]+
 inference_time\(ms\) p50: [\d.]+, p90: [\d.]+, p99: [\d.]+
 whole_batch_time\(ms\) p50: [\d.]+, p90: [\d.]+, p99: [\d.]+
 images/s: [\d.]+ \(inference alone: [\d.]+\)
 backend: paddle [\d.]+, threads: 3, workers: 0
""".strip().splitlines()


def test_benchmark_block_row_for_row(place):
    done = infer(
        place,
        f"--img-path={place}/pictures",
        "--batch-size=4",
        "--benchmark=True",
        "--enable-mkldnn=False",
        "--cpu-threads=3",
        "--warmup=2",
        "--use-gpu=False",
    )
    assert done.returncode == 0, done.stderr
    prefix = r"^\[\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\] infer INFO: "
    lines = [re.sub(prefix, "", line) for line in done.stdout.splitlines() if re.match(prefix, line)]
    assert lines[0] == "" and re.search(prefix + "\n\n", done.stdout, re.M)
    assert len(lines) == len(ROWS) + 1
    for line, row in zip(lines[1:], ROWS):
        assert re.fullmatch(row, line), (line, row)
    figures = json.loads((place / "model/benchmark_cpu_batchsize_4.json").read_text())
    perf, more = figures["Perf"], figures["More"]
    assert more["batches"] == 3 and figures["Data"]["data_num"] == 10
    parts = sum(perf[f"{part}_time_ms"] for part in ("preprocess", "inference", "postprocess"))
    assert perf["total_time_s"] == pytest.approx(3 * parts / 1000, rel=0.01)
    assert more["images_per_s"] == pytest.approx(10 / more["wall_s"], rel=0.01)
    assert more["wall_s"] >= perf["total_time_s"] - 0.0002  # in turn: the stages, and what is printed
    assert 0 < more["inference_ms"]["p50"] <= more["inference_ms"]["p90"] <= more["inference_ms"]["p99"]
    assert 50 < perf["cpu_rss_mb"] < 5000


def watched(directory, workers):
    """A benchmark whose preprocessing is slow, with the network's calls counted."""
    import time

    sys.path.insert(0, f"{directory}/deployed")
    import images
    import infer

    calls, prepare, scores = [], images.prepare, infer.Classifier.scores

    def slow(*arguments):
        time.sleep(0.2)
        return prepare(*arguments)

    def counted(self, batch):
        calls.append(len(batch))
        return scores(self, batch)

    images.prepare, infer.Classifier.scores = slow, counted
    base = [
        f"--model-dir={directory}/model",
        f"--img-path={directory}/pictures/ant",
        f"--json={directory}/watched.json",
        "--backend=paddle",
    ]
    assert infer.main([*base, "--benchmark=True", "--warmup=3", f"--workers={workers}"]) == 0

    def interrupted(options):
        raise KeyboardInterrupt

    infer.run = interrupted
    return calls, infer.main(base)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_measured(place, workers):
    ((calls, code),) = run(watched, 1, place / "out", str(place), workers)
    figures = json.loads((place / "watched.json").read_text())["benchmark"]
    assert calls == [1] * 5 and figures["More"]["batches"] == 2 and code == 130
    assert figures["Perf"]["preprocess_time_ms"] > 200  # what the watched preparation sleeps, workers or not
    assert figures["More"]["wall_s"] > (0.2 if workers else 0.4)
    assert figures["More"]["images_per_s"] == pytest.approx(2 / figures["More"]["wall_s"], rel=0.01)
    assert figures["Conf"]["enable_mkldnn"] is True


def test_nvidia_smi_that_fails_or_hangs_is_given_up(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'deploy/inference_python')!r})\n"
        "import benchmark; print(benchmark.nvidia_smi('driver_version'))"
    )
    env = {**environment(0, []), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for script, answer in (("exit 9", "{}"), ("exec sleep 30", "{}"), ("echo 550.1", "{'driver_version': '550.1'}")):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == answer, done.stderr


def test_bad_images_are_named_and_the_others_answered(place, tmp_path):
    shutil.copytree(place / "pictures/ant", tmp_path / "mixed")
    good = sorted(path.name for path in (tmp_path / "mixed").iterdir())
    assert good == ["0.jpg", "6.jpg"]
    (tmp_path / "mixed/3text.jpg").write_text("not an image")
    whole = next((place / "pictures/cow").glob("*.jpg")).read_bytes()
    (tmp_path / "mixed/-half.jpg").write_bytes(whole[: len(whole) // 2])  # before and between the good ones
    done = infer(place, f"--img-path={tmp_path}/mixed", "--batch-size=3", f"--json={tmp_path}/out.json")
    alone = answers(place, f"--img-path={place}/pictures/ant")["images"]
    got = json.loads((tmp_path / "out.json").read_text())
    assert [Path(answer["path"]).name for answer in got["images"]] == good and len(got["bad"]) == 2
    for one, other in zip(got["images"], alone):  # each answer stands beside its own file
        np.testing.assert_allclose([t["score"] for t in one["top"]], [t["score"] for t in other["top"]], rtol=2e-3)
    assert done.returncode == 1
    errors = done.stderr.splitlines()
    assert len(errors) == 3 and "-half.jpg: not an image" in errors[0] and "3text.jpg: not an image" in errors[1]
    assert "2 of 4 images could not be read" in errors[2]
    done = infer(place, f"--img-path={tmp_path}/mixed/3text.jpg")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "3text.jpg: not an image" in done.stderr


def spoil(place, what, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    target = tmp_path / "model"
    if what == "weights gone":
        (target / "inference.pdiparams").unlink()
    elif what == "weights damaged":
        (target / "inference.pdiparams").write_bytes(b"x" + (target / "inference.pdiparams").read_bytes()[1:])
    elif what == "another form damaged":  # which no other backend needs: the copy cannot be trusted
        (target / "inference.pdmodel").write_bytes((target / "inference.pdmodel").read_bytes()[:-1])
    elif what == "no stamp":
        (target / "export.json").unlink()
    elif what == "stamp damaged":
        (target / "export.json").write_text("{")
    elif what == "stamp without classes":
        stamp = json.loads((target / "export.json").read_text())
        (target / "export.json").write_text(json.dumps({**stamp, "classes": CLASSES[:3]}))
    elif what == "stamp of another kind":
        (target / "export.json").write_text("[1]")
    elif what == "stamp without files":
        stamp = json.loads((target / "export.json").read_text())
        (target / "export.json").write_text(json.dumps({**stamp, "sha256": {}}))
    return target


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weights gone", "has no inference.pdiparams"),
        ("weights damaged", "inference.pdiparams is damaged or from another export"),
        ("another form damaged", "inference.pdmodel is damaged or from another export"),
        ("no stamp", "has no export.json"),
        ("stamp damaged", "export.json is damaged or incomplete"),
        ("stamp without classes", "has 3 classes, but the model has 6"),
        ("stamp of another kind", "export.json is damaged or incomplete"),
        ("stamp without files", "classes or files are missing"),
    ],
)
def test_a_model_that_is_not_whole(place, tmp_path, what, said):
    target = spoil(place, what, tmp_path)
    done = infer(place, f"--img-path={place}/pictures", model=target)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--img-path=/nowhere/x.jpg"], 1, "--img-path=/nowhere/x.jpg does not exist"),
        (["--img-path={empty}"], 1, "contains no images"),
        (["--img-path=" + "a.jpg," * 100], 1, "a.jpg,a.jpg"),  # the reason differs between versions of Python
        (["--img-path={pictures}", "--batch-size=0"], 2, "must be an integer >= 1, got '0'"),
        (["--img-path={pictures}", "--use-gpu=True"], 1, "use --use-gpu=False"),
        (["--img-path={pictures}", "--use-tensorrt=True"], 1, "--use-tensorrt=True needs --use-gpu=True"),
        (["--img-path={pictures}", "--precision=fp16"], 1, "--precision=fp16 needs --use-gpu=True"),
        (["--img-path={pictures}", "--precision=int4"], 2, "invalid choice: 'int4'"),
        (["--img-path={pictures}", "--backend=torch"], 2, "invalid choice: 'torch'"),
        (["--img-path={pictures}", "--backend=openvino", "--use-gpu=True"], 1, "--use-gpu is for Paddle"),
        (
            ["--img-path={pictures}", "--backend=onnxruntime", "--enable-mkldnn=True"],
            1,
            "--enable-mkldnn is for Paddle",
        ),
        (["--img-path={pictures}", "--workers=-1"], 2, "must be an integer >= 0, got '-1'"),
        (["--img-path={pictures}", "--use-gpu=maybe"], 2, "must be True or False, got 'maybe'"),
        (["--img-path={pictures}", "--model-dir=/nowhere"], 1, "--model-dir=/nowhere does not exist"),
        (["--img-path={pictures}", "--json=/proc/nowhere/x.json"], 1, "cannot write /proc/nowhere/x.json"),
        (["--img-path={pictures}", "--batch=2"], 2, "unrecognized arguments: --batch=2"),
        ([], 2, "the following arguments are required: --img-path"),
    ],
)
def test_wrong_arguments_are_one_line(place, tmp_path, arguments, code, said):
    filled = [argument.format(empty=tmp_path, pictures=place / "pictures") for argument in arguments]
    done = infer(place, *filled)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
