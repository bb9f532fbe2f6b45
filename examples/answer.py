"""Ask an exported model: python examples/answer.py output/digits/export"""

import json
import sys
from pathlib import Path

from model import Digits

# isort: split
from ppfleet.export import Predictor, find_model

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "output/digits/export")
stamp = json.loads((directory / "export.json").read_text(encoding="utf-8"))
digits = Digits(train=False)
(scores,) = Predictor(*find_model(directory))([digits.images])
answers = [stamp["classes"][best] for best in scores.argmax(-1)]
right = sum(answer == str(label) for answer, label in zip(answers, digits.labels))
print(f"the first ten digits are {' '.join(map(str, digits.labels[:10]))}, the model says {' '.join(answers[:10])}")
print(f"{directory}: top1 {right / len(digits):.6f} of {len(digits)} digits, written by Paddle {stamp['paddle']}")
