"""Read `.pdparams` files of unknown origin: tensors and plain containers, nothing that executes. Pure: no Paddle.

`paddle.load` unpickles, and a pickle may run any code. Here only the names in the short list below are resolved;
anything else is refused before it is imported.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ppfleet.errors import CheckpointError

_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_PLAIN: dict[tuple[str, str], Any] = {
    ("builtins", "tuple"): tuple,  # how paddle.save writes a tensor: (name, array)
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return _latin1
        if module in _ARRAYS and name == "_reconstruct":
            return _empty_array
        if module in _ARRAYS and name == "scalar":
            return _scalar
        raise CheckpointError(f"refusing to unpickle {module}.{name}")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise CheckpointError(f"refusing to unpickle bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _empty_array(kind: type, shape: Any, dtype: Any) -> Any:
    return np.ndarray(0, np.dtype(dtype))


def _scalar(dtype: Any, data: bytes) -> Any:
    return np.frombuffer(data, dtype=dtype, count=1)[0]


def load(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a `.pdparams` file by structured name. bfloat16 is returned as uint16, as Paddle stores it."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            state = _Restricted(stream).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a directory, not a .pdparams file") from None
    except OSError as failure:
        raise CheckpointError(f"cannot read {path}: {failure.strerror}") from None
    except CheckpointError as refusal:
        raise CheckpointError(
            f"{path}: {refusal}, which is neither a tensor nor a plain container. If you trust the file, load it with "
            f"paddle.load and save its state_dict again"
        ) from None
    except Exception as failure:  # noqa: BLE001 - a damaged pickle can raise anything; all of it means the same
        raise CheckpointError(
            f"{path} is truncated or not a .pdparams file ({type(failure).__name__}: {' '.join(str(failure).split())})"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a dictionary of tensors")
    if "UnpackBigParamInfor@@" in state:
        raise CheckpointError(
            f"{path} was saved in slices with pickle protocol 2 or 3: save it again with paddle.save's default protocol"
        )
    state.pop("StructuredToParameterName@@", None)
    arrays = {str(name): _array(value) for name, value in state.items()}
    wrong = [name for name, array in arrays.items() if array is None]
    if wrong:
        raise CheckpointError(
            f"{path}: {', '.join(wrong[:5])} is not a tensor; use the model's .pdparams, not the optimizer's .pdopt"
        )
    return {name: array for name, array in arrays.items() if array is not None}


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    if isinstance(value, np.generic):
        value = np.asarray(value)
    return value if isinstance(value, np.ndarray) and value.dtype != object else None
