"""What a step through `Job` costs against the same loop written by hand, interleaved step by step in one run.

    python benchmarks/overhead.py                 # 1 and 2 ranks, batch 16, 64x64, MobileNetV3-small

Both loops are alive in the same processes and take turns, so that a noisy machine disturbs both alike; the figure is
the median over pairs of neighbouring steps. A third loop is the job's with flight record, watch and comparison of
weights turned off. Then the time and size of a checkpoint against `paddle.save`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import common
from common import Case, Worker

NOTHING = type("Entry", (), {"operation": 0, "what": ""})()


def main() -> None:
    common.serve({"loops": Loops})
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks to measure (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=150, help="pairs of steps to measure (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="a rank (default: %(default)s)")
    parser.add_argument("--image-size", type=int, default=64, help="pixels (default: %(default)s)")
    o = parser.parse_args()
    machine, results = common.machine(), []
    for ranks in (int(number) for number in o.ranks.split(",")):
        pairs = 5 if o.quick else o.pairs
        case = {"ranks": ranks, "threads": 1, "pairs": pairs, "batch": o.batch_size, "pixels": o.image_size}
        with common.started([Worker("loops", case)]) as (worker,):
            results.append(worker.ask("measure")[1])
        show(results[-1])
    output = Path(o.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "overhead.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    print(f"\n{machine['cpu']}, {machine['cores']} cores; figures in {output}/overhead.json")


class Loops:
    """The loops that are compared, all in one process of each rank."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def measure(self) -> dict:
        return measure(self.case)


def measure(case: Case) -> dict:
    import numpy as np
    import paddle
    import paddle.nn.functional as F
    from paddle.vision.models import mobilenet_v3_small

    import ppfleet

    class Pictures(paddle.io.Dataset):
        def __init__(self) -> None:
            shape = (64, 3, case["pixels"], case["pixels"])
            self.pictures = np.random.RandomState(0).standard_normal(shape).astype("float32")

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int):
            return self.pictures[index % 64], np.int64(index % 10)

    def make():
        net = mobilenet_v3_small(num_classes=10)
        return net, paddle.optimizer.Momentum(0.01, parameters=net.parameters(), weight_decay=1e-4)

    scratch = Path(case["scratch"])
    job = ppfleet.Job(scratch / "run", device="cpu", log_every=10**9)
    ours, our_optimizer = job.prepare(*make(), fast_cpu=False)
    data = job.loader(Pictures(), case["batch"], shuffle=True)

    def through_job():
        for pictures, labels in job.steps(data):
            job.backward(F.cross_entropy(ours(pictures), labels))
            yield

    plain, plain_optimizer = make()
    by_hand_net = plain if job.world.alone else paddle.DataParallel(plain)
    sampler = paddle.io.DistributedBatchSampler(Pictures(), case["batch"], shuffle=True, drop_last=True)
    loader = paddle.io.DataLoader(Pictures(), batch_sampler=sampler, num_workers=0)

    def by_hand():
        for pictures, labels in loader:
            loss = F.cross_entropy(by_hand_net(pictures), labels)
            loss.backward()
            plain_optimizer.step()
            plain_optimizer.clear_grad()
            yield

    steps = through_job()
    loops = {"job": steps, "bare": steps, "hand": by_hand()}
    times = {name: [] for name in loops}
    for pair in range(case["pairs"] + 10):
        for name in ("job", "bare", "hand") if pair % 2 else ("hand", "bare", "job"):
            watched(job, name != "bare")
            began = time.perf_counter()
            next(loops[name])
            if pair >= 10:  # the first steps allocate
                times[name].append(time.perf_counter() - began)
    steps.close()

    saves = {"job": [], "paddle": []}
    for _ in range(7):
        began = time.perf_counter()
        job.save()
        saves["job"].append(time.perf_counter() - began)
        began = time.perf_counter()
        if job.world.first:
            paddle.save(plain.state_dict(), str(scratch / "plain.pdparams"))
            paddle.save(plain_optimizer.state_dict(), str(scratch / "plain.pdopt"))
        saves["paddle"].append(time.perf_counter() - began)
    checkpoint = (scratch / "run/checkpoints/latest").resolve()
    quarters = {
        other: statistics.quantiles([a / b for a, b in zip(times["job"], times[other])], n=4)
        for other in ("hand", "bare")
    }
    return {
        "ranks": job.world.size,
        "step_ms": {name: 1000 * statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(times["job"]) / statistics.median(times["hand"]),
        "ratio_of_pairs": {
            other: {"median": middle, "quartiles": [low, high]} for other, (low, middle, high) in quarters.items()
        },
        "save_ms": {name: 1000 * statistics.median(values) for name, values in saves.items()},
        "save_mb": {
            "job": sum(part.stat().st_size for part in checkpoint.iterdir()) / 1e6,
            "paddle": sum((scratch / name).stat().st_size for name in ("plain.pdparams", "plain.pdopt")) / 1e6,
        },
        "pairs": case["pairs"],
        "paddle": paddle.__version__,
    }


def watched(job, on: bool) -> None:
    """Turn flight record, watchdog and comparison of weights on or off."""
    flight, watch, probe = job.flight, job.comm.watchdog, job._loop.stepper.exchange._probe
    parts = (
        (flight, {"enter": lambda *_, **__: NOTHING, "leave": lambda *_: None}),
        (watch, {"_tell": lambda: None, "_look": lambda now: None, "_hear": lambda: time.sleep(0.25)}),
        (probe, {"next": lambda: ("", probe.parameters[-1])}),  # a bias: next to nothing to compare
    )
    for owner, stubs in parts:
        for name, stub in stubs.items():
            if on:
                vars(owner).pop(name, None)  # the class's own again
            else:
                setattr(owner, name, stub)
    flight.open.clear()


def show(result: dict) -> None:
    step, save, size = result["step_ms"], result["save_ms"], result["save_mb"]
    ratio = {
        other: "ratio {:.3f} (quartiles {:.3f} to {:.3f} of {} pairs)".format(
            told["median"], *told["quartiles"], result["pairs"]
        )
        for other, told in result["ratio_of_pairs"].items()
    }
    print(
        f"{result['ranks']} rank(s): step {step['job']:.1f} ms through Job, {step['hand']:.1f} ms by hand; "
        f"{ratio['hand']}\n"
        f"  without flight record and watchdog {step['bare']:.1f} ms: {ratio['bare']}\n"
        f"  save {save['job']:.0f} ms, {size['job']:.1f} MB (flushed, hashed, read back, and latest.pdparams); "
        f"paddle.save {save['paddle']:.0f} ms, {size['paddle']:.1f} MB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
