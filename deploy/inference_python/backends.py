"""Backends that run an exported model: Paddle Inference, OpenVINO, ONNX Runtime. Each is imported only when used."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

import numpy as np

PROGRAMS, WEIGHTS = ("inference.json", "inference.pdmodel"), "inference.pdiparams"  # of Paddle 3 and 2
ONNX, PARITY = "inference.onnx", "parity.npz"
_ON_GPU = {"fp32": 0.02, "fp16": 0.1}  # how much of the largest output may differ there; not measured on a real card
_PACKAGE = {"paddle": "paddlepaddle"}
Images = np.ndarray[Any, Any]


class UserError(Exception):
    """An error that the user can fix."""


class Absent(UserError):
    """A backend that is not available: its package, or the model in its format, is missing."""


class Backend:
    """A loaded model, with the name and version of the backend; `conf` is TIPC's section of that name."""

    name: str
    version: str
    streams = 1  # threads that may call it at the same time

    def __call__(self, images: Images) -> np.ndarray[Any, Any]:
        """One row per image, one column per class."""
        raise NotImplementedError

    def facts(self, options: argparse.Namespace) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "threads": options.cpu_threads,
            "workers": options.workers,
        }

    def conf(self, options: argparse.Namespace) -> dict[str, Any]:
        return {
            "runtime_device": "cpu",
            "ir_optim": True,  # both optimise the graph and its memory when they load it
            "enable_memory_optim": True,
            "enable_tensorrt": False,
            "enable_mkldnn": False,
            "cpu_math_library_num_threads": options.cpu_threads,
        }


def _streams(options: argparse.Namespace) -> int:
    """Two calls at a time, if workers prepare images: the threads of a single call would wait for each other."""
    return min(2, options.cpu_threads) if options.workers else 1


class OnnxRuntime(Backend):
    name = "onnxruntime"

    def __init__(self, program: Path, options: argparse.Namespace) -> None:
        import onnxruntime

        self.version = onnxruntime.__version__
        self.streams = _streams(options)
        setting = onnxruntime.SessionOptions()
        setting.log_severity_level = 3
        setting.intra_op_num_threads = options.cpu_threads - self.streams + 1  # the calling threads compute too
        # A spinning thread would take a core from the workers that prepare the next images.
        setting.add_session_config_entry("session.intra_op.allow_spinning", "0" if options.workers else "1")
        self.session = onnxruntime.InferenceSession(str(program), setting, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0].name

    def __call__(self, images: Images) -> np.ndarray[Any, Any]:
        return self.session.run(None, {self.input: images})[0]


class OpenVino(Backend):
    name = "openvino"

    def __init__(self, program: Path, options: argparse.Namespace) -> None:
        import openvino

        self.version, self.streams = openvino.__version__.partition("-")[0], _streams(options)
        setting = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": self.streams,
            "INFERENCE_NUM_THREADS": options.cpu_threads,
            "INFERENCE_PRECISION_HINT": "f32",  # otherwise processors with bfloat16 use it
            "ENABLE_CPU_PINNING": not options.workers,  # a pinned thread would wait for the worker on its core
        }
        self.model, self.own = openvino.Core().compile_model(str(program), "CPU", setting), threading.local()

    def __call__(self, images: Images) -> np.ndarray[Any, Any]:
        if not hasattr(self.own, "request"):  # one for each thread
            self.own.request = self.model.create_infer_request()
        return np.array(self.own.request.infer([images], share_inputs=True, share_outputs=True)[0])


class PaddleInference(Backend):
    """Paddle Inference, with oneDNN on a CPU; with `engine`, the OpenVINO that is built into Paddle 3."""

    def __init__(self, program: Path, options: argparse.Namespace, engine: bool = False) -> None:
        import paddle
        from paddle import inference

        self.name, self.version = "openvino" if engine else "paddle", f"{paddle.__version__}"
        self.config = inference.Config(str(program), str(program.with_name(WEIGHTS)))
        self.engine = engine
        if engine:
            self.version = f"of paddle {paddle.__version__}"
            # It writes a compiled model of 6 MB, by default into the working directory.
            self.cache = tempfile.TemporaryDirectory(prefix="ppfleet-")
            self.config.set_optim_cache_dir(self.cache.name)
            if not hasattr(self.config, "enable_openvino_engine"):
                raise Absent(f"Paddle {paddle.__version__} contains no OpenVINO: pip install openvino")
        _configure(self.config, inference, program.suffix, options, engine)
        self.predictor = inference.create_predictor(self.config)
        self.input = self.predictor.get_input_handle(self.predictor.get_input_names()[0])
        self.output = self.predictor.get_output_handle(self.predictor.get_output_names()[0])

    def __call__(self, images: Images) -> np.ndarray[Any, Any]:
        self.input.reshape(list(images.shape))
        self.input.copy_from_cpu(images)
        self.predictor.run()
        return self.output.copy_to_cpu()

    def conf(self, options: argparse.Namespace) -> dict[str, Any]:
        return {
            "runtime_device": "gpu" if options.use_gpu else "cpu",
            "ir_optim": bool(self.config.ir_optim()),
            "enable_memory_optim": True,  # _configure always enables it
            "enable_tensorrt": bool(self.config.tensorrt_engine_enabled()),
            "enable_mkldnn": bool(self.config.mkldnn_enabled()) and not self.engine,
            "cpu_math_library_num_threads": int(self.config.cpu_math_library_num_threads()),
        }


