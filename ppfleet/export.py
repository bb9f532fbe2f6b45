"""The static model: saved whole or not at all, compared with the dynamic one, stamped, and found again."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import inference
from paddle.static import InputSpec

from ppfleet.errors import ExportError
from ppfleet.files import TEMPORARY, digest, json_bytes, sync
from ppfleet.wrap import evaluating

STAMP = "export.json"
PARITY = "parity.npz"
_STEM = "inference"
_PROGRAMS = (".json", ".pdmodel")  # Paddle 3 and Paddle 2
TOLERANCE = 1e-4  # of the largest output: float32 rounding after fusion, with room to spare

Spec = Sequence[Any]


def find_model(directory: str | Path) -> tuple[Path, Path]:
    """Program and weights of an exported model, whichever Paddle wrote it."""
    directory = Path(directory)
    for suffix in _PROGRAMS:
        program, weights = directory / f"{_STEM}{suffix}", directory / f"{_STEM}.pdiparams"
        if program.is_file() and weights.is_file():
            return program, weights
    raise ExportError(f"{directory} holds no exported model ({_STEM}.json or {_STEM}.pdmodel, with {_STEM}.pdiparams)")


def export(net: Any, spec: Spec, directory: Path, batches: Sequence[int] = (1, 4), **stamp: Any) -> dict[str, Any]:
    """Save `net` (unwrapped, float32) for inference and prove that it answers the same; return what the stamp says.

    `spec` is the shape of a single float32 input, `[None, 3, 224, 224]`, or a list of `InputSpec`. `stamp` is
    written along: classes, preprocessing, whatever the deployed script needs.
    """
    specs = _specs(spec)
    directory = directory.absolute()
    fresh = not directory.exists()
    temporary = directory / f"{TEMPORARY}export-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with evaluating(net):
            _save(net, temporary / _STEM, specs)
            program, weights = find_model(temporary)
            error = _compare(net, specs, program, weights, batches, temporary / PARITY)
        facts = {
            "inputs": [
                {"name": s.name, "shape": [-1 if d is None else d for d in s.shape], "dtype": _dtype(s)} for s in specs
            ],
            **stamp,
            "paddle": paddle.__version__,
            "parity": {"batches": list(batches), "largest_error": error, "tolerance": TOLERANCE},
            "sha256": {part.name: digest(part) for part in sorted(temporary.iterdir())},
        }
        (temporary / STAMP).write_bytes(json_bytes(facts))
        _put(temporary, directory)
    except OSError as failure:
        raise ExportError(f"cannot write the exported model to {directory}: {failure.strerror or failure}") from failure
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if fresh:
            with contextlib.suppress(OSError):  # it is not empty where the export went well
                directory.rmdir()
    return facts


def _put(new: Path, directory: Path) -> None:
    """The finished files into `directory`, whatever else it holds; the stamp goes first and comes last, so that whoever
    checks it cannot take files of two exports for one."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (STAMP, *(f"{_STEM}{suffix}" for suffix in _PROGRAMS)):
        (directory / name).unlink(missing_ok=True)
    for part in sorted(new.iterdir(), key=lambda part: part.name == STAMP):
        sync(part)
        part.replace(directory / part.name)
    sync(directory)


def _save(net: Any, stem: Path, specs: list[Any]) -> None:
    try:
        paddle.jit.save(net, str(stem), input_spec=specs)
    except OSError:
        raise
    except Exception as failure:  # noqa: BLE001 - the tracer passes on whatever the model's code raises
        text = str(failure).strip().splitlines()
        raise ExportError(
            f"Paddle cannot make a static model of this: {type(failure).__name__}: {text[-1] if text else ''}"
        ) from failure


