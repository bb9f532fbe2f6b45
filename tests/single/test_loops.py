"""Loops that are interrupted, left, repeated or several in an epoch, and what a script does around them: the weights of
the undisturbed run, or an error; never other numbers without a word."""

import json

import pytest

from tests.harness import DEVICE, run, run_raising, start


def train(path, how, epochs=3, **options):
    """A training script with a schedule; `how` says what is special about it. Returns its epochs, steps and weights."""
    import os

    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1, **options)
    net = blocks.with_batch_norm()
    rate = paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5)
    wrapped, _ = job.prepare(net, paddle.optimizer.Momentum(rate, parameters=net.parameters()))
    data, more = job.loader(blocks.Points(64), 8, shuffle=True), job.loader(blocks.Points(48), 8, shuffle=True)
    job.resume()
    seen = []

    def loop(loader):
        for points, labels in job.steps(loader):
            job.backward(F.cross_entropy(wrapped(points), labels))
            if how == "interrupt" and job.step == 11 and "interrupted" not in seen:
                wrapped(points)  # an unfinished batch
                seen.append("interrupted")
                raise KeyboardInterrupt
            if how == f"kill at {job.step}":
                os._exit(9)

    def cell():
        for epoch in job.epochs(epochs):
            loop(data)
            if how.startswith(("two", "kill")):
                if how == "two, save between":
                    job.save()
                loop(more)
            assert job.epoch == epoch
            if how == "interrupt evaluation" and epoch == 1 and "interrupted" not in seen:
                rate.step()
                seen.append("interrupted")
                raise KeyboardInterrupt
            if how == "save first":
                job.save()
                rate.step()
            else:
                rate.step()
                job.save()
            seen.append(job.step)

    try:
        cell()
    except KeyboardInterrupt:
        cell()  # a notebook's cell, run again
    return [seen, tensors.fingerprint(net), float(rate())]


def weights(ended):
    ((_, fingerprint, rate),) = ended
    return fingerprint, rate


@pytest.mark.parametrize("how", ["interrupt", "interrupt evaluation"])
def test_an_interrupted_cell_is_run_again(tmp_path, how):
    """The rest of the epoch follows, in its own order, with the statistics and the schedule of an undisturbed run."""
    plain = run(train, 1, tmp_path / "out", str(tmp_path / "plain"), "plain")
    again = run(train, 1, tmp_path / "out", str(tmp_path / "again"), how)
    assert [step for step in again[0][0] if step != "interrupted"] == plain[0][0] == [8, 16, 24]
    assert weights(again) == weights(plain)


def interrupted_optimizer(path):
    import paddle

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE)
    net = blocks.mlp()
    sgd = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    job.prepare(net, sgd)
    data, real = job.loader(blocks.Points(64), 8), sgd.step

    def interrupted():
        real()
        raise KeyboardInterrupt

    def cell():
        for _ in job.epochs(1):
            for points, _ in job.steps(data):
                job.backward(net(points).mean())

    sgd.step = interrupted
    try:
        cell()
    except KeyboardInterrupt:
        sgd.step = real
    cell()


def test_weights_between_two_steps_are_not_trained_on(tmp_path):
    ((kind, message),) = run_raising(interrupted_optimizer, 1, tmp_path / "out", str(tmp_path / "run"))
    assert kind == "FleetError" and "partly updated: call job.resume()" in message


@pytest.mark.parametrize("kills", [(5,), (11,), (17, 25), (28, 40)])
def test_two_loops_in_an_epoch_resume_to_the_same_bits(tmp_path, kills):
    """8 + 6 steps an epoch; killed in the first loop, in the second, in a later epoch: 42 steps in all."""
    plain = run(train, 1, tmp_path / "out", str(tmp_path / "plain"), "two")
    assert plain[0][0] == [14, 28, 42]
    for step in kills:
        arguments = (str(tmp_path / "run"), f"kill at {step}", 3)
        (end,) = start(saving_often, 1, tmp_path / "out", *arguments).wait()
        assert end.code == 9, end.output
    resumed = run(saving_often, 1, tmp_path / "out", str(tmp_path / "run"), "two", 3)
    assert resumed[0][0][-1] == 42 and weights(resumed) == weights(plain)


def saving_often(path, how, epochs):
    return train(path, how, epochs, save_every=1)


