"""The facade in one process: progress, settings, files, names, misuse."""

import json
import re

import pytest

from ppfleet.checkpoint.history import RANKS, curves, read
from tests.harness import DEVICE, run, run_raising, start


def train(path, options, build_another_first=False, epochs=2):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet import metrics
    from ppfleet.checkpoint import tensors
    from tests import blocks

    if build_another_first:
        blocks.with_batch_norm()  # a teacher: Paddle's generated names are other ones now
    job = ppfleet.Job(path, device=DEVICE, seed=1, log_every=4, **options)
    net = blocks.with_batch_norm()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.02, T_max=10)
    wrapped, adam = job.prepare(net, paddle.optimizer.AdamW(rate, parameters=net.parameters()))
    job.settings["lr_rule"] = "0.02, cosine"
    train, val = job.loader(blocks.Points(128), 16, shuffle=True), job.loader(blocks.Points(100), 16)
    job.resume()
    started = job.step
    for _ in job.epochs(epochs):
        for points, labels in job.steps(train):
            job.backward(F.cross_entropy(wrapped(points), labels))
        rate.step()
        job.save(**job.evaluate(wrapped, val, top1=metrics.top1))
    job.close()
    return {"weights": tensors.fingerprint(net), "started": started, "best": job.best}


@pytest.mark.essential
def test_the_run_directory(tmp_path):
    (end,) = start(train, 1, tmp_path / "out", str(tmp_path / "run"), {}).wait()
    assert end.code == 0, end.output
    files = {
        p.relative_to(tmp_path / "run").as_posix() for p in (tmp_path / "run").rglob("*") if "vdlrecords" not in p.name
    }
    assert {
        "settings.json",
        "history.jsonl",
        "latest.pdparams",
        "best.pdparams",
        "logs/rank0.log",
        "visualdl",
        "checkpoints/latest",
        "checkpoints/best",
    } <= files
    assert not [name for name in files if ".tmp" in name]
    settings = json.loads((tmp_path / "run/settings.json").read_text())
    assert settings["global_batch"] == 16 and settings["samples"] == 128 and settings["lr_rule"] == "0.02, cosine"
    assert (
        settings["optimizer"]["schedule"] == "CosineAnnealingDecay" and settings["optimizer"]["learning_rate"] == 0.02
    )
    assert end.output.count("global_batch=16") == 1
    lines = [line for line in end.output.splitlines() if "batch_cost" in line]
    form = (
        r"epoch: \[\d/2\], step: \[\d/8\], loss: [\d.e-]+, lr: [\d.e-]+, batch_cost: [\d.]+ s, reader_cost: [\d.]+ s, "
        r"ips: [\d.]+ samples/s, eta: \d:\d\d:\d\d$"
    )
    assert len(lines) == 4 and all(re.search(form, line) for line in lines), lines
    assert [line.split("] ", 1)[1] for line in lines] == [
        line.split("] ", 1)[1]
        for line in (tmp_path / "run/logs/rank0.log").read_text().splitlines()
        if "batch_cost" in line
    ]


def scalars(path):
    import glob

    from visualdl import LogReader

    (file,) = glob.glob(f"{path}/visualdl/vdlrecords*")  # noqa: PTH207
    reader = LogReader(file_path=file)
    return {
        tag: [(point.id, point.value) for point in reader.get_data("scalar", tag)]
        for tag in reader.get_tags()["scalar"]
    }


def test_visualdl_scalars(tmp_path):
    run(train, 1, tmp_path / "out", str(tmp_path / "run"), {})
    (tags,) = run(scalars, 1, tmp_path / "out", str(tmp_path / "run"))
    assert {"train/loss", "train/lr", "train/ips", "train/batch_cost", "train/reader_cost", "eval/top1"} <= set(tags)
    assert [step for step, _ in tags["train/loss"]] == [4, 8, 12, 16]
    assert [step for step, _ in tags["eval/top1"]] == [8, 16]
    history = curves(read(tmp_path / "run/history.jsonl"))
    assert history.pop(RANKS) == [(0, 1)]
    assert {tag: [step for step, _ in points] for tag, points in history.items()} == {
        tag: [step for step, _ in points] for tag, points in tags.items()
    }
    for tag, points in history.items():  # VisualDL keeps single precision
        assert [value for _, value in points] == pytest.approx([value for _, value in tags[tag]], rel=1e-6)


