"""`deploy/cluster/slurm/train.sbatch` on a real Slurm of two nodes: trained, requeued, preempted, failed, lost."""

import contextlib
import hashlib
import json
import subprocess
import sys

import pytest

from tests.harness import ROOT
from tests.hosts import namespaces, slurm

LACKING = slurm.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=LACKING or "-")]
PLAN = {"kind": "none", "rank": -1, "step": -1, "samples": 512, "epochs": 2, "pause": 0.1}  # 32 steps of 4 ranks
OVER = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def script(run, plan):
    return [f"{ROOT}/tests/faults/victim.py", str(run), json.dumps({**PLAN, **plan})]


def weights(run):
    return hashlib.sha256((run / "latest.pdparams").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The weights of two hosts with two ranks each, started by hand."""
    run = cluster.place / "by-hand"
    command = [sys.executable, "-m", "ppfleet", "launch", f"--ips={','.join(namespaces.ADDRESSES)}"]
    hosts = []
    for name, before in zip("ab", cluster.before):
        words = [*before, *command, "--nproc_per_node=2", f"--log_dir={cluster.place}/by-hand-{name}", *script(run, {})]
        with (cluster.place / f"by-hand-{name}.out").open("w") as out:
            hosts.append(subprocess.Popen(words, cwd=ROOT, env=cluster.env, stdout=out, stderr=out))
    assert [host.wait(120) for host in hosts] == [0, 0]
    return weights(run)


class Job:
    """A job of the cluster: train.sbatch with a small script that something happens to."""

    def __init__(self, cluster, name, **plan):
        self.cluster, self.run, self.out = cluster, cluster.place / name, cluster.place / f"{name}.out"
        sbatch = ["sbatch", "--parsable", "--nodes=2", "--cpus-per-task=2", f"--output={self.out}"]
        launch = [f"{ROOT}/deploy/cluster/slurm/train.sbatch", "--nproc_per_node=2"]
        self.number = cluster.run(*sbatch, *launch, *script(self.run, plan)).strip()

    def told(self):
        return self.cluster.job(self.number)

    def is_in(self, *states):
        return self.told()["JobState"] in states

    def trains(self):
        """In the middle of the first epoch, with a checkpoint."""
        self.cluster.wait_for("a checkpoint", lambda: list(self.run.glob("checkpoints/0*/manifest.json")), 90)
        assert self.is_in("RUNNING"), self.told()
        return self

    def end(self):
        """How it ended, after how many times in the queue again."""
        self.cluster.wait_for("the end of the job", lambda: self.is_in(*OVER), 180)
        told = self.told()
        return told["JobState"], int(told["Restarts"]), told["ExitCode"]

    def resumed(self):
        return self.out.read_text().count("resumed from")


def test_the_weights_are_those_of_two_hosts_started_by_hand(cluster, undisturbed):
    job = Job(cluster, "plain")
    assert job.end() == ("COMPLETED", 0, "0:0"), job.out.read_text()[-3000:]
    assert weights(job.run) == undisturbed
    logs = sorted(cluster.place.glob(f"log/slurm-{job.number}/*/workerlog.*"))
    assert [path.parent.name for path in logs] == [name for name in cluster.nodes for _ in range(2)]


@pytest.mark.parametrize("words", [["scontrol", "requeue"], ["scancel", "--signal=TERM"]], ids=["requeue", "sigterm"])
def test_a_job_that_goes_back_to_the_queue_goes_on_to_the_same_bits(cluster, undisturbed, words):
    job = Job(cluster, words[0]).trains()
    cluster.run(*words, job.number)
    assert job.end() == ("COMPLETED", 1, "0:0"), job.out.read_text()[-3000:]
    assert job.resumed() == 1 and weights(job.run) == undisturbed


def test_sigterm_before_there_is_anything_to_save(cluster, undisturbed):
    job = Job(cluster, "early")
    cluster.wait_for("ppfleet launch", lambda: list(cluster.place.glob(f"log/slurm-{job.number}/*")))
    cluster.run("scancel", "--signal=TERM", job.number)
    assert job.end() == ("COMPLETED", 1, "0:0"), job.out.read_text()[-3000:]
    assert job.resumed() == 0 and weights(job.run) == undisturbed


def test_a_job_that_fails_has_failed(cluster):
    job = Job(cluster, "fails", kind="exception", rank=1, step=7)
    assert job.end() == ("FAILED", 0, "1:0")
    assert "rank 1 on 192.168.0.1 raised KeyError: 'learning_curve'" in job.out.read_text()


def test_a_job_that_is_cancelled_stays_so(cluster):
    job = Job(cluster, "cancelled").trains()
    cluster.run("scancel", job.number)
    assert job.end()[:2] == ("CANCELLED", 0)
    cluster.wait_for("two idle nodes", lambda: cluster.idle() == 2)


@contextlib.contextmanager
def set_down(cluster):
    cluster.run("scontrol", "update", f"nodename={cluster.nodes[1]}", "state=down", "reason=test")
    yield


@contextlib.contextmanager
def crashed(cluster):
    cluster.crash(1)
    yield
    cluster.start_node(1)


@contextlib.contextmanager
def unreachable(cluster):
    with namespaces.cut(cluster.before):
        yield


def in_service(cluster):
    """Whether the node is back; an administrator helps."""
    node = cluster.nodes[1]
    if not cluster.run("sinfo", "--noheader", "--format=%T", f"--nodes={node}").startswith("down"):
        return True
    with contextlib.suppress(AssertionError):  # it has come back by itself
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    return False


@pytest.mark.parametrize("lost", [set_down, crashed, unreachable])
def test_a_lost_node_puts_the_job_back_into_the_queue(cluster, undisturbed, lost):
    """It waits there for a node, and goes on."""
    job = Job(cluster, lost.__name__, pause=0.3).trains()
    with lost(cluster):
        cluster.wait_for("a way back to the queue", lambda: job.is_in("PENDING", *OVER))
        assert job.told()["Restarts"] == "1", job.out.read_text()[-3000:]
    cluster.wait_for("the node", lambda: in_service(cluster), 60)
    assert job.end() == ("COMPLETED", 1, "0:0"), job.out.read_text()[-3000:]
    assert job.resumed() == 1 and weights(job.run) == undisturbed
