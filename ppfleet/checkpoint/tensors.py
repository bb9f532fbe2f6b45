"""Model and optimizer state as arrays by structured name, and back: the contents of a checkpoint's tensor files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.base.layer_helper import LayerHelper
from paddle.optimizer.lr import LRScheduler
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ppfleet.errors import CheckpointError

Arrays = dict[str, "np.ndarray[Any, Any]"]
_MASTER = "master_weight"
_RATE, _KIND, _OPAQUE = "learning_rate", "kind", object()


def to_bytes(arrays: Arrays) -> bytes:
    return bytes(save({name: np.asarray(array, order="C") for name, array in arrays.items()}))


def from_bytes(data: bytes, source: str) -> Arrays:
    try:
        return dict(load(data))
    except SafetensorError as failure:
        raise CheckpointError(f"{source} is not a safetensors file ({failure})") from None


def load_file(path: Path) -> Arrays:
    try:
        return from_bytes(path.read_bytes(), str(path))
    except OSError as failure:
        raise CheckpointError(f"cannot read {path}: {failure.strerror}") from None


def model_arrays(net: Any) -> Arrays:
    """Parameters and persistent buffers. Half-precision values are stored as float32, which loses nothing."""
    return {name: _array(tensor) for name, tensor in net.state_dict().items()}


def fingerprint(net: Any) -> str:
    """SHA-256 of all weights: `print(ppfleet.fingerprint(net))` tells whether two models are bitwise equal."""
    return hashlib.sha256(to_bytes(model_arrays(net))).hexdigest()


def load_model(net: Any, arrays: Arrays, source: str, strict: bool = True) -> list[str]:
    """Copy `arrays` into `net`. What does not fit raises before anything is copied; if not `strict`, it is returned."""
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
        raise CheckpointError(
            f"{source} is for a different architecture: {'; '.join(wrong[:8])}{more}. Nothing was loaded"
        )
    for name, tensor in target.items():
        if name in arrays and list(arrays[name].shape) == list(tensor.shape):
            _assign(tensor, arrays[name])
    return wrong


def optimizer_arrays(optimizer: Any, parameters: dict[str, Any]) -> Arrays:
    """Accumulators (moments, velocities …) and master weights, as `<structured name>/<accumulator>`."""
    return {name: _array(tensor) for name, tensor in _tensors(optimizer, parameters).items()}


def _tensors(optimizer: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's tensors. Paddle keys them by generated names, which differ between processes."""
    structured = {parameter.name: name for name, parameter in parameters.items()}
    found = {}
    for kind, by_owner in optimizer._accumulators.items():
        for owner, tensor in by_owner.items():
            plain = owner.partition("_fp32_master_")[0]  # with O2 an accumulator belongs to the master weight
            found[f"{structured[plain]}/{kind}"] = tensor
    for owner, tensor in getattr(optimizer, "_master_weights", {}).items():
        found[f"{structured[owner]}/{_MASTER}"] = tensor
    return found


def load_optimizer(optimizer: Any, parameters: dict[str, Any], arrays: Arrays, source: str) -> None:
    """Fill the optimizer's accumulators; create them first if it has made no step yet."""
    owners = sorted({name.rpartition("/")[0] for name in arrays})
    unknown = [owner for owner in owners if owner not in parameters]
    if unknown:
        raise CheckpointError(
            f"{source} has optimizer state for {', '.join(unknown[:8])}, which this optimizer does not update"
        )
    # Exactly the stored ones: a parameter that never had a gradient has none.
    create_accumulators(optimizer, [parameters[owner] for owner in owners])
    tensors = _tensors(optimizer, parameters)
    missing, extra = sorted(set(tensors) - set(arrays)), sorted(set(arrays) - set(tensors))
    if missing or extra:
        raise CheckpointError(
            f"{source} was written by a different optimizer than {type(optimizer).__name__}: "
            f"missing {', '.join(missing[:4]) or 'nothing'}, unexpected {', '.join(extra[:4]) or 'nothing'}"
        )
    for name, tensor in tensors.items():
        _assign(tensor, arrays[name])


def create_accumulators(optimizer: Any, parameters: list[Any]) -> None:
    """Create accumulators as the optimizer's first step would; existing ones are kept."""
    if optimizer.helper is None:  # Paddle 2.6 makes it at the first step
        optimizer.helper = LayerHelper(type(optimizer).__name__)
    optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), parameters)


def schedule_settings(schedule: Any) -> dict[str, Any]:
    """The attributes of a learning-rate schedule, and of those it wraps, or a plain learning rate, as JSON data."""
    if not isinstance(schedule, LRScheduler):
        return {_RATE: float(schedule)}
    found: dict[str, Any] = {}
    for name, value in vars(schedule).items():
        if isinstance(value, LRScheduler):
            found.update({f"{name}.{inner}": part for inner, part in schedule_settings(value).items()})
        elif (encoded := _encode(value)) is not _OPAQUE:
            found[name] = encoded
    return found


def schedule_state(schedule: Any, start: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a schedule that have changed since `start`. Paddle's own state_dict lacks some of them. One
    that has not changed is a setting, which a script may alter between two runs (more epochs, for example)."""
    now = schedule_settings(schedule)
    return {name: value for name, value in now.items() if name not in start or start[name] != value}


def load_schedule(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore what `schedule_state` returned into the schedule or plain learning rate of `optimizer`."""
    for name, value in state.items():
        *path, last = name.split(".")
        owner = optimizer._learning_rate
        for part in path:
            owner = getattr(owner, part, None)
        if isinstance(owner, LRScheduler):
            setattr(owner, last, _decode(value))
        elif name == _RATE:
            optimizer.set_lr(value)


def _encode(value: Any) -> Any:
    """JSON data from which `_decode` restores `value` with its type: ReduceOnPlateau keeps the Tensor it was given and
    compares in its precision. `_OPAQUE` for what is not plain data (functions, objects)."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (paddle.Tensor, np.ndarray, np.generic)):
        array = np.asarray(value.astype("float32") if "bfloat16" in str(value.dtype) else value)
        kind = next(kind.__name__ for kind in (paddle.Tensor, np.ndarray, np.generic) if isinstance(value, kind))
        return {_KIND: kind, "dtype": str(value.dtype).rpartition(".")[2], "value": array.tolist()}
    if isinstance(value, (list, tuple)):
        parts = [_encode(part) for part in value]
        return _OPAQUE if _OPAQUE in parts else {_KIND: type(value).__name__, "value": parts}
    return _OPAQUE


def _decode(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    kind, value = data[_KIND], data["value"]
    if kind == "Tensor":
        return paddle.to_tensor(value, dtype=data["dtype"])
    if kind in ("ndarray", "generic"):
        array = np.asarray(value, dtype=data["dtype"])
        return array if kind == "ndarray" else array[()]
    parts = [_decode(part) for part in value]
    return tuple(parts) if kind == "tuple" else parts


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    low = tensor.dtype in (paddle.float16, paddle.bfloat16)
    return np.asarray((tensor.astype("float32") if low else tensor).numpy())


def _assign(tensor: Any, array: np.ndarray[Any, Any]) -> None:
    value = paddle.to_tensor(array)
    tensor.set_value(value if value.dtype == tensor.dtype else value.astype(tensor.dtype))