def _configure(config: Any, inference: Any, form: str, options: argparse.Namespace, engine: bool) -> None:
    config.disable_glog_info()
    config.switch_ir_optim(True)
    config.enable_memory_optim()
    if form == ".json":  # without it, memory optimisation fails on Paddle 3's format
        config.enable_new_executor(True)
        config.enable_new_ir(True)
    if options.use_gpu:
        kind = inference.PrecisionType.Half if options.precision == "fp16" else inference.PrecisionType.Float32
        config.enable_use_gpu(256, 0, kind)
        if options.use_tensorrt:
            if form == ".json":
                raise UserError("Paddle runs TensorRT on .pdmodel only: export the model with --formats=paddle,pdmodel")
            config.enable_tensorrt_engine(
                max_batch_size=options.batch_size, min_subgraph_size=3, precision_mode=kind, use_static=False
            )
        return
    config.disable_gpu()
    config.set_cpu_math_library_num_threads(options.cpu_threads)
    if engine:
        config.enable_openvino_engine(inference.PrecisionType.Float32)
    elif options.enable_mkldnn is not False:
        config.enable_mkldnn()
    else:
        config.disable_mkldnn()  # Paddle 3 enables it by default


def choose(directory: Path, stamp: dict[str, Any], options: argparse.Namespace) -> Backend:
    """The backend of --backend; with `auto` the fastest available one that reproduces the exported model's outputs.

    Paddle is tried last: importing it takes longer than classifying hundreds of images with another backend.
    """
    name = options.backend
    if name == "auto" and (options.use_gpu or options.enable_mkldnn is not None):
        name = "paddle"  # only Paddle has these options
    if name != "auto":
        return load(name, directory, stamp, options)
    light = [name for name in ("onnxruntime", "openvino") if find_spec(name)]
    failures: list[UserError] = []
    for names in (light, [name for name in ("openvino", "paddle") if name not in light]):
        passed = []
        for name in names:
            try:
                passed.append(load(name, directory, stamp, options))
            except Absent as absent:
                failures.insert(0, absent)
            except UserError as failure:
                failures.append(failure)
        if passed:
            for problem in failures:
                if not isinstance(problem, Absent):
                    print(f"infer.py: not used: {problem}", file=sys.stderr)
            crop = stamp["preprocess"]["crop"]
            return fastest(passed, np.zeros((min(options.batch_size, 16), 3, crop, crop), np.float32))
    raise failures[-1] if not isinstance(failures[-1], Absent) else failures[0]  # Paddle's is the first


def fastest(backends: list[Backend], images: Images) -> Backend:
    """The fastest, measured; a near tie goes to the first, so that a machine always uses the same backend."""
    if len(backends) == 1:
        return backends[0]
    best = []
    for backend in backends:
        backend(images)  # the first batch of a size plans its memory
        times = []
        for _ in range(3):
            began = time.perf_counter()
            backend(images)
            times.append(time.perf_counter() - began)
        best.append(min(times))
    return min(zip(best, backends), key=lambda pair: pair[0] * (1 if pair[1] is backends[0] else 1.1))[1]


def load(name: str, directory: Path, stamp: dict[str, Any], options: argparse.Namespace) -> Backend:
    """One backend, after it has reproduced the outputs that the export stored."""
    make = _find(name, directory, stamp["sha256"], options)
    try:
        backend = make()
        error = _error(backend, directory / PARITY)
    except UserError:
        raise
    except Exception as failure:  # noqa: BLE001 - each raises its own types; the last line is the reason
        reason = (str(failure).strip().splitlines() or [""])[-1]
        raise UserError(
            f"{name} cannot run {directory} ({type(failure).__name__}: {reason}); it was exported by Paddle "
            f"{stamp.get('paddle')}: use that version, or export the model again"
        ) from None
    tolerance = stamp["parity"]["tolerance"]
    if options.use_gpu:  # TF32 and float16 differ by more than rounding, another model by much more
        tolerance = max(tolerance, _ON_GPU[options.precision])
    if not error <= tolerance:
        raise UserError(
            f"the outputs of {name} {backend.version} differ from those of the exported model (error {error:.3g} of "
            f"the largest output, allowed {tolerance:g}): use another --backend, or export the model again"
        )
    return backend


def _find(name: str, directory: Path, files: dict[str, str], options: argparse.Namespace) -> Callable[[], Backend]:
    """A function that creates that backend, if its package and the model in its format are available."""

    def form(*programs: str) -> Path:
        for program in programs:
            if program in files:
                return directory / program
        kind = {ONNX: "onnx", PROGRAMS[0]: "paddle", PROGRAMS[1]: "pdmodel"}[programs[0]]
        raise Absent(
            f"{directory} has no {programs[0]}, which --backend={name} needs: use tools/export.py --formats={kind}"
        )

    own = name == "openvino" and not find_spec(name) and find_spec("paddle")
    if not own and not find_spec(name):
        raise Absent(f"--backend={name} needs a package that is not installed: pip install {_PACKAGE.get(name, name)}")
    if name == "onnxruntime":
        program = form(ONNX)
        return lambda: OnnxRuntime(program, options)
    if name == "openvino" and not own:
        program = form(PROGRAMS[1], ONNX)
        return lambda: OpenVino(program, options)
    program = form(PROGRAMS[1]) if own else form(*(PROGRAMS[::-1] if options.use_tensorrt else PROGRAMS))
    return lambda: PaddleInference(program, options, engine=bool(own))


def _error(backend: Backend, store: Path) -> float:
    """The largest difference from the stored outputs, relative to the largest output."""
    worst = 0.0
    with np.load(store) as stored:
        for name in stored.files:
            if name.startswith("input0_"):
                expected, got = stored[name.replace("input", "output")], backend(stored[name])
                if got.shape != expected.shape or not np.isfinite(got).all():
                    return float("inf")
                worst = max(worst, float(np.abs(got - expected).max() / np.abs(expected).max().clip(1e-6)))
    return worst
