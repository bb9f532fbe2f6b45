"""The simulated card against the CPU, and whether it behaves as a card does. The functions run in processes of their
own, because Paddle loads a plugin when it is imported."""

import signal
import threading

import pytest

from tests.harness import on_cards, run, start
from tests.simcard import build, environment, read_trace

pytestmark = on_cards


def cnn(paddle):
    from paddle import nn

    paddle.seed(7)
    return nn.Sequential(
        nn.Conv2D(3, 8, 3, padding=1, bias_attr=False),
        nn.BatchNorm2D(8),
        nn.Hardswish(),
        nn.Conv2D(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2D(8),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.AdaptiveAvgPool2D(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 4),
    )


def optimizer(paddle, name, net):
    kwargs = {"parameters": net.parameters(), "weight_decay": 1e-4}
    if name == "momentum":
        return paddle.optimizer.Momentum(0.05, 0.9, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0), **kwargs)
    return {"adam": paddle.optimizer.Adam, "adamw": paddle.optimizer.AdamW}[name](0.01, **kwargs)


def batches(steps):
    import numpy as np

    random = np.random.RandomState(0)
    return [(random.randn(6, 3, 8, 8).astype("float32"), random.randint(0, 4, 6)) for _ in range(steps)]


def train(device, name, steps=20):
    """Losses and weights, and what the card was asked for."""
    import numpy as np
    import paddle

    from tests.simcard import counters

    paddle.set_device(device)
    net = cnn(paddle)
    opt = optimizer(paddle, name, net)
    losses = []
    counters.reset()
    for x, y in batches(steps):
        loss = paddle.nn.functional.cross_entropy(net(paddle.to_tensor(x)), paddle.to_tensor(y))
        loss.backward()
        opt.step()
        opt.clear_grad()
        losses.append(loss)
    counted = counters.counters()
    weights = {key: np.asarray(value.numpy()) for key, value in net.state_dict().items()}
    return [float(loss.numpy()) for loss in losses], weights, counted


def training(name):
    losses, weights, _ = train("cpu", name)
    on_card, card_weights, counted = train("sim:0", name)
    return {
        "same losses": losses == on_card,
        "learns": losses[-1] < losses[0],
        "different weights": [key for key in weights if weights[key].tobytes() != card_weights[key].tobytes()],
        "counted": counted,
    }


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_training_gives_the_bits_of_the_cpu_without_a_read(tmp_path, name):
    [seen] = run(training, 1, tmp_path, name, env=environment(1))
    assert seen["same losses"] and seen["learns"] and seen["different weights"] == []
    counted = seen["counted"]
    assert counted["kernels"] > 20 * 40
    assert counted["fallback_copies"] == 0  # every operator of the step runs on the card
    assert counted["d2h"] == 0 or PADDLE26  # 2.6's cross_entropy reads whether all labels are in range
    assert counted["h2d"] == 2 * 20  # the batch and the labels


PADDLE26 = build._paddle()[1].startswith("2.")


