"""Inference with MobileNetV3-small: from JPEG files to labels, and the network alone. Ours against peers.

    python benchmarks/infer.py                   # about 7 minutes on 2 cores

Ours is deploy/inference_python/infer.py with its defaults. The others are scripts as a careful user writes them, with
the same preprocessing and the same weights: Paddle Inference as it comes, ONNX Runtime (also with threads that prepare
the next images meanwhile), OpenVINO, TorchScript. All must have the same scores before anything is timed.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
import report
from common import OURS, PEERS, ROOT, Arrays, Case, Worker, fill
from pictures import make
from report import Row

from deploy.inference_python import preprocess

SIZE = 224
TOLERANCE = {"": 1e-4}


class Script:
    """A loop over batches of files: preprocess, run the network, take the best class."""

    ahead = False  # whether threads prepare the next images meanwhile

    def __init__(self, case: Case) -> None:
        import cv2

        self.case, self.size, self.how = case, case["batch"], preprocess.settings(SIZE)
        self.paths = [Path(path) for path in case["paths"]]
        self.pool = ThreadPoolExecutor(case["threads"]) if self.ahead else None
        cv2.setNumThreads(1 if self.ahead else case["threads"])
        self.load(case["models"], case["threads"])
        self.image = self.read(self.paths[: self.size])

    def load(self, models: str, threads: int) -> None:
        raise NotImplementedError

    def scores(self, images: Any) -> Any:
        raise NotImplementedError

    def read(self, paths: list[Path]) -> Any:
        return np.stack([preprocess.prepare(path, self.how) for path in paths])

    def groups(self, steps: int) -> list[list[Path]]:
        files = itertools.cycle(self.paths)
        return [list(itertools.islice(files, self.size)) for _ in range(steps)]

    def run(self, steps: int) -> list[int]:
        groups, labels = self.groups(steps), []
        for images in self.pool.map(self.read, groups) if self.pool else map(self.read, groups):
            labels += self.scores(images).argmax(-1).tolist()
        return labels

    def network(self, steps: int) -> None:
        for _ in range(steps):
            self.scores(self.image)

    def check(self) -> Arrays:
        return {"scores": np.array(self.scores(self.image)), "labels": np.array(self.run(len(self.paths) // self.size))}


class Ours(Script):
    """deploy/inference_python/infer.py, by its own classes and defaults."""

    def load(self, models: str, threads: int) -> None:
        sys.path.insert(0, str(ROOT / "deploy/inference_python"))  # before this directory, which has an infer.py, too
        import images
        import infer

        where = [f"--model-dir={models}/ours", f"--img-path={models}", f"--batch-size={self.size}"]
        self.options = infer.parse(where)  # on as many cores as threads: see common.pin
        self.answered, self.model = images.answered, infer.Classifier(f"{models}/ours", self.options)

    def scores(self, images: Any) -> Any:
        return self.model.scores(images)

    def run(self, steps: int) -> list[int]:
        paths, labels = list(itertools.chain(*self.groups(steps))), []
        how = self.size, self.how, self.options.workers, self.model.scores, self.model.backend.streams
        for _, scores, _, _, _ in self.answered(paths, *how):
            labels += [best[0]["label"] for best in self.model.top(scores, 1)]
        return labels

    def about(self) -> str:
        return self.model.backend.name


class PaddleInference(Script):
    """With its defaults, except for the number of threads."""

    def load(self, models: str, threads: int) -> None:
        from paddle import inference

        config = inference.Config(f"{models}/ours/inference.json", f"{models}/ours/inference.pdiparams")
        config.set_cpu_math_library_num_threads(threads)
        config.disable_glog_info()
        self.predictor = inference.create_predictor(config)
        self.input = self.predictor.get_input_handle(self.predictor.get_input_names()[0])
        self.output = self.predictor.get_output_handle(self.predictor.get_output_names()[0])

    def scores(self, images: Any) -> Any:
        self.input.reshape(images.shape)
        self.input.copy_from_cpu(images)
        self.predictor.run()
        return self.output.copy_to_cpu()


class OnnxRuntime(Script):
    def load(self, models: str, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        if self.ahead:  # those threads need the cores
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(f"{models}/model.onnx", options, ["CPUExecutionProvider"])

    def scores(self, images: Any) -> Any:
        return self.session.run(None, {"images": images})[0]


class OnnxRuntimeAhead(OnnxRuntime):
    ahead = True


class OpenVino(Script):
    def load(self, models: str, threads: int) -> None:
        import openvino

        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",  # processors with bfloat16 would compute in it
        }
        self.model = openvino.Core().compile_model(f"{models}/model.onnx", "CPU", settings)

    def scores(self, images: Any) -> Any:
        return self.model(images)[0]


class TorchScript(Script):
    def load(self, models: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch = torch
        self.net = torch.jit.optimize_for_inference(torch.jit.load(f"{models}/model.pt").eval())

    def scores(self, images: Any) -> Any:
        with self.torch.inference_mode():
            return self.net(self.torch.from_numpy(images)).numpy()


class Truth(Script):
    """In float64: what the others should compute."""

    def load(self, models: str, threads: int) -> None:
        import torch
        import torch_net

        self.torch, self.net = torch, torch_net.filled().double().eval()

    def scores(self, images: Any) -> Any:
        with self.torch.inference_mode():
            return self.net(self.torch.from_numpy(images).double()).numpy()


class OurModel:
    """Exports the network in all forms that can be written here, as tools/export.py does."""

    def __init__(self, case: Case) -> None:
        from models.mobilenet_v3_small.net import MobileNetV3Small
        from ppfleet.export.runtimes import installed
        from ppfleet.export.static_model import FORMATS, export

        net = MobileNetV3Small()
        net.set_state_dict({name: fill(name, tensor.shape) for name, tensor in net.state_dict().items()})
        formats = [name for name in FORMATS if name != "onnx" or installed("paddle2onnx")]
        about = {"model": "mobilenet_v3_small", "classes": [str(number) for number in range(1000)]}
        target = Path(case["models"]) / "ours"
        export(net, [None, 3, SIZE, SIZE], target, formats=formats, **about, preprocess=preprocess.settings(SIZE))


class TorchModel:
    """Writes the same network as ONNX and as TorchScript."""

    def __init__(self, case: Case) -> None:
        import torch
        import torch_net

        net, example = torch_net.filled().eval(), torch.zeros(1, 3, SIZE, SIZE)
        names = {"input_names": ["images"], "output_names": ["scores"], "dynamic_axes": {"images": {0: "batch"}}}
        torch.onnx.export(net, (example,), f"{case['models']}/model.onnx", dynamo=False, opset_version=17, **names)
        torch.jit.freeze(torch.jit.trace(net, example)).save(f"{case['models']}/model.pt")


CONTENDERS = {
    "ours": Ours,
    "Paddle Inference": PaddleInference,
    "ONNX Runtime": OnnxRuntime,
    "ONNX Runtime, reading ahead": OnnxRuntimeAhead,
    "OpenVINO": OpenVino,
    "TorchScript": TorchScript,
}


def measure(case: Case, rounds: int) -> tuple[list[dict[str, Any]], list[Row]]:
    size, threads = case["batch"], case["threads"]
    title = f"batch {size}, {threads} thread(s)"
    common.say(title)
    workers = [Worker(name, case, OURS if name in ("ours", "Paddle Inference") else PEERS) for name in CONTENDERS]
    with common.started(workers):
        with common.started([Worker("float64", case, PEERS)]) as (truth,):
            errors = common.same(workers, truth, TOLERANCE)
        backend = workers[0].ask("about")[1]
        files = common.take_turns(workers, rounds, 0.5)
        network = common.take_turns([w for w in workers if "ahead" not in w.name], rounds, 0.3, order="network")
    cases, rows = [], []
    for what, seconds in (("from file to label", files), ("the network alone", network)):
        speeds = {name: size / common.spread(times)["median"] for name, times in seconds.items()}
        told = {"title": f"{what}, {title}", "unit": "images/s", "values": speeds, "seconds": seconds}
        cases.append({**told, "errors": errors, "backend": backend})
        if what == "from file to label":
            peer, goal, floor = max((n for n in speeds if n.startswith("ONNX")), key=speeds.__getitem__), 1.05, 1.0
        else:
            peer, goal, floor = "Paddle Inference", 2.2, 1.9
        if size == 1 or what == "from file to label":
            ours = f"{speeds['ours']:.0f} images/s ({backend})"
            ratio = common.ratio(seconds["ours"], seconds[peer])
            rows.append(Row(told["title"], ours, f"{peer}: {speeds[peer]:.0f}", **ratio, goal=goal, floor=floor))
    return cases, rows


def main() -> None:
    common.serve({**CONTENDERS, "float64": Truth, "our model": OurModel, "their model": TorchModel})
    parser = common.parser(__doc__)
    parser.add_argument("--batches", default="1,16", help="images at a time (default: %(default)s)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender (default: %(default)s)")
    o = parser.parse_args()
    common.need_peers()
    if o.quick:
        o.batches, o.threads, o.rounds = "1", "1", 2
    machine, cases, rows = common.machine(), [], []
    with tempfile.TemporaryDirectory() as scratch:
        where = {"models": scratch, "paths": make(Path(scratch) / "images", 32), "threads": 1}
        with common.started([Worker("our model", where), Worker("their model", where, PEERS)]):
            pass
        for size, threads in itertools.product(o.batches.split(","), o.threads.split(",")):
            case = {**where, "batch": int(size), "threads": int(threads), "pinned": True}
            more_cases, more_rows = measure(case, o.rounds)
            cases, rows = cases + more_cases, rows + more_rows
    report.write("infer", o.output, rows, cases, machine)


if __name__ == "__main__":
    sys.exit(main())
