"""What plain Paddle lets through in silence: ranks that differ, NaN on one of them, a peer that dies."""

import json

import numpy as np
import pytest

from tests.harness import DEVICE, on_cpus, run, run_raising, start


def brings(path, what):
    import paddle
    from paddle import nn

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    odd = job.world.rank == 1
    net = nn.Sequential(
        nn.Linear(16, 65 if odd and what == "shape" else 64), nn.Linear(65 if odd and what == "shape" else 64, 10)
    )
    if odd and what == "layer":
        net.add_sublayer("extra", nn.Linear(10, 10))
    if odd and what == "frozen":
        net[0].weight.trainable = False
    if odd and what == "multiplier":
        net[0].weight.optimize_attr["learning_rate"] = 0.5
    rate = 0.2 if odd and what == "rate" else 0.1
    schedule = paddle.optimizer.lr.StepDecay(rate, 5 if odd and what == "schedule" else 6)
    decay = 1e-3 if odd and what == "decay" else 1e-4
    clip = nn.ClipGradByGlobalNorm(1.0 if odd and what == "clip" else 2.0)
    momentum = paddle.optimizer.Momentum(
        schedule, 0.8 if odd and what == "momentum" else 0.9, net.parameters(), weight_decay=decay, grad_clip=clip
    )
    net, momentum = job.prepare(net, momentum)
    length = 100 if odd and what == "length" else 128
    data = job.loader(blocks.Points(length), 9 if odd and what == "batch" else 8, shuffle=True)
    for points, labels in job.steps(data):
        job.backward(nn.functional.cross_entropy(net(points), labels))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", "0.weight"),
        ("layer", "extra.weight"),
        ("frozen", "0.weight"),
        ("multiplier", "learning rate x 0.5"),
        ("rate", "learning_rate: 0.1 on rank 0"),
        ("decay", "0.001 on rank 1"),
        ("momentum", "momentum: 0.9 on rank 0 on 127.0.0.1; 0.8 on rank 1"),
        ("schedule", "schedule.step_size: 6 on rank 0"),
        ("clip", "clip.clip_norm: 2.0 on rank 0"),
        ("batch", "batch_size: 8 on rank 0"),
        ("length", "samples: 128 on rank 0"),
    ],
)
def test_a_difference_is_listed_with_its_rank(tmp_path, what, named):
    for kind, message in run_raising(brings, 2, tmp_path / "out", str(tmp_path / "run"), what):
        assert kind == "MismatchError", message
        assert named in message and "rank 1 on 127.0.0.1" in message, message


def steps(path, what, ranks_that_differ=(1,)):
    """A few steps in which one rank misbehaves; the weights' hash at the end."""
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    class Branches(nn.Layer):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b, self.never = (
                nn.Linear(16, 32),
                nn.Linear(32, 10),
                nn.Linear(32, 10),
                nn.Linear(32, 10),
            )

        def forward(self, x, left):
            return (self.a if left else self.b)(self.stem(x))

    job = ppfleet.Job(path, device=DEVICE, seed=1, on_nan="skip" if what == "nan-skip" else "stop")
    odd = job.world.rank in ranks_that_differ
    net = Branches() if what == "branch" else blocks.with_batch_norm()
    never = net.never.weight.numpy().copy() if what == "branch" else None
    rate = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 0.5 if odd and what == "rate" and step > 3 else 1.0)
    momentum = paddle.optimizer.Momentum(rate, parameters=net.parameters(), weight_decay=1e-2)
    wrapped, momentum = job.prepare(net, momentum, find_unused=what == "branch")
    data = job.loader(blocks.Points(96), 8, shuffle=True)
    job.resume()
    kept, good = None, None
    initial = net[1]._mean.numpy().copy() if what == "nan-skip" else None
    for number, (points, labels) in enumerate(job.steps(data)):
        if odd and number == 3 and what.startswith("nan"):
            points = points * float("nan")
        if odd and number == 3 and what == "continue":
            continue
        output = wrapped(points, number % 2 == 0 or not odd) if what == "branch" else wrapped(points)
        before = net[1]._mean.numpy() if number == 3 and what == "nan-skip" and kept is None else None
        job.backward(F.cross_entropy(output, labels))
        if before is not None:
            kept = bool((good == net[1]._mean.numpy()).all() and (good != initial).any())
        good = net[1]._mean.numpy().copy() if what == "nan-skip" else None
        rate.step()
    finite = all(bool(paddle.isfinite(t).all()) for t in net.state_dict().values())
    same = never is None or bool((net.never.weight.numpy() == never).all())
    job.save()
    return {
        "weights": tensors.fingerprint(net),
        "finite": finite,
        "skipped": job.skipped,
        "unused_untouched": same,
        "kept": kept,
    }


