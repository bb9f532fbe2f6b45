"""Export trained weights as a static model for deploy/inference_python/infer.py, and compare it with the dynamic one.

python tools/export.py --pretrained=output/mobilenet_v3_small/best.pdparams --save-inference-dir=output/inference
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for models/ and deploy/, which pip does not install
warnings.filterwarnings("ignore", message="No ccache found")  # Paddle says it at every start
import common
import paddle

from models.mobilenet_v3_small.net import CLASSIFIER, MobileNetV3Small, load_weights, read_weights
from ppfleet import cli
from ppfleet.errors import CheckpointError
from ppfleet.export import FORMATS, agreement, export, installed


def formats(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(FORMATS):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(FORMATS)}, got {text!r}")
    return names


def main() -> None:
    paddle.set_device("cpu")  # the parity check runs there; TF32 on a card would differ by more than rounding
    parser = common.parser(__doc__)
    parser.add_argument("--save-inference-dir", metavar="DIR", help="(default: export/ beside the weights)")
    parser.add_argument(
        "--formats",
        type=formats,
        help=f"some of {','.join(FORMATS)}: for Paddle itself, for OpenVINO (its own or Paddle 3's), for ONNX Runtime; "
        "the last needs paddle2onnx (default: all that can be written on this machine)",
    )
    o = parser.parse_args()
    if not o.pretrained:
        parser.error("--pretrained=<run>/latest.pdparams is required")
    card = common.card(o.pretrained)
    how = common.preprocessing(o, card, print)
    bias = read_weights(o.pretrained).get(f"{CLASSIFIER}.bias")
    if bias is None:
        raise CheckpointError(f"{o.pretrained} has no {CLASSIFIER}.bias: these are not the weights of a {o.model}")
    net = MobileNetV3Small(len(bias))
    load_weights(net, o.pretrained)
    directory = Path(o.save_inference_dir or common.run_directory(o.pretrained) / "export")
    classes = card.get("classes") or [str(number) for number in range(len(bias))]
    if len(classes) != len(bias):
        raise CheckpointError(
            f"{o.pretrained} has {len(bias)} classes, but {common.CARD} beside it names {len(classes)}"
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