def train_without_visualdl(path):
    import sys

    sys.modules["visualdl"] = None
    return train(path, {})


def test_history_needs_no_visualdl(tmp_path):
    (end,) = start(train_without_visualdl, 1, tmp_path / "out", str(tmp_path / "run")).wait()
    assert end.code == 0 and end.output.count("VisualDL is not installed") == 1, end.output
    start_of_it, *lines = read(tmp_path / "run/history.jsonl")
    assert start_of_it.step == 0 and start_of_it.values == {RANKS: 1}
    assert [step for step, _ in curves(lines)["train/loss"]] == [4, 8, 12, 16]
    assert not (tmp_path / "run/visualdl").exists()


def test_optimizer_state_survives_a_model_built_first(tmp_path):
    (whole,) = run(train, 1, tmp_path / "out", str(tmp_path / "whole"), {}, False, 3)
    run(train, 1, tmp_path / "out", str(tmp_path / "run"), {}, False, 1)
    (resumed,) = run(train, 1, tmp_path / "out", str(tmp_path / "run"), {}, True, 3)
    assert resumed["started"] == 8 and resumed["weights"] == whole["weights"]


def names_in(path):
    from safetensors import safe_open

    with safe_open(path, framework="np") as stream:
        return sorted(stream.keys())


def test_optimizer_state_has_structured_names(tmp_path):
    run(train, 1, tmp_path / "out", str(tmp_path / "run"), {}, True, 1)
    (names,) = run(names_in, 1, tmp_path / "out", str(tmp_path / "run/checkpoints/latest/optimizer.safetensors"))
    assert {"0.weight/moment1", "0.weight/moment2", "4.bias/beta1_pow_acc"} <= {
        name.replace("_0", "") for name in names
    }, names


def other_tools(path):
    import numpy as np
    import paddle

    from ppfleet.checkpoint import pdparams
    from tests import blocks

    loaded = paddle.load(f"{path}/latest.pdparams")
    net = blocks.with_batch_norm()
    missing = net.set_state_dict(loaded)
    ours = pdparams.load(f"{path}/latest.pdparams")
    return [str(missing), all(np.array_equal(ours[name], value.numpy()) for name, value in net.state_dict().items())]


@pytest.mark.essential
def test_latest_pdparams_is_read_by_paddle_and_by_the_restricted_reader(tmp_path):
    run(train, 1, tmp_path / "out", str(tmp_path / "run"), {}, False, 1)
    assert run(other_tools, 1, tmp_path / "out", str(tmp_path / "run")) == [["([], [])", True]]


