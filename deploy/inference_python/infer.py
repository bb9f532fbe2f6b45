"""Classify images with an exported model: python deploy/inference_python/infer.py --model-dir=… --img-path=…

Needs this directory's three files, Paddle, NumPy and OpenCV; nothing else of the repository.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main: Ctrl-C during the imports needs no traceback
warnings.filterwarnings("ignore", message="No ccache found")  # Paddle's advice to those who compile operators

try:
    import numpy as np
    from benchmark import Benchmark
    from paddle import inference
    from preprocess import EXTENSIONS, BadImage, prepare
except ImportError as missing:
    # Not opencv-python: that one needs libGL, which a server lacks.
    package = {"paddle": "paddlepaddle", "numpy": "numpy"}.get(missing.name or "", "opencv-python-headless")
    sys.exit(f"infer.py needs Paddle, NumPy and OpenCV: {missing}; pip install {package}")

PROGRAMS, WEIGHTS = ("inference.json", "inference.pdmodel"), "inference.pdiparams"  # of Paddle 3 and 2


class UserError(Exception):
    """What the person who typed the command can mend."""


class Classifier:
    """An exported model with its stamp: class names and how images are prepared."""

    def __init__(self, directory: str | Path, options: argparse.Namespace) -> None:
        self.directory = Path(directory)
        self.stamp = read_stamp(self.directory)
        self.classes: list[str] = self.stamp["classes"]
        program = next(name for name in PROGRAMS if name in self.stamp["sha256"])
        self.config = configure(self.directory / program, self.directory / WEIGHTS, options)
        try:
            self.predictor = inference.create_predictor(self.config)
        except Exception as failure:  # noqa: BLE001 - Paddle raises many kinds; the last line has the reason
            reason = (str(failure).strip().splitlines() or [""])[-1]
            raise UserError(
                f"Paddle cannot load {self.directory} ({type(failure).__name__}: {reason}); it was exported "
                f"by Paddle {self.stamp.get('paddle')}: use that version, or export it anew"
            ) from None

    def scores(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What the network answers: one row an image, one column a class."""
        handle = self.predictor.get_input_handle(self.predictor.get_input_names()[0])
        handle.reshape(list(images.shape))
        handle.copy_from_cpu(images)
        self.predictor.run()
        scores = self.predictor.get_output_handle(self.predictor.get_output_names()[0]).copy_to_cpu()
        if scores.shape[-1] != len(self.classes):
            raise UserError(
                f"{self.directory}/export.json names {len(self.classes)} classes, the model answers with "
                f"{scores.shape[-1]}: export it anew"
            )
        return scores

    def top(self, scores: np.ndarray[Any, Any], count: int) -> list[list[dict[str, Any]]]:
        """The `count` most probable classes of each row, the most probable first."""
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        shares = raised / raised.sum(-1, keepdims=True)
        best = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
        return [
            [{"label": int(i), "class": self.classes[i], "score": float(row[i])} for i in order]
            for order, row in zip(best, shares)
        ]


def read_stamp(directory: Path) -> dict[str, Any]:
    """export.json, after a check that the model's files are the ones it speaks of."""
    if not directory.is_dir():
        raise UserError(f"--model-dir={directory} does not exist; tools/export.py makes one")
    try:
        stamp: dict[str, Any] = json.loads((directory / "export.json").read_text(encoding="utf-8"))
        parts, how = dict(stamp["sha256"]), dict(stamp["preprocess"])
        if not stamp["classes"] or WEIGHTS not in parts or not set(PROGRAMS) & set(parts):
            raise ValueError("classes or files are missing")
        if not {"resize_short", "crop", "mean", "std"} <= set(how):
            raise ValueError("preprocessing is missing")
    except FileNotFoundError:
        raise UserError(f"{directory} holds no export.json: is it a directory that tools/export.py wrote?") from None
    except OSError as failure:
        raise UserError(f"cannot read {failure.filename}: {failure.strerror}") from None
    except (ValueError, KeyError, TypeError) as failure:
        raise UserError(
            f"{directory}/export.json is damaged or incomplete ({failure}): export the model anew"
        ) from None
    for name, expected in parts.items():
        try:
            found = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise UserError(f"{directory} lacks {name}: copy the whole directory, or export the model anew") from None
        except OSError as failure:
            raise UserError(f"cannot read {directory / name}: {failure.strerror}") from None
        if found != expected:
            raise UserError(f"{directory / name} is damaged or from another export: copy it again, or export anew")
    return stamp


