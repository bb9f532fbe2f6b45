"""The confusion matrix of a classifier and its worst mistakes: counted in evaluation, shown by `ppfleet report`. Pure.

    seen = Confusion(val, classes)
    scores = job.evaluate(net, val, top1=seen)
    seen.gather(job.comm).write(job, f"step {job.step}", show)      # <run>/evaluation.json, by rank 0

`ppfleet report` shows the file, whichever script wrote it.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable

import numpy as np

from ppfleet.checkpoint.files import json_bytes, replace_file

NAME = "evaluation.json"
FORMAT = 1
_WORST = 16  # number of mistakes that are kept
_DIGITS = 4  # of a probability: the last ones may differ with the number of ranks, and would change the order

Show = Callable[[int], tuple[str, bytes]]


@dataclass(frozen=True)
class Mistake:
    """One sample that was classified wrongly."""

    sample: int
    truth: int
    guess: int
    probability: float  # of the guess, according to the network
    name: str = ""  # by which a person finds it, such as its path
    picture: str = ""  # a small PNG or JPEG, in base64


@dataclass(frozen=True)
class Seen:
    """The counts of all ranks."""

    classes: Sequence[str]
    pairs: dict[tuple[int, int], int]  # (true class, guess) -> samples, without pairs that did not occur
    mistakes: Sequence[Mistake] = ()  # highest probability first
    of: str = ""  # what was evaluated
    time: float = 0.0

    @property
    def samples(self) -> int:
        return sum(self.pairs.values())

    def matrix(self) -> np.ndarray[Any, Any]:
        """Row = the true class, column = the guess."""
        counts = np.zeros((len(self.classes),) * 2, np.int64)
        for pair, count in self.pairs.items():
            counts[pair] = count
        return counts

    def write(self, job: Any, of: str, show: Show | None = None) -> None:
        """Write evaluation.json into the run directory, on rank 0; every rank calls this. `of` says what was evaluated,
        `show(sample)` returns a mistake's name and a small PNG or JPEG of it (empty: none)."""

        def on_first() -> None:
            shown = [_shown(mistake, show) for mistake in self.mistakes]
            facts = {
                "format": FORMAT,
                "time": round(time.time(), 3),
                "of": of,
                "classes": list(self.classes),
                "pairs": [[*pair, count] for pair, count in sorted(self.pairs.items())],
                "mistakes": [asdict(mistake) for mistake in shown],
            }
            replace_file(job.directory / NAME, json_bytes(facts))

        job.comm.on_first(on_first, f"writing {NAME}")


class Confusion:
    """A metric, 1 where the highest score is the label's, that also counts which classes are confused."""

    def __init__(self, loader: Any, classes: Sequence[str]) -> None:
        self._loader, self._classes = loader, classes
        self._batches: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, scores: Any, labels: Any) -> Any:
        import paddle
        import paddle.nn.functional as F

        guesses = paddle.topk(scores, 1, axis=-1)[1]
        sure = paddle.take_along_axis(F.softmax(scores.astype("float32")), guesses, 1)
        # A copy, as a tensor from a loader worker keeps a file in /dev/shm. Fetched later: no wait for a card here.
        self._batches.append((self._samples(), labels.reshape([-1]).clone(), guesses.reshape([-1]), sure.reshape([-1])))
        return (guesses.reshape([-1]) == labels.reshape([-1])).astype("float32")

    def _samples(self) -> np.ndarray[Any, Any]:
        """The indices of this rank's current samples, without padding."""
        loader, plan = self._loader, self._loader.plan
        start = loader.position - loader.real + plan.rank * plan.batch_size
        places = np.arange(start, start + int(loader.mask.sum()))
        return plan.order(loader.epoch)[places] if plan.shuffle else places

    def gather(self, comm: Any) -> Seen:
        """The counts of all ranks: the same on every rank, and on any number of them."""
        pairs: Counter[tuple[int, int]] = Counter()
        mistakes: list[Mistake] = []
        for samples, *tensors in self._batches:
            labels, guesses, sure = (np.asarray(tensor)[: len(samples)].tolist() for tensor in tensors)
            pairs.update(zip(labels, guesses))
            for sample, label, guess, probability in zip(samples.tolist(), labels, guesses, sure):
                if label != guess:
                    known = 0.0 if math.isnan(probability) else round(probability, _DIGITS)
                    mistakes.append(Mistake(sample, label, guess, known))
        mine = {"pairs": [[*pair, count] for pair, count in pairs.items()], "mistakes": _plain(_worst(mistakes))}
        gathered = comm.gather(mine, "confusion matrix")
        whole: Counter[tuple[int, int]] = Counter()
        for part in gathered:
            for truth, guess, count in part["pairs"]:
                whole[truth, guess] += count
        found = _worst(Mistake(*each) for part in gathered for each in part["mistakes"])
        return Seen(self._classes, dict(sorted(whole.items())), found)


def read(path: Path) -> Seen:
    """Read what `write` wrote; a ValueError if it is something else."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] > FORMAT:
            raise ValueError(f"it has format {facts['format']}, this ppfleet reads up to {FORMAT}: upgrade ppfleet")
        classes = [str(name) for name in facts["classes"]]
        pairs = {(int(truth), int(guess)): int(count) for truth, guess, count in facts["pairs"]}
        mistakes = [_mistake(each) for each in facts["mistakes"]]
        seen = Seen(classes, pairs, mistakes, str(facts["of"]), float(facts["time"]))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError("it is damaged") from None
    known = range(len(classes))
    named = {number for pair in pairs for number in pair} | {n for each in mistakes for n in (each.truth, each.guess)}
    if not all(number in known for number in named) or not all(0 <= count < 1 << 53 for count in pairs.values()):
        raise ValueError("it is damaged: its counts are not of its classes")
    return seen


def _mistake(facts: dict[str, Any]) -> Mistake:
    sample, truth, guess = (int(facts[name]) for name in ("sample", "truth", "guess"))
    return Mistake(sample, truth, guess, float(facts["probability"]), str(facts["name"]), str(facts["picture"]))


def _worst(mistakes: Iterable[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda each: (-each.probability, each.sample))[:_WORST]


def _plain(mistakes: Iterable[Mistake]) -> list[list[Any]]:
    return [[each.sample, each.truth, each.guess, each.probability] for each in mistakes]


def _shown(mistake: Mistake, show: Show | None) -> Mistake:
    name, picture = show(mistake.sample) if show else ("", b"")
    return replace(mistake, name=name, picture=base64.b64encode(picture).decode())