def test_a_branch_that_one_rank_takes_keeps_the_ranks_together(tmp_path):
    ends = run(steps, 2, tmp_path / "out", str(tmp_path / "run"), "branch")
    assert ends[0] == ends[1]
    assert ends[0]["unused_untouched"]  # as in one process: no gradient, no weight decay


def test_a_learning_rate_that_drifts_stops_all_ranks(tmp_path):
    for kind, message in run_raising(steps, 2, tmp_path / "out", str(tmp_path / "run"), "rate"):
        assert kind == "MismatchError"
        assert "0.100000001 on rank 0" in message and "0.0500000007 on rank 1" in message and "step 5" in message, (
            message
        )


def test_nan_stops_all_ranks_and_names_the_one(tmp_path):
    for kind, message in run_raising(steps, 3, tmp_path / "out", str(tmp_path / "run"), "nan"):
        assert kind == "NonFiniteError"
        # On cards, gradients are summed before they can be looked at.
        who = "rank 1 on 127.0.0.1" if DEVICE == "cpu" else "some rank"
        assert f"NaN or infinite on {who} (step 4, epoch 0" in message, message
        assert "rank 0 on" not in message and "rank 2 on" not in message


def test_nan_in_one_process(tmp_path):
    ((kind, message),) = run_raising(steps, 1, tmp_path / "out", str(tmp_path / "run"), "nan", [0])
    assert kind == "NonFiniteError" and "on rank 0 (step 4" in message


@pytest.mark.parametrize("ranks", [1, 2])
def test_nan_skipped_leaves_weights_and_statistics_clean(tmp_path, ranks):
    ends = run(steps, ranks, tmp_path / "out", str(tmp_path / "run"), "nan-skip", [ranks - 1])
    assert all(end == ends[0] for end in ends)
    assert ends[0]["skipped"] == 1 and ends[0]["finite"]
    assert ends[0]["kept"]  # the statistics of the step before, not the initial ones
    again = run(steps, ranks, tmp_path / "out", str(tmp_path / "run"), "nan-skip", [ranks - 1])
    assert again[0]["skipped"] == 2 and again[0]["kept"]


def test_a_batch_without_backward_is_said_on_the_rank_that_left_it_out(tmp_path):
    ends = start(steps, 2, tmp_path / "out", str(tmp_path / "run"), "continue").wait(60)
    assert ends[1].error is not None, ends[1].output
    kind, message = ends[1].error
    assert kind == "FleetError" and "job.backward was not called for a batch on rank 1" in message
    assert ends[0].error is not None and ends[0].error[0] == "CommError"


def catches(path):
    """Rank 1 dies in the middle of training; rank 0 must be able to catch that and go on living."""
    import os

    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    net = blocks.mlp()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    try:
        for number, (points, labels) in enumerate(job.steps(job.loader(blocks.Points(96), 8, shuffle=True))):
            if job.world.rank == 1 and number == 3:
                os._exit(9)
            job.backward(F.cross_entropy(wrapped(points), labels))
    except ppfleet.FleetError as failure:
        return [type(failure).__name__, str(failure), job.step]
    return "nothing happened"


def test_a_dead_peer_in_the_backward_pass_can_be_caught(tmp_path):
    ends = start(catches, 2, tmp_path / "out", str(tmp_path / "run")).wait(60)
    assert ends[1].code == 9
    assert ends[0].code == 0, ends[0].output
    kind, message, step = ends[0].value
    assert kind == "CommError" and "all-reduce" in message and "failed on rank 0" in message and step == 3


def statistics_after_training(path):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    net = blocks.with_batch_norm()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    expected, random = net[1]._mean.numpy().astype("float64"), []
    for points, labels in job.steps(job.loader(blocks.Points(96), 8, shuffle=True)):
        random.append(paddle.rand([4]).tolist())
        mine = net[0](points).mean(0).numpy().tolist()
        everybodys = np.array(job.comm.gather(mine)).mean(0)
        expected = 0.9 * expected + 0.1 * everybodys
        job.backward(F.cross_entropy(wrapped(points), labels))
    return {
        "mean": net[1]._mean.numpy().tolist(),
        "variance": net[1]._variance.numpy().tolist(),
        "expected": expected.tolist(),
        "random": random,
    }