def configure(program: Path, weights: Path, options: argparse.Namespace) -> Any:
    config = inference.Config(str(program), str(weights))
    config.disable_glog_info()
    config.switch_ir_optim(True)
    config.enable_memory_optim()
    if program.suffix == ".json":  # without it, memory optimisation fails on Paddle 3's format
        config.enable_new_executor(True)
        config.enable_new_ir(True)
    if options.use_gpu:
        kind = inference.PrecisionType.Half if options.precision == "fp16" else inference.PrecisionType.Float32
        config.enable_use_gpu(256, 0, kind)
        if options.use_tensorrt:
            if program.suffix == ".json":
                raise UserError("Paddle runs TensorRT on models of Paddle 2 (.pdmodel) only: take --use-tensorrt=False")
            config.enable_tensorrt_engine(
                max_batch_size=options.batch_size, min_subgraph_size=3, precision_mode=kind, use_static=False
            )
        return config
    config.disable_gpu()
    config.set_cpu_math_library_num_threads(options.cpu_threads)
    if options.enable_mkldnn:
        config.enable_mkldnn()
    else:
        config.disable_mkldnn()  # Paddle 3 turns it on by itself
    return config


def check_device(options: argparse.Namespace) -> None:
    import paddle

    cards = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if options.use_gpu and not cards:
        why = "no NVIDIA card is visible" if paddle.is_compiled_with_cuda() else "this is the CPU build of PaddlePaddle"
        raise UserError(f"--use-gpu=True, but {why}; take --use-gpu=False")
    if options.use_tensorrt and not options.use_gpu:
        raise UserError("--use-tensorrt=True needs --use-gpu=True")
    if options.precision != "fp32" and not options.use_gpu:
        raise UserError(f"--precision={options.precision} needs --use-gpu=True; on a CPU take --precision=fp32")


def find_images(pattern: str) -> list[Path]:
    """A file, all images below a folder, or what a glob pattern matches; in the order of their names."""
    path = Path(pattern)
    try:
        if path.is_file():
            return [path]
        folder = path.is_dir()
        matches = below(path) if folder else glob.glob(pattern, recursive=True)  # noqa: PTH207 - takes absolute patterns
        found = sorted(Path(match) for match in matches if Path(match).is_file())
    except OSError as failure:
        raise UserError(f"cannot read {str(failure.filename or pattern)[:200]}: {failure.strerror}") from None
    if not found:
        what = "holds no images" if folder else "does not exist, and matches no file as a pattern"
        raise UserError(f"--img-path={pattern} {what} ({' '.join(EXTENSIONS)})")
    return found


def below(folder: Path) -> Iterator[str]:
    """All images in a folder and its subfolders, also behind links; a link back up is not followed twice."""

    def refuse(failure: OSError) -> None:
        raise failure

    seen = set()
    for where, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        if os.path.realpath(where) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(where))
        folders[:] = [name for name in folders if not name.startswith(".")]  # as evaluation does
        shown = (name for name in names if not name.startswith("."))
        yield from (f"{where}/{name}" for name in shown if name.lower().endswith(EXTENSIONS))


def batches(
    paths: Sequence[Path], size: int, how: dict[str, Any]
) -> Iterator[tuple[list[Path], Any, list[str], float]]:
    """Paths and input of `size` readable images at a time, the complaints about others, and the seconds it took."""
    for start in range(0, len(paths), size):
        began, good, images, bad = time.perf_counter(), [], [], []
        for path in paths[start : start + size]:
            try:
                images.append(prepare(path, how))
                good.append(path)
            except BadImage as complaint:
                bad.append(str(complaint))
        yield good, np.stack(images) if images else None, bad, time.perf_counter() - began