class Predictor:
    """An exported model on the CPU, as Paddle Inference runs it by default."""

    def __init__(self, program: Path, weights: Path) -> None:
        config = inference.Config(str(program), str(weights))
        config.disable_gpu()
        config.disable_glog_info()
        self._predictor = inference.create_predictor(config)

    def __call__(self, inputs: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        for name, value in zip(self._predictor.get_input_names(), inputs):
            handle = self._predictor.get_input_handle(name)
            handle.reshape(list(value.shape))
            handle.copy_from_cpu(np.ascontiguousarray(value))
        self._predictor.run()
        return [self._predictor.get_output_handle(name).copy_to_cpu() for name in self._predictor.get_output_names()]


def _compare(net: Any, specs: list[Any], program: Path, weights: Path, batches: Sequence[int], store: Path) -> float:
    predictor = Predictor(program, weights)
    worst, stored = 0.0, {}
    for batch in batches:
        inputs = [_example(s, batch, number) for number, s in enumerate(specs)]
        with paddle.no_grad():
            answer = net(*[paddle.to_tensor(value) for value in inputs])
        expected = [np.asarray(tensor.numpy()) for tensor in paddle.utils.flatten(answer)]
        got = _ask(predictor, inputs)
        stored.update({f"input{i}_batch{batch}": value for i, value in enumerate(inputs)})
        stored.update({f"output{i}_batch{batch}": value for i, value in enumerate(expected)})
        if len(expected) != len(got):
            raise ExportError(f"the static model has {len(got)} outputs, the dynamic one {len(expected)}")
        worst = max([worst, *(_error(a, b, batch) for a, b in zip(expected, got))])
    # Not compressed: noise does not shrink, and Paddle 2.6 brings symbols of its own that crash Python's zlib.
    np.savez(store, **stored)  # type: ignore[arg-type]
    if not worst <= TOLERANCE:
        raise ExportError(
            f"the static model answers differently: error {worst:.3g} of the largest output, allowed {TOLERANCE:g}. "
            f"Usual causes: a Python condition on a tensor's value, randomness or training-mode layers in forward()"
        )
    return worst


def _ask(predictor: Predictor, inputs: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    try:
        return predictor(inputs)
    except Exception as failure:  # noqa: BLE001 - the predictor has no exceptions of its own
        raise ExportError(f"the exported model cannot be run: {failure}") from failure


def _error(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any], batch: int) -> float:
    if expected.shape != got.shape:
        raise ExportError(
            f"for batch {batch} the static model answers with shape {list(got.shape)}, "
            f"the dynamic one with {list(expected.shape)}"
        )
    for whose, values in (("dynamic", expected), ("static", got)):
        if not np.isfinite(values.astype(np.float64)).all():
            raise ExportError(f"the {whose} model answers with NaN or infinity for batch {batch}")
    scale = max(float(np.abs(expected).max(initial=0)), 1e-6)
    return float(np.abs(expected.astype(np.float64) - got.astype(np.float64)).max(initial=0)) / scale


def _example(spec: Any, batch: int, number: int) -> np.ndarray[Any, Any]:
    shape = [batch if position == 0 else (d if d and d > 0 else 32) for position, d in enumerate(spec.shape)]
    random = np.random.RandomState(1000 * number + batch)
    if _dtype(spec).startswith(("int", "uint", "bool")):
        return random.randint(0, 2, shape).astype(_dtype(spec))  # 0 and 1 are valid indices nearly everywhere
    return random.standard_normal(shape).astype(_dtype(spec))


def _specs(spec: Spec) -> list[Any]:
    if spec and all(dimension is None or isinstance(dimension, int) for dimension in spec):
        specs = [InputSpec(shape=list(spec), dtype="float32", name="x")]
    else:
        specs = list(spec)
    if not specs or not all(isinstance(s, InputSpec) for s in specs):
        raise ExportError(f"input spec {spec!r} is neither a shape like [None, 3, 224, 224] nor a list of InputSpec")
    for s in specs:
        if s.shape and s.shape[0] not in (None, -1):
            raise ExportError(
                f"input {s.name}: the first dimension is {s.shape[0]}; leave it None, so that any batch fits"
            )
    return specs


def _dtype(spec: Any) -> str:
    name = str(spec.dtype).rpartition(".")[2].lower()
    return {"fp32": "float32", "fp64": "float64", "fp16": "float16"}.get(name, name)
