"""Gradients of gradients through the CPU operators: right, or an error that says what to do."""

import pytest

from tests.harness import run

RIGHT = ["pointwise", "stem", "depthwise", "mean"]
RAISING = ["batch_norm", "convolution_norm", "stem_norm", "squeeze_excite"]


def _net(name):
    from paddle import nn

    from models.mobilenet_v3_small.net import SqueezeExcite

    first = {"bias_attr": False} if name.endswith("_norm") else {}
    start = nn.Conv2D(3, 6, 3, stride=2, **first) if "stem" in name else nn.Conv2D(3, 6, 1, **first)
    rest = {
        "pointwise": [nn.Tanh(), nn.Conv2D(6, 4, 1)],
        "stem": [nn.Tanh(), nn.Conv2D(6, 4, 1)],
        "depthwise": [nn.Tanh(), nn.Conv2D(6, 6, 3, padding=1, groups=6)],
        "mean": [nn.Tanh(), nn.AdaptiveAvgPool2D(1)],
        "batch_norm": [nn.Tanh(), nn.BatchNorm2D(6)],
        "convolution_norm": [nn.BatchNorm2D(6), nn.ReLU()],
        "stem_norm": [nn.BatchNorm2D(6), nn.Hardswish()],
        "squeeze_excite": [nn.Tanh(), SqueezeExcite(6)],
    }[name]
    return nn.Sequential(start, *rest)


def _penalty(net, images, of_images, **how):
    """How far the length of a gradient is from 1, as WGAN-GP wants it: by the images, or by the weights."""
    import paddle

    images = paddle.to_tensor(images, stop_gradient=not of_images)
    wanted = [images] if of_images else [p for p in net.parameters() if not p.stop_gradient]
    found = paddle.grad(net(images).square().sum(), wanted, **how)
    return (sum(value.square().sum() for value in found).sqrt() - 1).square()


def second_order(name):
    """Of the penalty: the slope along a random direction of the weights, and what backward makes of it."""
    import numpy as np
    import paddle

    from ppfleet import cpu

    paddle.seed(1)
    chance = np.random.RandomState(2)
    net, images = _net(name), chance.standard_normal((3, 3, 7, 6)).astype("float32")
    ways = [chance.standard_normal(p.shape).astype("float32") for p in net.parameters()]
    weights, told = [p.numpy() for p in net.parameters()], {}

    def moved(far, of_images):
        for p, weight, way in zip(net.parameters(), weights, ways):
            p.set_value(weight + np.float32(far) * way)
        return float(_penalty(net, images, of_images))

    def slope(of_images):
        _penalty(net, images, of_images, create_graph=True).backward()
        pairs = zip(net.parameters(), ways)
        found = sum(float((p.grad.numpy() * way).sum()) for p, way in pairs if p.grad is not None)
        net.clear_gradients()
        return found

    # Stock Paddle's second-order gradient is right by images, but not by weights (3.3.1): the slopes are, for both.
    told["stock"] = None if name == "depthwise" else slope(True)
    assert cpu.fast_cpu(net) == "ppfleet's"
    for of_images in (True, False):
        ends = [moved(far, of_images) for far in (2e-3, -2e-3)]
        moved(0, of_images)
        told["images" if of_images else "weights"] = [slope(of_images), (ends[0] - ends[1]) / 4e-3]
    return told


@pytest.mark.parametrize("name", RIGHT)
def test_second_order_gradients_are_the_slopes(tmp_path, name):
    (told,) = run(second_order, 1, tmp_path, name)
    print(told)
    if told["stock"] is not None:
        assert told["images"][0] == pytest.approx(told["stock"], rel=1e-4)
    for found, slope in (told["images"], told["weights"]):
        assert found == pytest.approx(slope, rel=2e-2, abs=1e-3 * abs(slope) + 1e-4)


def refused(name, order):
    """What is raised where a gradient of this order is asked for."""
    import numpy as np
    import paddle

    from ppfleet import cpu

    paddle.seed(1)
    net, images = _net(name), np.random.RandomState(2).standard_normal((3, 3, 7, 6)).astype("float32")
    cpu.fast_cpu(net)
    told = []
    for of_images in (True, False):
        penalty = _penalty(net, images, of_images, create_graph=True)
        try:
            if order == 2:
                penalty.backward()
            else:
                found = paddle.grad(penalty, net[0].weight, create_graph=True)[0]
                paddle.grad(found.square().sum(), net[0].weight)
            told.append("nothing")
        except (OSError, RuntimeError) as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize(("name", "order"), [*((name, 2) for name in RAISING), *((name, 3) for name in RIGHT)])
def test_what_is_not_there_says_what_to_do(tmp_path, name, order):
    (told,) = run(refused, 1, tmp_path, name, order)
    # Paddle's own operators beside ours have no third order either, and may be the first to say so.
    first = "doesn't have any gradop" if order == 3 else "fast_cpu=False"
    assert all("fast_cpu=False" in error or first in error for error in told), told
