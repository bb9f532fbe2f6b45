"""The static model: written completely or not at all, compared with the dynamic one, described by export.json."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import paddle
from paddle.static import InputSpec

from ppfleet.checkpoint.files import TEMPORARY, digest, json_bytes, sync
from ppfleet.errors import ExportError
from ppfleet.export.runtimes import Runtime, runtimes, to_onnx
from ppfleet.training.model import evaluating

STAMP = "export.json"
PARITY = "parity.npz"
_STEM = "inference"
FORMATS = ("paddle", "pdmodel", "onnx")  # this Paddle's own; for OpenVINO, also the one in Paddle 3; for ONNX Runtime
_OWN = (".json", ".pdmodel")  # Paddle 3 and Paddle 2
_PROGRAMS, _WEIGHTS = (*_OWN, ".onnx"), (".pdiparams", ".pdiparams.info")
# Relative to the largest output. Rounding in another order was measured at 1e-6 with an untrained MobileNetV3-small and
# at 1e-4 after one epoch; bfloat16 at 4e-3 and 0.2.
TOLERANCE = 1e-3

Spec = Sequence[Any]
Case = tuple[int, list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]  # batch size, inputs, outputs


def find_model(directory: str | Path) -> tuple[Path, Path]:
    """Program and weights of an exported model, whichever Paddle wrote it."""
    directory = Path(directory)
    for suffix in _OWN:
        program, weights = directory / f"{_STEM}{suffix}", directory / f"{_STEM}.pdiparams"
        if program.is_file() and weights.is_file():
            return program, weights
    raise ExportError(
        f"{directory} contains no exported model ({_STEM}.json or {_STEM}.pdmodel, with {_STEM}.pdiparams)"
    )


def export(
    net: Any,
    spec: Spec,
    directory: Path,
    batches: Sequence[int] = (1, 4),
    formats: Sequence[str] = ("paddle",),
    **stamp: Any,
) -> dict[str, Any]:
    """Save `net` (unwrapped, float32) for inference, check that its outputs are the same, and return export.json.

        export(net, [None, 3, 224, 224], Path("inference"), formats=("paddle", "onnx"), classes=["cat", "dog"])

    `spec` is the shape of a single float32 input or a list of `InputSpec`. `formats` are some of FORMATS; each is run
    by every installed runtime that supports it, and listed as `unchecked` in export.json if there is none. `stamp` is
    added to export.json: classes, preprocessing, whatever the deployed script needs.
    """
    specs = _specs(spec)
    if not formats or not set(formats) <= set(FORMATS):
        raise ExportError(f"formats must be some of {', '.join(FORMATS)}, got {list(formats)!r}")
    directory = directory.absolute()
    fresh = not directory.exists()
    temporary = directory / f"{TEMPORARY}export-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with evaluating(net):
            _write(net, temporary, specs, set(formats))
            cases = [_case(net, specs, batch) for batch in batches]
        parity = _parity(temporary, [s.name for s in specs], cases)
        # Not compressed: noise does not shrink, and Paddle 2.6 has symbols that crash Python's zlib.
        np.savez(temporary / PARITY, **_named(cases))  # type: ignore[arg-type]
        facts = {
            "inputs": [
                {"name": s.name, "shape": [-1 if d is None else d for d in s.shape], "dtype": _dtype(s)} for s in specs
            ],
            **stamp,
            "paddle": paddle.__version__,
            "paddle_commit": paddle.version.commit,
            "parity": {"batches": list(batches), **parity, "tolerance": TOLERANCE},
            "sha256": {part.name: digest(part) for part in sorted(temporary.iterdir())},
        }
        (temporary / STAMP).write_bytes(json_bytes(facts))
        _put(temporary, directory)
    except OSError as failure:
        raise ExportError(f"cannot write the exported model to {directory}: {failure.strerror or failure}") from failure
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if fresh:
            with contextlib.suppress(OSError):  # it is not empty if the export worked
                directory.rmdir()
    return facts


def _put(new: Path, directory: Path) -> None:
    """Move the finished files into `directory`, whatever else it contains. The stamp is removed first and moved last,
    so that a reader who checks it cannot mix files of two exports."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (STAMP, *(f"{_STEM}{suffix}" for suffix in (*_PROGRAMS, *_WEIGHTS))):
        (directory / name).unlink(missing_ok=True)
    for part in sorted(new.iterdir(), key=lambda part: part.name == STAMP):
        sync(part)
        part.replace(directory / part.name)
    sync(directory)


