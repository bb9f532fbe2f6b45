"""Model and optimizer as plain arrays by structured name, and back. What a checkpoint's two tensor files hold."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.base.layer_helper import LayerHelper
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ppfleet.errors import CheckpointError

Arrays = dict[str, "np.ndarray[Any, Any]"]
_MASTER = "master_weight"


def to_bytes(arrays: Arrays) -> bytes:
    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def from_bytes(data: bytes, source: str) -> Arrays:
    try:
        return dict(load(data))
    except SafetensorError as failure:
        raise CheckpointError(f"{source} is no safetensors file ({failure})") from None


def load_file(path: Path) -> Arrays:
    try:
        return from_bytes(path.read_bytes(), str(path))
    except OSError as failure:
        raise CheckpointError(f"cannot read {path}: {failure.strerror}") from None


def model_arrays(net: Any) -> Arrays:
    """Parameters and persistent buffers. Half-precision values are written as float32, which loses nothing."""
    return {name: _array(tensor) for name, tensor in net.state_dict().items()}


def fingerprint(net: Any) -> str:
    """SHA-256 over all weights."""
    return hashlib.sha256(to_bytes(model_arrays(net))).hexdigest()


def load_model(net: Any, arrays: Arrays, source: str, strict: bool = True) -> list[str]:
    """Copy `arrays` into `net`. What does not fit: an error before anything is copied, or left out and returned."""
    target = net.state_dict()
    wrong = [f"{name} is missing" for name in target if name not in arrays]
    wrong += [f"{name} is not in the model" for name in arrays if name not in target]
    wrong += [
        f"{name} has shape {list(arrays[name].shape)}, the model's {list(tensor.shape)}"
        for name, tensor in target.items()
        if name in arrays and list(arrays[name].shape) != list(tensor.shape)
    ]
    if wrong and strict:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointError(f"{source} is of another architecture: {'; '.join(wrong[:8])}{more}. Nothing was loaded")
    for name, tensor in target.items():
        if name in arrays and list(arrays[name].shape) == list(tensor.shape):
            _assign(tensor, arrays[name])
    return wrong


def optimizer_arrays(optimizer: Any) -> Arrays:
    """Accumulators (moments, velocities …) and master weights, as `<parameter>/<accumulator>`."""
    arrays = {
        f"{owner.replace(_master_suffix(owner), '')}/{kind}": _array(tensor)
        for kind, by_parameter in optimizer._accumulators.items()
        for owner, tensor in by_parameter.items()
    }
    for owner, tensor in getattr(optimizer, "_master_weights", {}).items():
        arrays[f"{owner}/{_MASTER}"] = _array(tensor)
    return arrays


def load_optimizer(optimizer: Any, parameters: dict[str, Any], arrays: Arrays, source: str) -> None:
    """Create the optimizer's accumulators if it has made no step yet, then fill them."""
    owners = sorted({name.rpartition("/")[0] for name in arrays})
    unknown = [owner for owner in owners if owner not in parameters]
    if unknown:
        raise CheckpointError(
            f"{source} holds optimizer state of {', '.join(unknown[:8])}, which the model does not have"
        )
    # Exactly the stored ones: a parameter that never had a gradient has none.
    create_accumulators(optimizer, [parameters[owner] for owner in owners])
    current = optimizer_arrays(optimizer)
    missing, extra = sorted(set(current) - set(arrays)), sorted(set(arrays) - set(current))
    if missing or extra:
        raise CheckpointError(
            f"{source} was written by another optimizer than {type(optimizer).__name__}: "
            f"it lacks {', '.join(missing[:4]) or 'nothing'}, and also holds {', '.join(extra[:4]) or 'nothing else'}"
        )
    for kind, by_parameter in optimizer._accumulators.items():
        for owner, tensor in by_parameter.items():
            _assign(tensor, arrays[f"{owner.replace(_master_suffix(owner), '')}/{kind}"])
    for owner, tensor in getattr(optimizer, "_master_weights", {}).items():
        _assign(tensor, arrays[f"{owner}/{_MASTER}"])


def create_accumulators(optimizer: Any, parameters: list[Any]) -> None:
    """What the optimizer's first step would do; an accumulator that is there already is left alone."""
    if optimizer.helper is None:  # Paddle 2.6 makes it at the first step
        optimizer.helper = LayerHelper(type(optimizer).__name__)
    optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), parameters)


def schedule_state(optimizer: Any) -> dict[str, Any]:
    """The learning-rate schedule's state as plain data."""
    return {name: _plain(value) for name, value in optimizer.state_dict().get("LR_Scheduler", {}).items()}


def load_schedule(optimizer: Any, state: dict[str, Any]) -> None:
    schedule = optimizer._learning_rate
    if state and hasattr(schedule, "set_state_dict"):
        schedule.set_state_dict(dict(state))


def _master_suffix(owner: str) -> str:
    # With O2 an accumulator belongs to `<parameter>_fp32_master_0`.
    position = owner.rfind("_fp32_master_")
    return owner[position:] if position >= 0 else "\0"


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    low = tensor.dtype in (paddle.float16, paddle.bfloat16)
    return np.asarray((tensor.astype("float32") if low else tensor).numpy())


def _assign(tensor: Any, array: np.ndarray[Any, Any]) -> None:
    value = paddle.to_tensor(array)
    tensor.set_value(value if value.dtype == tensor.dtype else value.astype(tensor.dtype))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (np.generic, np.ndarray, paddle.Tensor)):
        return np.asarray(value).reshape(-1)[0].item() if np.asarray(value).size == 1 else np.asarray(value).tolist()
    return value
