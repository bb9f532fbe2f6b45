"""One epoch of a small network, with a line in RUN/steps for every step: how many ranks made it, of which samples.

    python -m paddle.distributed.launch --nproc_per_node 2 counted.py RUN [SECONDS A STEP]

`every_sample_once` tells of the whole run, whatever happened to it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SAMPLES = 1030


def train(directory: str, pause: float) -> None:
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(directory, device="cpu", seed=5, save_every=5)
    net = blocks.mlp()
    wrapped, _ = job.prepare(net, paddle.optimizer.Adam(0.01, parameters=net.parameters()))
    data = job.loader(blocks.Points(SAMPLES), 8, shuffle=True, tail="pad")
    # Which samples these are: found by their content, not by asking the sampler.
    table = {blocks.Points()[index][0].tobytes(): index for index in range(SAMPLES)}
    job.resume()
    for _ in job.epochs(1):
        for points, labels in job.steps(data):
            own = [table[point.tobytes()] for point in points.numpy()[: int(data.mask.sum())]]
            drawn = sum(job.comm.gather(own, "samples of a step"), [])
            if job.world.first:  # before the step: a kill from here on repeats it, and its line
                with Path(directory, "steps").open("a") as steps:
                    print(json.dumps([job.step, job.world.size, drawn]), file=steps)
            losses = F.cross_entropy(wrapped(points), labels, reduction="none").reshape([-1])
            job.backward((losses * data.weights).mean())
            time.sleep(pause)
        job.save()
    print(f"rank {job.world.rank} of {job.world.size} came to the end at step {job.step}", flush=True)


def lines(directory: Path) -> list[list]:
    """All steps that were begun, in order: number, ranks, samples."""
    path = directory / "steps"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def kept(directory: Path) -> list[list]:
    """Those that the weights have seen: what a resume went back over was made again."""
    made: list[list] = []
    for line in lines(directory):
        made[line[0] :] = [line]
    return made


def every_sample_once(directory: Path) -> bool:
    return sorted(index for line in kept(directory) for index in line[2]) == list(range(SAMPLES))


if __name__ == "__main__":
    train(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
