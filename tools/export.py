"""Export trained weights as a static model, proven to answer as the dynamic one, for deploy/inference_python/infer.py.

python tools/export.py --pretrained=output/mobilenet_v3_small/best.pdparams --save-inference-dir=output/inference
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common

# isort: split
import paddle

from models.mobilenet_v3_small.net import CLASSIFIER, MobileNetV3Small, load_weights, read_weights
from ppfleet import cli
from ppfleet.errors import CheckpointError
from ppfleet.export import FORMATS, agreement, export, installed


def formats(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(FORMATS):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(FORMATS)} are wanted")
    return names


def main() -> None:
    paddle.set_device(
        "cpu"
    )  # where the static model is compared: a card's TF32 would differ from it by more than rounding
    parser = common.parser(__doc__)
    parser.add_argument("--save-inference-dir", metavar="DIR", help="(default: export/ beside the weights)")
    parser.add_argument(
        "--formats",
        type=formats,
        help=f"some of {','.join(FORMATS)}: for Paddle itself, for OpenVINO (its own or Paddle 3's), for ONNX Runtime; "
        "the last needs paddle2onnx (default: all that can be written here)",
    )
    o = parser.parse_args()
    if not o.pretrained:
        parser.error("which weights? give --pretrained=<run>/latest.pdparams")
    card = common.card(o.pretrained)
    how = common.preparation(o, card, print)
    bias = read_weights(o.pretrained).get(f"{CLASSIFIER}.bias")
    if bias is None:
        raise CheckpointError(f"{o.pretrained} holds no {CLASSIFIER}.bias: is it of another model?")
    net = MobileNetV3Small(len(bias))
    load_weights(net, o.pretrained)
    directory = Path(o.save_inference_dir or common.beside(o.pretrained) / "export")
    classes = card.get("classes") or [str(number) for number in range(len(bias))]
    if len(classes) != len(bias):
        raise CheckpointError(
            f"{o.pretrained} tells {len(bias)} classes apart, {common.CARD} beside it names {len(classes)}"
        )
    size = how["crop"]
    wanted = o.formats or [name for name in FORMATS if name != "onnx" or installed("paddle2onnx")]
    about = {"model": o.model, "classes": classes, "preprocess": how}
    stamp = export(net, [None, 3, size, size], directory, formats=wanted, **about)
    if not o.formats and "onnx" not in wanted:
        print("no inference.onnx, for ONNX Runtime: paddle2onnx is not installed")
    print(f"exported to {directory}: {len(classes)} classes, {size}x{size}, {agreement(stamp['parity'])}")


if __name__ == "__main__":
    cli.run(main)
