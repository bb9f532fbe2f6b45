"""MobileNetV3-small: the network, and the weights it takes."""

import json

from tests.harness import run

FRESH = "blocks.0.mid_se.fc1.weight"


def compared():
    import numpy as np
    import paddle

    from models.mobilenet_v3_small.net import MobileNetV3Small

    paddle.seed(3)
    theirs, ours = paddle.vision.models.mobilenet_v3_small(num_classes=1000), MobileNetV3Small(1000)
    for parameter in theirs.parameters():  # statistics too: a fresh BatchNorm would hide an exchanged pair
        noise = np.random.RandomState(parameter.size).rand(*parameter.shape).astype("float32")
        parameter.set_value(parameter + 0.1 * paddle.to_tensor(noise))
    ours.set_state_dict(theirs.state_dict())
    theirs.eval(), ours.eval()
    images = paddle.to_tensor(np.random.RandomState(0).standard_normal((2, 3, 224, 224)).astype("float32"))
    trained = sum(int(p.size) for p in ours.parameters() if not p.stop_gradient)
    few = MobileNetV3Small(7)(images[:, :, :64, :64])
    return {
        "parameters": trained,
        "same_names": list(ours.state_dict()) == list(theirs.state_dict()),
        "difference": float((ours(images) - theirs(images)).abs().max()),
        "spread": float(theirs(images).std()),
        "few": list(few.shape),
    }


def test_it_is_paddle_visions(tmp_path):
    (value,) = run(compared, 1, tmp_path)
    assert value["parameters"] == 2_542_856 and value["same_names"] and value["few"] == [2, 7]
    assert value["difference"] == 0 and value["spread"] > 1e-3


def paddle_clas(classes=1000):
    """Names and shapes as PaddleClas' MobileNetV3_small_x1_0 has them; values that tell tensors apart."""
    import numpy as np

    from models.mobilenet_v3_small.net import BLOCKS

    shapes = {}

    def unit(name, outside, inside, kernel):
        shapes[f"{name}.conv.weight"] = [outside, inside, kernel, kernel]
        shapes.update({f"{name}.bn.{part}": [outside] for part in ("weight", "bias", "_mean", "_variance")})

    unit("conv", 16, 3, 3)
    inside = 16
    for number, (kernel, wide, outside, squeeze, _, _) in enumerate(BLOCKS):
        block = f"blocks.{number}"
        unit(f"{block}.expand_conv", wide, inside, 1)
        unit(f"{block}.bottleneck_conv", wide, 1, kernel)
        if squeeze:
            for name, shape in (("conv1", [wide // 4, wide, 1, 1]), ("conv2", [wide, wide // 4, 1, 1])):
                shapes[f"{block}.mid_se.{name}.weight"], shapes[f"{block}.mid_se.{name}.bias"] = shape, shape[:1]
        unit(f"{block}.linear_conv", outside, wide, 1)
        inside = outside
    unit("last_second_conv", 576, 96, 1)
    shapes["last_conv.weight"] = [1280, 576, 1, 1]
    shapes["fc.weight"], shapes["fc.bias"] = [1280, classes], [classes]
    random = np.random.RandomState(5)
    return {name: random.rand(*shape).astype("float32") for name, shape in shapes.items()}


def loads(directory):
    import numpy as np
    import paddle

    import ppfleet
    from models.mobilenet_v3_small.net import MobileNetV3Small, load_weights

    job = ppfleet.Job(directory, device="cpu")
    paddle.seed(1)
    told = {}

    def attempt(name, path, classes, **how):
        net = MobileNetV3Small(classes)
        before = {key: value.numpy().copy() for key, value in net.state_dict().items()}
        try:
            load_weights(net, path, **how)
            error = None
        except ppfleet.FleetError as failure:
            error = str(failure)
        changed = [key for key, value in net.state_dict().items() if (value.numpy() != before[key]).any()]
        told[name] = {"error": error, "changed": len(changed), "all": len(before)}
        return net

    clas = paddle_clas()
    paddle.save({name: paddle.to_tensor(value) for name, value in clas.items()}, f"{directory}/clas.pdparams")
    net = attempt("clas", f"{directory}/clas.pdparams", 10, partial=True).state_dict()
    pairs = {
        "conv.0.weight": "conv.conv.weight",
        "conv.1._mean": "conv.bn._mean",
        "blocks.3.mid_se.fc2.bias": "blocks.3.mid_se.conv2.bias",
        "blocks.10.expand_conv.1._variance": "blocks.10.expand_conv.bn._variance",
        "blocks.4.bottleneck_conv.0.weight": "blocks.4.bottleneck_conv.conv.weight",
        "lastconv.1.bias": "last_second_conv.bn.bias",
    }
    told["values"] = [bool((net[ours].numpy() == clas[theirs]).all()) for ours, theirs in pairs.items()]
    attempt("clas_whole", f"{directory}/clas.pdparams", 1000)

    vision = paddle.vision.models.mobilenet_v3_small(num_classes=1000)
    for parameter in vision.parameters():
        parameter.set_value(parameter + 0.5)
    paddle.save(vision.state_dict(), f"{directory}/vision.pdparams")
    whole = attempt("vision", f"{directory}/vision.pdparams", 1000)
    told["identical"] = all(
        bool(np.array_equal(value.numpy(), whole.state_dict()[name].numpy()))
        for name, value in vision.state_dict().items()
    )
    attempt("fine", f"{directory}/vision.pdparams", 10, partial=True)
    attempt("count", f"{directory}/vision.pdparams", 10)
    paddle.save(paddle.nn.Linear(3, 3).state_dict(), f"{directory}/other.pdparams")
    attempt("other", f"{directory}/other.pdparams", 10, partial=True)
    attempt("missing", f"{directory}/gone.pdparams", 10, partial=True)
    job.close()
    return told


def test_weights_of_paddle_vision_and_paddle_clas(tmp_path):
    (told,) = run(loads, 1, tmp_path / "out", str(tmp_path / "run"))
    said = (tmp_path / "run/logs/rank0.log").read_text()
    assert told["values"] == [True] * 6 and told["identical"]
    # PaddleClas squeezes by exactly 4, widens the first block too, and has another head: said, and left as it was.
    assert told["clas"]["error"] is None and told["clas"]["changed"] == told["clas"]["all"] - 5 * 3 - 4, told["clas"]
    assert "clas.pdparams: 191 of 210 tensors loaded" in said
    assert f"{FRESH} has shape [4, 16, 1, 1], the model's [8, 16, 1, 1]" in said
    assert "blocks.0.expand_conv.0.weight is not in the model" in said
    assert "different architecture" in told["clas_whole"]["error"] and told["clas_whole"]["changed"] == 0
    assert told["vision"] == {"error": None, "changed": 210, "all": 210}
    assert told["fine"] == {"error": None, "changed": 208, "all": 210}
    assert "classifier.3.weight has shape [1024, 1000], the model's [1024, 10]" in said
    assert "has 1000 classes, the data set has 10" in told["count"]["error"] and told["count"]["changed"] == 0
    assert "has no tensor that fits MobileNetV3-small" in told["other"]["error"]
    assert "gone.pdparams does not exist" in told["missing"]["error"]
    assert json.dumps(told)
