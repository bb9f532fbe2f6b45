"""The CPU operators on random inputs, most of them valid: what stock Paddle's layers do, result or error."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.harness import run

OPERATORS = ("depthwise", "pointwise", "stem", "batch_norm", "convolution_norm", "stem_norm", "squeeze_excite",
             "global_mean")  # fmt: skip


def _net(chance):
    """Random layers that the operators know, and how many channels their images should have."""
    from paddle import nn

    from models.mobilenet_v3_small.net import SqueezeExcite

    kind = chance.choice(["depthwise", "pointwise", "stem", "norm", "mean", "excite"])
    channels, out = int(chance.randint(1, 9)), int(chance.randint(1, 9))
    if kind == "mean":
        return nn.Sequential(nn.AdaptiveAvgPool2D(1)), channels
    if kind == "excite":
        return nn.Sequential(SqueezeExcite(channels)), channels
    layers = []
    if kind == "depthwise":
        size, out = int(chance.choice([3, 5])), channels
        how = {"stride": int(chance.randint(1, 3)), "padding": int(chance.randint(size)), "groups": channels}
        layers.append(nn.Conv2D(channels, out, size, bias_attr=False, **how))
    elif kind == "pointwise":
        layers.append(nn.Conv2D(channels, out, 1, bias_attr=False))
    elif kind == "stem":
        channels = int(chance.randint(1, 4))
        how = {"stride": int(chance.randint(1, 3)), "padding": int(chance.randint(3))}
        layers.append(nn.Conv2D(channels, out, 3, bias_attr=False, **how))
    else:
        out = channels
    if kind == "norm" or chance.rand() < 0.5:
        wrong = chance.rand() < 0.1
        layers.append(nn.BatchNorm2D(out + wrong, use_global_stats=bool(chance.rand() < 0.1) or None))
        layers += [[], [nn.ReLU()], [nn.Hardswish()]][chance.randint(3)]
    return nn.Sequential(*layers), channels


def _images(chance, channels):
    """Mostly such as the net expects; else with other channels, tiny, empty, of other types or layouts."""
    import paddle

    if chance.rand() < 0.2:
        channels = int(chance.randint(1, channels + 5))
    most = 3 if chance.rand() < 0.3 else 13
    shape = [int(chance.randint(1, 6)), channels, int(chance.randint(1, most)), int(chance.randint(1, most))]
    if chance.rand() < 0.03:
        shape[int(chance.choice([0, 2]))] = 0
    values = chance.standard_normal(shape).astype("float32")
    kind = chance.choice(["plain"] * 12 + ["turned", "part", "double", "three dimensions", "none", "inf"])
    if kind == "inf" and values.size:
        values.flat[chance.randint(values.size)] = chance.choice([float("inf"), -float("inf"), float("nan")])
    if kind == "turned":
        return paddle.to_tensor(values.swapaxes(2, 3).copy()).transpose([0, 1, 3, 2])
    if kind == "part":
        return paddle.to_tensor(values.repeat(2, axis=1))[:, ::2]
    if kind == "three dimensions":
        return paddle.to_tensor(values[0] if len(values) else values)
    return None if kind == "none" else paddle.to_tensor(values.astype("float64") if kind == "double" else values)


def _crashes_paddle(layer, images):
    """Where Paddle's own layers may end in a segmentation fault: kernels larger than images, in 2.6 also empty maps."""
    import paddle
    from paddle import nn

    if not isinstance(layer, nn.Conv2D) or images is None or images.ndim < 4:
        return False
    padding, size = layer._plain[1], layer._kernel_size[0]
    if min(images.shape) == 0:
        return paddle.__version__.startswith("2.")
    return min(images.shape[2:]) + 2 * padding < size


def _tamper(chance, net):
    """What a user may do to a net after `prepare`."""
    import paddle
    from paddle import nn

    what = chance.choice(["nothing"] * 8 + ["eval", "cast", "weight", "scale"])
    if what == "eval":
        net.eval()
    elif what == "cast":
        net.to(dtype="float64")
    for layer in net.sublayers():
        if what == "weight" and isinstance(layer, nn.Conv2D):
            shape = [side + int(chance.randint(2)) for side in layer.weight.shape]
            layer.weight = paddle.create_parameter(shape, "float32")
        elif what == "scale" and isinstance(layer, nn.BatchNorm2D):
            layer.weight = paddle.create_parameter([layer.weight.shape[0] + int(chance.randint(2))], "float32")


