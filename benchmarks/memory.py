"""Growth: step time over batch and pixels, memory over 10,000 steps, and how long a rank takes to start.

    python benchmarks/memory.py                  # about 4 minutes on 2 cores

Step time is fitted by a straight line, once over batch sizes and once over the number of pixels; no size may lie
further from it than a tenth. Memory is what the process holds at most, against the first tenth of the steps. Start-up
is from the start of a process until it could make its first step, against a process that imports Paddle.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import report
from common import Case, Worker, batch
from report import Row
from train import Ours

BATCHES, AT = (8, 16, 24, 32, 48, 64), 96  # batch sizes, with images of so many pixels
PIXELS, OF = (64, 96, 128, 160, 192, 224), 16  # images of so many pixels, in batches of so many
STEPS, SAMPLES = 10_000, 100


class Sizes(Ours):
    """MobileNetV3-small on batches of any size."""

    def take(self, size: int, pixels: int) -> None:
        self.images, self.labels = (self.paddle.to_tensor(array) for array in batch(size, pixels))


class Long:
    """A small network in a whole loop: its own loader, progress lines, checkpoints."""

    def __init__(self, case: Case) -> None:
        import paddle
        from paddle import nn

        import ppfleet
        from models.mobilenet_v3_small.net import Block, convolution

        class Noise(paddle.io.Dataset):
            def __len__(self) -> int:
                return 10**6

            def __getitem__(self, index: int) -> Any:
                return np.full((3, 32, 32), index % 7, np.float32) + np.random.rand(3, 32, 32).astype(
                    np.float32
                ), index % 7

        job = ppfleet.Job(case["run"], device="cpu", log_every=100, save_every=case["steps"] // 5)
        head = (nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(16, 7))
        block = Block(8, 3, 16, 16, True, nn.Hardswish, 2)
        net = nn.Sequential(convolution(3, 8, 3, nn.Hardswish, stride=2), block, *head)
        optimizer = paddle.optimizer.Momentum(0.01, 0.9, parameters=net.parameters())
        net, _ = job.prepare(net, optimizer)
        data = job.loader(Noise(), 8, shuffle=True)

        def loop() -> Any:
            for images, labels in job.steps(data):
                job.backward(nn.functional.cross_entropy(net(images), labels))
                yield

        self.loop = loop()

    def run(self, steps: int) -> float:
        """MB that this process uses after so many more steps."""
        for _ in range(steps):
            next(self.loop)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


class Start:
    """Everything before the first step."""

    def __init__(self, case: Case) -> None:
        import paddle

        import ppfleet
        from models.mobilenet_v3_small.net import MobileNetV3Small

        job = ppfleet.Job(case["run"], device="cpu")
        net = MobileNetV3Small()
        self.job, self.data = job, job.loader(range(1000), 10, shuffle=True)
        self.net, _ = job.prepare(net, paddle.optimizer.Momentum(0.01, parameters=net.parameters()))


class Import:
    """The minimum that any script with Paddle needs."""

    def __init__(self, case: Case) -> None:
        import paddle

        self.paddle = paddle


def lines(rounds: int) -> tuple[list[dict[str, Any]], list[Row]]:
    """Step times by size, and how far they are from a straight line."""
    sizes = [(size, AT) for size in BATCHES], [(OF, pixels) for pixels in PIXELS]
    case = {"batch": OF, "pixels": AT, "threads": 1, "pinned": True}
    times: dict[tuple[int, int], list[float]] = {size: [] for size in {*sizes[0], *sizes[1]}}
    common.say("step time over batch and pixels")
    with common.started([Worker("sizes", case)]) as (worker,):
        for _ in range(rounds):
            for size, found in times.items():
                worker.ask("take", *size)
                worker.ask("run", 1)
                found.append(worker.ask("run", 3)[0] / 3)
    cases, rows = [], []
    for what, group in zip((f"batch, at {AT}×{AT}", f"pixels, batch {OF}"), sizes):
        work = np.array([size * pixels**2 for size, pixels in group], float)
        seconds = np.array([statistics.median(times[size]) for size in group])
        slope, offset = np.polyfit(work, seconds, 1, w=1 / seconds)
        off = np.abs(seconds / (slope * work + offset) - 1)
        worst = int(off.argmax())
        told = f"{1e3 * seconds[0]:.1f} to {1e3 * seconds[-1]:.1f} ms"
        size, pixels = group[worst]
        line = f"line: {1e3 * offset:.1f} ms + {1e9 * slope:.1f} ns a pixel; furthest: {size} × {pixels}×{pixels}"
        rows.append(Row(f"step time over {what}", told, line, 100 * off[worst], 10, 10, most=True, unit=" %"))
        values = {f"ours, {size} × {pixels}×{pixels}": 1e3 * median for (size, pixels), median in zip(group, seconds)}
        cases.append({"title": f"step time over {what}", "unit": "ms", "values": values})
    return cases, rows


def flat(steps: int) -> tuple[dict[str, Any], Row]:
    common.say(f"memory over {steps} steps")
    held = []
    with common.started([Worker("long", {"threads": 1, "steps": steps})]) as (worker,):
        for sample in range(SAMPLES):
            held.append(worker.ask("run", steps // SAMPLES)[1])
            common.say(f"  {(sample + 1) * steps // SAMPLES} steps: {held[-1]:.0f} MB", end="\r")
    early, most = max(held[: SAMPLES // 10]), max(held)
    told = f"at most {most:.1f} MB"
    row = Row(
        f"memory over {steps} steps", told, f"in the first tenth: {early:.1f} MB", most / early, 1.02, 1.02, most=True
    )
    values = {
        f"ours, {(n + 1) * steps // SAMPLES} steps": held[n] for n in range(SAMPLES // 10 - 1, SAMPLES, SAMPLES // 10)
    }
    return {"title": f"memory over {steps} steps", "unit": "MB", "values": values, "held": held}, row


def starts(ranks: int, rounds: int) -> tuple[dict[str, Any], Row]:
    common.say(f"start-up of {ranks} rank(s)")
    times: dict[str, list[float]] = {"import": [], "start": []}
    for kind, found in itertools.islice(itertools.cycle(times.items()), 2 * (rounds + 1)):
        began = time.perf_counter()
        with common.started([Worker(kind, {"threads": 1, "ranks": ranks})]):
            found.append(time.perf_counter() - began)
    imported, started = (statistics.median(found[1:]) for found in times.values())  # the first one reads from the disk
    title = f"start-up, {ranks} rank(s)"
    row = Row(
        title, f"{started:.2f} s", f"import paddle: {imported:.2f} s", started - imported, 1, 1, most=True, unit=" s"
    )
    values = {"ours, ready for the first step": started, "import paddle": imported}
    return {"title": title, "unit": "s", "values": values, "seconds": times}, row


def main() -> None:
    common.serve({"sizes": Sizes, "long": Long, "start": Start, "import": Import})
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each size (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="over which memory is watched (default: %(default)s)")
    o = parser.parse_args()
    if o.quick:
        o.rounds, o.steps = 1, 200
    machine = common.machine()
    cases, rows = ([], []) if o.quick else lines(o.rounds)
    for case, row in (flat(o.steps), *(starts(ranks, o.rounds) for ranks in (1, 2))):
        cases.append(case)
        rows.append(row)
    report.write("memory", o.output, rows, cases, machine)


if __name__ == "__main__":
    sys.exit(main())