def cases(paddle, np):
    """Operators by name, as functions of the tensors that they get; each gives tensors."""
    F = paddle.nn.functional
    random = np.random.RandomState(0)
    a, b = random.randn(4, 6).astype("float32"), random.randn(6, 5).astype("float32")
    image, labels = random.randn(2, 3, 8, 8).astype("float32"), np.array([1, 3, 0, 2])
    T = paddle.to_tensor

    def with_grad(function, *arrays):
        inputs = [T(array, stop_gradient=False) for array in arrays]
        out = function(*inputs)
        (out * out).sum().backward()
        return [out, *[one.grad for one in inputs]]

    activations = ["relu", "relu6", "hardswish", "hardsigmoid", "sigmoid", "tanh"]
    activations += ["gelu", "silu", "leaky_relu", "mish", "softplus", "elu"]
    unary = ["sqrt", "rsqrt", "square", "abs", "exp", "log", "sin", "cos"]
    return {
        **{f"{n}": lambda n=n: with_grad(getattr(F, n), a) for n in activations},
        **{f"{n} ": lambda n=n: with_grad(getattr(paddle, n), abs(a) + 1) for n in unary},
        **{
            n: lambda n=n: with_grad(getattr(paddle, n), a, a[::-1].copy() + 3)
            for n in ["add", "subtract", "multiply", "divide", "maximum", "minimum"]
        },
        "broadcast": lambda: with_grad(lambda x, y: x * y + 1, a, a[0]),
        "matmul": lambda: with_grad(paddle.matmul, a, b),
        "matmul_transposed": lambda: with_grad(lambda x: x @ x.T, a),
        "linear": lambda: with_grad(F.linear, a, b, b[0]),
        "conv2d": lambda: with_grad(lambda x, w: F.conv2d(x, w, padding=1, stride=2), image, random_weight(4, 3)),
        "depthwise": lambda: with_grad(lambda x, w: F.conv2d(x, w, groups=3), image, random_weight(3, 1)),
        "max_pool": lambda: with_grad(lambda x: F.max_pool2d(x, 3, 2, 1), image),
        "avg_pool": lambda: with_grad(lambda x: F.adaptive_avg_pool2d(x, 2), image),
        "layer_norm": lambda: with_grad(lambda x: F.layer_norm(x, 6), a),
        "softmax": lambda: with_grad(F.softmax, a),
        "log_softmax": lambda: with_grad(F.log_softmax, a),
        "cross_entropy": lambda: with_grad(lambda x: F.cross_entropy(x, T(labels)), a),
        "soft_labels": lambda: with_grad(lambda x: F.cross_entropy(x, F.softmax(T(a)), soft_label=True), a),
        "embedding": lambda: with_grad(lambda w: F.embedding(T(np.array([1, 1, 2])), w), a),
        "bilinear": lambda: with_grad(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image),
        "nearest": lambda: with_grad(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), image),
        "sum": lambda: with_grad(lambda x: x.sum(axis=1), a) + [T(a).sum(), T(a).mean(), T(a).max(), T(a).min()],
        "mean": lambda: with_grad(lambda x: x.mean(axis=0), a) + with_grad(paddle.mean, a),
        "pow": lambda: with_grad(lambda x: x**3, a),
        "clip": lambda: with_grad(lambda x: x.clip(-0.5, 0.5), a),
        "where": lambda: with_grad(lambda x: paddle.where(x > 0, x, x * 2), a),
        "concat": lambda: with_grad(lambda x, y: paddle.concat([x, y]), a, a),
        "stack": lambda: with_grad(lambda x, y: paddle.stack([x, y]), a, a),
        "split": lambda: with_grad(lambda x: paddle.split(x, 2, axis=1)[0], a),
        "slice": lambda: with_grad(lambda x: x[1:3, ::2], a),
        "transpose": lambda: with_grad(lambda x: x.transpose([1, 0]).reshape([4, 6]) + 1, a),
        "squeeze": lambda: with_grad(lambda x: x.unsqueeze(1).squeeze(1).flatten(), a),
        "gather": lambda: with_grad(lambda x: paddle.gather(x, T(np.array([0, 2]))), a),
        "index_select": lambda: with_grad(lambda x: paddle.index_select(x, T(np.array([0, 2])), axis=1), a),
        "expand": lambda: with_grad(lambda x: x.expand([4, 6]), a[:1]),
        "tile": lambda: with_grad(lambda x: x.tile([2, 1]), a),
        "pad": lambda: with_grad(lambda x: F.pad(x, [1, 1, 2, 2]), image),
        "add_n": lambda: [paddle.add_n([T(a), T(a), T(a)])],
        "compare": lambda: [T(a) > 0, T(a) == T(a), T(a) != 0, T(a) < 1, paddle.isfinite(T(a)).all(), (T(a) > 9).any()],
        "topk": lambda: [*paddle.topk(T(a), 2), T(a).argmax(axis=1)],
        "one_hot": lambda: [F.one_hot(T(labels), 6)],
        "cast": lambda: [T(a).astype("float64"), T(a).astype("int64"), T(a).astype("float16").astype("float32")],
        "create": lambda: [paddle.full([3], 2.0), paddle.zeros([2, 2]), paddle.ones_like(T(a)), paddle.eye(3)],
        "inplace": lambda: [F.relu_(T(a)), T(a).scale_(2.0), T(a).add_(T(a)), T(a).zero_()],
        "assign_column": lambda: [assign_column(T(a))],
        "clone": lambda: [T(a).clone(), paddle.assign(T(a))],
        "unscale": lambda: [*unscale(paddle, T, np, a), *unscale(paddle, T, np, a * np.inf)],
        "random": lambda: [paddle.rand([5]), paddle.randn([5]), paddle.randint(0, 9, [5]), F.dropout(T(a), 0.5)],
    }