def loads(path, source):
    import paddle
    from paddle import nn

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=9)
    same = blocks.with_batch_norm()
    job.prepare(same, paddle.optimizer.SGD(0.1, parameters=same.parameters()))
    before = same[0].weight.numpy().copy()
    left_out = job.load(source)
    changed = bool((before != same[0].weight.numpy()).any())
    other = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1D(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
    job = ppfleet.Job(f"{path}2", device=DEVICE, seed=9)
    job.prepare(other, paddle.optimizer.SGD(0.1, parameters=other.parameters()))
    try:
        job.load(source)
        strict = "nothing"
    except ppfleet.FleetError as failure:
        strict = str(failure)
    return [left_out, changed, strict, job.load(source, strict=False)]


def test_weights_to_start_from(tmp_path):
    run(train, 1, tmp_path / "out", str(tmp_path / "run"), {}, False, 1)
    for name in ("latest.pdparams", "checkpoints/latest/model.safetensors"):
        ((left_out, changed, strict, loose),) = run(
            loads, 1, tmp_path / "out", str(tmp_path / "other"), str(tmp_path / "run" / name)
        )
        assert left_out == [] and changed
        assert "4.weight has shape [64, 10], the model's [64, 3]" in strict
        assert len(loose) == 2 and all(part.startswith("4.") for part in loose)


def misuse(path):
    import paddle

    import ppfleet
    from tests import blocks

    said = []

    def attempt(call):
        try:
            call()
            said.append("nothing")
        except ppfleet.FleetError as failure:
            said.append(str(failure))

    job = ppfleet.Job(path, device=DEVICE, accumulate=2)
    net = blocks.mlp()
    sgd = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    attempt(lambda: next(job.steps(None)))
    attempt(lambda: job.backward(paddle.ones([1])))
    attempt(lambda: job.save())
    attempt(lambda: job.prepare(paddle.DataParallel(net), sgd))
    attempt(lambda: job.prepare(net, paddle.optimizer.SGD(0.1, parameters=blocks.mlp().parameters())))
    both = [*net.parameters(), *blocks.mlp().parameters()]
    attempt(lambda: job.prepare(net, paddle.optimizer.SGD(0.1, parameters=both)))
    attempt(lambda: job.prepare(net, paddle.incubate.LookAhead(sgd)))
    sparse = paddle.nn.Sequential(paddle.nn.Embedding(3, 4, sparse=True))
    attempt(lambda: job.prepare(sparse, paddle.optimizer.SGD(0.1, parameters=sparse.parameters())))
    job.prepare(net, sgd)
    attempt(lambda: job.prepare(net, sgd))
    data = job.loader(blocks.Points(64), 8, shuffle=True)
    for number, (points, _) in enumerate(job.steps(data)):
        if number == 0:
            attempt(lambda points=points: job.backward(net(points)))
            job.backward(net(points).mean())
            attempt(lambda: job.save())
            attempt(lambda points=points: job.backward(net(points).mean()))
            continue
        break
    attempt(lambda: next(job.steps([1])))
    attempt(lambda: job.evaluate(net, data))
    attempt(lambda: job.save(mode="most"))
    attempt(lambda: job.resume(f"{path}/none"))
    attempt(lambda: job.evaluate(net, data, mean=lambda output, label: output.mean()))
    attempt(lambda: job.resume(f"{path}/settings.json"))
    named = job.loader([{"x": 1.0}] * 8, 4)
    attempt(lambda: job.evaluate(net, named, one=lambda output: output))
    return said


@pytest.mark.essential
def test_misuse_is_explained(tmp_path):
    (said,) = run(misuse, 1, tmp_path / "out", str(tmp_path / "run"))
    parts = (
        "job.steps needs a model: call job.prepare",
        "job.backward needs a model",
        "job.save needs a model",
        "plain model",
        "holds none of the model's parameters",
        "also holds 4 parameters that are not the model's",
        "keeps its state in another optimizer",
        "sparse=False",
        "one model with one optimizer",
        "scalar loss",
        "within a step (1 of 2 accumulated batches)",
        "once per batch",
        "job.steps takes what job.loader returns, not a list",
        "needs a metric",
        "mode must be max or min, got",
        "does not exist: give the directory of a checkpoint",
        "one value per sample",
        "settings.json is a file: a checkpoint is a directory (job.load takes weights alone)",
        "make the data set return a tuple",
    )
    assert len(said) == len(parts)
    for message, part in zip(said, parts):
        assert part in message, (message, part)


def test_best_follows_the_first_metric(tmp_path):
    (end,) = run(best, 1, tmp_path / "out", str(tmp_path / "run"))
    assert end == [0.9, "000002-step-0", 0.1, "000003-step-0"]


def best(path):
    from pathlib import Path

    import paddle

    import ppfleet
    from tests import blocks

    seen = []
    for mode, name in (("max", "top1"), ("min", "loss")):
        job = ppfleet.Job(f"{path}-{mode}", device=DEVICE)
        net = blocks.mlp()
        job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
        for value in (0.5, 0.9, 0.1, float("nan")):
            job.save(mode=mode, **{name: value})
        seen += [job.best, Path(f"{path}-{mode}/checkpoints/best").resolve().name]
    return seen


def saves(path, what):
    """Saves under odd circumstances, by a job that has one model and no data."""
    import os
    from contextlib import nullcontext
    from pathlib import Path

    import paddle

    import ppfleet
    from ppfleet.checkpoint import manifest, run_directory
    from tests import blocks

    os.chdir(Path(path).parent)
    job = ppfleet.Job("odd", device=DEVICE)
    net = blocks.mlp()
    job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    root = Path(path).parent / "odd"
    job.save(top1=0.5)
    if what == "chdir":
        os.chdir("/")
        job.save()
    if what == "copied":  # with links followed, as cp -rL and object stores do
        target = (root / "checkpoints/latest").resolve()
        (root / "checkpoints/latest").unlink()
        target.rename(root / "checkpoints/latest")
        job.save()
    if what == "full":
        real, manifest.write = manifest.write, lambda *_: (_ for _ in ()).throw(OSError("full"))
        try:
            job.save(top1=0.9)
        except OSError:
            manifest.write = real
        job.save(top1=0.8)
    if what == "killed":  # between the rename and the links: what a resume finds
        real, manifest.link = manifest.link, lambda *_: None
        run = run_directory.RunDir
        weights, described = run._weights, run._describe_weights
        run._weights, run._describe_weights = lambda *_: nullcontext(), lambda *_: None
        net[0].weight.set_value(net[0].weight * 2)
        job.save(top1=0.9)
        manifest.link, run._weights, run._describe_weights = real, weights, described
        job.resume()
        same = paddle.load(str(root / "best.pdparams"))["0.weight"].numpy() == net[0].weight.numpy()
        assert bool(same.all())
    links = [(root / "checkpoints" / name).resolve().name for name in ("latest", "best")]
    return [job.best, *links, sorted(p.name for p in root.iterdir())]


def test_best_is_what_was_really_written(tmp_path):
    ((best_score, _, link, _),) = run(saves, 1, tmp_path / "out", str(tmp_path / "run"), "full")
    assert best_score == 0.8 and link == "000002-step-0"


def test_links_are_mended_after_a_kill(tmp_path):
    ((best_score, latest, link, _),) = run(saves, 1, tmp_path / "out", str(tmp_path / "run"), "killed")
    assert best_score == 0.9 and latest == link == "000002-step-0"


def test_a_copied_run_and_a_change_of_directory(tmp_path):
    ((_, latest, _, _),) = run(saves, 1, tmp_path / "out", str(tmp_path / "run"), "copied")
    assert latest == "000001-step-0"
    (tmp_path / "other").mkdir()
    ((_, latest, _, names),) = run(saves, 1, tmp_path / "out", str(tmp_path / "other/run"), "chdir")
    assert latest == "000002-step-0" and "checkpoints" in names and ".lock" in names


@pytest.mark.essential
def test_best_survives_a_resume(tmp_path):
    assert run(best_again, 1, tmp_path / "out", str(tmp_path / "run")) == [[0.9, "000001-step-0", 0.9, "000001-step-0"]]


def best_again(path):
    from pathlib import Path

    import paddle

    import ppfleet
    from tests import blocks

    seen = []
    for score in (0.9, 0.5):
        job = ppfleet.Job(path, device=DEVICE)
        net = blocks.mlp()
        job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
        job.resume()
        job.save(top1=score)
        seen += [job.best, Path(path, "checkpoints/best").resolve().name]
        job.close()
    return seen


def accumulates(path):
    import paddle

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, accumulate=3)
    net = blocks.mlp()
    job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    losses = []
    for points, _ in job.steps(job.loader(blocks.Points(64), 8, shuffle=True)):
        job.backward((net(points).mean() * 0 + 2.0).reshape([1]))
        losses.append(job._loop.stepper.loss)
    steps = job.step
    for number, (points, _) in enumerate(job.steps(job.loader(blocks.Points(64), 8, shuffle=True))):
        job.backward(net(points).mean())
        if number == 0:
            break
    return [steps, losses[-1], all(p.grad is None for p in net.parameters())]