def accuracy(answers: list[dict[str, Any]], classes: Sequence[str]) -> dict[str, float] | None:
    """Top-1 and top-5, where every image lies in a folder that is called like its class."""
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
    log = Benchmark(options, model.config, model.stamp, [3, how["crop"], how["crop"]])
    if options.benchmark:
        for size in {min(options.batch_size, len(paths)), len(paths) % options.batch_size or options.batch_size}:
            for _ in range(options.warmup):  # the last, partial batch too
                model.scores(np.zeros((size, 3, how["crop"], how["crop"]), np.float32))
    answers: list[dict[str, Any]] = []
    bad: list[str] = []
    for good, images, complaints, prepared in batches(paths, options.batch_size, how):
        for complaint in complaints:
            print(f"bad image: {complaint}", file=sys.stderr)
        bad += complaints
        if images is None:
            continue
        began = time.perf_counter()
        scores = model.scores(images)
        inferred = time.perf_counter()
        for path, top in zip(good, model.top(scores, options.topk)):
            answers.append({"path": str(path), "top": top})
        log.add(len(good), prepared, inferred - began, time.perf_counter() - inferred)
        for answer in answers[-len(good) :]:
            print(f"{answer['path']}: " + ", ".join(f"{t['class']} ({t['score']:.4f})" for t in answer["top"]))
    scores_all = accuracy(answers, model.classes)
    if scores_all:
        print(" ".join(f"{k}: {v:.6f}" if k != "samples" else f"{k}: {v}" for k, v in scores_all.items()))
    result: dict[str, Any] = {"images": answers, "bad": bad, "accuracy": scores_all}
    if options.benchmark and answers:
        result["benchmark"] = log.report()
    write_json(options, result)
    if bad and len(paths) > 1:
        print(f"infer.py: {len(bad)} of {len(paths)} images could not be read: see above", file=sys.stderr)
    return 1 if bad else 0


def write_json(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Everything, where --json says; with --benchmark=True alone, the figures beside the model."""
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
        raise UserError(f"cannot write {path}: {failure.strerror}; choose another place with --json") from None


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults where there are any, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def yes_or_no(text: str) -> bool:
    if text.lower() in ("true", "yes", "1", "gpu"):
        return True
    if text.lower() in ("false", "no", "0", "cpu", "null", ""):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")
        return int(text)

    return number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=Help, allow_abbrev=False)
    flag: dict[str, Any] = {"type": yes_or_no, "nargs": "?", "const": True, "metavar": "True|False"}
    parser.add_argument("--model-dir", required=True, help="what tools/export.py wrote")
    parser.add_argument("--img-path", required=True, help="an image, a folder of them, or a pattern such as 'a/*.jpg'")
    parser.add_argument("--batch-size", type=at_least(1), default=1, help="images at a time")
    parser.add_argument("--use-gpu", **flag, default=False, help="run on the first visible card")
    parser.add_argument("--use-tensorrt", **flag, default=False, help="let TensorRT run what it can")
    parser.add_argument("--enable-mkldnn", **flag, default=True, help="oneDNN, on a CPU")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--cpu-threads", type=at_least(1), default=cores, help="threads for the network, on a CPU")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32", help="fp16 needs a card")
    parser.add_argument("--benchmark", **flag, default=False, help="measure, print the TIPC block, write JSON")
    parser.add_argument("--warmup", type=at_least(0), default=10, help="batches before measuring starts")
    parser.add_argument("--topk", type=at_least(1), default=5, help="how many classes an image")
    parser.add_argument(
        "--json", help="file for answers, accuracy and figures (default: the figures, beside the model)"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):  # a file name that is no text is shown with escapes
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except UserError as failure:
        print(f"{parser.prog}: {failure}", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"{parser.prog}: out of memory: take a smaller --batch-size", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