def random_weight(*channels):
    import numpy as np

    return np.random.RandomState(1).randn(*channels, 3, 3).astype("float32")


def assign_column(x):
    x[:, 1] = 7.0
    return x


def unscale(paddle, T, np, a):
    gradients = [T(a), T(a * 2)]
    found = paddle._C_ops.check_finite_and_unscale_(gradients, T(np.array([4.0], "float32")))[1]
    return [*gradients, found]


def operators():
    """Which operators differ from the CPU, raise, or fall back to it."""
    import numpy as np
    import paddle

    from tests.simcard import counters

    results, bad = {}, {}
    for device in ("cpu", "sim:0"):
        paddle.set_device(device)
        for name, function in cases(paddle, np).items():
            paddle.seed(3)
            try:
                made = function()
                values = [value.numpy() for value in made]
            except Exception as error:  # noqa: BLE001 - the test shows it
                bad[name] = f"{device}: {str(error)[-300:]}"
                continue
            if device == "cpu":
                results[name] = values
                continue
            counted = counters.counters()
            same = [a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(results[name], values)]
            if not all(same) or counted["fallback_copies"]:
                bad[name] = f"same: {same}, fallback copies: {counted['fallback_copies']}"
            counters.reset()
    return {"bad": bad, "good": len(results) - len(bad), "native": sorted(counters.native_kernels())}


def test_operators_give_the_bits_of_the_cpu_and_none_falls_back(tmp_path):
    [seen] = run(operators, 1, tmp_path, env=environment(1))
    assert seen["bad"] == {}
    assert len(seen["native"]) > 180


def low_precision(dtype):
    """Convolution, activation, pooling and product, forward and backward: types, and the largest relative difference
    from float32 on the same rounded values."""
    import numpy as np
    import paddle

    from tests.simcard import counters

    paddle.set_device("sim:0")
    F = paddle.nn.functional
    random = np.random.RandomState(0)
    arrays = [random.randn(2, 3, 8, 8), random.randn(4, 3, 3, 3), random.randn(4, 5)]
    narrow = [paddle.to_tensor(array.astype("float32")).astype(dtype) for array in arrays]
    made, types = {}, []
    for kind in ("float32", dtype):
        inputs = [one.astype(kind) for one in narrow]
        for one in inputs:
            one.stop_gradient = False
        counters.reset()
        out = F.adaptive_avg_pool2d(F.hardswish(F.conv2d(inputs[0], inputs[1])), 1).flatten(1) @ inputs[2]
        (out * out).mean().backward()
        assert counters.counters()["fallback_copies"] == 0
        results = [out, *[one.grad for one in inputs]]
        types.append([str(one.dtype).split(".")[-1] for one in results])
        made[kind] = [one.astype("float32").numpy() for one in results]
    errors = [float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(made["float32"], made[dtype])]
    return [types[1], errors]


@pytest.mark.parametrize("dtype, most", [("float16", 5e-3), ("bfloat16", 3e-2)])
def test_low_precision_is_rounded_to_its_type(tmp_path, dtype, most):
    [[types, errors]] = run(low_precision, 1, tmp_path, dtype, env=environment(1))
    assert set(types) == {dtype}
    assert all(0 < error < most for error in errors), errors


def mixed_precision():
    """Losses of float16 O2 training with master weights, and of float32."""
    import paddle

    paddle.set_device("sim:0")
    losses = []
    for low in (False, True):
        net = cnn(paddle)
        net[9].p = 0.0
        opt = paddle.optimizer.Momentum(0.05, 0.9, parameters=net.parameters(), multi_precision=True)
        scaler = paddle.amp.GradScaler(enable=low, init_loss_scaling=1024.0)
        if low:
            net, opt = paddle.amp.decorate(net, opt, level="O2", dtype="float16")
        for x, y in batches(5):
            with paddle.amp.auto_cast(low, level="O2", dtype="float16"):
                out = net(paddle.to_tensor(x))
            loss = paddle.nn.functional.cross_entropy(out.astype("float32"), paddle.to_tensor(y))
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.clear_grad()
        losses.append(float(loss.numpy()))
    return [*losses, str(out.dtype).split(".")[-1], str(net[0].weight.dtype).split(".")[-1]]


