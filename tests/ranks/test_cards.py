"""What is special about cards, shown on simulated ones: reads, BatchNorm, unused parameters, precision, export."""

import numpy as np
import pytest

from tests.harness import DEVICE, on_cards, run, start

pytestmark = on_cards
STEPS = 6


def picture_net(kind="plain"):
    import paddle
    from paddle import nn

    paddle.seed(7)
    norm = nn.BatchNorm(8) if kind == "old" else nn.BatchNorm2D(8, weight_attr=False if kind == "bare" else None)
    layers = [nn.Conv2D(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2D(8, 8, 3, padding=1, groups=8)]
    return nn.Sequential(
        *layers, nn.BatchNorm2D(8), nn.Hardswish(), nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(8, 10)
    )


def trained(path, device=DEVICE, prepare=None, kind="plain", options=None, resume=False, steps=STEPS):
    """Some steps of a small CNN with a global batch of 16; what was used, the losses and the weights."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=device, seed=3, log_every=10**9, **(options or {}))
    net = picture_net(kind)
    optimizer = paddle.optimizer.Momentum(0.05, parameters=net.parameters())
    model, optimizer = job.prepare(net, optimizer, **(prepare or {}))
    data = job.loader(blocks.Pictures(16 * steps, 12), 16 // job.world.size, shuffle=True)
    if resume:
        job.resume()
    losses = []
    for pictures, labels in job.steps(data):
        job.backward(F.cross_entropy(model(pictures), labels))
        losses.append(job._loop.stepper.loss)
    job.save()
    weights = {name: value.numpy().astype("float64").sum() for name, value in net.state_dict().items()}
    return {
        "losses": losses,
        "weights": {name: float(total) for name, total in weights.items()},
        "settings": {"amp": job.settings["amp"], **job.settings["defaults"]},
        "kinds": [type(layer).__name__ for layer in net.sublayers()],
        "skipped": job.skipped,
    }


def close(one, other, limit=1e-5):
    assert np.abs(np.array(one["losses"]) - other["losses"]).max() < limit
    for name, total in one["weights"].items():
        assert abs(total - other["weights"][name]) < 20 * limit * (1 + abs(total)), name


@pytest.mark.parametrize(
    ("kind", "env", "operator"),
    [
        ("plain", {}, "Paddle's"),
        ("plain", {"SIM_WITHOUT": "sync_batch_norm"}, "ppfleet's"),  # as most plugins of Paddle
        ("plain", {"SIM_SYNC_BN": "local"}, "ppfleet's"),  # as Paddle 3 may be: computes, but does not synchronise
        ("old", {}, "Paddle's"),
        ("old", {"SIM_SYNC_BN": "local"}, "ppfleet's"),
        ("bare", {"SIM_SYNC_BN": "local"}, "ppfleet's"),
    ],
)
def test_batch_norm_is_that_of_the_global_batch(tmp_path, kind, env, operator):
    (alone,) = run(trained, 1, tmp_path / "out1", str(tmp_path / "one"), "cpu", {"fast_cpu": False}, kind)
    two = run(trained, 2, tmp_path / "out2", str(tmp_path / "two"), DEVICE, {}, kind, env=env)
    assert two[0]["settings"]["BatchNorm"] == f"synchronised by {operator} operator"
    assert two[0]["kinds"] == alone["kinds"]  # layers stay as the user made them
    for end in two:
        close(end, alone)


def test_cpus_may_synchronise_batch_norm_too(tmp_path):
    (alone,) = run(trained, 1, tmp_path / "out1", str(tmp_path / "one"), "cpu")
    for end in run(trained, 2, tmp_path / "out2", str(tmp_path / "two"), "cpu", {"sync_bn": True}):
        close(end, alone)
    apart = run(trained, 2, tmp_path / "out3", str(tmp_path / "three"), "cpu")
    assert apart[0]["settings"]["BatchNorm"] == "not synchronised"
    assert abs(apart[0]["losses"][-1] - alone["losses"][-1]) > 1e-4


def frozen(path):
    """BatchNorm layers that the user froze, in each way, or hooked: as they were, after job.prepare and a step."""
    import paddle
    from paddle import nn

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = nn.Sequential(
        nn.Conv2D(3, 4, 3), nn.BatchNorm2D(4), nn.BatchNorm2D(4, use_global_stats=True), nn.BatchNorm2D(4)
    )
    net.add_sublayer("head", nn.Sequential(nn.AdaptiveAvgPool2D(1), nn.Flatten()))
    net[1].eval()
    called = []
    net[3].register_forward_post_hook(lambda *_: called.append(1))
    model, _ = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    before = [float(net[number]._mean.abs().sum()) for number in (1, 2, 3)]
    for pictures, labels in job.steps(job.loader(blocks.Pictures(16, 8), 8)):
        job.backward(nn.functional.cross_entropy(model(pictures), labels % 4))
    after = [float(net[number]._mean.abs().sum()) for number in (1, 2, 3)]
    return {"mode": net[1].training, "hook": len(called), "moved": [a != b for a, b in zip(before, after)]}


def test_frozen_layers_and_hooks_stay_as_the_user_made_them(tmp_path):
    for end in run(frozen, 2, tmp_path, str(tmp_path / "run")):
        assert end == {"mode": False, "hook": 1, "moved": [False, False, True]}


def counted(path):
    """Copies of the later steps of a job, and of a plain loop without one, as the card counts them."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks
    from tests.simcard import counters

    job = ppfleet.Job(path, device=DEVICE, seed=3, log_every=10**9)
    net, plain = picture_net(), picture_net()
    sgd = paddle.optimizer.Momentum(0.05, parameters=plain.parameters())
    model, _ = job.prepare(net, paddle.optimizer.Momentum(0.05, parameters=net.parameters()))
    ours, theirs = [], []
    for pictures, labels in job.steps(job.loader(blocks.Pictures(96, 12), 8)):
        counters.reset()
        F.cross_entropy(plain(pictures), labels).backward()
        sgd.step()
        sgd.clear_grad()
        theirs.append(counters.counters())
        counters.reset()
        job.backward(F.cross_entropy(model(pictures), labels))
        ours.append(counters.counters())
    return list(zip(ours, theirs))[2:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_reads_the_card_once_and_copies_nothing_else(tmp_path, ranks):
    for steps in run(counted, ranks, tmp_path, str(tmp_path / "run")):
        for ours, plain in steps:
            assert ours["d2h"] == plain["d2h"] + 1 and ours["h2d"] == plain["h2d"] == 0, (ours, plain)
            assert ours["fallback_copies"] == plain["fallback_copies"] == 0, (ours, plain)
            assert ours["kernels"] <= plain["kernels"] + 20, (ours, plain)


def unused(path, what):
    """A net with parts that are used at some steps or on some ranks only."""
    import paddle
    from paddle import nn

    import ppfleet
    from tests import blocks

    class Branches(nn.Layer):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 10), nn.Linear(8, 10)

        def forward(self, x, both):
            hidden = self.stem(x)
            return self.a(hidden) + self.b(hidden) if both else self.a(hidden)

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = Branches()
    if what == "unfrozen":
        net.b.weight.trainable = False
    model, _ = job.prepare(
        net, paddle.optimizer.SGD(0.1, parameters=net.parameters()), find_unused=what.startswith("found")
    )
    odd = job.world.rank == 1
    for number, (points, labels) in enumerate(job.steps(job.loader(blocks.Points(96), 8))):
        both = {"rank": odd, "first": odd or number > 2, "later": number > 2, "stops": number < 2}
        if what == "unfrozen" and number == 2:
            net.b.weight.trainable = True
        called = net if what == "unwrapped" and odd and number == 2 else model
        out = called(points, both.get(what.removeprefix("found-"), True))
        job.backward(nn.functional.cross_entropy(out, labels))
    return {name: float(value.numpy().astype("float64").sum()) for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("what", "kind", "shown"),
    [
        ("rank", "MismatchError", "b.weight was not used in the first step on rank 0 on 127.0.0.1"),
        ("later", "FleetError", "a parameter that was unused in the first step is used now on rank"),
        ("stops", "FleetError", "b.bias, b.weight: not used at this step on rank"),
        ("unfrozen", "FleetError", "a parameter that was frozen at job.prepare cannot be unfrozen"),
        ("unwrapped", "FleetError", "the loss was not computed by the model that job.prepare returned (rank 1"),
    ],
)
def test_what_paddles_reducer_cannot_do_is_said_on_the_spot(tmp_path, what, kind, shown):
    ends = start(unused, 2, tmp_path, str(tmp_path / "run"), what).wait(60)
    assert all(end.error for end in ends), [end.output for end in ends]
    assert any(end.error[0] == kind and shown in end.error[1] for end in ends), [end.error for end in ends]
    assert all(shown in end.error[1] for end in ends), [end.error for end in ends]  # … and the others learn why


@pytest.mark.parametrize("what", ["rank", "first", "later", "stops"])
def test_branches_are_averaged_as_on_cpus_if_prepare_knows(tmp_path, what):
    ends = run(unused, 2, tmp_path, str(tmp_path / "run"), f"found-{what}")
    assert ends[0] == ends[1]
    expected = run(unused_on_cpus, 2, tmp_path / "cpu", str(tmp_path / "cpus"), f"found-{what}")
    assert all(abs(ends[0][name] - value) < 1e-5 for name, value in expected[0].items())


def unused_on_cpus(path, what):
    global DEVICE
    DEVICE = "cpu"
    return unused(path, what)


def overflows(path, steps, scale):
    """float16 with a loss scale that is too large at first, or a model that never gives finite gradients."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3, amp="O1", amp_dtype="float16")
    job.precision.scaler.scale = scale
    net = blocks.mlp()
    model, _ = job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    resumed = job.resume()
    if resumed:
        return {"scale": job.precision.scaler.scale, "skipped": job.skipped}
    losses = []
    for points, labels in job.steps(job.loader(blocks.Points(8 * job.world.size * steps), 8)):
        loss = F.cross_entropy(model(points * (1e4 if scale == 1.0 else 1.0)), labels)
        job.backward(loss * (1e30 if scale == 1.0 else 1.0))
        losses.append(job._loop.stepper.loss)
    job.save()
    return {"scale": job.precision.scaler.scale, "skipped": job.skipped, "step": job.step}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_float16_overflow_is_skipped_counted_and_halves_the_scale(tmp_path, ranks):
    ends = run(overflows, ranks, tmp_path, str(tmp_path / "run"), 12, 2.0**24)
    assert all(end == ends[0] for end in ends)
    skipped = ends[0]["skipped"]
    assert skipped > 2 and ends[0]["scale"] == 2.0 ** (24 - skipped)
    again = run(overflows, ranks, tmp_path, str(tmp_path / "run"), 12, 2.0**24)
    assert again[0] == {"scale": ends[0]["scale"], "skipped": skipped}  # part of the checkpoint


def test_overflows_without_end_end_the_job(tmp_path):
    ends = start(overflows, 2, tmp_path, str(tmp_path / "run"), 40, 1.0).wait(60)
    for end in ends:
        assert end.error and end.error[0] == "NonFiniteError", end.output
        assert "20 steps in a row had float16 gradients that are not finite" in end.error[1]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_trains_and_resumes(tmp_path, level, dtype):
    options = {"amp": level, "amp_dtype": dtype}
    plain = run(trained, 2, tmp_path / "out", str(tmp_path / "plain"))
    low = run(trained, 2, tmp_path / "out", str(tmp_path / "low"), DEVICE, {}, "plain", options)
    assert low[0]["settings"]["amp"] in (f"{level} {dtype}", "O0") and low[0] == low[1] | {
        "settings": low[0]["settings"]
    }
    assert np.abs(np.array(low[0]["losses"]) - plain[0]["losses"]).max() < 0.05
    if low[0]["settings"]["amp"] != "O0":
        assert low[0]["losses"] != plain[0]["losses"]  # it was really computed in low precision


def test_settings_say_what_is_really_computed(tmp_path):
    options = {"amp": "O1", "amp_dtype": "bfloat16"}
    env = {"SIM_WITHOUT": "bfloat16"}
    (end,) = start(trained, 1, tmp_path, str(tmp_path / "run"), DEVICE, {}, "plain", options, env=env).wait(60)
    assert end.value["settings"]["amp"] == "O0"
    assert "amp=O1 has no effect: Paddle has no autocast to bfloat16 on a sim card" in end.output


def exported(path):
    """Exports after training; what the program contains, and whether training can go on."""
    import re
    from pathlib import Path

    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = picture_net()
    model, _ = job.prepare(net, paddle.optimizer.Momentum(0.05, parameters=net.parameters()))
    data = job.loader(blocks.Pictures(64, 12), 8, shuffle=True)
    for _ in job.epochs(2):
        for pictures, labels in job.steps(data):
            job.backward(F.cross_entropy(model(pictures), labels))
        facts = job.export(model, [None, 3, 12, 12])
    program = next(p for p in (Path(path) / "export").iterdir() if p.suffix in (".json", ".pdmodel")).read_bytes()
    return {
        "sync": bool(re.search(rb"sync_batch_norm", program)),
        "parity": max(v for v in facts["parity"].values() if isinstance(v, float)),
        "place": str(net[0].weight.place),
        "step": job.step,
    }


@pytest.mark.parametrize("env", [{}, {"SIM_SYNC_BN": "local"}])
def test_a_job_on_several_cards_exports_stock_operators(tmp_path, env):
    for end in run(exported, 2, tmp_path, str(tmp_path / "run"), env=env):
        assert not end["sync"] and end["parity"] <= 1e-3 and "sim" in end["place"], end


def test_a_run_goes_on_between_cpus_and_cards(tmp_path):
    (whole,) = run(trained, 1, tmp_path / "out", str(tmp_path / "whole"), "cpu", {}, "plain", {"save_every": 2})
    for first, then in (("cpu", DEVICE), (DEVICE, "cpu")):
        path = str(tmp_path / f"{first}-{then}")
        run(stopped, 1, tmp_path / "out", path, first)
        (end,) = run(trained, 1, tmp_path / "out", path, then, {}, "plain", {"save_every": 2}, True)
        close({**end, "losses": whole["losses"][-2:]}, {**whole, "losses": end["losses"][-2:]})


def stopped(path, device):
    """As `trained`, but only four of its steps, of which a checkpoint has four."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=device, seed=3, save_every=2)
    net = picture_net()
    model, _ = job.prepare(net, paddle.optimizer.Momentum(0.05, parameters=net.parameters()))
    for pictures, labels in job.steps(job.loader(blocks.Pictures(16 * STEPS, 12), 16, shuffle=True)):
        job.backward(F.cross_entropy(model(pictures), labels))
        if job.step == 5:
            break


def deterministic(path):
    import ppfleet

    ppfleet.Job(path, device=DEVICE, deterministic=True)


def test_determinism_that_is_not_known_is_refused(tmp_path):
    (end,) = start(deterministic, 1, tmp_path, str(tmp_path / "run")).wait(60)
    assert end.error == (
        "FleetError",
        "deterministic=True: it is not known how a sim card computes the same bits each time",
    )


def fed(path, workers, kind):
    """A pass of images of 8 bits over a job's loader, normalised on the card: whether all arrived, and its counters."""
    import numpy as np
    import paddle

    import ppfleet
    from tests.simcard import counters

    class Pixels(paddle.io.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return np.full((200, 200, 3), index, np.uint8), index

    class Threaded(ppfleet.ThreadedDataset):
        fields = (((200, 200, 3), np.uint8), ((), np.int64))

        def __len__(self):
            return 40

        def draw_into(self, sample, index, chance):
            sample[0][...] = sample[1][...] = index

    class Stream(paddle.io.IterableDataset):
        def __iter__(self):
            return (Pixels()[index] for index in range(40))

    job = ppfleet.Job(path, device=DEVICE)
    scale = paddle.to_tensor([1.0, 2.0, 4.0])
    data = {"processes": Pixels, "threads": Threaded, "stream": Stream}[kind]()
    loader = job.loader(
        data, 4, workers=workers, on_device=lambda batch: [batch[0].astype("float32") * scale, batch[1]]
    )
    seen, positions, counts = [], [], []
    busy = paddle.ones([64, 64])
    for images, labels in loader:
        busy = paddle.tanh(busy @ busy)  # the card is behind, and memory is used again
        seen.append((images.sum([1, 2]), labels))
        positions.append(loader.position)
        counts.append(counters.counters())
        counters.reset()
    expected = np.arange(40).reshape(10, 4)
    assert [labels.tolist() for _, labels in seen] == expected.tolist()
    assert (
        np.stack([sums.numpy() for sums, _ in seen]).tolist() == (expected[..., None] * [40000, 80000, 160000]).tolist()
    )
    return positions, counts[4]


@pytest.mark.parametrize(("workers", "kind"), [(0, "processes"), (2, "processes"), (2, "threads"), (0, "stream")])
@pytest.mark.parametrize(("pinned", "kernel", "copy"), [(0, 3000, 0), (1, 3000, 0), (1, 1000, 6000)])
def test_batches_of_8_bits_reach_the_card_whole_and_ahead(tmp_path, workers, kind, pinned, kernel, copy):
    """Kernels and copies take longer: one that does not wait for the other, or whose memory is given away too early,
    would bring something else."""
    env = {"SIM_DELAY_US": str(kernel), "SIM_COPY_DELAY_US": str(copy), "SIM_PINNED": str(pinned)}
    ((positions, counts),) = run(fed, 1, tmp_path, str(tmp_path / "run"), workers, kind, env=env)
    assert positions == list(range(4, 44, 4))
    assert counts["h2d"] == 2 and counts["h2d_bytes"] < 4 * 200 * 200 * 3 + 4 * 8 + 512, counts
    assert counts["blocking_copies"] == (0 if pinned else 2) and counts["d2h"] == 0, counts


def fed_badly(path):
    import paddle

    import ppfleet

    class Bad(paddle.io.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            if index == 7:
                raise ValueError("sample 7")
            return (paddle.to_tensor([float(index)]),)

    seen = []
    try:
        for (values,) in ppfleet.Job(path, device=DEVICE).loader(Bad(), 2):
            seen += values.flatten().tolist()
    except ValueError as failure:
        seen.append(str(failure))
    return seen


def test_an_error_in_the_next_batch_comes_when_it_is_its_turn(tmp_path):
    assert run(fed_badly, 1, tmp_path, str(tmp_path / "run")) == [[0, 1, 2, 3, 4, 5, "sample 7"]]
