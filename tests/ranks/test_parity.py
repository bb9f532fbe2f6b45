"""Same numbers on 1 and N ranks: the reduced gradients of one global batch."""

import numpy as np
import pytest

from tests.harness import DEVICE, on_cpus, run

GLOBAL_BATCH = 16


def gradients(kind, accumulate, path):
    """One step through Job; the gradients that the optimizer saw, stored by rank 0."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1, accumulate=accumulate)
    size = 64 if kind == "mobilenet" else 32
    net = paddle.vision.models.mobilenet_v3_small(num_classes=10) if kind == "mobilenet" else blocks.small_conv()
    sgd = paddle.optimizer.SGD(0.1, parameters=net.parameters(), grad_clip=clipping(kind))
    wrapped, sgd = job.prepare(net, sgd)
    if kind == "mobilenet":
        net.eval()  # BatchNorm's batch statistics are the stated exception
    data = job.loader(blocks.Pictures(64, size), GLOBAL_BATCH // job.world.size // accumulate, shuffle=True)
    step = sgd.step
    seen = {}

    def recording_step():
        seen.update({f"{name}.grad": p.grad.numpy().copy() for name, p in net.named_parameters() if p.grad is not None})
        step()

    sgd.step = recording_step
    for pictures, labels in job.steps(data):
        job.backward(F.cross_entropy(wrapped(pictures), labels))
        if seen:
            break
    seen.update({name: p.numpy() for name, p in net.named_parameters()})
    if job.world.first:
        np.savez(f"{path}.npz", **seen)
    return sorted(seen)


def clipping(kind):
    import paddle

    return paddle.nn.ClipGradByGlobalNorm(0.05) if kind == "clipped" else None


def by_hand(kind, path):
    """The same global batch without ppfleet: what the gradients must be."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet.data.sampler import Plan, mix
    from tests import blocks

    paddle.seed(mix(1, 0) >> 33)  # as Job(seed=1) does before the model is built
    size = 64 if kind == "mobilenet" else 32
    net = paddle.vision.models.mobilenet_v3_small(num_classes=10) if kind == "mobilenet" else blocks.small_conv()
    if kind == "mobilenet":
        net.eval()
    batch = next(Plan(length=64, batch_size=GLOBAL_BATCH, seed=1, shuffle=True, tail="drop").batches(0))
    samples = [blocks.Pictures(64, size)[i] for i in batch.indices]
    loss = F.cross_entropy(
        net(paddle.to_tensor(np.stack([s[0] for s in samples]))), paddle.to_tensor([s[1] for s in samples])
    )
    loss.backward()
    np.savez(
        f"{path}.npz", **{f"{name}.grad": p.grad.numpy() for name, p in net.named_parameters() if p.grad is not None}
    )
    return ppfleet.__version__


def worst(one, other):
    """The largest difference of a parameter's gradient, relative to that gradient's largest element."""
    one, other = np.load(one), np.load(other)
    names = [name for name in other.files if name in one.files]
    assert names
    return max(float(np.abs(one[name] - other[name]).max() / (np.abs(other[name]).max() + 1e-12)) for name in names)


@pytest.mark.parametrize("kind", ["conv", "clipped", pytest.param("mobilenet", marks=pytest.mark.slow)])
def test_gradients_agree_with_one_process(tmp_path, kind):
    run(gradients, 1, tmp_path / "out", kind, 1, str(tmp_path / "1x1"))
    figures = {}
    for ranks, accumulate in ((2, 1), (4, 1), (1, 4), (2, 2), (4, 2)):
        name = f"{ranks}x{accumulate}"
        seen = run(gradients, ranks, tmp_path / "out", kind, accumulate, str(tmp_path / name))
        assert all(names == seen[0] for names in seen)
        figures[name] = worst(tmp_path / f"{name}.npz", tmp_path / "1x1.npz")
    print(f"{kind}: largest relative difference to one process, ranks x accumulation: {figures}")
    assert max(figures.values()) <= 1e-5, figures


@pytest.mark.parametrize("kind", ["conv", "mobilenet"])
def test_one_process_agrees_with_plain_paddle(tmp_path, kind):
    run(gradients, 1, tmp_path / "out", kind, 1, str(tmp_path / "job"))
    run(by_hand, 1, tmp_path / "out", kind, str(tmp_path / "hand"))
    assert worst(tmp_path / "job.npz", tmp_path / "hand.npz") <= 5e-6  # the CPU operators round in another order


