"""The CPU operators: stock Paddle's numbers on every shape and instruction set, and a swap that can be undone."""

import os

import pytest

from tests.harness import run

# Sizes of MobileNetV3-small's maps at 224 and at 64 pixels, and odd ones.
MAPS = [(2, 16, 112, 112), (2, 9, 28, 28), (3, 8, 14, 14), (2, 8, 7, 7), (3, 9, 4, 4), (3, 9, 2, 2), (2, 3, 1, 1)]
ODD = [(1, 2, 3, 5), (2, 3, 33, 17), (1, 1, 9, 8), (2, 5, 16, 31), (21, 3, 9, 8)]


def _gradients(function, *inputs):
    """What `function` makes of its inputs, and their gradients for a random direction of the output."""
    import numpy as np
    import paddle

    inputs = [paddle.to_tensor(value, stop_gradient=False) for value in inputs]
    made = function(*inputs)
    direction = np.random.RandomState(7).standard_normal(made.shape).astype("float32")
    (made * paddle.to_tensor(direction)).sum().backward()
    return [made.numpy(), *(value.grad.numpy() for value in inputs)]


def _worst(ours, theirs):
    import numpy as np

    return max(float(np.abs(a - b).max() / (np.abs(b).max() + 1e-6)) for a, b in zip(ours, theirs))


