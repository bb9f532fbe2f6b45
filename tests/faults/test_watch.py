"""The watch and preemption on real ranks: who is named, exit codes, stacks; a checkpoint that goes on to the same bits.

Nobody asks for a dead process's exit code here before the others have ended: as long, Linux tells them how it died.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ppfleet.errors import PREEMPTED, STALLED
from ppfleet.watchdog import recorder
from tests import fork_server
from tests.faults.chaos import VICTIM, saved_step
from tests.harness import DEVICE, ROOT, environment, free_ports, on_cpus, start, wait_for


class Victims:
    """Ranks of tests/faults/victim.py, started without a launcher: nobody but the watch ends them."""

    def __init__(self, place, ranks, **plan):
        self.place, self.run = place, place / "run"
        plan = {"kind": "none", "rank": ranks - 1, "step": 8, "epochs": 2, **plan}
        endpoints = [f"127.0.0.1:{port}" for port in free_ports(ranks)]
        self.processes = []
        for rank in range(ranks):
            (place / f"rank{rank}.out").unlink(missing_ok=True)
            words = [str(VICTIM), str(self.run), json.dumps(plan)]
            env = environment(rank, endpoints)
            process = fork_server.start(rank, words, env, place / f"rank{rank}.out", session=True)
            self.processes.append(process)

    def until_step(self, step, seconds=60):
        def steps():
            rings = sorted(self.run.glob("flight/*-rank0.ring"))
            return max((e.step for e in recorder.read(rings[-1]).entries), default=0) if rings else 0

        self.until(lambda: steps() >= step, seconds)
        return self

    def until(self, condition, seconds=60):
        def reached():
            assert all(process.poll() is None for process in self.processes), self.outputs()
            return condition()

        wait_for(reached, seconds, "what the test waits for", self.outputs)

    def outputs(self):
        return [(self.place / f"rank{rank}.out").read_text(errors="replace") for rank in range(len(self.processes))]

    def end(self, seconds=60):
        """Exit codes and outputs; whoever does not end by itself fails the test."""
        deadline = time.monotonic() + seconds
        try:
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(self.outputs())) from None
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return codes, self.outputs()

    def weights(self):
        return hashlib.sha256((self.run / "latest.pdparams").read_bytes()).hexdigest()


pytestmark = pytest.mark.usefixtures("operators")
STALL = {"stall": 4.0, "stall_long": 6.0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run that nothing happens to, by the number of ranks."""
    known = {}

    def weights(ranks):
        if ranks not in known:
            victims = Victims(tmp_path_factory.mktemp(f"undisturbed{ranks}"), ranks)
            codes, outputs = victims.end()
            assert codes == [0] * ranks, outputs
            known[ranks] = victims.weights()
        return known[ranks]

    return weights


def test_a_rank_that_stands_still_is_named_with_its_line_and_the_job_ends(tmp_path):
    victims = Victims(tmp_path, 3, kind="stall", rank=1, options=STALL)
    codes, outputs = victims.end(40)
    assert codes == [STALLED] * 3, outputs
    sentence = (
        r"rank 1 on 127.0.0.1 has been in `stand_still` \(tests/faults/victim.py:\d+\) for [45] s while ranks 0 and 2 "
        r"wait in all-reduce of gradients #\d+ \(\[\d+\] float32, step 8, tests/faults/victim.py:\d+\)"
    )
    assert all(re.search(sentence, output) for output in outputs), outputs
    assert "in stand_still" in (victims.run / "logs/rank1.stacks").read_text()
    assert ("in all_reduce" if DEVICE == "cpu" else "in all_gather") in (victims.run / "logs/rank0.stacks").read_text()


def test_a_stopped_rank(tmp_path):
    victims = Victims(tmp_path, 2, epochs=50, options=STALL).until_step(5)
    victims.processes[1].send_signal(signal.SIGSTOP)
    assert victims.processes[0].wait(30) == STALLED
    number = victims.processes[1].pid
    assert re.search(
        rf"rank 1 on 127.0.0.1 has not answered for \d s \(its process {number} is stopped by SIGSTOP",
        victims.outputs()[0],
    )
    victims.processes[1].kill()


