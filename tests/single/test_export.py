"""What is exported is what was trained."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from ppfleet.checkpoint.files import digest
from tests.harness import run, run_raising


def exported(path, where=None):
    import numpy as np
    import paddle

    import ppfleet
    from ppfleet.export.runtimes import Predictor
    from ppfleet.export.static_model import find_model
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=1)
    net = blocks.small_conv()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    stamp = job.export(wrapped, [None, 3, 32, 32], where, classes=["a", "b"], preprocessing={"mean": [0.5]})
    again = job.export(wrapped, [None, 3, 32, 32], where)
    program, weights = find_model(where or f"{path}/export")
    pictures = np.random.RandomState(0).standard_normal((7, 3, 32, 32)).astype("float32")
    (answer,) = Predictor(program, weights)([pictures])
    net.eval()
    error = float(np.abs(answer - net(paddle.to_tensor(pictures)).numpy()).max())
    return {
        "stamp": stamp,
        "again": "classes" in again,
        "program": program.name,
        "error": error,
        "training": wrapped.training,
    }


def test_exported_on_1_and_2_ranks(tmp_path):
    import hashlib

    import numpy as np

    for ranks in (1, 2):
        target = tmp_path / f"export{ranks}"
        ends = run(exported, ranks, tmp_path / "out", str(tmp_path / f"run{ranks}"), str(target))
        for end in ends:
            assert end["error"] < 1e-4 and not end["again"]
            assert end["stamp"]["classes"] == ["a", "b"] and end["stamp"]["preprocessing"] == {"mean": [0.5]}
            assert end["stamp"]["inputs"] == [{"name": "x", "shape": [-1, 3, 32, 32], "dtype": "float32"}]
            assert end["stamp"]["parity"]["batches"] == [1, 4] and end["stamp"]["parity"]["largest_error"] <= 1e-4
            assert end["program"] in ("inference.json", "inference.pdmodel")
        stamp = json.loads((target / "export.json").read_text())
        assert set(stamp["sha256"]) == {part.name for part in target.iterdir()} - {"export.json"}
        for name, expected in stamp["sha256"].items():
            assert hashlib.sha256((target / name).read_bytes()).hexdigest() == expected
        stored = np.load(target / "parity.npz")
        assert stored["input0_batch1"].shape == (1, 3, 32, 32) and stored["output0_batch4"].shape == (4, 10)
        assert not list(tmp_path.rglob(".tmp-*"))


def other_answer(path, what):
    import paddle

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=1)
    net = blocks.Unexportable() if what == "unexportable" else blocks.Random()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    return job.export(wrapped, {"fixed": [8, 4], "nonsense": ["a"]}.get(what, [None, 4]))


@pytest.mark.essential
def test_a_static_model_that_answers_differently_is_not_exported(tmp_path):
    for ranks in (1, 2):
        for kind, message in run_raising(other_answer, ranks, tmp_path / "out", str(tmp_path / "run"), "random"):
            assert kind == "ExportError" and "gives different outputs" in message
    assert not (tmp_path / "run/export").exists()
    assert not list((tmp_path / "run").rglob(".tmp-*"))


def test_a_model_that_paddle_cannot_export_is_an_export_error_everywhere(tmp_path):
    for kind, message in run_raising(other_answer, 2, tmp_path / "out", str(tmp_path / "run"), "unexportable"):
        assert kind == "ExportError" and "Paddle cannot convert this model to a static one" in message


def test_a_fixed_batch_and_nonsense_are_refused(tmp_path):
    ((kind, message),) = run_raising(other_answer, 1, tmp_path / "out", str(tmp_path / "run"), "fixed")
    assert kind == "ExportError" and "must be None" in message
    ((kind, message),) = run_raising(other_answer, 1, tmp_path / "out", str(tmp_path / "run"), "nonsense")
    assert kind == "ExportError" and "must be a shape like [None, 3, 224, 224]" in message


def exports(path, what):
    """Unusual models: how each export ends."""
    import paddle
    from paddle.static import InputSpec

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=1)
    net = blocks.TwoInputs() if what == "two" else blocks.with_batch_norm()
    job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    job.resume()
    job.save()
    if what == "nan":
        net[4].weight.set_value(net[4].weight * float("nan"))
    if what == "frozen":
        net[1].eval()
    spec = [InputSpec([None, 4], "int64", "ids"), InputSpec([None, 8], "float32", "x")] if what == "two" else [None, 16]
    try:
        formats = ["paddle", "pdmodel", "onnx"] if what == "two" and find_spec("paddle2onnx") else ["paddle"]
        stamp = job.export(net, spec, path if what == "occupied" else None, formats=formats)
    except ppfleet.FleetError as failure:
        return [str(failure), None]
    if what == "occupied":
        return [None, (Path(path) / "checkpoints/latest/manifest.json").exists()]
    return [stamp["inputs"], [layer.training for layer in net.sublayers()]]


def test_a_directory_that_holds_other_things_keeps_them(tmp_path):
    """TIPC exports into the run's own directory."""
    for _ in range(2):
        ((_, still_there),) = run(exports, 1, tmp_path / "out", str(tmp_path / "run"), "occupied")
        assert still_there
        stale = {"inference.json", "inference.pdmodel"} - {path.name for path in (tmp_path / "run").iterdir()}
        assert len(stale) == 1  # the other Paddle's program, left there by the first round, is gone
        (tmp_path / "run" / stale.pop()).write_text("of another Paddle")
    stamp = json.loads((tmp_path / "run/export.json").read_text())
    assert all(digest(tmp_path / "run" / name) == sha for name, sha in stamp["sha256"].items())