def _outcome(net, images, direction):
    """What comes out: arrays by name, or the class of the exception."""
    import numpy as np
    import paddle

    state = {name: value.numpy() for name, value in net.state_dict().items()}
    try:
        images = images if images is None else images.detach()
        if direction and images is not None:
            images.stop_gradient = False
        made = net(images)
        found = {"made": made.numpy()} if min(made.shape) > 0 else {"shape": np.array(made.shape)}
        if "made" in found and not made.stop_gradient:
            way = np.random.RandomState(3).standard_normal(made.shape).astype(found["made"].dtype)
            made.backward(paddle.to_tensor(way))
            gradients = {"images": images.grad, **{name: value.grad for name, value in net.named_parameters()}}
            found.update({f"d {name}": value.numpy() for name, value in gradients.items() if value is not None})
        return {**found, **{f"after {name}": value.numpy() for name, value in net.state_dict().items()}}
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    finally:
        net.clear_gradients()
        net.set_state_dict(state)


def _differ(ours, theirs, noisy):
    """How our outcome is another one than Paddle's, if it is."""
    import numpy as np

    if isinstance(ours, str) or isinstance(theirs, str):
        return None if isinstance(ours, str) and ours == theirs else f"{_short(ours)}, not {_short(theirs)}"
    if set(ours) != set(theirs):
        return f"{sorted(ours)}, not {sorted(theirs)}"
    for name, value in theirs.items():
        mine = ours[name]
        if mine.shape != value.shape or mine.dtype != value.dtype:
            return f"{name}: {mine.dtype} {mine.shape}, not {value.dtype} {value.shape}"
        known = np.isfinite(value)
        # Of a weight that only ever meets the border, Paddle's gradient is 0 times NaN; ours is 0.
        hidden = (
            np.isfinite(mine).all() and not known.all() if name == "d 0.weight" else np.isfinite(mine)[~known].any()
        )
        if hidden:
            return f"{name}: finite where Paddle's is not"
        if noisy and name.startswith("d ") or not all(np.isfinite(all_of).all() for all_of in theirs.values()):
            continue  # beside a NaN: Paddle's ReLU makes 0 of it, ours keeps it
        if known.any() and not np.allclose(mine[known], value[known], 2e-3, 2e-4 * (1 + np.abs(value[known]).max())):
            return f"{name}: off by {np.abs(mine - value).max()}"
    return None


def _short(outcome):
    return outcome if isinstance(outcome, str) else "a result"


def fuzz_layers(seed, count):
    """Random nets and images, fast beside stock: how many raised, how many did not, and which differ."""
    import numpy as np
    import paddle

    from ppfleet import cpu

    paddle.seed(seed)
    chance, told = np.random.RandomState(seed), {"raised": 0, "returned": 0, "differ": []}
    for number in range(count):
        net, channels = _net(chance)
        assert cpu.fast_cpu(net) == "ppfleet's"
        images = _images(chance, channels)
        if _crashes_paddle(net[0], images):
            continue
        _tamper(chance, net)
        print(number, net, None if images is None else [images.dtype, images.shape], flush=True)
        direction = bool(chance.rand() < 0.7)
        ours = _outcome(net, images, direction)
        with cpu.stock(net):
            theirs = _outcome(net, images, direction)
        told["raised" if isinstance(theirs, str) else "returned"] += 1
        few = images is not None and images.ndim == 4 and images.size // max(1, images.shape[1]) < 40
        difference = _differ(ours, theirs, noisy=few)  # BatchNorm of a handful of values: gradients are rounding
        if difference:
            told["differ"].append(f"{number}: {net} of {images if images is None else images.shape}: {difference}")
    return told