def test_a_stopped_rank_0_is_noticed_by_the_others(tmp_path):
    """It is the one that judges."""
    victims = Victims(tmp_path, 3, epochs=50, options=STALL).until_step(5)
    victims.processes[0].send_signal(signal.SIGSTOP)
    assert [p.wait(30) for p in victims.processes[1:]] == [STALLED] * 2
    assert all("rank 0 on 127.0.0.1 has not answered for" in output for output in victims.outputs()[1:])
    victims.processes[0].kill()


@pytest.mark.parametrize("kind", ["branch", "uneven"])
def test_ranks_that_go_different_ways_are_told_so_long_before_gloo_gives_up(tmp_path, kind):
    codes, outputs = Victims(tmp_path, 2, kind=kind).end(25)
    assert codes == [STALLED] * 2, outputs
    first, other = "all-reduce of gradients", {"branch": "all-reduce of a branch", "uneven": "check of buffers"}[kind]
    told = rf"the ranks diverged after step 8: rank 0 on 127.0.0.1 waits in {first} .*, rank 1 on 127.0.0.1 in {other} "
    assert all(re.search(told, output) for output in outputs), outputs


def test_shapes_that_differ_are_an_error_on_all_ranks_and_no_abort(tmp_path):
    codes, outputs = Victims(tmp_path, 2, kind="shape").end()
    assert codes == [1, 1]
    assert all(
        "a mean [7] float32 on rank 0 on 127.0.0.1; all-reduce of a mean [8] float32 on rank 1" in o for o in outputs
    )


def test_weights_that_drift_apart_are_noticed_without_a_save(tmp_path):
    codes, outputs = Victims(tmp_path, 2, kind="drift", save_every=0).end()
    assert codes == [1, 1]
    assert all("the weights differ (step" in o and "head.weight differs between rank" in o for o in outputs), outputs


@pytest.mark.parametrize(("victim", "name"), [(1, "SIGKILL"), (0, "SIGSEGV")])
def test_a_killed_rank_is_named_with_its_signal(tmp_path, victim, name):
    victims = Victims(tmp_path, 2, epochs=50).until_step(5)
    victims.processes[victim].send_signal(getattr(signal, name))
    assert victims.processes[1 - victim].wait(30) == 1
    codes, outputs = victims.end(30)
    assert codes[victim] == -getattr(signal, name) and codes[1 - victim] == 1
    assert f"rank {victim} on 127.0.0.1 was killed by {name}" in outputs[1 - victim], outputs