def _write(net: Any, directory: Path, specs: list[Any], formats: set[str]) -> None:
    """Write the files of these formats, and no others."""
    _save(net, directory / _STEM, specs)
    program, weights = find_model(directory)
    if "onnx" in formats:
        to_onnx(program, weights, program.with_suffix(".onnx"))
    if "pdmodel" in formats and program.suffix == ".json":
        with paddle.pir_utils.OldIrGuard():
            _save(net, directory / "old" / _STEM, specs)
        old, its_weights = find_model(directory / "old")
        if digest(its_weights) != digest(weights):
            raise ExportError("Paddle's two formats of this model need different weight files: omit the format pdmodel")
        old.replace(directory / old.name)
        shutil.rmtree(directory / "old")
    wanted = {f".{name}" for name in formats} | ({program.suffix} if "paddle" in formats else set())
    if {"paddle", "pdmodel"} & formats:
        wanted.update(_WEIGHTS)
    for part in directory.iterdir():
        if part.name.removeprefix(_STEM) not in wanted:
            part.unlink()


def _save(net: Any, stem: Path, specs: list[Any]) -> None:
    try:
        paddle.jit.save(net, str(stem), input_spec=specs)
    except OSError:
        raise
    except Exception as failure:  # noqa: BLE001 - the tracer raises whatever the model's code raises
        text = str(failure).strip().splitlines()
        raise ExportError(
            f"Paddle cannot convert this model to a static one: {type(failure).__name__}: {text[-1] if text else ''}"
        ) from failure


def _case(net: Any, specs: list[Any], batch: int) -> Case:
    """Inputs for a batch of that size, and the outputs of the dynamic model."""
    inputs = [_example(s, batch, number) for number, s in enumerate(specs)]
    with paddle.no_grad():
        answer = net(*[paddle.to_tensor(value) for value in inputs])
    return batch, inputs, [np.asarray(tensor.numpy()) for tensor in paddle.utils.flatten(answer)]


def _named(cases: Sequence[Case]) -> dict[str, np.ndarray[Any, Any]]:
    return {
        f"{kind}{number}_batch{batch}": value
        for batch, inputs, outputs in cases
        for kind, values in (("input", inputs), ("output", outputs))
        for number, value in enumerate(values)
    }


def _parity(directory: Path, names: Sequence[str], cases: Sequence[Case]) -> dict[str, Any]:
    """The error of each file against the dynamic model, in every installed runtime."""
    errors: dict[str, dict[str, float]] = {}
    for program in sorted(part for part in directory.iterdir() if part.suffix in _PROGRAMS):
        errors[program.name] = {}
        for name, load in runtimes(program, names).items():
            error = _compare(load, cases)
            if not error <= TOLERANCE:
                raise ExportError(
                    f"the static model ({program.name}, run by {name}) gives different outputs: error {error:.3g} "
                    f"of the largest output, allowed {TOLERANCE:g}. Common causes: a Python condition on a tensor, "
                    f"randomness or layers in training mode in forward()"
                )
            errors[program.name][name] = error
    return {
        "largest_error": max((error for each in errors.values() for error in each.values()), default=None),
        "errors": errors,
        "unchecked": [name for name, each in errors.items() if not each],
    }


def agreement(parity: dict[str, Any]) -> str:
    """The outcome in words: what was compared, by which runtime, and what could not be."""
    checked = [f"{name} by {' and '.join(errors)}" for name, errors in parity["errors"].items() if errors]
    lines = (
        [f"static and dynamic outputs agree within {parity['largest_error']:.1e} ({', '.join(checked)})"]
        if checked
        else []
    )
    return "; ".join(
        [*lines, *(f"{name} is unchecked: no installed runtime supports it" for name in parity["unchecked"])]
    )


def _compare(load: Callable[[], Runtime], cases: Sequence[Case]) -> float:
    worst = 0.0
    try:
        runtime = load()
        answers = [runtime(inputs) for _, inputs, _ in cases]
    except Exception as failure:  # noqa: BLE001 - the runtimes have no exceptions in common
        raise ExportError(f"the exported model cannot be run: {failure}") from failure
    for (batch, _, expected), got in zip(cases, answers):
        if len(expected) != len(got):
            raise ExportError(f"the static model has {len(got)} outputs, the dynamic one {len(expected)}")
        worst = max([worst, *(_error(a, b, batch) for a, b in zip(expected, got))])
    return worst


def _error(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any], batch: int) -> float:
    if expected.shape != got.shape:
        raise ExportError(
            f"for batch {batch} the static model returns shape {list(got.shape)}, "
            f"the dynamic one {list(expected.shape)}"
        )
    for whose, values in (("dynamic", expected), ("static", got)):
        if not np.isfinite(values.astype(np.float64)).all():
            raise ExportError(f"the {whose} model returns NaN or infinity for batch {batch}")
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
        raise ExportError(
            f"the input spec must be a shape like [None, 3, 224, 224] or a list of InputSpec, got {spec!r}"
        )
    for s in specs:
        if s.shape and s.shape[0] not in (None, -1):
            raise ExportError(f"input {s.name}: the first dimension must be None, for any batch size, got {s.shape[0]}")
    return specs


def _dtype(spec: Any) -> str:
    name = str(spec.dtype).rpartition(".")[2].lower()
    return {"fp32": "float32", "fp64": "float64", "fp16": "float16"}.get(name, name)