@pytest.mark.essential
def test_accumulated_steps(tmp_path):
    """8 batches make 3, 3 and 2; the loss shown is a mean; a loop that is left leaves no gradient behind."""
    assert run(accumulates, 1, tmp_path / "out", str(tmp_path / "run")) == [[3, 2.0, True]]


def stops_and_goes_on(path, what):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    net = blocks.with_batch_norm()
    sgd = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    job.prepare(net, sgd)
    data = job.loader(blocks.Points(64), 8, shuffle=True)
    job.resume()
    seen, failed = [], False
    real_step = sgd.step

    def interrupted():
        real_step()
        raise KeyboardInterrupt

    try:
        while job.epoch < 3:
            try:
                for _ in job.epochs(3):
                    for number, (points, labels) in enumerate(job.steps(data)):
                        if what == "break" and number == 3:
                            break
                        if what == "interrupt" and job.step == 10:
                            sgd.step = interrupted
                        bad = what == "rollback" and job.step == 10 and not failed
                        job.backward(F.cross_entropy(net(points * float("nan") if bad else points), labels))
                        if what == "exception" and job.step == 11:
                            raise KeyboardInterrupt
                    seen.append(job.step)
                    job.save()
                    if what == "break" and job.step == 6 and path.endswith("stopped"):
                        return seen
            except ppfleet.FleetError:
                failed = True
                assert all(bool(paddle.isfinite(t).all()) for t in net.state_dict().values())
                job.resume()
    except KeyboardInterrupt:
        try:
            job.save()
            return seen
        except ppfleet.FleetError as refusal:
            job.resume()
            job.save()  # from whole weights again
            return str(refusal)
    return [seen, tensors.fingerprint(net)]