def ends_in_a_sum(path, way):
    """Rank 1 ends in the middle of a sum through shared memory: the others have its numbers, but wait for its part."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE)
    net = blocks.mlp()
    job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    for number, (points, labels) in enumerate(job.steps(job.loader(blocks.Points(), 8))):
        if number == 3 and job.world.rank == 1:

            def end(means):
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("something is wrong")

            job._loop.stepper.exchange._shared._add = end
        job.backward(F.cross_entropy(net(points), labels))


@on_cpus
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("killed", "rank 1 on 127.0.0.1 was killed by SIGKILL"),
        ("raised", "rank 1 on 127.0.0.1 exited before it (ValueError: something is wrong)"),
    ],
)
def test_a_rank_that_ends_in_the_middle_of_a_sum(tmp_path, way, told):
    """Long before the limit of 25 s."""
    for number, end in enumerate(start(ends_in_a_sum, 3, tmp_path / "out", str(tmp_path / "run"), way).wait(15)):
        if number != 1:
            assert end.error is not None and end.error[0] == "CommError" and told in end.error[1], end


def waits_for_another(path):
    """Rank 0 and 1 wait on the store for rank 2, which computes."""
    import ppfleet

    job = ppfleet.Job(path, device=DEVICE)
    job.comm.barrier("before")
    if job.world.rank == 2:
        (job.directory / "there").touch()
        time.sleep(600)
    job.comm.gather(1, "a gather")


def test_a_rank_that_is_killed_while_others_wait_for_it_on_the_store(tmp_path):
    running = start(waits_for_another, 3, tmp_path / "out", str(tmp_path / "run"))
    wait_for((tmp_path / "run/there").exists, 60, "rank 2 is in its long computation")
    os.kill(running.processes[2].pid, signal.SIGKILL)
    for end in running.wait(15)[:2]:
        assert end.error == ("CommError", end.error[1]) and "rank 2 on 127.0.0.1 was killed by SIGKILL" in end.error[1]


def held_up(path, holds):
    """Rank 1's Python stands still for 3.2 s now and then, as in a large json or pickle."""
    import ctypes
    import random

    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE)
    net = blocks.mlp()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    choose, done, again = random.Random(1), 0, time.monotonic() + 1
    for points, labels in job.steps(job.loader(blocks.Points(1 << 20), 8, shuffle=True)):
        job.backward(F.cross_entropy(wrapped(points), labels))
        if job.world.rank == 1 and time.monotonic() > again:
            ctypes.PyDLL(None).usleep(3_200_000)  # PyDLL keeps the interpreter's lock
            done, again = done + 1, time.monotonic() + 0.5 + choose.random()
        if float(job.comm.all_reduce(paddle.to_tensor([float(done)]))[0]) >= holds:
            return job.step
    return None


@pytest.mark.slow
def test_python_that_is_held_up_for_seconds_is_no_fault(tmp_path):
    ends = start(held_up, 2, tmp_path / "out", str(tmp_path / "run"), 15).wait(150)
    assert [end.code for end in ends] == [0, 0], ends[0].output + ends[1].output


def blocked(path):
    """Rank 1 prints more than anybody reads."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, stall=4)
    net = blocks.mlp()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    for points, labels in job.steps(job.loader(blocks.Points(96), 8)):
        if job.world.rank == 1 and job.step == 3:
            reader, writer = os.pipe()
            os.dup2(writer, 1)
            print("x" * (1 << 20), flush=True)
        job.backward(F.cross_entropy(wrapped(points), labels))


def test_a_rank_whose_output_nobody_reads_can_be_ended(tmp_path):
    ends = start(blocked, 2, tmp_path / "out", str(tmp_path / "run")).wait(40)
    assert ends[0].error is not None and ends[0].error[0] == "Stalled" and ends[1].code == STALLED
    assert "rank 1 on 127.0.0.1 has been in `blocked` (tests/faults/test_watch.py:" in ends[0].output


def dies_early(path):
    import paddle.distributed as dist

    import ppfleet
    from ppfleet.distributed.world import World

    if World.from_env().rank == 1:
        dist.init_parallel_env = lambda: os.kill(os.getpid(), signal.SIGKILL)
    ppfleet.Job(path, device=DEVICE)


def test_a_rank_that_dies_where_paddle_holds_python_up(tmp_path):
    env = {"PPFLEET_WAIT": "3"}
    ends = start(dies_early, 2, tmp_path / "out", str(tmp_path / "run"), env=env).wait(40)
    assert ends[1].code == -signal.SIGKILL and ends[0].code not in (0, None)
    assert "init_parallel_env" in ends[0].output


def test_an_orphan_from_the_start_does_not_begin(tmp_path):
    """The launcher was killed while its trainers still imported Paddle."""
    running = start(
        waits_for_another, 2, tmp_path / "out", str(tmp_path / "run"), env={"PADDLE_LOG_DIR": str(tmp_path)}
    )
    for end in running.wait(60):
        assert end.error[0] == "WorldError" and "started by Paddle's launcher, which is gone" in end.error[1]


def goes_on_after_closing(path):
    import ppfleet

    job = ppfleet.Job(path, device=DEVICE)
    job.close()
    time.sleep(job.world.rank)
    return job.comm.gather(job.world.rank)


def test_a_closed_job_still_talks(tmp_path):
    ends = start(goes_on_after_closing, 2, tmp_path / "out", str(tmp_path / "run")).wait()
    assert [end.value for end in ends] == [[0, 1], [0, 1]], ends


def many_jobs(path, count):
    import threading

    import ppfleet

    counts = []
    for number in range(count):
        ppfleet.Job(f"{path}/{number}", device=DEVICE).close()
        counts.append([len(os.listdir("/proc/self/fd")), threading.active_count()])  # noqa: PTH208
    return counts


def test_jobs_one_after_another_leave_nothing_open(tmp_path):
    (end,) = start(many_jobs, 1, tmp_path / "out", str(tmp_path / "run"), 12).wait()
    assert end.value[-1] == end.value[3], end.value


# Preemption


@pytest.mark.parametrize(
    ("ranks", "to", "workers"), [(1, 0, 0), pytest.param(2, 0, 0, marks=pytest.mark.slow), (2, 1, 2)]
)
def test_sigterm_saves_once_and_the_same_command_goes_on(tmp_path, undisturbed, ranks, to, workers):
    """To the whole process group, as Paddle's launcher sends it: loader workers must live on until the save."""
    victims = Victims(tmp_path, ranks, save_every=0, workers=workers).until_step(10)
    os.killpg(victims.processes[to].pid, signal.SIGTERM)
    codes, outputs = victims.end()
    assert codes == [PREEMPTED] * ranks, outputs
    assert re.search(rf"rank {to}( on 127.0.0.1)? got SIGTERM: all ranks save", outputs[0]), outputs
    assert "stopping after SIGTERM: saved at step" in outputs[0]
    checkpoints = [path.name for path in victims.run.glob("checkpoints/0*")]
    assert len(checkpoints) == 1 and saved_step(tmp_path) >= 10  # one, of the very step
    steps = max(e.step for r in victims.run.glob("flight/*.ring") for e in recorder.read(r).entries)
    assert saved_step(tmp_path) == steps
    again = Victims(tmp_path, ranks)
    codes, outputs = again.end()
    assert codes == [0] * ranks and "resumed from" in outputs[0] and again.weights() == undisturbed(ranks)


