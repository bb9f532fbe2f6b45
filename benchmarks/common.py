"""What all benchmarks share: contenders in separate processes that take turns, medians, the machine, the table.

Two frameworks cannot share a process, nor always an environment. So each contender is a worker: the same script,
started by its own Python with `--worker`, which sets itself up and then runs some steps whenever it is told to. Only
one computes at a time, and all of them in every round: a noisy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, NoReturn

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the packages of this clone, not those of another one that is installed
OURS, PEERS = sys.executable, str(ROOT / ".venv-peers/bin/python")
# Intel's OpenMP, which Paddle brings along, lets idle threads spin for 200 ms: the next one waits until that is over.
SPIN = 0.25
# Memory is not given back to the kernel after every step, and comes in huge pages.
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
    ":glibc.malloc.top_pad=268435456:glibc.malloc.hugetlb=1"
}
Case = dict[str, Any]
Arrays = dict[str, Any]


# The worker's side


def serve(contenders: Mapping[str, Callable[[Case], Any]]) -> None:
    """Act as a worker if the command line says so. A contender is a class with `run(steps)` and `check() -> arrays`."""
    if sys.argv[1:2] != ["--worker"]:
        return
    name, case = sys.argv[2], json.loads(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    if case.get("pinned"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case["threads"]])
    contender = contenders[name](case)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order, arguments = json.loads(line)
        began = time.perf_counter()
        told = getattr(contender, order)(*arguments)
        seconds = time.perf_counter() - began
        if order == "check":
            np.savez(f"{case['scratch']}/{os.getpid()}.npz", **told)
            told = os.getpid()
        print(json.dumps([seconds, told]), file=answers, flush=True)
    if hasattr(contender, "close"):
        contender.close()
    os._exit(0)  # without the farewells of libraries, which may hang


# The parent's side


class Worker:
    """A contender's process, or processes where the case has several `ranks`, as the parent sees them."""

    def __init__(
        self, name: str, case: Case, python: str = OURS, env: Mapping[str, str] | None = None, kind: str = ""
    ) -> None:
        """`kind` is what `serve` knows the contender by, where that is not its name."""
        self.name, self.case, self.python, self.env, self.kind = name, case, python, env or {}, kind or name
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, scratch: Path) -> None:
        ranks, self.scratch = self.case.get("ranks", 1), scratch
        env = {**environment(), "OMP_NUM_THREADS": str(self.case["threads"]), **self.env}
        self.logs = [scratch / f"{self.name} {rank}.log" for rank in range(ranks)]
        endpoints = [f"127.0.0.1:{port}" for port in free_ports(ranks)]
        case = {**self.case, "scratch": str(scratch), "run": str(scratch / f"{self.name} run")}
        command = [self.python, sys.argv[0], "--worker", self.kind, json.dumps(case)]
        for rank, log in enumerate(self.logs):
            with log.open("wb") as stderr:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                        env={**env, **(rank_variables(rank, endpoints) if ranks > 1 else {})},
                        start_new_session=True,  # so that it can be ended with all that it started
                    )
                )
        if self._answers() != ["ready\n"] * ranks:
            self.fail("did not start")

    def ask(self, order: str, *arguments: Any) -> tuple[float, Any]:
        """The seconds that it took, and rank 0's answer."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps([order, arguments]), file=process.stdin, flush=True)
        lines = self._answers()
        if not all(lines):
            self.fail(f"died while it was to {order}")
        told = [json.loads(line) for line in lines]
        return max(seconds for seconds, _ in told), told[0][1]

    def check(self) -> Arrays:
        """What rank 0 computes, as float64."""
        _, pid = self.ask("check")
        with np.load(self.scratch / f"{pid}.npz") as arrays:
            return {name: arrays[name].astype(np.float64) for name in arrays.files}

    def _answers(self) -> list[str]:
        return [process.stdout.readline() for process in self.processes]

    def fail(self, what: str) -> NoReturn:
        for log in self.logs:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
        case = {name: value for name, value in self.case.items() if not isinstance(value, list)}
        raise SystemExit(f"{sys.argv[0]}: {self.name} {what} ({case}); its output is above")

    def end(self) -> None:
        children: list[int] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children += [child.pid for each in self.processes for child in psutil.Process(each.pid).children(True)]
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for child in children:  # Paddle's loader leaves batches there that nobody has taken
            for segment in Path("/dev/shm").glob(f"paddle_{child}_*"):
                segment.unlink(missing_ok=True)


def rank_variables(rank: int, endpoints: list[str]) -> dict[str, str]:
    """What the launchers of Paddle and PyTorch would set."""
    host, port = endpoints[0].split(":")
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_DISTRI_BACKEND": "gloo",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "WORLD_SIZE": str(len(endpoints)),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def started(workers: Iterable[Worker]) -> Iterator[list[Worker]]:
    """The workers, started one after the other and stopped after the block."""
    running: list[Worker] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for worker in workers:
                say(f"  starting {worker.name}")
                running.append(worker)
                worker.start(Path(scratch))
            yield running
        finally:
            for worker in running:
                worker.end()


def environment() -> dict[str, str]:
    """This process's environment without variables that would make workers unequal."""
    apart = ("PADDLE_", "FLAGS_", "OMP_", "KMP_", "GOMP_", "MKL_", "GLIBC_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(apart)}
    return {**env, "GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore"}


def same(workers: list[Worker], truth: Worker, tolerances: Mapping[str, float]) -> dict[str, float]:
    """Raise unless all compute what `truth` does: the error of each array against its norm. Returns the largest.

    `tolerances` are by kind, "" for all others. Arrays are called "kind: name"; one whose norm is
    below the median of its kind is held against that: the gradient of a bias before BatchNorm is 0 but for rounding.
    """
    expected = truth.check()
    norms = {key: float(np.linalg.norm(array)) for key, array in expected.items()}
    kinds: dict[str, list[str]] = {}
    for key in expected:
        kinds.setdefault(key.partition(":")[0], []).append(key)
    worst = {}
    for worker in workers:
        arrays = worker.check()
        if {key: array.shape for key, array in arrays.items()} != {key: a.shape for key, a in expected.items()}:
            raise SystemExit(f"{worker.name} and {truth.name} do not even compute arrays of the same names and shapes")
        for kind, keys in kinds.items():
            usual = statistics.median(norms[key] for key in keys)
            errors = {key: float(np.linalg.norm(arrays[key] - expected[key])) / max(norms[key], usual) for key in keys}
            key = max(errors, key=errors.__getitem__)
            if not errors[key] <= tolerances.get(kind, tolerances[""]):
                raise SystemExit(f"{worker.name} has another {key} than {truth.name}: error {errors[key]:.2g}")
            worst[f"{worker.name}, {kind}"] = errors[key]
        told = ", ".join(f"{kind} {worst[f'{worker.name}, {kind}']:.1e}" for kind in kinds)
        say(f"  {worker.name} computes the same; errors: {told}")
    return worst


def take_turns(
    workers: list[Worker], rounds: int, seconds: float, lead: int = 1, rest: float = SPIN, order: str = "run"
) -> dict[str, list[float]]:
    """Seconds per step of each worker and round. A turn takes about `seconds` (0: one step), after `lead` steps that
    do not count, as other workers used the caches and batches were prepared in the meantime."""
    steps = {}
    for worker in workers:
        worker.ask(order, lead + 1)
        steps[worker.name] = max(2, round(seconds / (worker.ask(order, 2)[0] / 2))) if seconds else 1
    times: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for turn in range(rounds):
        for worker in workers if turn % 2 else workers[::-1]:
            time.sleep(rest)
            count = steps[worker.name]
            if lead:
                worker.ask(order, lead)
            times[worker.name].append(worker.ask(order, count)[0] / count)
        say(f"  round {turn + 1} of {rounds}", end="\r")
    return times


def say(text: str, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        print(text, end=end, file=sys.stderr, flush=True)


# Figures


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Our speed relative to theirs, from seconds for the same work, round by round."""
    told = spread([peer / mine for mine, peer in zip(ours, theirs)])
    return {"value": told["median"], "low": told["low"], "high": told["high"]}


def fill(name: str, shape: Iterable[int]) -> Any:
    """The weight of that name, the same in every framework: by name and shape alone."""
    shape = tuple(shape)
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        inputs = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))  # a Linear of Paddle is inputs x outputs
        return draw * np.float32((2 / inputs) ** 0.5)
    if name.endswith("variance"):
        return np.abs(draw) + 1
    return draw * np.float32(0.1) + np.float32(name.endswith("weight"))


def batch(size: int, pixels: int, classes: int = 1000) -> tuple[Any, Any]:
    """Images and labels: the same for every contender, different on each rank."""
    draw = np.random.RandomState(size * pixels + int(os.environ.get("RANK", "0")))
    images = draw.standard_normal((size, 3, pixels, pixels)).astype(np.float32)
    return images, draw.randint(0, classes, size).astype(np.int64)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Where this was measured."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    flags = [flag for flag in ("avx2", "avx512f") if f" {flag}" in cpu]
    return {
        "cpu": f"{model} ({platform.machine()}, {', '.join(flags) or 'no AVX2'})",
        "cores": cores(),
        "memory": f"{memory:.0f} GiB",
        "system": f"Linux {platform.release()}, {' '.join(platform.libc_ver())}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load": round(os.getloadavg()[0], 2),
        "versions": {"Python": platform.python_version(), **versions(OURS), **versions(PEERS)},
    }


def versions(python: str) -> dict[str, str]:
    packages = ["paddlepaddle", "torch", "onnxruntime", "openvino", "opencv-python-headless", "numpy"]
    code = (
        "import json, sys, importlib.metadata as m\n"
        "names = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({name: names[name] for name in sys.argv[1:] if name in names}))"
    )
    try:
        told = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return json.loads(told)


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a few steps of the smallest case: does it work?")
    made.add_argument("--output", default="output/bench", help="directory for JSON, table, plot (default: %(default)s)")
    return made


def need_peers() -> None:
    if not Path(PEERS).exists():
        raise SystemExit(f"{PEERS} is missing: `make bench` makes it, or `make .venv-peers/.ready`")
