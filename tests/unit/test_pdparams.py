import collections
import os
import pickle

import numpy as np
import pytest

from ppfleet.checkpoint import pdparams
from ppfleet.errors import CheckpointError

WEIGHTS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "a.bias": np.float32(3)}


def write(tmp_path, value, protocol=4):
    path = tmp_path / "x.pdparams"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_tensors_and_plain_containers_are_read(tmp_path, protocol):
    state = collections.OrderedDict(WEIGHTS, **{"StructuredToParameterName@@": {"a.weight": "linear_0.w_0"}})
    state["pair"] = ("linear_0.b_0", np.ones(2, dtype=np.float16))
    loaded = pdparams.load(write(tmp_path, state, protocol))
    assert set(loaded) == {"a.weight", "a.bias", "pair"}
    assert (loaded["a.weight"] == WEIGHTS["a.weight"]).all() and loaded["a.weight"].dtype == np.float32
    assert loaded["a.bias"].shape == () and loaded["pair"].dtype == np.float16


class Evil:
    def __init__(self, call, argument):
        self.reduced = (call, (argument,))

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("call", "argument"),
    [(os.system, "touch {}"), (eval, "open('{}', 'w')"), (exec, "open('{}', 'w')"), (np.loadtxt, "{}")],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_code_is_refused_and_not_run(tmp_path, call, argument, protocol):
    trace = tmp_path / "trace"
    evil = Evil(call, argument.format(trace))
    path = write(tmp_path, {"a.weight": WEIGHTS["a.weight"], "b": evil}, protocol)
    with pytest.raises(CheckpointError, match=r"x.pdparams: refusing to unpickle .*neither a tensor nor"):
        pdparams.load(path)
    assert not trace.exists()
    if call is os.system:  # the plain unpickler would have run it: the test can fail
        pickle.loads(path.read_bytes())
        assert trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(WEIGHTS)[:-20], "truncated"),
        (b"", "truncated"),
        (b"not a pickle", "truncated or not a .pdparams"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps({"LR_Scheduler": {"last_epoch": 3}}), "not the optimizer's .pdopt"),
        (pickle.dumps({"UnpackBigParamInfor@@": {}}), "save it again"),
        (pickle.dumps({"a": np.array([None, 1], dtype=object)}), "is not a tensor"),
    ],
)
def test_other_files_are_explained(tmp_path, content, message):
    path = tmp_path / "x.pdparams"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        pdparams.load(path)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        pdparams.load(tmp_path / "none.pdparams")
    with pytest.raises(CheckpointError, match="is a directory"):
        pdparams.load(tmp_path)
