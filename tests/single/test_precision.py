"""Mixed precision as far as a CPU can show it: Paddle computes neither float16 nor bfloat16 there."""

from tests.harness import DEVICE, run, start


def trained(path, amp):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=1, amp=amp)
    net = blocks.with_batch_norm()
    wrapped, adam = job.prepare(net, paddle.optimizer.Adam(0.01, parameters=net.parameters()))
    for points, labels in job.steps(job.loader(blocks.Points(64), 16, shuffle=True)):
        job.backward(F.cross_entropy(wrapped(points), labels))
    return [tensors.fingerprint(net), job.settings["amp"]]


def test_on_a_cpu_amp_is_float32_and_that_is_said_once(tmp_path):
    plain, o1 = (start(trained, 1, tmp_path / level, str(tmp_path / level), level).wait()[0] for level in ("O0", "O1"))
    assert plain.value == o1.value and plain.value[1] == "O0"
    assert o1.output.count("amp=O1 has no effect: Paddle has no autocast on a CPU") == 1
    assert "autocast" not in plain.output


def plumbing():
    """What happens to a model on a card, short of the arithmetic: its forward pass is entered under autocast."""
    import paddle
    from paddle import nn

    from ppfleet.training import precision as module
    from ppfleet.training.precision import Precision, plain

    module._casts = lambda dtype: True  # as on a card
    asked = []
    real = paddle.amp.auto_cast

    def recording(**options):
        asked.append(options)
        return real(**options)

    paddle.amp.auto_cast = recording

    class Low(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(4, 4)

        def forward(self, x):
            return {"low": self.inside(x).astype("bfloat16"), "pair": (x.astype("float16"), x.astype("int64"))}

    net = Low()
    from ppfleet.distributed.devices import CPU, GPU

    precision = Precision("O1", "bfloat16", GPU)
    precision.wrap(net, None)
    out = net(paddle.ones([2, 4]))
    own = plain(net)
    return {
        "asked": asked,
        "out": [
            str(out["low"].dtype),
            str(out["pair"][0].dtype),
            str(out["pair"][1].dtype),
            type(out["pair"]).__name__,
        ],
        "own": str(own(paddle.ones([2, 4]))["low"].dtype),
        "calls": len(asked),
        "scaling": [
            precision.scaling,
            Precision("O2", None, GPU).scaling,
            Precision("O1", None, CPU).scaling,
        ],
        "name": str(precision),
    }


def name(dtype):
    return dtype.rpartition(".")[2].replace("VarType", "").lower()


def test_the_forward_pass_is_wrapped_and_answers_in_float32(tmp_path):
    (seen,) = run(plumbing, 1, tmp_path)
    assert seen["asked"] == [{"level": "O1", "dtype": "bfloat16"}] and seen["calls"] == 1
    assert [name(d) for d in seen["out"][:3]] in (["float32", "float32", "int64"], ["fp32", "fp32", "int64"])
    assert seen["out"][3] == "tuple"
    assert name(seen["own"]) in ("bfloat16", "bf16")  # export sees the author's own forward
    assert seen["scaling"] == [False, True, False]
    assert seen["name"] == "O1 bfloat16"


def half_precision_state():
    """bfloat16 weights and float32 master weights: written without loss, read back exactly, by structured name."""
    import paddle

    from ppfleet.checkpoint import tensors
    from tests import blocks

    def make(seed):
        paddle.seed(seed)
        net = blocks.mlp()
        net.to(dtype="bfloat16")
        parameters = dict(net.named_parameters())
        return net, parameters, paddle.optimizer.Adam(0.1, parameters=net.parameters(), multi_precision=True)

    net, parameters, adam = make(1)
    tensors.create_accumulators(adam, list(parameters.values()))
    model, moments = (
        tensors.to_bytes(tensors.model_arrays(net)),
        tensors.to_bytes(tensors.optimizer_arrays(adam, parameters)),
    )
    other, others, fresh = make(2)
    differed = tensors.fingerprint(net) != tensors.fingerprint(other)
    tensors.load_model(other, tensors.from_bytes(model, "m"), "m")
    tensors.load_optimizer(fresh, others, tensors.from_bytes(moments, "o"), "o")
    return {
        "differed": differed,
        "model": tensors.fingerprint(net) == tensors.fingerprint(other),
        "moments": tensors.to_bytes(tensors.optimizer_arrays(fresh, others)) == moments,
        "names": sorted(tensors.optimizer_arrays(fresh, others)),
    }


def test_half_precision_state_is_kept_without_loss(tmp_path):
    (seen,) = run(half_precision_state, 1, tmp_path)
    assert seen["differed"] and seen["model"] and seen["moments"]
    assert "0.weight/master_weight" in seen["names"] and any(n.startswith("0.weight/moment1") for n in seen["names"])


def mixed_gradients():
    """bfloat16 parameters beside float32 ones: both are averaged over ranks."""
    import paddle
    from paddle import nn

    from ppfleet.training.gradients import HostExchange
    from tests.ranks.test_comm import make

    comm = make()
    low, high = nn.Linear(3, 2), nn.Linear(2, 1)
    low.to(dtype="bfloat16")
    parameters = {
        f"{name}.{key}": p for name, layer in (("low", low), ("high", high)) for key, p in layer.named_parameters()
    }
    for p in parameters.values():
        p.grad = paddle.full(p.shape, comm.world.rank + 1.0).astype(p.dtype)
    vitals = HostExchange(comm, parameters, [], []).reduce(loss=float(comm.world.rank), rate=0.1)
    return [vitals.loss, *[[str(p.grad.dtype), p.grad.astype("float32").mean().item()] for p in parameters.values()]]


def test_gradients_of_both_precisions_are_averaged(tmp_path):
    for loss, *gradients in run(mixed_gradients, 2, tmp_path):
        assert loss == 0.5
        assert [mean for _, mean in gradients] == [1.5] * 4
        assert len({dtype for dtype, _ in gradients}) == 2


def refusals(path):
    import ppfleet

    said = []
    for options in (
        {"amp": "O3"},
        {"amp": "O1", "amp_dtype": "int8"},
        {"on_nan": "hope"},
        {"accumulate": 0},
        {"device": "gpu"},
        {"device": "tpu"},
    ):
        try:
            ppfleet.Job(path, **{"device": "cpu", **options})
            said.append("nothing")
        except ppfleet.FleetError as failure:
            said.append(str(failure))
    return said


def test_wrong_options_are_explained(tmp_path):
    (said,) = run(refusals, 1, tmp_path / "out", str(tmp_path / "run"))
    expected = (
        "O0, O1, O2",
        "float16, bfloat16",
        "stop, skip",
        "must be >= 1",
        "paddlepaddle-gpu is not installed",
        "auto, cpu, gpu",
    )
    for message, part in zip(said, expected):
        assert part in message, message
