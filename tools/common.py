"""What train.py, eval.py and export.py share: the repository on Python's path, and the options of the same name."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until script.run: Ctrl-C during the imports needs no traceback
for package in ("cv2", "numpy", "paddle"):
    if find_spec(package) is None:
        sys.exit(f"{package} is not installed: pip install -e '.[cpu]', or '.[gpu]' on a machine with NVIDIA cards")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
for noise in ("No ccache found", "When training, we now always track"):  # of Paddle's, at every start
    warnings.filterwarnings("ignore", message=noise)

from deploy.inference_python import preprocess  # noqa: E402
from ppfleet.cli import Parser, number  # noqa: E402
from ppfleet.errors import CheckpointError  # noqa: E402

MODEL = "mobilenet_v3_small"
CARD = "model.json"  # what ppfleet writes beside latest.pdparams


def parser(description: str) -> Parser:
    made = Parser(description)
    made.add_argument("--model", choices=[MODEL], default=MODEL, help="the network")
    made.add_argument(
        "--pretrained", metavar="FILE", help="weights: a .pdparams of ppfleet, paddle.vision or PaddleClas"
    )
    made.add_argument(
        "--image-size", type=number(int, 32), metavar="PIXELS", help="(default: 224; eval and export: the weights' own)"
    )
    return made


def card(weights: str) -> dict[str, Any]:
    """What training left beside its weights: model, classes, how images are prepared. Empty for foreign weights."""
    path = Path(weights).absolute()
    # In a run's directory model.json; a checkpoint has it in its state.json.
    for beside, find in ((path.with_name(CARD), lambda found: found), (path.with_name("state.json"), _from_state)):
        try:
            if beside.is_file():
                return dict(find(json.loads(beside.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as failure:
            raise CheckpointError(f"cannot read {beside}: {failure}") from None
    return {}


def _from_state(state: dict[str, Any]) -> dict[str, Any]:
    return dict(state.get("card", {}))


def preparation(o: argparse.Namespace, found: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """How images are prepared: as the weights' own card says, unless --image-size does."""
    how = found.get("preprocess")
    if o.image_size is None and how is None:
        say(f"no {CARD} with preprocessing beside {o.pretrained}: images are prepared for 224x224 (--image-size)")
    return preprocess.settings(o.image_size or 224) if o.image_size or how is None else dict(how)


def beside(weights: str) -> Path:
    """Where what is made of weights goes: their run's directory. A checkpoint's own may be pruned at any time."""
    path = Path(weights).absolute().parent
    return path.parent.parent if (path / "manifest.json").exists() else Path(weights).parent