def compared(maps, threads=1):
    """Each operator beside stock Paddle's layers: the largest relative difference of an output or gradient."""
    import numpy as np
    import paddle
    import paddle.nn.functional as F

    from ppfleet.cpu import build
    from ppfleet.cpu.layers import run as op

    assert build.load() is None
    paddle.base.core.set_num_threads(threads)
    chance = np.random.RandomState(0)

    def draw(*shape, around=0.0):
        return (chance.standard_normal(shape) + around).astype("float32")

    worst = {}

    def check(name, ours, theirs):
        assert np.isfinite(ours[0]).all()
        worst[name] = max(worst.get(name, 0.0), _worst(ours, theirs))

    for batch, channels, height, width in maps:
        x = draw(batch, channels, height, width, around=1.5)
        for kernel in (3, 5):
            for stride in (1, 2):
                for border in {0, 1, kernel // 2, kernel - 1}:
                    if min(height, width) + 2 * border < kernel:
                        continue
                    w = draw(channels, 1, kernel, kernel)
                    check(
                        "depthwise",
                        _gradients(lambda x, w, s=stride, p=border: op("depthwise", x, w, s, p), x, w),
                        _gradients(lambda x, w, s=stride, p=border: F.conv2d(x, w, None, s, p, 1, len(w)), x, w),
                    )
        w = draw(6, channels, 1, 1)
        check("pointwise", _gradients(lambda x, w: op("pointwise", x, w), x, w), _gradients(F.conv2d, x, w))
        check(
            "mean", _gradients(lambda x: op("global_mean", x), x), _gradients(lambda x: F.adaptive_avg_pool2d(x, 1), x)
        )
        weights = [draw(7, channels, 1, 1), draw(7), draw(channels, 7, 1, 1), draw(channels)]
        check(
            "squeeze_excite",
            _gradients(lambda *inputs: op("squeeze_excite", *inputs), x, *weights),
            _gradients(
                lambda x, a, b, c, d: (
                    x * F.hardsigmoid(F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d(x, 1), a, b)), c, d))
                ),
                x,
                *weights,
            ),
        )
        if batch * height * width < 8:
            continue  # BatchNorm of a handful of values has gradients of nothing but rounding
        for act, function in enumerate((lambda z: z, F.relu, F.hardswish)):
            for training in (True, False):
                scale, bias = draw(channels, around=1), draw(channels)
                ours = [paddle.zeros([channels]), paddle.ones([channels])]
                theirs = [paddle.zeros([channels]), paddle.ones([channels])]
                check(
                    "batch_norm",
                    _gradients(
                        lambda x, s, b, a=act, t=training, r=ours: op("batch_norm", x, s, b, *r, 0.9, 1e-3, a, t),
                        x, scale, bias,
                    ) + [value.numpy() for value in ours],
                    _gradients(
                        lambda x, s, b, f=function, t=training, r=theirs: f(
                            F.batch_norm(x, *r, s, b, training=t, momentum=0.9, epsilon=1e-3)
                        ),
                        x, scale, bias,
                    ) + [value.numpy() for value in theirs],
                )  # fmt: skip
        together = [((channels, 1, k, k), s, p) for k, s, p in ((3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 2))]
        if channels > 1:  # of a single input BatchNorm undoes the scale: the gradient is nothing but rounding
            together.append(((6, channels, 1, 1), 1, 0))
        if channels in (2, 3):
            together.append(((5, channels, 3, 3), 2, 1))
        for number, (shape, stride, border) in enumerate(together):
            made = [(side + 2 * border - shape[2]) // stride + 1 for side in (height, width)]
            if batch * made[0] * made[1] < 8:
                continue
            act, training = number % 3, (number + batch) % 4 > 0
            name = "stem_norm" if shape[2] > 1 < shape[1] else "convolution_norm"
            w, scale, bias = draw(*shape), draw(shape[0], around=1), draw(shape[0])
            ours, theirs = ([paddle.zeros([shape[0]]), paddle.ones([shape[0]])] for _ in range(2))

            def both(x, w, s, b, t=stride, p=border, r=ours, n=name, a=act, training=training):
                return op(n, x, w, s, b, *r, t, p, 0.9, 1e-3, a, training)

            def apart(x, w, s, b, t=stride, p=border, r=theirs, a=act, training=training):
                z = F.conv2d(x, w, None, t, p, 1, len(w) if w.shape[1] == 1 < w.shape[2] else 1)
                z = F.batch_norm(z, *r, s, b, training=training, momentum=0.9, epsilon=1e-3)
                return (lambda z: z, F.relu, F.hardswish)[a](z)

            images = [] if name == "stem_norm" else [x]  # for which the stem has no gradient
            pair = [
                _gradients(lambda *given, f=f, x=x: f(*([] if len(given) == 4 else [paddle.to_tensor(x)]), *given),
                           *images, w, scale, bias) + [value.numpy() for value in seen]
                for f, seen in ((both, ours), (apart, theirs))
            ]  # fmt: skip
            check(name, *pair)
        for stride, border, size in ((2, 1, 3), (1, 1, 3), (2, 2, 5 if channels < 3 else 3)):
            if channels <= 3 and min(height, width) >= size:
                images = paddle.to_tensor(x)
                w = draw(16, channels, size, size)
                check(
                    "stem",
                    _gradients(lambda w, i=images, s=stride, p=border: op("stem", i, w, s, p), w),
                    _gradients(lambda w, i=images, s=stride, p=border: F.conv2d(i, w, None, s, p), w),
                )
    return worst


@pytest.mark.parametrize("how", ["avx2", "portable", "2 threads"])
def test_numbers_are_stock_paddles(tmp_path, how):
    env = {"PPFLEET_PORTABLE": "1"} if how == "portable" else {}
    (worst,) = run(compared, 1, tmp_path, MAPS + ODD, 2 if how == "2 threads" else 1, env=env)
    print(how, worst)
    names = {"depthwise", "pointwise", "mean", "squeeze_excite", "batch_norm", "convolution_norm", "stem", "stem_norm"}
    assert set(worst) == names
    assert max(worst.values()) < 2e-5, worst


def steps_on(threads):
    """Weights after some steps, as a hash."""
    import hashlib

    import numpy as np
    import paddle
    from paddle import nn

    from ppfleet import cpu

    paddle.base.core.set_num_threads(threads)
    paddle.seed(3)
    net = nn.Sequential(
        nn.Conv2D(3, 16, 3, stride=2, padding=1, bias_attr=False), nn.BatchNorm2D(16), nn.Hardswish(),
        nn.Conv2D(16, 24, 1, bias_attr=False), nn.BatchNorm2D(24), nn.ReLU(),
        nn.Conv2D(24, 24, 5, stride=2, padding=2, groups=24, bias_attr=False), nn.BatchNorm2D(24), nn.ReLU(),
        nn.Conv2D(24, 40, 1, bias_attr=False), nn.BatchNorm2D(40),
    )  # fmt: skip
    sgd = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    assert cpu.fast_cpu(net) == "ppfleet's"
    images = paddle.to_tensor(np.random.RandomState(0).standard_normal((20, 3, 70, 70)).astype("float32"))
    for _ in range(2):
        (net(images) ** 3).mean().backward()
        sgd.step()
        sgd.clear_grad()
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in net.parameters())).hexdigest()


def test_same_bits_on_any_number_of_threads(tmp_path):
    hashes = [run(steps_on, 1, tmp_path / str(threads), threads)[0] for threads in (1, 2, 3)]
    assert len(set(hashes)) == 1, hashes