def test_batch_norm_statistics_are_the_mean_over_ranks_after_each_step(tmp_path):
    ends = run(statistics_after_training, 3, tmp_path / "out", str(tmp_path / "run"))
    assert ends[0]["mean"] == ends[1]["mean"] == ends[2]["mean"]
    assert ends[0]["variance"] == ends[1]["variance"] == ends[2]["variance"]
    assert np.allclose(ends[0]["mean"], ends[0]["expected"], atol=1e-6)
    draws = [tuple(draw) for end in ends for draw in end["random"]]
    assert len(set(draws)) == len(draws)  # dropout differs from rank to rank and step to step


def fine_tuning(path, what):
    """Freeze, train, unfreeze, train; or a layer with a buffer of its own. This rank's weights and buffers."""
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    class Centred(nn.Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", paddle.zeros([16]))

        def forward(self, x):
            if self.training:
                self.centre.set_value(0.9 * self.centre + 0.1 * x.mean(0).detach())
            return x - self.centre

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    net = nn.Sequential(Centred() if what == "buffer" else nn.Linear(16, 16), nn.Linear(16, 10))
    frozen = net[0].parameters() if what == "unfreeze" else []
    for parameter in frozen:
        parameter.stop_gradient = True
    wrapped, adam = job.prepare(net, paddle.optimizer.Adam(0.01, parameters=net.parameters()))
    before = [p.numpy().copy() for p in frozen]
    data = job.loader(blocks.Points(96), 8, shuffle=True)
    for _ in job.epochs(2):
        for points, labels in job.steps(data):
            job.backward(F.cross_entropy(wrapped(points), labels))
        untouched = all((old == p.numpy()).all() for old, p in zip(before, frozen))
        for parameter in frozen:
            parameter.stop_gradient = False
        job.save()
    return [tensors.fingerprint(net), bool(untouched)]


@pytest.mark.parametrize("what", [pytest.param("unfreeze", marks=on_cpus), "buffer"])
def test_unfrozen_parameters_and_own_buffers_stay_together(tmp_path, what):
    ends = run(fine_tuning, 2, tmp_path / "out", str(tmp_path / "run"), what)
    assert ends[0] == ends[1]
    assert ends[0][1] == (what != "unfreeze")


def diverges(path):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    net = blocks.mlp()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    for points, labels in job.steps(job.loader(blocks.Points(32), 8, shuffle=True)):
        job.backward(F.cross_entropy(wrapped(points), labels))
        if job.world.rank == 1:
            net[0].weight.set_value(net[0].weight * 1.01)  # what no check of ours foresees
    job.save()


def test_weights_that_differ_are_never_saved(tmp_path):
    for kind, message in run_raising(diverges, 2, tmp_path / "out", str(tmp_path / "run")):
        assert kind == "MismatchError" and "different training progress or weights to save" in message
    assert not (tmp_path / "run/checkpoints").exists()


def changes_its_batch(path, only_here=False):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    net = blocks.mlp()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    job.settings["here"] = {"path": f"on rank {job.world.rank}"}  # may differ
    for epoch in job.epochs(2):
        batch = 4 if epoch and job.world.rank and not only_here else 8
        for points, labels in job.steps(job.loader(blocks.Points(32), batch, shuffle=True)):
            job.backward(F.cross_entropy(wrapped(points), labels))


def test_settings_that_differ_later_are_found_too(tmp_path):
    for kind, message in run_raising(changes_its_batch, 2, tmp_path / "out", str(tmp_path / "run")):
        assert kind == "MismatchError" and "batch_size: 8 on rank 0 on 127.0.0.1; 4 on rank 1" in message


def test_settings_of_a_host_may_differ(tmp_path):
    run(changes_its_batch, 2, tmp_path / "out", str(tmp_path / "run"), True)
    assert json.loads((tmp_path / "run/settings.json").read_text())["here"] == {"path": "on rank 0"}


def other_meetings(path, way):
    import ppfleet

    job = ppfleet.Job(path, device=DEVICE)
    name = "of rank 1" if job.world.rank == 1 else "of rank 0"
    if way == "gather":
        job.comm.gather(job.world.rank, name)
    else:
        job.comm.on_first(lambda: 1, name)
        job.comm.barrier()


@pytest.mark.parametrize("way", ["gather", "on_first"])
def test_ranks_that_meet_in_different_operations_do_not_take_each_others_values(tmp_path, way):
    errors = run_raising(other_meetings, 2, tmp_path / "out", str(tmp_path / "run"), way)
    kinds = [kind for kind, _ in errors]
    assert kinds[1] == "MismatchError" and kinds[0] in ("MismatchError", "CommError"), errors
    assert "is of rank 0 on rank 0 on 127.0.0.1; of rank 1 on rank 1" in errors[1][1]
