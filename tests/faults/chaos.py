"""Real jobs that something happens to: kills at any moment, and every fault of a list at random times.

    python -m tests.faults.chaos kills --count 200     any process, any moment; restarted until it is done
    python -m tests.faults.chaos faults --count 100    any fault; then `why`, which is not told which; then a resume
    python -m tests.faults.chaos table                 each fault side by side with plain Paddle, 4 ranks on two hosts
    python -m tests.faults.chaos cards                 hangs and exits on simulated cards beside CPUs

`make chaos` runs the first three and writes the tables of docs/reliability.md. `--seed` repeats a run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ppfleet.checkpoint import manifest
from ppfleet.commands.why import cause
from ppfleet.errors import CheckpointError
from ppfleet.watchdog import recorder
from tests import simcard
from tests.harness import ROOT, free_ports
from tests.hosts import namespaces

VICTIM = ROOT / "tests/faults/victim.py"
LOOPBACK = ("127.0.0.2", "127.0.0.3")
SAVE_EVERY = 3
# What is done to processes from outside; the rest the victim does to itself.
FROM_OUTSIDE = ("kill", "segv", "stop", "term", "term-launcher", "kill-launcher", "cut", "kill-worker")


class Job:
    """One start of the victim: `ranks` on one host under Paddle's launcher, or half of them on each of two hosts."""

    def __init__(self, place: Path, plan: dict, ranks: int = 2, before: list[list[str]] | None = None) -> None:
        self.place, self.plan, self.ranks = place, plan, ranks
        self.mark = f"{time.time_ns()}"
        hosts = before or [[]]
        self.logs = [place / f"log{number}" for number in range(len(hosts))]
        for log in self.logs:
            shutil.rmtree(log, ignore_errors=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "FLAGS_", "GLOO_"))}
        env.update(OMP_NUM_THREADS="1", GLOG_minloglevel="2", PYTHONWARNINGS="ignore", CHAOS=self.mark)
        if plan.get("device") == "sim":
            env.update(simcard.environment(8), PPFLEET_TEST_DEVICE="sim", **plan.get("knobs", {}))
        self.launchers, self.files = [], []
        for number, words in enumerate(hosts[: plan.get("hosts_that_come")]):
            self.files.append((place / f"host{number}.out").open("w+"))
            command = [*words, *self._launch(number, len(hosts), ranks // len(hosts)), str(VICTIM), str(place / "run")]
            if not before:
                env["GLOO_SOCKET_IFNAME"] = "lo"
            elif plan.get("plain"):
                env["GLOO_SOCKET_IFNAME"] = words[3]
            process = subprocess.Popen(
                [*command, json.dumps(plan)], cwd=ROOT, env=env, stdout=self.files[-1], stderr=subprocess.STDOUT
            )
            self.launchers.append(process)

    def _launch(self, number: int, hosts: int, ranks: int) -> list[str]:
        ours = self.plan.get("launch") == "ppfleet"
        words = [sys.executable, "-m", *(["ppfleet", "launch"] if ours else ["paddle.distributed.launch"])]
        words += [f"--nproc_per_node={ranks}", f"--log_dir={self.logs[number]}"]
        if hosts > 1:
            address = namespaces.ADDRESSES[number]
            words += [f"--ips={','.join(namespaces.ADDRESSES)}", f"--host={address}", "--start_port=6070"]
        if port := self.plan.get("port"):
            words += ["--ips=127.0.0.1", "--host=127.0.0.1", f"--start_port={port}"]
        return words

    def records(self) -> dict[int, recorder.Record]:
        """The newest ring of each rank that this start has made."""
        found = {}
        for log in self.logs:
            for link in log.glob("rank*.ring"):
                try:
                    record = recorder.read(link)
                except (OSError, ValueError):
                    continue
                found[record.facts.get("rank", -1)] = record
        return found

    def step(self) -> int:
        """Steps that every rank has done."""
        if self.plan.get("plain"):
            files = [self.place / f"run/plain_step_{rank}" for rank in range(self.ranks)]
            return min((int(f.read_text() or 0) if f.exists() else 0) for f in files)
        records = self.records()
        if len(records) < self.ranks:
            return 0
        return min(max((e.step for e in r.entries), default=0) for r in records.values())

    def processes(self) -> list[psutil.Process]:
        """Everything that this start has left running: trainers, workers, launchers, whoever is their parent now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("CHAOS") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def trainers(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self.processes():
            try:
                words, env = process.cmdline(), process.environ()
                worker = psutil.Process(process.ppid()).cmdline() == words
            except psutil.Error:
                continue
            if str(VICTIM) in words[:4] and not worker:
                found[int(env.get("PADDLE_TRAINER_ID", -1))] = process
        return found

    def wait_for_step(self, step: int, seconds: float = 90) -> bool:
        deadline = time.monotonic() + seconds
        while self.step() < step and time.monotonic() < deadline:
            if any(process.poll() is not None for process in self.launchers):
                return False
            time.sleep(0.02)
        return self.step() >= step

    def wait(self, seconds: float) -> list[int | None]:
        """The launchers' exit codes; None for one that goes on."""
        deadline = time.monotonic() + seconds
        for process in self.launchers:
            try:
                process.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        return [process.poll() for process in self.launchers]

    def trainers_gone(self, seconds: float, apart: int = -1) -> float | None:
        """Seconds until no trainer is left (but one that is stopped and cannot go by itself)."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if not [p for rank, p in self.trainers().items() if rank != apart]:
                return time.monotonic() - began
            time.sleep(0.1)
        return None

    def left(self, seconds: float) -> list[psutil.Process]:
        """What does not end by itself. A trainer whose launcher dies while it starts finds out after its imports."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def end(self) -> None:
        for process in self.processes():
            process.kill()
        for process in self.launchers:
            process.kill()
            process.wait()
        for out in self.files:
            out.close()

    def output(self) -> str:
        texts = [out.read_text(errors="replace") for out in sorted(self.place.glob("host*.out"))]
        return "\n".join(texts + [log.read_text(errors="replace") for d in self.logs for log in d.glob("workerlog.*")])


def weights(place: Path) -> str:
    import hashlib

    return hashlib.sha256((place / "run/latest.pdparams").read_bytes()).hexdigest()


def reference(scratch: Path, plan: dict, ranks: int, hosts: int = 1) -> str:
    """The weights of an undisturbed run. On two hosts gloo adds up in another order than shared memory does on one:
    with more than two ranks, sums round differently."""
    place = scratch / f"reference{ranks}x{hosts}"
    if not (place / "run/latest.pdparams").exists():
        place.mkdir(parents=True)
        told, codes = undisturbed(place, plan, ranks, hosts)
        assert codes == [0] * hosts, told[-3000:]
    return weights(place)


def undisturbed(place: Path, plan: dict, ranks: int, hosts: int) -> tuple[str, list[int | None]]:
    """Run to the end without a fault: what was printed, and the exit codes."""
    with ExitStack() as stack:
        before = stack.enter_context(namespaces.two_hosts()) if hosts == 2 else None
        job = Job(place, {**plan, "kind": "none", "launch": "ppfleet" if before else "paddle"}, ranks, before)
        try:
            codes = job.wait(180)
            return job.output(), codes
        finally:
            job.end()


def torn(place: Path) -> int:
    """Checkpoints that do not verify."""
    count = 0
    for path in (place / "run/checkpoints").glob("0*"):
        try:
            manifest.verify(path)
        except CheckpointError as failure:
            print(f"torn: {failure}", flush=True)
            count += 1
    return count


def saved_step(place: Path) -> int:
    """How far the newest checkpoint is."""
    root = place / "run/checkpoints"
    found = manifest.newest(root)
    return json.loads((found.path / "state.json").read_text())["step"] if found.path else 0


# Kills at any moment


def kills(count: int, seed: int, scratch: Path) -> dict:
    """SIGKILL to any rank or to the launcher at any moment, start and saves included, until `count` were made."""
    choose = random.Random(seed)
    plan = {"kind": "none", "rank": 0, "step": 0, "epochs": 4, "save_every": SAVE_EVERY, "pause": 0.02}
    told = {
        "kills": 0,
        "runs": 0,
        "same": 0,
        "left": 0,
        "most_lost": 0,
        "torn": 0,
        "in_save": 0,
        "before_step_1": 0,
        "gone": [],
    }
    chain = 0
    while told["kills"] < count:
        chain += 1
        ranks = choose.choice([2, 2, 2, 3, 4])
        expected = reference(scratch, plan, ranks)
        place = scratch / f"chain{chain}"
        place.mkdir()
        while True:
            job = Job(place, plan, ranks)
            try:
                moment = choose.choice(["anywhere", "anywhere", "training", "saving"])
                if moment != "anywhere":
                    job.wait_for_step(saved_step(place) + 1)
                if moment == "saving":
                    _await_temporary(place / "run/checkpoints", job)
                time.sleep(choose.uniform(0, {"anywhere": 7.0, "training": 1.5, "saving": 0.01}[moment]))
                if job.launchers[0].poll() is not None or told["kills"] >= count:
                    break
                _kill_one(job, choose, told)
            finally:
                codes = job.wait(60)
                left = job.left(15)
                told["left"] += len(left)
                job.end()
                if left:
                    print(f"seed {seed}, chain {chain}: left behind: {left}", flush=True)
            done = max((e.step for r in job.records().values() for e in r.entries), default=0)
            lost = max(0, done - saved_step(place))
            told["most_lost"] = max(told["most_lost"], lost)
            told["torn"] += torn(place)
            assert codes[0] != 0, f"seed {seed}, chain {chain}: exit code 0 after a kill"
            assert lost <= SAVE_EVERY, f"seed {seed}, chain {chain}: {lost} steps lost"
        assert codes == [0], job.output()[-3000:]
        told["runs"] += 1
        told["same"] += weights(place) == expected
        shutil.rmtree(place)
        print(f"  {told['kills']} kills, {told['runs']} runs, {told['same']} of them with the same weights", flush=True)
    return told


def _kill_one(job: Job, choose: random.Random, told: dict) -> None:
    victims = [*job.trainers().values(), psutil.Process(job.launchers[0].pid)]
    told["before_step_1"] += job.step() == 0
    told["in_save"] += bool(list((job.place / "run/checkpoints").glob(".tmp-*")))
    began = time.monotonic()
    choose.choice(victims).kill()
    told["kills"] += 1
    gone = job.trainers_gone(30)
    assert gone is not None, f"trainers live on after a kill\n{job.output()[-3000:]}"
    told["gone"].append(time.monotonic() - began)


def _await_temporary(root: Path, job: Job) -> None:
    deadline = time.monotonic() + 10
    while not list(root.glob(".tmp-*")) and time.monotonic() < deadline and job.launchers[0].poll() is None:
        time.sleep(0.001)


# Faults of every kind


@dataclass(frozen=True)
class Fault:
    """What is planted, and what `why` may call it."""

    name: str
    answers: tuple[str, ...]  # kinds of cause.Cause
    limit: float  # seconds to the end of all trainers that do not hang themselves
    plan: dict = field(default_factory=dict)
    hosts: tuple[int, ...] = (1, 2)
    named: bool = True  # whether the answer must name the rank
    codes: tuple[int, ...] = ()  # exit codes of a launcher; else any but 0
    resumes: bool = True


STALL = {"options": {"stall": 4.0, "stall_long": 6.0}}
FAULTS = [
    Fault("kill", ("killed",), 10),
    Fault("segv", ("killed",), 10),
    Fault("abort", ("killed",), 10),
    Fault("memory", ("oom", "killed"), 40, hosts=(1,)),
    Fault("exit", ("killed", "exit"), 10),
    Fault("stop", ("stopped", "stall"), 12, STALL),
    Fault("term", ("preempted",), 20, named=False, codes=(75,)),
    Fault("term-launcher", ("preempted",), 20, named=False, codes=(75, 15, 143)),
    Fault("kill-launcher", ("orphan",), 10, hosts=(1,), named=False),
    Fault("cut", ("host",), 12, hosts=(2,)),
    Fault("stall", ("stall",), 10, STALL),
    Fault("data-stall", ("data", "stall"), 10, STALL),
    Fault("slow-save", ("slow save", "work", "stall"), 14, STALL, named=False),
    Fault("exception", ("exception",), 10),
    Fault("bad-sample", ("exception", "data"), 10),
    Fault("kill-worker", ("worker", "exception", "data"), 15, {"workers": 1}),
    Fault("nan", ("nan",), 10),
    Fault("rate", ("mismatch", "exception", "diverged"), 10),
    Fault("drift", ("mismatch", "exception", "diverged"), 10, named=False),
    Fault("branch", ("mismatch",), 12),
    Fault("shape", ("mismatch", "exception", "diverged"), 10),
    Fault("uneven", ("uneven", "mismatch"), 12),
    Fault("slow", ("straggler",), 60, {"epochs": 3}, resumes=False),
    Fault("port", ("port",), 20, hosts=(1,), named=False),
]


def faults(count: int, seed: int, scratch: Path, only: str = "") -> list[dict]:
    """Random faults, each into a job of its own; what `why` says of it, and whether it resumes to the same bits."""
    choose = random.Random(seed)
    known = [fault for fault in FAULTS if not only or fault.name in only.split(",")]
    if why := no_memory_limits():
        known = [fault for fault in known if fault.name != "memory"]
        print(f"without `memory`: {why}")
    if why := namespaces.missing():
        print(f"on one host alone: {why}")
    two = not namespaces.missing()
    results = []
    for number in range(count):
        if number % len(known) == 0:
            round_of = choose.sample(known, len(known))
        fault = round_of[number % len(known)]
        hosts = choose.choice([h for h in fault.hosts if h == 1 or two] or [0])
        if not hosts:
            continue
        ranks = choose.choice([2, 2, 3, 4]) if hosts == 1 else choose.choice([2, 4])
        results.append(one(fault, hosts, ranks, choose, scratch, f"{seed}/{number}"))
        told = results[-1]
        print(f"  {told['id']} {told['fault']} on {told['hosts']} host(s), {told['ranks']} ranks, rank {told['rank']}: "
              f"{'OK' if told['ok'] else 'NOT OK ' + str(told['problems'])}, {told['seconds']} s\n    {told['why']}",
              flush=True)  # fmt: skip
    return results


def one(
    fault: Fault, hosts: int, ranks: int, choose: random.Random, scratch: Path, name: str, slack: float = 1.0
) -> dict:
    """One job, one fault. `slack`: on a machine that is busy with other tests, limits are that much longer."""
    plan = {"kind": fault.name, "rank": choose.randrange(ranks), "epochs": 2, "save_every": SAVE_EVERY, **fault.plan,
            "step": choose.randint(4, 2 * 512 // (8 * ranks) - 8), "sample": choose.randint(40, 120),
            "launch": "ppfleet" if hosts == 2 else choose.choice(["ppfleet", "paddle"])}  # fmt: skip
    if fault.name == "slow-save":
        plan["rank"] = 0
    place = Path(tempfile.mkdtemp(prefix=f"{fault.name}-", dir=scratch))
    told = {"id": name, "fault": fault.name, "hosts": hosts, "ranks": ranks, "rank": plan["rank"], "step": plan["step"]}
    problems: list[str] = []
    with ExitStack() as stack:
        before = stack.enter_context(namespaces.two_hosts()) if hosts == 2 else None
        job, began = inject(fault, place, plan, ranks, before, choose, stack)
        try:
            stopped = plan["rank"] if fault.name == "stop" else -1
            gone = job.trainers_gone(90, apart=stopped)
            told["over"] = round(gone, 1) if gone is not None else None
            codes = job.wait(60)
            told["codes"] = codes
            records = job.records()
            said = [r.event.time for r in records.values() if r.event and r.event.code != "ended"]
            told["seconds"] = round(max(0.0, min(said) - began), 2) if said else told["over"]
            left = job.left(15)
            told["left"] = len(left)
            answer = cause.answer([place / "run", *job.logs])
        finally:
            job.end()
    told["why"], told["kind"] = (answer.sentence, answer.kind) if answer else ("no answer", "none")
    if told["kind"] not in fault.answers:
        problems.append(f"why: {told['kind']}, not {'/'.join(fault.answers)}")
    elif fault.named and not re.search(rf"\branks? [\d, –and]*\b{plan['rank']}\b", told["why"]) and fault.name != "cut":
        problems.append("the rank is not named")
    if gone is None or told["over"] > slack * fault.limit:
        problems.append(f"over after {told['over']} s, the limit is {fault.limit}")
    if fault.name != "slow" and (0 in codes or (fault.codes and not set(codes) <= set(fault.codes))):
        problems.append(f"exit codes {codes}")
    if left:
        problems.append(f"left behind: {left}")
    done = max((e.step for r in records.values() for e in r.entries), default=0)
    told["lost"] = max(0, done - saved_step(place)) if fault.name not in ("port", "slow") else 0
    if told["lost"] > (0 if fault.name.startswith("term") else SAVE_EVERY):
        problems.append(f"{told['lost']} steps lost")
    if torn(place):
        problems.append("a torn checkpoint")
    if fault.resumes and not problems:
        problems += resume(place, plan, ranks, hosts, scratch)
    told["problems"], told["ok"] = problems, not problems
    if not problems:
        shutil.rmtree(place, ignore_errors=True)
    return told


def resume(place: Path, plan: dict, ranks: int, hosts: int, scratch: Path) -> list[str]:
    """The same command again, without the fault: to the end, with the bits of an undisturbed run."""
    again = {**plan, "workers": 0}
    shared = {k: v for k, v in again.items() if k in ("epochs", "save_every", "rank", "step")}
    expected = reference(scratch, shared, ranks, hosts)
    told, codes = undisturbed(place, again, ranks, hosts)
    if codes != [0] * hosts:
        return [f"the resumed run ended with {codes}: {told[-500:]}"]
    return [] if weights(place) == expected else ["the resumed run has other weights"]


def inject(fault: Fault, place: Path, plan: dict, ranks: int, before, choose: random.Random, stack: ExitStack):
    """Start the job and do it: the job, and when it was done."""
    kind = fault.name
    if kind == "port":  # somebody listens where rank 0's store should
        plan.update(port=free_ports(ranks)[0], launch="paddle")
        stack.enter_context(socket.create_server(("127.0.0.1", plan["port"])))
    job = Job(place, plan, ranks, before)
    if kind in ("bad-sample", "data-stall"):
        job.wait_for_step(1)
        while job.launchers[0].poll() is None and not _in_it(job, plan):
            time.sleep(0.02)
        return job, time.time()
    if kind in ("slow", "port"):
        return job, time.time()
    if kind == "memory":  # a little more than it has; at its step it takes all it can get
        job.wait_for_step(1)
        _limit_memory(job.trainers()[plan["rank"]], stack)
    job.wait_for_step(plan["step"])
    if kind in FROM_OUTSIDE:
        time.sleep(choose.uniform(0, 0.1))
        from_outside(kind, job, plan, before, stack)
    return job, time.time()


def _in_it(job: Job, plan: dict) -> bool:
    """Whether the victim has drawn the sample that stops or breaks it."""
    record = job.records().get(plan["rank"])
    if record is None or record.event:
        return True
    last = record.entries[-1]
    return last.kind == "data" and not last.left and time.time() - last.entered > 0.5


def from_outside(kind: str, job: Job, plan: dict, before, stack: ExitStack) -> None:
    rank, deadline = plan["rank"], time.monotonic() + 20
    while rank not in job.trainers() and time.monotonic() < deadline:  # a busy machine
        time.sleep(0.1)
    numbers = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
    if kind in numbers:
        job.trainers()[rank].send_signal(numbers[kind])
    elif kind == "kill-worker":
        next(p for p in job.trainers()[rank].children()).kill()
    elif kind == "cut":
        stack.enter_context(namespaces.cut(before))
    elif kind in ("term-launcher", "kill-launcher"):
        number = rank * len(job.launchers) // job.ranks
        top = psutil.Process(job.launchers[number].pid)
        if kind == "kill-launcher":  # Paddle's own, wherever it stands; our guard has its words, too, but later
            everybody = [top, *top.children(recursive=True)]
            top = next(p for p in everybody if p.cmdline()[1:3] == ["-m", "paddle.distributed.launch"])
        elif job.plan["launch"] == "ppfleet" and top.name() in ("ip", "sh", "unshare"):
            top = next(p for p in top.children(recursive=True) if "ppfleet" in p.cmdline())
        top.send_signal(signal.SIGKILL if kind == "kill-launcher" else signal.SIGTERM)


def _memory_group() -> Path:
    """Where a control group for this process's children could be; control groups of the first kind alone."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":")[2] for line in lines if ":memory:" in line), "")
    return Path(f"/sys/fs/cgroup/memory{own}/chaos{os.getpid()}")


def no_memory_limits() -> str:
    """Why a process cannot be given less memory here."""
    if not os.access(_memory_group().parent, os.W_OK):
        return "needs root and a memory control group (version 1) to run out of"
    return ""


def _limit_memory(process: psutil.Process, stack: ExitStack) -> None:
    """Move it to a control group that has not much more than it uses now."""
    group = _memory_group()
    group.mkdir(exist_ok=True)
    stack.callback(group.rmdir)
    (group / "memory.limit_in_bytes").write_text(str(process.memory_info().rss + (200 << 20)))
    (group / "cgroup.procs").write_text(str(process.pid))


# Side by side with plain Paddle


def table(scratch: Path, only: str = "", seconds: float = 75) -> list[dict]:
    """Each fault of the facts page into 4 ranks on two hosts: what a user sees, and after how long."""
    rows = []
    for name, (kind, plan) in SIDE_BY_SIDE.items():
        if only and kind not in only.split(","):
            continue
        row = {"fault": name}
        for who in ("plain", "ppfleet"):
            place = Path(tempfile.mkdtemp(prefix=f"table-{kind}-", dir=scratch))
            row[who] = _side(kind, {**plan, "plain": who == "plain", "launch": who}, place, seconds)
            print(f"  {name}: {who}: {row[who]}", flush=True)
        rows.append(row)
    return rows


SIDE_BY_SIDE = {
    "`kill -9` of a trainer": ("kill", {}),
    "SIGTERM to a trainer": ("term", {}),
    "link down": ("cut", {}),
    "link down for 10 s": ("cut-10", {}),
    "SIGSTOP of a rank": ("stop", {}),
    "rank 0 busy for 45 s": ("stall", {"rank": 0, "seconds": 45}),
    "the launcher is killed": ("kill-launcher", {}),
    "a host never joins (`--ips`)": ("missing", {"hosts_that_come": 1}),
    "one batch fewer on one rank": ("uneven", {}),
    "other shape of a parameter": ("other-shape", {}),
    "other learning rate on one rank": ("rate", {}),
    "another branch on one rank": ("other-branch", {}),
    "NaN on one rank": ("nan", {}),
}


def _side(kind: str, plan: dict, place: Path, seconds: float) -> str:
    plan = {"kind": kind, "rank": 3, "step": 12, "epochs": 6, **plan}
    with ExitStack() as stack:
        before = stack.enter_context(namespaces.two_hosts("right"))
        job = Job(place, plan, 4, before)
        stack.callback(job.end)
        job.wait_for_step(1 if kind == "other-shape" else plan["step"], 60 if kind != "missing" else 0)
        began = time.monotonic()
        if kind == "cut-10":
            with namespaces.cut(before):
                time.sleep(10)
        elif kind in FROM_OUTSIDE:
            from_outside(kind, job, plan, before, stack)
        if kind == "missing":  # there is nobody to be seen but the launcher that waits
            job.wait(seconds if plan["plain"] else 150)
        while time.monotonic() - began < seconds and job.trainers():
            time.sleep(0.1)
        took, left = time.monotonic() - began, job.trainers()
        codes = job.wait(1 if left else 45)
        said = _told(job, plan)
    if kind == "missing" and None in codes:
        return f"still waiting after {seconds:.0f} s: {said}"
    if left:
        return f"{len(left)} trainers still there after {seconds:.0f} s: {said}"
    shown = "/".join("running" if code is None else str(code) for code in codes)
    return f"over after {took:.1f} s, exit codes {shown}: {said}"


def _told(job: Job, plan: dict) -> str:
    """What the output says: our sentence, the weights' sums, or the last line that looks like an error."""
    text = job.output()
    found = re.findall(
        r"sum of weights (\S+)", "\n".join(f.read_text() for d in job.logs for f in d.glob("workerlog.*"))
    )
    if len(found) == job.ranks:
        differ = f"the weights differ: sums {', '.join(sorted(set(found)))}"
        same = "all weights are NaN" if set(found) == {"nan"} else "all ranks have the same weights"
        return f"trained to the end; {differ if len(set(found)) > 1 else same}"
    if not plan["plain"]:
        answer = cause.answer([job.place / "run", *job.logs])
        launch = re.findall(r"launch: (.*did not join.*)", text)
        return launch[0] if launch else answer.sentence if answer else "nothing"
    told = re.findall(r"Container rank \d+ status failed .*? (code -?\d+)", text)
    lines = re.findall(r"what\(\): +(?:\[.*?\] )?(.*)|^(\w*Error: .*)", text, re.MULTILINE)
    lines = [one or other for one, other in lines]
    shown = [f"the launcher says `rank 0 … {told[0]}`"] if told else []
    shown += [f"a log `{lines[0][:140]}`"] if lines else []
    return ", ".join(shown).replace("|", "/") or "nothing is said"


# Cards

HANGS_AND_EXITS = {
    "hang": Fault("stall", ("stall",), 14, STALL),
    "exit": Fault("exit", ("killed", "exit"), 14),
    "exception": Fault("exception", ("exception",), 14),
    "kill": Fault("kill", ("killed",), 14),
    "stop": Fault("stop", ("stopped", "stall"), 16, STALL),
    "GIL held": Fault("gil", ("stall", "stopped"), 20, STALL),
    "card stuck in the forward pass": Fault("stuck", ("stall",), 20, STALL, named=False),
}


def cards(scratch: Path, only: str = "") -> list[dict]:
    """Each of them on CPUs and on simulated cards, 2 and 4 ranks, one and two hosts: seconds to the verdict, and it."""
    results = []
    for name, fault in HANGS_AND_EXITS.items():
        if only and fault.name not in only.split(","):
            continue
        for hosts, ranks, device in itertools.product((1, 2), (2, 4), ("cpu", "sim")):
            if fault.name == "stuck" and device == "cpu":
                continue
            knobs = {"SIM_STALL": f"rank={ranks - 1},kernel=sync_batch_norm,count=16"} if fault.name == "stuck" else {}
            plan = {**fault.plan, "device": device, "knobs": knobs, "rank": ranks - 1}
            told = one(
                replace(fault, plan=plan, resumes=False), hosts, ranks, random.Random(ranks), scratch, name, slack=2.0
            )
            results.append({**told, "fault": name, "device": device})
            print(f"  {name}, {hosts} host(s), {ranks} ranks, {device}: {told['seconds']} s to the verdict, over after "
                  f"{told['over']} s, codes {told['codes']}{'' if told['ok'] else ' NOT OK ' + str(told['problems'])}\n"
                  f"    {told['why']}", flush=True)  # fmt: skip
    return results


# The command


def summary(results: list[dict]) -> list[str]:
    """Fault, injected, detected, median seconds, lost steps."""
    lines = [
        "| fault | injected | found, named, resumed | seconds to the verdict (median) | most steps lost |",
        "|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        mine = [told for told in results if told["fault"] == fault.name]
        if mine:
            times = [told["seconds"] for told in mine if told["seconds"] is not None]
            median = f"{statistics.median(times):.1f}" if times else "-"
            good, lost = sum(told["ok"] for told in mine), max(told["lost"] for told in mine)
            lines.append(f"| {fault.name} | {len(mine)} | {good} | {median} | {lost} |")
    good = sum(told["ok"] for told in results)
    return [*lines, f"| all | {len(results)} | {good} | | |"]


def write(output: Path, pages: list[Path]) -> None:
    """Put what the last runs gave into the pages, between the marks."""
    blocks = {}
    for name, form in (("kills", _kills_lines), ("faults", summary), ("table", _table_lines)):
        if (path := output / f"{name}.json").exists():
            told = json.loads(path.read_text())
            blocks[name] = "\n".join(form(told["results"])) + f"\n\n(`chaos {name}`, seed {told['seed']})"
    for page in pages:
        text = page.read_text()
        for name, block in blocks.items():
            begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}"
        page.write_text(text)


def _kills_lines(told: dict) -> list[str]:
    gone = sorted(told["gone"])
    columns = {
        "kills": f"{told['kills']} ({told['in_save']} during a save, {told['before_step_1']} before the first step)",
        "runs": told["runs"],
        "ended with the undisturbed run's SHA-256": told["same"],
        "torn checkpoints": told["torn"],
        f"most steps lost (saved every {SAVE_EVERY})": told["most_lost"],
        "processes left": told["left"],
        "seconds until all ranks had ended (median, longest)": f"{statistics.median(gone):.1f}, {gone[-1]:.1f}",
    }
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", f"| {' | '.join(map(str, columns.values()))} |"]


def _table_lines(rows: list[dict]) -> list[str]:
    lines = ["| fault | plain Paddle | ppfleet |", "|---|---|---|"]
    return lines + [f"| {r['fault']} | {r['plain']} | {r['ppfleet']} |".replace("\n", " ") for r in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "faults", "table", "cards", "write"])
    parser.add_argument("pages", nargs="*", type=Path, help="with write: the pages that show the results")
    parser.add_argument("--count", type=int, default=24, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="repeats a run (default: a new one)")
    parser.add_argument("--only", default="", help="faults of these names alone, such as kill,nan")
    parser.add_argument("--output", default="output/chaos", help="where figures go, as JSON (default: %(default)s)")
    o = parser.parse_args()
    output = Path(o.output)
    if o.what == "write":
        write(output, o.pages)
        return 0
    print(f"{o.what}: seed {o.seed}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        if o.what == "kills":
            told: object = kills(o.count, o.seed, Path(scratch))
        elif o.what == "faults":
            told = faults(o.count, o.seed, Path(scratch), o.only)
            print("\n".join(summary(told)))
        elif o.what == "cards":
            told = cards(Path(scratch), o.only)
        else:
            told = table(Path(scratch), o.only)
    (output / f"{o.what}.json").write_text(json.dumps({"seed": o.seed, "results": told}, indent=1, ensure_ascii=False))
    failed = isinstance(told, list) and any(not row.get("ok", True) for row in told)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