def finite_differences():
    """The gradients against the slope of the function itself, along random directions."""
    import numpy as np
    import paddle

    from ppfleet.cpu import build
    from ppfleet.cpu.layers import run as op

    assert build.load() is None
    chance = np.random.RandomState(3)

    def slopes(function, *inputs):
        inputs = [value.astype("float32") for value in inputs]
        tensors = [paddle.to_tensor(value, stop_gradient=False) for value in inputs]
        made = function(*tensors)
        weights = chance.standard_normal(made.shape)
        (made * paddle.to_tensor(weights.astype("float32"))).sum().backward()

        def value(moved):
            made = function(*(paddle.to_tensor(value) for value in moved))
            return float((made.numpy().astype("float64") * weights).sum())

        found = []
        for number, tensor in enumerate(tensors):
            way = chance.standard_normal(inputs[number].shape).astype("float32")
            far = 2e-3
            ends = [
                value([*inputs[:number], inputs[number] + side * far * way, *inputs[number + 1 :]]) for side in (1, -1)
            ]
            slope, told = (ends[0] - ends[1]) / (2 * far), float((tensor.grad.numpy().astype("float64") * way).sum())
            found.append(abs(slope - told) / (abs(slope) + np.sqrt(way.size)))
        return max(found)

    def normal(x, s, b):
        return op("batch_norm", x, s, b, paddle.zeros([3]), paddle.ones([3]), 0.9, 1e-3, 2, True)

    draw = chance.standard_normal
    return {
        **{
            f"depthwise {kernel} {stride}": slopes(
                lambda x, w, k=kernel, s=stride: op("depthwise", x, w, s, k // 2),
                draw((2, 3, 9, 10)),
                draw((3, 1, kernel, kernel)),
            )
            for kernel in (3, 5)
            for stride in (1, 2)
        },
        "pointwise": slopes(lambda x, w: op("pointwise", x, w), draw((2, 3, 5, 5)), draw((4, 3, 1, 1))),
        "batch_norm": slopes(normal, draw((4, 3, 6, 5)), draw(3), draw(3)),
        "squeeze_excite": slopes(
            lambda *inputs: op("squeeze_excite", *inputs),
            draw((2, 3, 5, 5)), draw((4, 3, 1, 1)), draw(4) + 2, draw((3, 4, 1, 1)) / 4, draw(3) / 4,
        ),
        "mean": slopes(lambda x: op("global_mean", x), draw((2, 3, 4, 4))),
    }  # fmt: skip


def test_gradients_are_the_slopes(tmp_path):
    (found,) = run(finite_differences, 1, tmp_path)
    assert max(found.values()) < 1e-2, found


def trained(path, fast):
    """Some steps of a model with all kinds of layers, through Job or by hand; then what the swap left behind."""
    import copy

    import numpy as np
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from models.mobilenet_v3_small.net import MobileNetV3Small
    from ppfleet import cpu
    from ppfleet.cpu import layers
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=4)
    net = MobileNetV3Small(10, dropout=0.0)
    names = list(net.state_dict())
    wrapped, sgd = job.prepare(net, paddle.optimizer.Momentum(0.02, parameters=net.parameters()), fast_cpu=fast)
    swapped = sum(map(layers._is_fast, net.sublayers()))
    for pictures, labels in job.steps(job.loader(blocks.Pictures(32, 48), 8, shuffle=True)):
        job.backward(F.cross_entropy(wrapped(pictures), labels))
    assert list(net.state_dict()) == names
    twin = copy.deepcopy(net)
    twin.conv[0].weight.set_value(twin.conv[0].weight * 0)
    x = paddle.to_tensor(np.random.RandomState(1).standard_normal((2, 3, 48, 48)).astype("float32"))
    net.eval(), twin.eval()
    with cpu.stock(net):
        inside = sum(map(layers._is_fast, net.sublayers()))
        stock = net(x).numpy()
    assert not np.allclose(twin(x).numpy(), stock)  # a copy has weights of its own
    job.export(net, [None, 3, 48, 48])
    program = next(path for path in job.directory.glob("export/inference.*") if path.suffix in (".json", ".pdmodel"))
    return {
        "weights": {name: value.numpy().tolist() for name, value in net.state_dict().items() if value.size < 5000},
        "difference": float(np.abs(net(x).numpy() - stock).max() / np.abs(stock).max()),
        "swapped": [swapped, inside, sum(map(layers._is_fast, net.sublayers()))],
        "exported": b"ppfleet_" in program.read_bytes(),
    }