def test_a_loop_left_by_break_ends_its_epoch_also_after_a_resume(tmp_path):
    (whole,) = run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "whole"), "break")
    assert whole[0] == [3, 6, 9]
    run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "stopped"), "break")
    (tmp_path / "stopped").rename(tmp_path / "again")
    (again,) = run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "again"), "break")
    assert again == [[9], whole[1]]


def test_going_back_to_the_last_checkpoint_after_nan(tmp_path):
    (plain,) = run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "plain"), "nothing")
    (rolled,) = run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "rolled"), "rollback")
    assert plain[0] == rolled[0] == [8, 16, 24] and plain[1] == rolled[1]


@pytest.mark.essential
def test_an_exception_is_saved_where_it_came(tmp_path):
    (plain,) = run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "plain"), "nothing")
    assert run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "run"), "exception") == [[8]]
    (resumed,) = run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "run"), "nothing")
    assert resumed == [[16, 24], plain[1]]


def test_weights_between_two_steps_are_not_saved(tmp_path):
    (refusal,) = run(stops_and_goes_on, 1, tmp_path / "out", str(tmp_path / "run"), "interrupt")
    assert "interrupted optimizer step" in refusal


def with_a_card(path, card, score, resume):
    import paddle

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    job.card = card
    net = blocks.mlp()
    job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    job.resume(resume)
    job.save(**({"top1": score} if score else {}))


def test_a_card_says_what_the_weights_mean(tmp_path):
    arguments = [tmp_path / "out", str(tmp_path / "run")]
    run(with_a_card, 1, *arguments, {"classes": ["a", "b"]}, 0.5, "auto")
    assert json.loads((tmp_path / "run/model.json").read_text()) == {"classes": ["a", "b"]}
    run(with_a_card, 1, *arguments, {"classes": ["a", "b"], "more": 1}, None, "auto")
    assert (tmp_path / "run/best.pdparams").exists()  # an addition to the card is no other card
    assert json.loads((tmp_path / "run/model.json").read_text())["more"] == 1
    ((kind, message),) = run_raising(with_a_card, 1, *arguments, {"classes": ["b", "a"]}, None, "auto")
    assert kind == "CheckpointError" and "was trained with different classes" in message
    assert json.loads((tmp_path / "run/model.json").read_text())["classes"] == ["a", "b"]