def puts(directory):
    """The order in which the files of an export come to their place."""
    from ppfleet.export import static_model

    new, target, order = Path(directory) / "new", Path(directory) / "target", []
    for where in (new, target):
        where.mkdir(parents=True)
        for name in ("export.json", "inference.json", "inference.pdiparams", "parity.npz"):
            (where / name).write_text(where.name)
    replace = Path.replace

    def noted(self, place):
        order.append([self.name, (target / "export.json").exists()])
        return replace(self, place)

    Path.replace = noted
    static_model._put(new, target)
    return order


def test_the_stamp_goes_first_and_comes_last(tmp_path):
    (order,) = run(puts, 1, tmp_path / "out", str(tmp_path / "files"))
    assert len(order) == 4 and order[-1][0] == "export.json"
    assert not any(stamped for _, stamped in order)  # a kill at any moment leaves no stamp that speaks of other files


def test_nan_does_not_pass_for_parity(tmp_path):
    ((message, _),) = run(exports, 1, tmp_path / "out", str(tmp_path / "run"), "nan")
    assert "the dynamic model returns NaN" in message


def test_layers_frozen_on_purpose_stay_so(tmp_path):
    ((_, training),) = run(exports, 1, tmp_path / "out", str(tmp_path / "run"), "frozen")
    assert training == [True, False, True, True, True]


def test_several_inputs_and_outputs(tmp_path):
    ((inputs, _),) = run(exports, 1, tmp_path / "out", str(tmp_path / "run"), "two")
    assert [(i["name"], i["dtype"]) for i in inputs] == [("ids", "int64"), ("x", "float32")]


def written(path, formats, without=(), swap=False):
    """Which files an export of those formats leaves, and what it says of them."""
    import sys

    import paddle

    from ppfleet.errors import ExportError
    from ppfleet.export import static_model
    from tests import blocks

    class Odd(paddle.nn.Linear):
        def forward(self, x):
            return paddle.digamma(paddle.matmul(x, self.weight).abs() + 1)

    for name in without:
        sys.modules[name] = None  # as if it were not installed
    if swap:  # another model's file comes out of the conversion
        other = blocks.with_batch_norm()
        static_model.export(other, [None, 16], Path(f"{path}-other"), formats=["onnx"])
        static_model.to_onnx = lambda program, weights, target: target.write_bytes(
            Path(f"{path}-other/inference.onnx").read_bytes()
        )
    net = Odd(16, 2) if formats == ["odd"] else blocks.with_batch_norm()
    try:
        facts = static_model.export(net, [None, 16], Path(path), formats=["onnx"] if formats == ["odd"] else formats)
    except ExportError as failure:
        return [str(failure), sorted(part.name for part in Path(path).glob("*"))]
    assert paddle.in_dynamic_mode() and net.training
    return [facts, sorted(part.name for part in Path(path).iterdir()), static_model.agreement(facts["parity"])]