def test_training_agrees_with_stock_and_export_is_stock(tmp_path):
    import numpy as np

    (fast,) = run(trained, 1, tmp_path / "fast", str(tmp_path / "fast/run"), True)
    (stock,) = run(trained, 1, tmp_path / "stock", str(tmp_path / "stock/run"), False)
    assert fast["swapped"][0] > 90 and fast["swapped"][1] == 0 and fast["swapped"][2] == fast["swapped"][0]
    assert stock["swapped"] == [0, 0, 0]
    assert fast["difference"] < 1e-5 and not fast["exported"]
    for name, theirs in stock["weights"].items():
        ours, theirs = np.array(fast["weights"][name]), np.array(theirs)
        assert np.abs(ours - theirs).max() <= 2e-4 * (np.abs(theirs).max() + 1e-3), name


def corners():
    """What the operators must leave to Paddle, and what must come out all the same."""
    import numpy as np
    import paddle
    from paddle import nn

    from ppfleet import cpu

    paddle.seed(1)
    chance = np.random.RandomState(5)
    told = {}
    x = paddle.randn([2, 8, 10, 10])

    def both(net, x):
        y = net(x)
        with cpu.stock(net):
            return float((y.astype("float32") - net(x).astype("float32")).abs().max())

    odd = {
        "dilated": nn.Conv2D(8, 8, 3, dilation=2, groups=8),
        "reflected": nn.Conv2D(8, 8, 3, padding=1, padding_mode="reflect", groups=8),
        "same": nn.Conv2D(8, 8, 3, padding="same", groups=8),
        "uneven": nn.Conv2D(8, 8, (3, 5), padding=(1, 2), groups=8),
        "kernel 7": nn.Conv2D(8, 8, 7, padding=3, groups=8),
        "grouped": nn.Conv2D(8, 8, 3, groups=4),
        "multiplied": nn.Conv2D(8, 16, 3, groups=8),
        "channels last": nn.Conv2D(10, 10, 3, padding=1, groups=10, data_format="NHWC"),
        "bias": nn.Conv2D(8, 8, 3, padding=1, groups=8),
        "pointwise with bias": nn.Conv2D(8, 4, 1),
        "strided pointwise": nn.Conv2D(8, 4, 1, stride=2),
        "pool to 2": nn.AdaptiveAvgPool2D(2),
    }
    for name, layer in odd.items():
        net = nn.Sequential(layer)
        cpu.fast_cpu(net)
        net.eval()
        told[name] = ["forward" in vars(layer), both(net, x)]
    net = nn.Sequential(nn.Conv2D(8, 8, 3, padding=1, groups=8, bias_attr=False), nn.BatchNorm2D(8), nn.ReLU())
    cpu.fast_cpu(net)
    told["turned input"] = [True, both(net, x.transpose([0, 1, 3, 2]))]
    told["part of an input"] = [True, both(net, paddle.randn([2, 16, 10, 10])[:, ::2])]

    def turned(x):
        return net(x).transpose([0, 1, 3, 2])

    ours = _gradients(turned, x.numpy())
    with cpu.stock(net):
        told["turned gradient"] = [True, _worst(ours, _gradients(turned, x.numpy()))]

    class Pair(nn.Layer):
        def forward(self, x):
            return (x, x) if isinstance(x, paddle.Tensor) else x[0] + x[1]

    pairs = nn.Sequential(Pair(), Pair(), nn.BatchNorm2D(8))
    cpu.fast_cpu(pairs)
    told["no tensor between layers"] = [True, both(pairs, x)]
    first = nn.Sequential(nn.Conv2D(3, 8, 3, stride=2, bias_attr=False), nn.BatchNorm2D(8), nn.Hardswish())
    cpu.fast_cpu(first)
    images = chance.standard_normal((4, 3, 12, 12)).astype("float32")
    told["stem"] = [True, both(first, paddle.to_tensor(images))]
    ours = _gradients(first, images)  # of the images, too
    with cpu.stock(first):
        told["gradient of images"] = [True, _worst(ours, _gradients(first, images)) / 10]

    def of_none():
        try:
            return net(x[:0]).shape
        except ValueError:  # Paddle 2.6 refuses that
            return "refused"

    ours = of_none()
    with cpu.stock(net):
        told["no images"] = [True, float(ours != of_none())]
    seen = []
    hook = net[1].register_forward_post_hook(lambda layer, inputs, output: seen.append(float(output.min())))
    told["hooked"] = [True, both(net, x)]
    assert min(seen) < 0, "the hook sees BatchNorm's own output"
    hook.remove()
    told["double"] = [True, both(nn.Sequential(net, nn.Flatten()).to(dtype="float64"), x.astype("float64"))]
    net.to(dtype="float32")
    bad = x.clone()
    bad[0, 3, 5, 5] = float("nan")
    told["nan"] = [True, float(not np.isnan(net(bad).numpy()[:, 3]).all())]
    told["finite"] = [True, float(not cpu.all_finite([x, x[0, 0, 0, :3].clone()]))]
    for number in (float("nan"), float("inf"), -float("inf")):
        bad = paddle.ones([100003])
        bad[int(chance.randint(100003))] = number
        told[f"not finite: {number}"] = [True, float(cpu.all_finite([x, bad]) is not False)]
    act = nn.ReLU()
    shared = nn.Sequential(nn.BatchNorm2D(8), act, nn.Conv2D(8, 8, 1), act)
    cpu.fast_cpu(shared)
    told["shared activation"] = [True, both(shared, x)]
    frozen = nn.Sequential(nn.BatchNorm2D(8, use_global_stats=True), nn.Hardswish())
    cpu.fast_cpu(frozen)
    told["global statistics"] = [True, both(frozen, x)]
    return told


