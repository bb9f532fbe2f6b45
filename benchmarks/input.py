"""Input pipelines: JPEG files of 500 x 375 to batches of float32, 3 x 224 x 224; random crop, flip, normalised.

    python benchmarks/input.py                   # about 3 minutes on 2 cores

Ours is `job.loader` on the model repo's data set; the others are the DataLoaders of Paddle and PyTorch on one data set
written with care for OpenCV (benchmarks/pictures.py), with as many workers as there are cores. All must draw the same
float32 values from the same random numbers before anything is timed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import report
from common import OURS, PEERS, Arrays, Case, Worker
from pictures import MEAN, SMALLEST, STD, Pictures, find, make
from report import Row

SIZE, BATCH, LENGTH = 224, 32, 10**5
TOLERANCE = {"": 1e-4}


class Pipeline:
    """Batches without end. `loader(seeded)` gives a fresh one; a seeded one draws in order, what is to be compared."""

    length = LENGTH

    def __init__(self, case: Case) -> None:
        self.case, self.paths, self.workers = case, case["paths"], case["workers"]
        self.batches = self.forever()

    def loader(self, seeded: bool) -> Any:
        raise NotImplementedError

    def forever(self) -> Any:
        while True:
            yield from self.loader(seeded=False)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            next(self.batches)

    def check(self) -> Arrays:
        images, labels = next(iter(self.loader(seeded=True)))
        return {"images": images.numpy(), "labels": labels.numpy().reshape(-1)}

    def close(self) -> None:
        self.batches.close()
        del self.batches  # ends its workers


class OurLoader(Pipeline):
    """ppfleet's loader, inside a prepared job, as users have it."""

    def __init__(self, case: Case) -> None:
        import ppfleet

        super().__init__(case)
        self.job = ppfleet.Job(case["run"], device="cpu")
        self.net, _ = self.job.prepare(*self.model())  # compiles the operators, which the loader uses too

    def model(self) -> tuple[Any, Any]:
        """A network and its optimizer."""
        import paddle

        net = paddle.nn.Conv2D(3, 8, 3)
        return net, paddle.optimizer.SGD(parameters=net.parameters())

    def loader(self, seeded: bool) -> Any:
        from models.mobilenet_v3_small.data import Images

        samples = [
            (self.paths[index % len(self.paths)], index % 1000) for index in range(BATCH if seeded else self.length)
        ]
        images = Images(samples, {"crop": SIZE, "mean": MEAN, "std": STD}, SMALLEST, ["flip"])
        return self.job.loader(images, BATCH, shuffle=not seeded, workers=self.workers)


class PaddleLoader(Pipeline):
    """Paddle's DataLoader."""

    def loader(self, seeded: bool) -> Any:
        import paddle

        paddle.set_device("cpu")

        class Images(Pictures, paddle.io.Dataset):
            pass

        images = Images(self.paths, SIZE, BATCH if seeded else self.length, seeded)
        return paddle.io.DataLoader(images, None, batch_size=BATCH, shuffle=not seeded, num_workers=self.workers)


class TorchLoader(Pipeline):
    """PyTorch's DataLoader."""

    def loader(self, seeded: bool) -> Any:
        import torch

        images = Pictures(self.paths, SIZE, BATCH if seeded else self.length, seeded)
        return torch.utils.data.DataLoader(images, BATCH, shuffle=not seeded, num_workers=self.workers)


def main() -> None:
    common.serve({"ours": OurLoader, "Paddle": PaddleLoader, "PyTorch": TorchLoader})
    parser = common.parser(__doc__)
    parser.add_argument("--images", help="a directory of JPEG files to take instead of made ones")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender (default: %(default)s)")
    o = parser.parse_args()
    common.need_peers()
    machine, cores = common.machine(), common.cores()
    kinds = [("ours", cores), ("Paddle", 0), ("Paddle", cores), ("PyTorch", 0), ("PyTorch", cores)]
    with tempfile.TemporaryDirectory() as scratch:
        paths = find(o.images) if o.images else make(Path(scratch), 8 if o.quick else 256)
        workers = [
            Worker(
                f"{name}, {count} workers",
                {"paths": paths, "workers": count, "threads": 1},
                PEERS if name == "PyTorch" else OURS,
                kind=name,
            )
            for name, count in kinds
        ]
        with common.started(workers):
            errors = common.same(workers, workers[1], TOLERANCE)
            lead = 4 * cores  # more than any of them prepares ahead
            seconds = common.take_turns(workers, 2 if o.quick else o.rounds, 0.2 if o.quick else 2, lead, rest=1)
    speeds = {name: BATCH / common.spread(times)["median"] for name, times in seconds.items()}
    ours = workers[0].name
    best = max((name for name in speeds if name != ours), key=speeds.__getitem__)
    rows = [
        Row(
            f"input pipeline, JPEG 500×375 → {SIZE}×{SIZE}, {cores} cores",
            f"{speeds[ours]:.0f} images/s",
            f"{best}: {speeds[best]:.0f}",
            **common.ratio(seconds[ours], seconds[best]),
            goal=2.5,
            floor=1.6,
        )
    ]
    case = {"title": f"input pipeline, {cores} cores", "unit": "images/s", "values": speeds}
    report.write("input", o.output, rows, [{**case, "seconds": seconds, "errors": errors}], machine)


if __name__ == "__main__":
    sys.exit(main())