OWN = {"inference.pdiparams", "inference.pdiparams.info"}
with_onnx = pytest.mark.skipif(
    not all(map(find_spec, ("paddle2onnx", "onnxruntime", "openvino"))),
    reason="paddle2onnx, onnxruntime or openvino is not installed",
)


@with_onnx
def test_the_formats_that_were_asked_for_and_no_others(tmp_path):
    """Each into the directory that holds the ones before."""
    for formats, programs in (
        (["paddle", "pdmodel", "onnx"], {"inference.pdmodel", "inference.onnx"}),
        (["onnx"], {"inference.onnx"}),
        (["pdmodel"], {"inference.pdmodel"}),
        (["paddle", "onnx"], {"inference.onnx"}),
    ):
        ((facts, names, said),) = run(written, 1, tmp_path / "out", str(tmp_path / "model"), formats)
        found = set(names) - OWN - {"export.json", "parity.npz"}
        own = {"inference.json"} if facts["paddle"][0] >= "3" else {"inference.pdmodel"}
        assert found == programs | (own if "paddle" in formats else set())
        assert bool(OWN & set(names)) == (formats != ["onnx"])
        assert set(facts["sha256"]) == set(names) - {"export.json"}
        assert all(digest(tmp_path / "model" / name) == sha for name, sha in facts["sha256"].items())
        able = {".json": {"paddle"}, ".pdmodel": {"paddle", "openvino"}, ".onnx": {"openvino", "onnxruntime"}}
        assert {name: set(by) for name, by in facts["parity"]["errors"].items()} == {
            name: able[Path(name).suffix] for name in found
        }
        assert facts["parity"]["unchecked"] == [] and all(name in said for name in found)


@with_onnx
def test_a_format_that_nothing_here_can_run_is_called_unchecked(tmp_path):
    without = ["onnxruntime", "openvino"]
    ((facts, names, said),) = run(written, 1, tmp_path / "out", str(tmp_path / "model"), ["onnx"], without)
    assert "inference.onnx" in names and facts["parity"]["unchecked"] == ["inference.onnx"]
    assert (
        facts["parity"]["largest_error"] is None
        and said == "inference.onnx is unchecked: no installed runtime supports it"
    )


@with_onnx
def test_a_format_that_answers_differently_is_not_exported(tmp_path):
    for without, name in (([], "openvino"), (["openvino"], "onnxruntime")):
        arguments = (str(tmp_path / "model"), ["paddle", "onnx"], without, True)
        ((said, names),) = run(written, 1, tmp_path / "out", *arguments)
        assert f"(inference.onnx, run by {name}) gives different outputs" in said and names == []


def test_formats_that_cannot_be_written(tmp_path):
    ((said, names),) = run(written, 1, tmp_path / "out", str(tmp_path / "a"), ["onnx"], ["paddle2onnx"])
    assert "needs paddle2onnx: pip install paddle2onnx" in said and names == []
    ((said, names),) = run(written, 1, tmp_path / "out", str(tmp_path / "a"), ["tflite"])
    assert "formats must be some of paddle, pdmodel, onnx" in said and names == []


@with_onnx
def test_a_model_that_cannot_be_converted_is_an_export_error(tmp_path):
    ((said, names),) = run(written, 1, tmp_path / "out", str(tmp_path / "a"), ["odd"])
    assert said.startswith("paddle2onnx cannot convert this model: ") and names == []
    assert "unsupported operators" in said and "omit the format onnx" in said and "\n" not in said


def find(path):
    from ppfleet.errors import ExportError
    from ppfleet.export.static_model import find_model

    try:
        return find_model(path)[0].name
    except ExportError as failure:
        return str(failure)


def test_models_of_either_paddle_are_found(tmp_path):
    for suffix in (".json", ".pdmodel"):
        directory = tmp_path / suffix
        directory.mkdir()
        (directory / f"inference{suffix}").write_text("")
        assert "contains no exported model" in run(find, 1, tmp_path / "out", str(directory))[0]
        (directory / "inference.pdiparams").write_text("")
        assert run(find, 1, tmp_path / "out", str(directory)) == [f"inference{suffix}"]