def evaluates(path, marker, with_epochs):
    """Two epochs of 4 steps; the evaluation after the first takes long."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    class Slow(blocks.Points):
        def __getitem__(self, index):
            if not os.path.exists(marker):  # noqa: PTH110
                time.sleep(0.2)
            return super().__getitem__(index)

    def metric(output, labels):
        return (output.argmax(-1) == labels).astype("float32")

    job = ppfleet.Job(path, device=DEVICE, seed=1)
    net = blocks.mlp()
    wrapped, adam = job.prepare(net, paddle.optimizer.Adam(0.01, parameters=net.parameters()))
    train, val = job.loader(blocks.Points(64), 8, shuffle=True), job.loader(Slow(256), 8)
    resumed, done = job.resume(), []
    for epoch in job.epochs(2) if with_epochs else range(job.epoch, 2):
        for points, labels in job.steps(train):
            done.append(epoch)
            job.backward(F.cross_entropy(wrapped(points), labels))
        job.save(**job.evaluate(net, val, accuracy=metric))
    return {"resumed": resumed, "steps": done, "best": job.best, "weights": tensors.fingerprint(net)}


@pytest.mark.parametrize("with_epochs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sigterm_in_an_evaluation_makes_it_again_after_the_resume(tmp_path, with_epochs):
    marker = tmp_path / "fast"
    running = start(evaluates, 2, tmp_path / "out", str(tmp_path / "run"), str(marker), with_epochs)
    rings = tmp_path / "run/flight"

    def entered():
        return [e.what for ring in rings.glob("*.ring") for e in recorder.read(ring).entries]

    wait_for(lambda: "next batch of the evaluation" in entered(), 60, "the evaluation begins")
    running.processes[1].send_signal(signal.SIGTERM)
    assert [end.code for end in running.wait(60)] == [PREEMPTED] * 2
    entries = [recorder.read(ring).entries for ring in rings.glob("*.ring")]
    assert all(
        sum(e.what == "next batch of the evaluation" for e in each) < 16 for each in entries
    )  # it was left early
    marker.touch()

    def ended(name):
        running = start(evaluates, 2, tmp_path / "out", str(tmp_path / name), str(marker), with_epochs)
        return [end.value for end in running.wait()]

    again, whole = ended("run"), ended("whole")
    assert again[0]["resumed"] and again[0]["steps"] == [1] * 4  # no step again, but both evaluations
    assert again[0]["best"] == whole[0]["best"] and again[0]["weights"] == whole[0]["weights"]
    saves = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("0*"))
    assert [name.partition("-")[2] for name in saves] == ["step-4", "step-4", "step-8"]


def second_job(path):
    """The first job of this process is over; what counts is the second."""
    from tests import blocks

    blocks.train(f"{path}/first", epochs=1)
    blocks.train(f"{path}/second", epochs=100, pause=0.02)


def test_sigterm_in_the_second_job_of_a_process(tmp_path):
    running = start(second_job, 1, tmp_path / "out", str(tmp_path))
    rings = tmp_path / "second/flight"
    wait_for(
        lambda: any(e.step > 5 for r in rings.glob("*.ring") for e in recorder.read(r).entries),
        60,
        "step 6 of the second",
    )
    running.processes[0].send_signal(signal.SIGTERM)
    assert running.wait(20)[0].code == PREEMPTED
    assert len(list(tmp_path.glob("second/checkpoints/0*"))) == 1


def loads_long(path, own):
    import ppfleet

    if own:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(17))
    job = ppfleet.Job(path, device=DEVICE)
    (job.directory / "there").touch()
    time.sleep(600)


@pytest.mark.parametrize(("own", "code"), [(False, PREEMPTED), (True, 17)])
def test_sigterm_outside_of_training_ends_at_once_and_a_handler_of_the_scripts_own_stays(tmp_path, own, code):
    running = start(loads_long, 1, tmp_path / "out", str(tmp_path / "run"), own)
    wait_for((tmp_path / "run/there").exists, 60, "the job is there")
    running.processes[0].send_signal(signal.SIGTERM)
    assert running.wait(20)[0].code == code


def launched(tmp_path):
    """Two ranks under Paddle's launcher: it, and the trainers."""
    plan = json.dumps({"kind": "none", "rank": 0, "step": 0, "epochs": 50})
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node=2", f"--log_dir={tmp_path}/log"]
    out = (tmp_path / "launcher.out").open("w")
    launcher = subprocess.Popen(
        [*command, str(VICTIM), str(tmp_path / "run"), plan], cwd=ROOT, env=environment(0, []), stdout=out, stderr=out
    )
    rings = tmp_path / "run/flight"

    def both_train():
        assert launcher.poll() is None, (tmp_path / "launcher.out").read_text()
        return len([r for r in rings.glob("*.ring") if len(recorder.read(r).entries) > 40]) == 2

    wait_for(both_train, 60, "both ranks train")
    return launcher, [psutil.Process(recorder.read(r).facts["pid"]) for r in rings.glob("*.ring")]


def test_orphans_notice_that_their_launcher_is_gone(tmp_path):
    launcher, trainers = launched(tmp_path)
    launcher.kill()
    launcher.wait()
    gone, alive = psutil.wait_procs(trainers, timeout=20)
    for process in alive:
        process.kill()
    assert not alive
    text = "".join(path.read_text() for path in tmp_path.glob("log/workerlog.*"))
    assert f"is an orphan: its launcher (process {launcher.pid}) is gone" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_launchers_end_is_a_checkpoint_and_no_process_left(tmp_path, number):
    launcher, trainers = launched(tmp_path)
    launcher.send_signal(number)
    assert launcher.wait(40) == number  # that is Paddle's way
    gone, alive = psutil.wait_procs(trainers, timeout=10)
    assert not alive
    assert "saved at step" in (tmp_path / "log/workerlog.0").read_text() and saved_step(tmp_path) > 0