def padded_step(path, length, accumulate=1):
    """Two epochs of a set that does not divide: the last global batch is padded, and weighted by the loader."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1, accumulate=accumulate)
    net = blocks.mlp()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.5, parameters=net.parameters()))
    data = job.loader(blocks.Points(length), 12 // job.world.size // accumulate, shuffle=True, tail="pad")
    masks = []
    for _ in range(2):
        for points, labels in job.steps(data):
            losses = F.cross_entropy(wrapped(points), labels, reduction="none").reshape([-1])
            job.backward((losses * data.weights).mean())
            masks.append(int(data.mask.sum()))
    if job.world.first:
        np.savez(f"{path}.npz", **{name: p.numpy() for name, p in net.named_parameters()})
    return masks


def test_padded_tail_weighs_every_real_sample_the_same(tmp_path):
    masks = [run(padded_step, ranks, tmp_path / "out", str(tmp_path / f"pad{ranks}"), 29) for ranks in (1, 2, 3)]
    assert [[sum(step) for step in zip(*per_rank)] for per_rank in masks] == [[12, 12, 5] * 2] * 3
    for ranks in (2, 3):
        assert worst(tmp_path / f"pad{ranks}.npz", tmp_path / "pad1.npz") <= 1e-5
    run(padded_step, 2, tmp_path / "out", str(tmp_path / "accumulated"), 29, 3)
    assert worst(tmp_path / "accumulated.npz", tmp_path / "pad1.npz") <= 1e-5


def through(path, way, clips):
    """Some steps with momentum, BatchNorm and a branch that only rank 0 takes; what the weights are afterwards."""
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    job = ppfleet.Job(f"{path}/{way}{clips}", device=DEVICE, seed=1)
    if way == "gloo":
        job.comm.share = lambda *_: None
    net = nn.LayerList([blocks.with_batch_norm(), nn.Linear(10, 10)])
    clip = paddle.nn.ClipGradByGlobalNorm(0.5) if clips else None
    optimizer = paddle.optimizer.Momentum(0.1, parameters=net.parameters(), weight_decay=1e-3, grad_clip=clip)
    job.prepare(net, optimizer)
    for number, (points, labels) in enumerate(job.steps(job.loader(blocks.Points(256), 8, shuffle=True))):
        scores = net[0](points)
        if number % 3 == 1 and job.world.first:
            scores = net[1](scores)
        job.backward(F.cross_entropy(scores, labels))
    exchange = job._loop.stepper.exchange
    return [tensors.fingerprint(net), exchange._shared is not None, exchange._lent]


@on_cpus
@pytest.mark.parametrize("clips", [False, True])
def test_shared_memory_gives_the_bits_that_gloo_gives(tmp_path, clips):
    """Of two summands: with more, gloo has an order of its own. Clipping writes to gradients, the rest only reads."""
    ends = {way: run(through, 2, tmp_path / "out", str(tmp_path), way, clips) for way in ("gloo", "shared")}
    assert [way for _, way, _ in (*ends["gloo"], *ends["shared"])] == [False, False, True, True]
    assert {lent for _, _, lent in ends["shared"]} == {not clips}
    assert len({weights for end in ends.values() for weights, *_ in end}) == 1, ends


def untouched():
    """For each of Paddle's optimizers whether its steps leave the gradients as they are."""
    import inspect

    import paddle

    from ppfleet.training.model import only_reads_gradients

    found = {}
    for name, kind in list(vars(paddle.optimizer).items()):
        if not inspect.isclass(kind) or not issubclass(kind, paddle.optimizer.Optimizer):
            continue
        if name in ("Optimizer", "LBFGS"):  # no optimizer; one that wants a closure, which job.backward has not
            continue
        for decay in (None, 0.01, paddle.regularizer.L1Decay(0.01)):
            weight = paddle.create_parameter([40, 3], "float32")
            option = {} if decay is None else {"weight_decay": decay}
            try:
                optimizer = kind(learning_rate=0.1, parameters=[weight], **option)
            except TypeError:
                continue
            for _ in range(3):
                weight.grad = paddle.randn([40, 3])
                before = weight.grad.numpy().tobytes()
                gradient = weight._grad_ivar()
                optimizer.step()
                same = gradient.numpy().tobytes() == before
                found[name] = same and found.get(name, True) and only_reads_gradients(optimizer)
    return found


@on_cpus
def test_paddles_optimizers_only_read_gradients(tmp_path):
    """What `Exchange` relies on when it lends them everybody's sum."""
    (found,) = run(untouched, 1, tmp_path)
    assert {"SGD", "Momentum", "Adam", "AdamW", "Lamb", "RMSProp"} <= set(found) and all(found.values()), found


def normalised(path):
    """Some steps in float64 of a network with BatchNorm over the global batch of 16: all it has learned."""
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    import ppfleet
    from tests import blocks

    paddle.set_default_dtype("float64")
    job = ppfleet.Job(path, device=DEVICE, seed=3, log_every=10**9)
    layers = [nn.Conv2D(3, 8, 3), nn.BatchNorm2D(8, epsilon=1e-3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 12)]
    net = nn.Sequential(*layers, nn.BatchNorm1D(12, momentum=0.7), nn.ReLU(), nn.Linear(12, 10))
    sgd = paddle.optimizer.Momentum(0.05, parameters=net.parameters())
    model, _ = job.prepare(net, sgd, sync_bn=True, fast_cpu=False)
    for pictures, labels in job.steps(job.loader(blocks.Pictures(64, 8), 16 // job.world.size, shuffle=True)):
        job.backward(F.cross_entropy(model(pictures.astype("float64")), labels))
    return {name: value.flatten().tolist() for name, value in net.state_dict().items()}


def test_batch_norm_of_the_global_batch_is_that_of_one_process(tmp_path):
    (alone,) = run(normalised, 1, tmp_path / "out1", str(tmp_path / "1"))
    for ranks in (2, 4):
        for learned in run(normalised, ranks, tmp_path / f"out{ranks}", str(tmp_path / str(ranks))):
            apart = max(abs(a - b) for name in alone for a, b in zip(alone[name], learned[name]))
            assert apart < 1e-12, apart
