"""What train.py, eval.py and export.py share: the repository on Python's path, and the options of the same name."""

from __future__ import annotations

import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

for package in ("cv2", "numpy", "paddle"):
    if find_spec(package) is None:
        sys.exit(f"{package} is not installed: pip install -e '.[cpu]', or '.[gpu]' on a machine with NVIDIA cards")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
for noise in ("No ccache found", "When training, we now always track"):  # of Paddle's, at every start
    warnings.filterwarnings("ignore", message=noise)

import ppfleet  # noqa: E402
from ppfleet import files  # noqa: E402
from ppfleet.errors import CheckpointError  # noqa: E402
from ppfleet.script import Parser, number  # noqa: E402

MODEL = "mobilenet_v3_small"
CARD = "model.json"


def parser(description: str) -> Parser:
    made = Parser(description)
    made.add_argument("--model", choices=[MODEL], default=MODEL, help="the network")
    made.add_argument(
        "--pretrained", metavar="FILE", help="weights: a .pdparams of ppfleet, paddle.vision or PaddleClas"
    )
    made.add_argument(
        "--image-size", type=number(int, 32), metavar="PIXELS", help="(default: the weights' own, or 224)"
    )
    return made


def write_json(job: ppfleet.Job, path: Path, facts: dict[str, Any]) -> None:
    """Rank 0 writes the file, whole or not at all; all ranks learn whether it worked."""
    text = json.dumps(facts, indent=1, ensure_ascii=False).encode()
    job.comm.on_first(lambda: files.replace_file(path, lambda part: files.write(part, text)), f"writing of {path.name}")


def card(weights: str | Path | None) -> dict[str, Any]:
    """What training wrote beside its weights: model, classes, how images are prepared. Empty for foreign weights."""
    path = Path(weights or "").with_name(CARD) if weights else None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}
    except (OSError, ValueError) as failure:
        raise CheckpointError(f"cannot read {path}: {failure}") from None
    return found