def test_what_the_operators_do_not_know_stays_paddles(tmp_path):
    (told,) = run(corners, 1, tmp_path)
    assert all(difference < 1e-5 for _, difference in told.values()), told
    known = {name for name, (swapped, _) in told.items() if swapped}
    assert {"bias", "pointwise with bias"} < known
    assert not known & {"dilated", "reflected", "same", "uneven", "kernel 7", "grouped", "multiplied"}, told
    assert not known & {"channels last", "pool to 2"}, told


def planes(compiled):
    """Of images of many sizes: whether the compiled code took them, and whether the planes are NumPy's, bit by bit."""
    import numpy as np

    from deploy.inference_python import preprocess
    from ppfleet.cpu import build
    from ppfleet.cpu.pixels import ToPlanes

    if compiled:
        assert build.load() is None
    line = preprocess.settings(32)["mean"], preprocess.settings(32)["std"]
    to_planes, chance, told = ToPlanes(*line), np.random.RandomState(2), []
    for height, width in ((224, 224), (7, 5), (1, 1), (33, 17), (3, 16), (1, 31)):
        image = chance.randint(0, 256, (height, width, 3)).astype(np.uint8)
        out = np.full((5, height, width), 9, np.float32)
        done = to_planes(image, out[1:4])
        same = out[1:4].tobytes() == preprocess.normalise(image, *line).tobytes()
        told.append([done, same, bool((out[[0, 4]] == 9).all())])
    other = np.zeros((8, 8, 3), np.uint8)
    refused = [
        (other[:, ::2], out[1:4, :8, :4]),
        (other, out[1:4]),
        (np.zeros((1, 31, 4), np.uint8), out[1:4]),
        (other.astype(np.float32), np.zeros((3, 8, 8))),
    ]
    return told, [to_planes(*each) for each in refused]


def test_planes_of_images_are_numpys(tmp_path):
    ((told, refused),) = run(planes, 1, tmp_path / "fast", True)
    assert told == [[True, True, True]] * 6 and not any(refused), (told, refused)
    ((told, _),) = run(planes, 1, tmp_path / "portable", True, env={"PPFLEET_PORTABLE": "1"})
    assert not any(done for done, _, _ in told)
    ((told, _),) = run(planes, 1, tmp_path / "none", False)
    assert not any(done for done, _, _ in told)


def without_a_compiler():
    import paddle

    from models.mobilenet_v3_small.net import MobileNetV3Small
    from ppfleet import cpu

    net = MobileNetV3Small(10, dropout=0.0)
    text = cpu.fast_cpu(net)
    swapped = sum("forward" in vars(layer) for layer in net.sublayers())
    paddle.seed(2)
    x = paddle.randn([4, 3, 64, 64])
    ours = _gradients(net, x.numpy())
    with cpu.stock(net):
        return text, swapped, _worst(ours, _gradients(net, x.numpy()))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_small_maps_are_products(tmp_path, compiler):
    env = {"CXX": compiler, "PPFLEET_CACHE": str(tmp_path / "cache")}
    ((text, swapped, worst),) = run(without_a_compiler, 1, tmp_path, env=env)
    assert ("no C++ compiler" if compiler != "false" else "failed") in text and "small depthwise" in text
    assert swapped == 11 and worst < 2e-4
    assert not list((tmp_path / "cache").glob("*.so"))


def loaded():
    from ppfleet.cpu import build

    return build.load()


def test_ranks_that_start_together_compile_once(tmp_path):
    cache = tmp_path / "cache"
    assert run(loaded, 2, tmp_path, env={"PPFLEET_CACHE": str(cache)}) == [None, None]
    assert len(list(cache.glob("*.so"))) == 1 and len(os.listdir(cache)) == 2  # and the lock  # noqa: PTH208
    assert sum("compiling" in (tmp_path / f"rank{rank}.out").read_text() for rank in (0, 1)) == 1
