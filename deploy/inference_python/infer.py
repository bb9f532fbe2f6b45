"""Classify images with an exported model: python deploy/inference_python/infer.py --model-dir=… --img-path=…

Needs this directory, NumPy, OpenCV, and Paddle or OpenVINO or ONNX Runtime; nothing else of the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main: Ctrl-C during the imports needs no traceback
warnings.filterwarnings("ignore", message="No ccache found")  # Paddle's advice to those who compile operators

try:
    import numpy as np
    from backends import ONNX, PARITY, PROGRAMS, WEIGHTS, UserError, choose
    from benchmark import Benchmark
    from images import answered, find_images
except ImportError as missing:
    # Not opencv-python: that one needs libGL, which a server lacks.
    package = {"numpy": "numpy"}.get(missing.name or "", "opencv-python-headless")
    sys.exit(f"infer.py needs NumPy and OpenCV: {missing}; pip install {package}")


_FEW = 10  # classes up to which repeated argmax is used


class Classifier:
    """An exported model with its export.json: class names and preprocessing."""

    def __init__(self, directory: str | Path, options: argparse.Namespace) -> None:
        self.directory = Path(directory)
        self.stamp = read_stamp(self.directory)
        self.classes: list[str] = self.stamp["classes"]
        self.backend = choose(self.directory, self.stamp, options)

    def scores(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The network's outputs: one row per image, one column per class."""
        scores = self.backend(images)
        if scores.shape[-1] != len(self.classes):
            raise UserError(
                f"{self.directory}/export.json has {len(self.classes)} classes, but the model has {scores.shape[-1]}: "
                f"export it again"
            )
        return scores

    def top(self, scores: np.ndarray[Any, Any], count: int) -> list[list[dict[str, Any]]]:
        """The `count` most probable classes of each row, the most probable first; ties by class number."""
        return [self._best(row, min(count, len(row))) for row in scores]

    def _best(self, row: np.ndarray[Any, Any], count: int) -> list[dict[str, Any]]:
        shares = np.exp(row - row.max())
        shares /= shares.sum()
        left = row.copy()
        best: list[int] = []
        while len(best) < min(count, _FEW):  # far cheaper than sorting a thousand classes
            best.append(int(left.argmax()))
            left[best[-1]] = -np.inf
        if count > _FEW:
            best = np.argsort(-row, kind="stable")[:count].tolist()
        return [{"label": i, "class": self.classes[i], "score": float(shares[i])} for i in best]


def read_stamp(directory: Path) -> dict[str, Any]:
    """export.json, after a check that the model's files match it."""
    if not directory.is_dir():
        raise UserError(f"--model-dir={directory} does not exist; tools/export.py makes one")
    try:
        stamp: dict[str, Any] = json.loads((directory / "export.json").read_text(encoding="utf-8"))
        parts, how = dict(stamp["sha256"]), dict(stamp["preprocess"])
        own = WEIGHTS in parts and set(PROGRAMS) & set(parts)
        if not stamp["classes"] or not (own or ONNX in parts) or PARITY not in parts:
            raise ValueError("classes or files are missing")
        float(stamp["parity"]["tolerance"])
        if not {"resize_short", "crop", "mean", "std"} <= set(how):
            raise ValueError("preprocessing is missing")
    except FileNotFoundError:
        raise UserError(
            f"{directory} has no export.json: --model-dir must be a directory that tools/export.py wrote"
        ) from None
    except OSError as failure:
        raise UserError(f"cannot read {failure.filename}: {failure.strerror}") from None
    except (ValueError, KeyError, TypeError) as failure:
        raise UserError(
            f"{directory}/export.json is damaged or incomplete ({failure}): export the model again"
        ) from None
    for name, expected in parts.items():
        try:
            found = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise UserError(f"{directory} has no {name}: copy the whole directory, or export the model again") from None
        except OSError as failure:
            raise UserError(f"cannot read {directory / name}: {failure.strerror}") from None
        if found != expected:
            raise UserError(f"{directory / name} is damaged or from another export: copy it again, or export again")
    return stamp


def check_device(options: argparse.Namespace) -> None:
    """Refuse impossible combinations of options before anything is loaded."""
    if options.use_tensorrt and not options.use_gpu:
        raise UserError("--use-tensorrt=True needs --use-gpu=True")
    if options.precision != "fp32" and not options.use_gpu:
        raise UserError(f"--precision={options.precision} needs --use-gpu=True; on a CPU use --precision=fp32")
    if options.backend in ("openvino", "onnxruntime") and (options.use_gpu or options.enable_mkldnn is not None):
        flag = "use-gpu" if options.use_gpu else "enable-mkldnn"
        raise UserError(f"--{flag} is for Paddle: use --backend=paddle, or remove --{flag}")
    if options.use_gpu:
        try:
            import paddle
        except ImportError:
            raise UserError("--use-gpu=True needs Paddle: pip install paddlepaddle-gpu") from None
        cuda = paddle.is_compiled_with_cuda()
        if not cuda or not paddle.device.cuda.device_count():
            reason = "no NVIDIA card is visible" if cuda else "this is the CPU build of PaddlePaddle"
            raise UserError(f"--use-gpu=True, but {reason}; use --use-gpu=False")


