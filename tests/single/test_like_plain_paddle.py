"""One process through Job is the plain Paddle loop, bit for bit, also with an unusual model or optimizer."""

from pathlib import Path

import pytest

from tests.harness import run


def make(kind):
    """A model of that kind, and its optimizer."""
    import paddle
    from paddle import nn

    class Transposed(nn.Layer):
        """The only use of the weight is a transposed view: its gradient is not contiguous."""

        def __init__(self):
            super().__init__()
            self.w = self.create_parameter([10, 16])

        def forward(self, x):
            return paddle.matmul(x, self.w.T)

    class Scaled(nn.Layer):
        """A parameter and a buffer without dimensions."""

        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(16, 10)
            self.scale = self.create_parameter([])
            self.register_buffer("offset", paddle.to_tensor(3.0))

        def forward(self, x):
            return self.inside(x) * (self.scale + 1) + self.offset * 0

    class Late(nn.Layer):
        """A part that is used, and has a gradient, from the third pass on; and one that is never used."""

        def __init__(self):
            super().__init__()
            self.first, self.second, self.never = nn.Linear(16, 10), nn.Linear(16, 10), nn.Linear(16, 10)
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            return self.first(x) + (self.second(x) if self.passes > 2 else 0)

    net = {"transposed": Transposed, "zero-d": Scaled, "late": Late}.get(
        kind, lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    )()
    if kind == "subset":
        return net, paddle.optimizer.Momentum(0.1, parameters=net[2].parameters())
    if kind == "groups":
        groups = [
            {"params": net[0].parameters(), "learning_rate": 0.1},
            {"params": net[2].parameters(), "weight_decay": 0.3},
        ]
        return net, paddle.optimizer.AdamW(0.05, parameters=groups, weight_decay=0.1)
    if kind == "decay by name":
        decayed = [p.name for name, p in net.named_parameters() if "bias" not in name]
        decays = {"weight_decay": 0.5, "apply_decay_param_fun": lambda name: name in decayed}
        return net, paddle.optimizer.AdamW(0.05, parameters=net.parameters(), **decays)
    if kind == "warm restarts":
        rate = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.05, T_0=2, T_mult=2)
        return net, paddle.optimizer.Adam(rate, parameters=net.parameters())
    if kind == "warm-up":
        after = paddle.optimizer.lr.StepDecay(0.05, 2, 0.5)
        rate = paddle.optimizer.lr.LinearWarmup(after, warmup_steps=3, start_lr=0.0, end_lr=0.05)
        return net, paddle.optimizer.RMSProp(rate, parameters=net.parameters())
    if kind.startswith("plateau"):
        rate = paddle.optimizer.lr.ReduceOnPlateau(0.05, factor=0.5, patience=1, cooldown=1)
        return net, paddle.optimizer.Adam(rate, parameters=net.parameters())
    return net, paddle.optimizer.Adam(0.05, parameters=net.parameters())


def follow(kind, optimizer):
    """What a script does to the learning rate after each step of the optimizer."""
    import paddle

    schedule = optimizer._learning_rate
    if kind == "set_lr":
        optimizer.set_lr(optimizer.get_lr() * 0.9)
    elif kind.startswith("plateau"):  # the best metric is that of the third step
        metric = paddle.to_tensor(0.1 if schedule.last_epoch == 2 else 0.9)  # as Paddle's own example does
        schedule.step(metric.numpy() if kind == "plateau, NumPy" else metric)
    elif isinstance(schedule, paddle.optimizer.lr.LRScheduler):
        schedule.step()


def fingerprint(net):
    import hashlib

    return hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in sorted(net.state_dict().items()))).hexdigest()


def through_job(path, kind, epochs):
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=1)
    net, optimizer = make(kind)
    wrapped, _ = job.prepare(net, optimizer)
    data = job.loader(blocks.Points(48), 16)
    job.resume()
    for _ in job.epochs(epochs):
        for points, labels in job.steps(data):
            job.backward(F.cross_entropy(wrapped(points), labels))
            follow(kind, optimizer)
        job.save()
    return fingerprint(net)


def by_hand(kind, epochs):
    import paddle
    import paddle.nn.functional as F

    from ppfleet.data.sampler import mix
    from tests import blocks

    paddle.set_device("cpu")
    paddle.seed(mix(1, 0) >> 33)  # as Job(seed=1) does
    net, optimizer = make(kind)
    for _ in range(epochs):
        for points, labels in paddle.io.DataLoader(blocks.Points(48), batch_size=16):
            F.cross_entropy(net(points), labels).backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
            net.clear_gradients()
            for p in net.parameters():
                p.clear_gradient(False)
            follow(kind, optimizer)
    return fingerprint(net)


def on_amd():
    return {"AuthenticAMD", "avx2"} <= set(Path("/proc/cpuinfo").read_text().split())


KINDS = ["transposed", "zero-d", "late", "subset", "groups", "decay by name", "warm restarts", "warm-up"]
KINDS += ["set_lr", "plateau, Tensor", "plateau, NumPy"]


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_the_plain_loop_and_after_a_resume(tmp_path, kind):
    # Job lets MKL take AVX2 on AMD (ppfleet/cpu/tuning.py): for the same bits the loop by hand must do so too.
    (hand,) = run(by_hand, 1, tmp_path / "out", kind, 3, env={"MKL_DEBUG_CPU_TYPE": "5"} if on_amd() else None)
    (job,) = run(through_job, 1, tmp_path / "out", str(tmp_path / "whole"), kind, 3)
    assert job == hand
    if kind == "late":
        return  # counts its own passes, which no checkpoint can know
    run(through_job, 1, tmp_path / "out", str(tmp_path / "run"), kind, 1)
    (resumed,) = run(through_job, 1, tmp_path / "out", str(tmp_path / "run"), kind, 3)
    assert resumed == hand
