"""What train.py, eval.py and export.py share: common options, and what is stored beside a model's weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Callable

from deploy.inference_python import preprocess
from ppfleet.cli import Parser, number
from ppfleet.errors import CheckpointError

MODEL = "mobilenet_v3_small"
CARD = "model.json"  # what ppfleet writes beside latest.pdparams


def parser(description: str) -> Parser:
    parser = Parser(description)
    parser.add_argument("--model", choices=[MODEL], default=MODEL, help="the network")
    parser.add_argument(
        "--pretrained", metavar="FILE", help="weights: a .pdparams file of ppfleet, paddle.vision or PaddleClas"
    )
    parser.add_argument(
        "--image-size", type=number(int, 32), metavar="PIXELS", help="(default: 224; eval and export: as trained)"
    )
    return parser


def card(weights: str) -> dict[str, Any]:
    """The model card that training wrote beside its weights: model, classes, preprocessing. Empty if there is none."""
    path = Path(weights).absolute()
    run, checkpoint = path.with_name(CARD), path.with_name("state.json")
    for file in (run, checkpoint):
        try:
            if file.is_file():
                stored = json.loads(file.read_text(encoding="utf-8"))
                return dict(stored if file == run else stored.get("card", {}))
        except (OSError, ValueError, TypeError, AttributeError) as failure:
            raise CheckpointError(f"cannot read {file}: {failure}") from None
    return {}


def preprocessing(o: argparse.Namespace, card: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The settings that images are preprocessed with: the card's, unless --image-size overrides them."""
    stored = card.get("preprocess")
    if o.image_size is None and stored is None:
        say(f"no {CARD} with preprocessing settings beside {o.pretrained}: using 224x224 (set --image-size to change)")
    return preprocess.settings(o.image_size or 224) if o.image_size or stored is None else dict(stored)


def run_directory(weights: str) -> Path:
    """The directory of the run that the weights belong to. A checkpoint's own directory may be pruned at any time."""
    path = Path(weights).absolute().parent
    return path.parent.parent if (path / "manifest.json").exists() else Path(weights).parent