def test_mixed_precision_training(tmp_path):
    [[exact, rounded, out, weight]] = run(mixed_precision, 1, tmp_path, env=environment(1))
    assert (out, weight) == ("float16", "float16")
    assert 0 < abs(exact - rounded) < 0.02


def touch():
    import ctypes

    import paddle

    paddle.set_device("sim:0")
    ctypes.string_at(paddle.ones([4]).data_ptr(), 4)


def test_the_host_cannot_touch_device_memory(tmp_path):
    [rank] = start(touch, 1, tmp_path, env=environment(1)).wait()
    assert rank.code == -signal.SIGSEGV, rank.output[-2000:]


def fresh_memory():
    import paddle

    paddle.set_device("sim:0")
    return bool(paddle.isnan(paddle.empty([64])).all())


def test_fresh_memory_is_nan(tmp_path):
    assert run(fresh_memory, 1, tmp_path, env=environment(1)) == [True]


def exhaust():
    import paddle

    paddle.set_device("sim:0")
    kept = []
    try:
        for _ in range(100):
            kept.append(paddle.ones([1 << 20]))  # 4 MB
    except Exception as error:  # noqa: BLE001 - which one is the question
        told = [type(error).__name__, str(error)]
    count = len(kept)
    kept.clear()
    return [*told, count, float(paddle.ones([1 << 20]).sum().numpy())]


def test_out_of_memory_is_an_error_and_the_card_goes_on(tmp_path):
    [[kind, message, count, total]] = run(exhaust, 1, tmp_path, env=environment(1, memory=64 << 20))
    assert kind == "MemoryError" and "Out of memory error on sim" in message
    assert 10 <= count <= 16 and total == 1 << 20


def run_ahead():
    import paddle

    from tests.simcard import counters

    paddle.set_device("sim:0")
    x = paddle.ones([8, 8])
    x.numpy()
    counters.reset()
    for _ in range(30):
        x = paddle.nn.functional.relu(x @ x) * 0.1
    launched = counters.counters()
    x.numpy()
    return [launched, counters.counters()]


def test_python_runs_ahead_of_the_card(tmp_path):
    env = environment(1, delay_us=10000, trace=tmp_path / "trace")
    [[launched, done]] = run(run_ahead, 1, tmp_path, env=env)
    assert launched["kernels"] == 90 and launched["blocking_waits"] == launched["d2h"] == 0
    assert launched["kernels_done"] < 60  # 10 ms each
    assert done["kernels_done"] == 90 and done["d2h"] == 1
    events = read_trace(tmp_path / "trace")
    loop = [e for e in events if e["event"] in ("launch", "end")][-180:]
    last_launch = max(i for i, e in enumerate(loop) if e["event"] == "launch")
    ended = [e for e in loop[:last_launch] if e["event"] == "end"]
    assert len(ended) < 60, "the loop waited for the card"


def read_back():
    import paddle

    from tests.simcard import counters

    paddle.set_device("sim:0")
    x = paddle.ones([16])
    seen = {}
    pinned = {
        "numpy": lambda: x.numpy(),
        "item": lambda: x[0].item(),
        "to_tensor": lambda: paddle.to_tensor([1.0, 2.0]),
        "synchronize": lambda: paddle.device.synchronize(),
        "fallback": lambda: paddle.linalg.det(x.reshape([4, 4])),
        "add": lambda: x + 1,
    }
    for name, function in pinned.items():
        counters.reset()
        function()
        counted = counters.counters()
        seen[name] = [counted[key] for key in ("d2h", "h2d", "blocking_waits", "fallback_copies")]
    return seen