def fuzz_operators(seed, count):
    """The operators themselves with random tensors: how many calls raised, how many gave something."""
    import numpy as np
    import paddle

    from ppfleet.cpu import build
    from ppfleet.cpu.layers import run as op

    assert build.load() is None
    chance, told = np.random.RandomState(seed), {"raised": 0, "returned": 0}

    def side():
        return int(chance.choice([0, 1, 2, 3, 4, 5, 8], p=[0.02, 0.2, 0.2, 0.3, 0.08, 0.1, 0.1]))

    def tensor(*shape):
        if chance.rand() < 0.15:
            shape = [side() for _ in range(chance.choice([len(shape), chance.randint(1, 5)]))]
        made = paddle.randn(list(shape)) if min(shape) > 0 else paddle.zeros(list(shape))
        if chance.rand() < 0.02:
            made = made.astype("float64")
        made.stop_gradient = bool(chance.rand() < 0.2)
        return made

    for number in range(count):
        name, channels, out, size = chance.choice(OPERATORS), side(), side(), int(chance.choice([1, 3, 5]))
        images = tensor(side(), channels, side() + 4, side() + 4)
        images.stop_gradient = images.stop_gradient or "stem" in name
        if name in ("depthwise", "convolution_norm") and size > 1:
            weight, out = tensor(channels, 1, size, size), channels
        else:
            weight = tensor(out, channels, size, size)
        how = [int(chance.randint(1, 3)), int(chance.randint(0, 3))] if size > 1 else [1, 0]
        norm = [tensor(out) for _ in range(4)]
        for statistic in norm[2:]:
            statistic.stop_gradient = True
        ending = [0.9, 1e-3, int(chance.randint(0, 4)), bool(chance.randint(2))]
        given = {
            "depthwise": [weight, *how],
            "pointwise": [weight],
            "stem": [weight, *how],
            "batch_norm": [*(tensor(channels).detach() for _ in range(4)), *ending],
            "convolution_norm": [weight, *norm, *how, *ending],
            "stem_norm": [weight, *norm, *how, *ending],
            "squeeze_excite": [tensor(out, channels, 1, 1), tensor(out), tensor(channels, out, 1, 1), tensor(channels)],
            "global_mean": [],
        }[name]
        print(
            number, name, *(value.shape if hasattr(value, "shape") else value for value in [images, *given]), flush=True
        )
        try:
            made = op(name, images, *given)
            if not made.stop_gradient:
                made.sum().backward()
            told["returned"] += 1
        except (OSError, RuntimeError, ValueError):
            told["raised"] += 1
    return told


def test_random_layers_do_what_paddles_do(tmp_path):
    (told,) = run(fuzz_layers, 1, tmp_path, 1, 400)
    print({**told, "differ": len(told["differ"])})
    assert not told["differ"], "\n".join(told["differ"])
    assert told["raised"] > 40 and told["returned"] > 200, told


def test_operators_refuse_what_does_not_fit(tmp_path):
    (told,) = run(fuzz_operators, 1, tmp_path, 2, 600)
    print(told)
    assert told["raised"] > 100 and told["returned"] > 100, told


def _sanitized():
    """The environment for operators with AddressSanitizer; None if the compiler does not bring it."""
    asked = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    library = Path(asked.stdout.strip())
    if not library.is_absolute():
        return None
    return {
        "PPFLEET_SANITIZE": "address",
        "LD_PRELOAD": f"{library} libstdc++.so.6",  # the second for exceptions, which Python itself does not load
        "LD_LIBRARY_PATH": str(Path(importlib.util.find_spec("paddle").origin).parent / "libs"),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:new_delete_type_mismatch=0",
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["avx2", "portable"])
@pytest.mark.parametrize("what", [fuzz_layers, fuzz_operators])
def test_no_access_outside_of_tensors(tmp_path, what, how):
    env = _sanitized()
    if env is None:
        pytest.skip("g++ comes without AddressSanitizer")
    portable = {"PPFLEET_PORTABLE": "1"} if how == "portable" else {}
    (told,) = run(what, 1, tmp_path, 5, 3000, timeout=400, env={**env, **portable})
    assert not told.get("differ"), "\n".join(told["differ"])
    assert told["raised"] > 400 and told["returned"] > 400, told