def test_a_save_between_two_loops_is_not_the_end_of_the_epoch(tmp_path):
    plain = run(train, 1, tmp_path / "out", str(tmp_path / "plain"), "two")
    between = run(train, 1, tmp_path / "out", str(tmp_path / "between"), "two, save between")
    assert weights(between) == weights(plain)
    states = [json.loads(p.read_text()) for p in sorted((tmp_path / "between/checkpoints").glob("0*/state.json"))]
    assert [(s["epoch"], s["loop"], s["step"]) for s in states] == [(2, 0, 28), (2, 1, 36), (3, 0, 42)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_stepped_after_the_save_is_resumed(tmp_path, ranks):
    plain = run(train, ranks, tmp_path / "out", str(tmp_path / "plain"), "plain")
    first = start(train, ranks, tmp_path / "out", str(tmp_path / "run"), "save first", 2).wait()
    assert "the learning rate changed after job.save" in first[0].output
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("0*"))
    assert len(names) == 2, names  # each written again in the place of the one before
    resumed = run(train, ranks, tmp_path / "out", str(tmp_path / "run"), "save first", 3)
    assert resumed[0][1:] == plain[0][1:]


def other_loss(path, where):
    import paddle

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE)
    net = blocks.mlp()
    sgd = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    job.prepare(net, sgd)
    if where == "before":
        net(paddle.ones([2, 16])).sum().backward()
    for points, _ in job.steps(job.loader(blocks.Points(64), 8)):
        loss = net(points).mean()
        if where == "inside" and job.step == 2:
            net(points).sum().backward()
        job.backward(loss)
        if where == "after" and job.step == 2:
            net(points).sum().backward()
        if where == "cleared":
            net(points).sum().backward()
            sgd.clear_grad()  # leaves zeros
    return job.step


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_gradients_of_another_loss_are_refused(tmp_path, where):
    ((kind, message),) = run_raising(other_loss, 1, tmp_path / "out", str(tmp_path / "run"), where)
    assert kind == "FleetError" and "0.weight already has a gradient before job.backward" in message


@pytest.mark.essential
def test_cleared_gradients_are_fine(tmp_path):
    assert run(other_loss, 1, tmp_path / "out", str(tmp_path / "run"), "cleared") == [8]


def another_run(path, options, action):
    import paddle

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, keep=2, **options)
    net = blocks.mlp()
    net, _ = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    if action == "elsewhere":
        job.resume(f"{path}-other")
    if action in ("resume", "none"):
        job.resume("auto" if action == "resume" else "none")
    if action != "save":
        for points, _ in job.steps(job.loader(blocks.Points(64), 16)):
            job.backward(net(points).mean())
    job.save(top1=0.5)


def content(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.parts[-2] != "flight"}


def test_a_directory_that_holds_another_run_is_refused_and_left_as_it_is(tmp_path):
    out, path = tmp_path / "out", tmp_path / "run"
    run(another_run, 1, out, f"{path}-other", {}, "train")
    for _ in range(2):
        run(another_run, 1, out, str(path), {}, "resume")
    kept = ("checkpoints", "latest.pdparams", "best.pdparams", "settings.json", "history.jsonl")
    before = {name: data for name, data in content(path).items() if name.parts[0] in kept}
    for action in ("train", "none", "save", "elsewhere"):
        ((kind, message),) = run_raising(another_run, 1, out, str(path), {}, action)
        assert kind == "FleetError" and "already holds a run" in message and "job.resume()" in message, (
            action,
            message,
        )
        assert {name: data for name, data in content(path).items() if name.parts[0] in kept} == before, action
    run(another_run, 1, out, str(path), {"existing": "move"}, "train")
    aside = content(path / "previous-1")
    assert {name: aside[name] for name in before} == before
    assert len(list((path / "checkpoints").glob("0*"))) == 1


def test_every_rank_learns_of_the_refusal(tmp_path):
    run(another_run, 2, tmp_path / "out", str(tmp_path / "run"), {}, "train")
    told = run_raising(another_run, 2, tmp_path / "out", str(tmp_path / "run"), {}, "train")
    assert all("already holds a run" in message for _, message in told)
    ((_, message),) = run_raising(another_run, 1, tmp_path / "out", str(tmp_path / "run"), {"existing": "x"}, "train")
    assert "existing must be one of refuse, move, got 'x'" in message