def cores(share: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors that this process may use, within the CPU limit of its container."""
    visible = len(os.sched_getaffinity(0))
    try:
        quota, period = share.read_text(encoding="utf-8").split()
        return max(1, min(visible, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return visible


def accuracy(answers: list[dict[str, Any]], classes: Sequence[str]) -> dict[str, float] | None:
    """Top-1 and top-5, if every image is in a folder with the name of its class."""
    truth = [Path(answer["path"]).parent.name for answer in answers]
    if not answers or not set(truth) <= set(classes) or len(set(classes)) < len(classes):
        return None
    places = [[guess["class"] for guess in answer["top"]] for answer in answers]
    scores = {
        f"top{k}": sum(name in best[:k] for name, best in zip(truth, places)) / len(answers)
        for k in (1, 5)
        if len(places[0]) >= min(k, len(classes))
    }
    return {**scores, "samples": len(answers)}


def run(options: argparse.Namespace) -> int:
    check_device(options)
    paths = find_images(options.img_path)
    model = Classifier(options.model_dir, options)
    how = model.stamp["preprocess"]
    log = Benchmark(options, model.backend, model.stamp, [3, how["crop"], how["crop"]])
    if options.benchmark:
        for size in {min(options.batch_size, len(paths)), len(paths) % options.batch_size or options.batch_size}:
            for _ in range(options.warmup):  # also for the size of the last, partial batch
                model.scores(np.zeros((size, 3, how["crop"], how["crop"]), np.float32))
    answers: list[dict[str, Any]] = []
    bad: list[str] = []
    start = time.perf_counter()
    streams = model.backend.streams
    for good, scores, errors, prepared, inferred in answered(
        paths, options.batch_size, how, options.workers, model.scores, streams
    ):
        for error in errors:
            print(f"bad image: {error}", file=sys.stderr)
        bad += errors
        if not good:
            continue
        began = time.perf_counter()
        for path, top in zip(good, model.top(scores, options.topk)):
            answers.append({"path": str(path), "top": top})
        log.add(len(good), prepared, inferred, time.perf_counter() - began)
        for answer in answers[-len(good) :]:
            print(f"{answer['path']}: " + ", ".join(f"{t['class']} ({t['score']:.4f})" for t in answer["top"]))
    log.wall = time.perf_counter() - start
    scores_all = accuracy(answers, model.classes)
    if scores_all:
        print(" ".join(f"{k}: {v:.6f}" if k != "samples" else f"{k}: {v}" for k, v in scores_all.items()))
    used = model.backend.facts(options)
    result: dict[str, Any] = {"images": answers, "bad": bad, "accuracy": scores_all, "backend": used}
    if options.benchmark and answers:
        result["benchmark"] = log.report()
    write_json(options, result)
    if bad and len(paths) > 1:
        print(f"infer.py: {len(bad)} of {len(paths)} images could not be read: see above", file=sys.stderr)
    return 1 if bad else 0


def write_json(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write everything to --json; with --benchmark=True alone, the benchmark to the model's directory."""
    if options.json:
        path, content = Path(options.json), result
    elif "benchmark" in result:
        device = "gpu" if options.use_gpu else "cpu"
        path = Path(options.model_dir) / f"benchmark_{device}_batchsize_{options.batch_size}.json"
        content = result["benchmark"]
    else:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, ensure_ascii=False)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        print(f"written: {path}")
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; choose another file with --json") from None


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there are any, and keeps the line breaks of the description."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def yes_or_no(text: str) -> bool:
    if text.lower() in ("true", "yes", "1", "gpu"):
        return True
    if text.lower() in ("false", "no", "0", "cpu", "null", ""):
        return False
    raise argparse.ArgumentTypeError(f"must be True or False, got {text!r}")


def at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
        return int(text)

    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=Help, allow_abbrev=False)
    flag: dict[str, Any] = {"type": yes_or_no, "nargs": "?", "const": True, "metavar": "True|False"}
    parser.add_argument("--model-dir", required=True, help="the directory that tools/export.py wrote")
    parser.add_argument(
        "--img-path", required=True, help="an image, a folder of images, or a pattern such as 'a/*.jpg'"
    )
    parser.add_argument("--batch-size", type=at_least(1), default=1, help="images per batch")
    parser.add_argument("--use-gpu", **flag, default=False, help="run on the first visible card")
    parser.add_argument("--use-tensorrt", **flag, default=False, help="use TensorRT where it can")
    parser.add_argument(
        "--backend",
        choices=["auto", "paddle", "openvino", "onnxruntime"],
        default="auto",
        help="what runs the network; auto: the fastest that is installed and reproduces the exported model's outputs",
    )
    parser.add_argument("--enable-mkldnn", **flag, help="oneDNN, for Paddle on a CPU (default: True)")
    parser.add_argument(
        "--cpu-threads",
        type=at_least(1),
        help="threads for the network, on a CPU (default: one per core)",
    )
    parser.add_argument(
        "--workers",
        type=at_least(0),
        help="threads that prepare the next images while the network runs (default: one per core; with "
        "--benchmark=True 0, so that each stage is measured separately)",
    )
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32", help="fp16 needs a card")
    parser.add_argument("--benchmark", **flag, default=False, help="measure, print the TIPC block, write JSON")
    parser.add_argument("--warmup", type=at_least(0), default=10, help="batches before the measurement")
    parser.add_argument("--topk", type=at_least(1), default=5, help="classes to print for each image")
    parser.add_argument(
        "--json", help="file for predictions, accuracy and benchmark (default: the benchmark, in the model's directory)"
    )
    options = parser.parse_args(arguments)
    if options.workers is None:
        options.workers = 0 if options.benchmark or cores() == 1 else cores()
    if options.cpu_threads is None:
        options.cpu_threads = cores()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):  # show file names that are not text with escapes
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except UserError as failure:
        print(f"infer.py: {failure}", file=sys.stderr)
        return 1
    except MemoryError:
        print("infer.py: out of memory: use a smaller --batch-size", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("infer.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