def test_counters_tell_reads_from_fallbacks(tmp_path):
    [seen] = run(read_back, 1, tmp_path, env=environment(1, trace=tmp_path / "trace"))
    assert seen["add"] == [0, 0, 0, 0]
    for name in ("numpy", "item"):
        d2h, h2d, waits, fallback = seen[name]
        assert (d2h, h2d, fallback) == (1, 0, 0) and waits >= 1, seen
    assert seen["to_tensor"][:2] == [0, 1] and seen["to_tensor"][2] >= 1 and seen["to_tensor"][3] == 0
    assert seen["synchronize"][:2] == [0, 0] and seen["synchronize"][2] >= 1
    d2h, h2d, waits, fallback = seen["fallback"]
    assert fallback == d2h + h2d > 0 and waits > 0
    copies = [event for event in read_trace(tmp_path / "trace") if event["event"] == "copy"]
    assert any(copy["fallback"] for copy in copies) and not all(copy["fallback"] for copy in copies)


def generator():
    """Whether the state of the card's generator can be kept and restored, as on CUDA."""
    import paddle

    paddle.set_device("sim:0")
    paddle.seed(5)
    paddle.rand([3])
    state = paddle.get_rng_state()
    first = paddle.rand([3]).tolist()
    later = paddle.rand([3]).tolist()
    paddle.set_rng_state(state)
    return [first == paddle.rand([3]).tolist(), first != later]


def test_the_state_of_the_generator_is_restored(tmp_path):
    assert run(generator, 1, tmp_path, env=environment(1)) == [[True, True]]


def lacking():
    import paddle

    from tests.simcard import counters

    paddle.set_device("sim:0")
    x = paddle.ones([2, 3, 4, 4])
    told = {"native": sorted(counters.native_kernels())}
    for name, function in {
        "sync_batch_norm": lambda: paddle.nn.SyncBatchNorm(3)(x),
        "relu": lambda: paddle.nn.functional.relu(x),
        "bfloat16": lambda: (x.astype("bfloat16") @ x.astype("bfloat16")).astype("float32"),
    }.items():
        counters.reset()
        try:
            function().numpy()
            told[name] = counters.counters()["fallback_copies"]
        except Exception as error:  # noqa: BLE001 - the test looks at it
            told[name] = str(error)
    return told


def test_a_card_may_lack_kernels_and_types(tmp_path):
    [whole] = run(lacking, 1, tmp_path, env=environment(1))
    assert whole["sync_batch_norm"] == whole["relu"] == whole["bfloat16"] == 0
    [seen] = run(lacking, 1, tmp_path, env=environment(1, without="sync_batch_norm,relu,bfloat16"))
    assert set(whole["native"]) - set(seen["native"]) == {"sync_batch_norm", "sync_batch_norm_grad", "relu"}
    assert "sync_batch_norm" in seen["sync_batch_norm"]  # no CPU has it
    assert seen["relu"] > 0
    assert seen["bfloat16"] != 0


def fail():
    import paddle

    paddle.set_device("sim:0")
    x = paddle.ones([4])
    x.numpy()
    told = []
    for _ in range(4):
        try:
            x = paddle.nn.functional.relu(x) + 1
            x.numpy()
            told.append("")
        except Exception as error:  # noqa: BLE001 - the test looks at it
            told.append(str(error))
    return told


def test_a_failed_card_stays_failed(tmp_path):
    [told] = run(fail, 1, tmp_path, env=environment(1, fail="rank=0,kernel=relu,count=2"))
    assert told[0] == "" and all("error code is : 3" in one or "failed before: relu" in one for one in told[1:]), told
    [told] = run(fail, 1, tmp_path, env=environment(1, fail="rank=1,kernel=relu,count=2"))
    assert told == [""] * 4  # another rank's


def broken_sources(directory, text):
    directory.mkdir()
    (directory / "card.cc").write_text(text)
    return directory


def test_the_build_tells_what_the_compiler_said(tmp_path):
    sources = broken_sources(tmp_path / "sources", "int card( { return 0; }\n")
    with pytest.raises(RuntimeError, match=r"does not compile.*card\.cc(?s:.*)error: expected"):
        build.plugin(tmp_path / "cache", sources)
    assert not list((tmp_path / "cache").glob("building-*"))


def test_two_builds_at_once_compile_once(tmp_path, monkeypatch):
    sources = broken_sources(tmp_path / "sources", "int card() { return 0; }\n")
    compiled = []
    really = build._compile
    monkeypatch.setattr(build, "_compile", lambda unit, *rest: compiled.append(unit) or really(unit, *rest))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(build.plugin(tmp_path / "cache", sources))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3 and len(compiled) == 1
    assert (found[0] / build.LIBRARY).exists()
