"""Run an exported model with Paddle Inference, OpenVINO or ONNX Runtime; convert it to ONNX."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

import numpy as np
from paddle import inference

from ppfleet import foreign
from ppfleet.errors import ExportError

Arrays = list[np.ndarray[Any, Any]]
Runtime = Callable[[Sequence[np.ndarray[Any, Any]]], Arrays]

# In its own process: the converter prints, hides errors, and crashes on some models. Its newest release would install
# further packages by itself unless its optimiser is disabled (the runtimes have their own).
_CONVERT = """
import inspect, sys, paddle2onnx
more = {"optimize_tool": "None"} if "optimize_tool" in inspect.signature(paddle2onnx.export).parameters else {}
paddle2onnx.export(*sys.argv[1:4], opset_version=13, **more)
"""


class Predictor:
    """An exported model on the CPU, as Paddle Inference runs it by default."""

    def __init__(self, program: Path, weights: Path, names: Sequence[str] = ()) -> None:
        config = inference.Config(str(program), str(weights))
        config.disable_gpu()
        config.disable_glog_info()
        self._predictor, self._names = inference.create_predictor(config), names

    def __call__(self, inputs: Sequence[np.ndarray[Any, Any]]) -> Arrays:
        for name, value in _feed(self._predictor.get_input_names(), self._names, inputs).items():
            handle = self._predictor.get_input_handle(name)
            handle.reshape(list(value.shape))
            handle.copy_from_cpu(np.ascontiguousarray(value))
        self._predictor.run()
        return [self._predictor.get_output_handle(name).copy_to_cpu() for name in self._predictor.get_output_names()]


def openvino(program: Path, names: Sequence[str]) -> Runtime:
    import openvino

    # Processors with bfloat16 would compute in it.
    model = openvino.Core().compile_model(str(program), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    theirs = [value.any_name for value in model.inputs]
    return lambda inputs: [np.array(value) for value in model(_feed(theirs, names, inputs)).values()]


def onnxruntime(program: Path, names: Sequence[str]) -> Runtime:
    import onnxruntime

    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(program), quiet, providers=["CPUExecutionProvider"])
    theirs = [value.name for value in session.get_inputs()]
    return lambda inputs: list(session.run(None, _feed(theirs, names, inputs)))


def _feed(
    theirs: Sequence[str], names: Sequence[str], inputs: Sequence[np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs by the runtime's names, which it may list in another order than the model."""
    known = dict(zip(names, inputs))
    return {name: known[name] for name in theirs} if set(known) == set(theirs) else dict(zip(theirs, inputs))


def installed(package: str) -> bool:
    return find_spec(package) is not None


def runtimes(program: Path, names: Sequence[str]) -> dict[str, Callable[[], Runtime]]:
    """The installed runtimes that can run this file, by name; `names` are those of the model's inputs."""
    found: dict[str, Callable[[], Runtime]] = {}
    if program.suffix != ".onnx":
        found["paddle"] = lambda: Predictor(program, program.with_suffix(".pdiparams"), names)
    if program.suffix != ".json" and installed("openvino"):
        found["openvino"] = lambda: openvino(program, names)
    if program.suffix == ".onnx" and installed("onnxruntime"):
        found["onnxruntime"] = lambda: onnxruntime(program, names)
    return found


def to_onnx(program: Path, weights: Path, target: Path) -> None:
    if not installed("paddle2onnx"):
        raise ExportError("the format onnx needs paddle2onnx: pip install paddle2onnx, or omit it")
    command = [sys.executable, "-c", _CONVERT, str(program), str(weights), str(target)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode or not target.is_file() or not target.stat().st_size:
        reason = foreign.telling_line(done.stdout).rpartition("]")[2].strip() or f"exit code {done.returncode}"
        raise ExportError(f"paddle2onnx cannot convert this model: {reason}; omit the format onnx")
