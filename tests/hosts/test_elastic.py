"""Paddle's elastic mode with a real etcd, as docs/clusters.md starts it: a host leaves and returns, a link is cut."""

import contextlib
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest

from tests.harness import ROOT, wait_for
from tests.hosts import counted, namespaces
from tests.tipc_files import surroundings

LACKING = "" if shutil.which("etcd") else "needs etcd: make debian-packages"
LACKING = LACKING or ("" if find_spec("etcd3") else "needs etcd3: pip install -e '.[dev]'")
pytestmark = [pytest.mark.slow, pytest.mark.two_hosts, pytest.mark.skipif(bool(LACKING), reason=LACKING or "-")]
ETCD = f"{namespaces.ADDRESSES[0]}:2379"


class Hosts:
    """Two hosts, an etcd on the first, and a rank on each."""

    def __init__(self, place, before):
        self.place, self.before, self.run = place, before, place / "run"
        self.pause = 0.2  # seconds a step
        self.supervised = set()  # hosts on which a launcher that fails is started again
        self.started, self.processes = 0, {}
        peer = "http://127.0.0.1:2380"
        urls = [f"--listen-client-urls=http://{ETCD}", f"--advertise-client-urls=http://{ETCD}"]
        self.start("etcd", 0, ["etcd", f"--data-dir={place}/etcd", f"--listen-peer-urls={peer}", *urls])

    def start(self, name, number, words, **env):
        self.started += 1
        with (self.place / f"{name}-{self.started}.out").open("w") as out:
            self.processes[name] = subprocess.Popen(
                [*self.before[number], *words], cwd=ROOT, env=surroundings(env), stdout=out, stderr=out
            )

    def script(self, number):
        flags = [f"--host={namespaces.ADDRESSES[number]}", "--nproc_per_node=1", f"--log_dir={self.place}/log{number}"]
        return [*flags, "tests/hosts/counted.py", str(self.run), str(self.pause)]

    def elastic(self, number, max_restart=3):
        words = [sys.executable, "-m", "paddle.distributed.launch", f"--master=etcd://{ETCD}", "--nnodes=1:2"]
        words += ["--job_id=job1", f"--max_restart={max_restart}", "--elastic_level=1", "--elastic_timeout=10"]
        env = {"GLOO_SOCKET_IFNAME": self.before[number][3], "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
        self.start(f"host{number}", number, [*words, *self.script(number)], **env)

    def ppfleet(self, number):
        words = [sys.executable, "-m", "ppfleet", "launch", f"--ips={','.join(namespaces.ADDRESSES)}", "--restarts=3"]
        self.start(f"host{number}", number, [*words, *self.script(number)], GLOO_SOCKET_IFNAME="")

    def wait_for(self, what, condition, seconds=90):
        def supervised():
            for number in self.supervised:
                if self.codes()[number] not in (None, 0):
                    self.elastic(number)
            return condition()

        def outputs():
            return "\n\n".join(path.read_text()[-2000:] for path in sorted(self.place.glob("host*.out")))

        wait_for(supervised, seconds, what, outputs)

    def goes_on_with(self, ranks, steps=6):
        """Wait until so many ranks have made so many steps more."""
        before = len(counted.lines(self.run))

        def made():
            return sum(line[1] == ranks for line in counted.lines(self.run)[before:]) >= steps

        self.wait_for(f"a step of {ranks} ranks", made)

    def codes(self):
        """How the launchers of both hosts ended; None: not yet."""
        return [self.processes[f"host{number}"].poll() for number in range(2)]

    def ended(self, seconds=120):
        self.wait_for("the end on both hosts", lambda: None not in self.codes(), seconds)
        return self.codes()

    def kill(self, name):
        process = self.processes[name]
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                each.kill()
        process.wait(20)


@pytest.fixture
def hosts(tmp_path):
    with namespaces.two_hosts() as before:
        made = Hosts(tmp_path, before)
        try:
            yield made
        finally:
            for name in list(made.processes):
                made.kill(name)


def test_a_host_leaves_and_returns(hosts):
    hosts.elastic(0)
    hosts.elastic(1)
    hosts.goes_on_with(2)
    hosts.supervised = {0}  # who is left sometimes gives up at once: `peer not ready`
    hosts.kill("host1")
    hosts.goes_on_with(1)
    hosts.elastic(1)
    hosts.supervised = {0, 1}
    hosts.goes_on_with(2)
    assert hosts.ended() == [0, 0]
    assert counted.every_sample_once(hosts.run)
    assert {line[1] for line in counted.kept(hosts.run)} == {1, 2}


def test_a_partition_longer_than_the_lease_needs_a_new_start(hosts):
    """Paddle does not bring the hosts together again: each goes on alone until its restarts are used up. The run
    directory lets in one at a time, so that nothing is lost, and the same commands go on."""
    hosts.pause = 0.5
    hosts.elastic(0, max_restart=1)
    hosts.elastic(1, max_restart=1)
    hosts.goes_on_with(2)
    with namespaces.cut(hosts.before):
        hosts.goes_on_with(1)
    hosts.ended()
    assert not counted.every_sample_once(hosts.run)
    hosts.pause = 0.0
    hosts.elastic(0)
    hosts.elastic(1)
    assert hosts.ended() == [0, 0]
    assert counted.every_sample_once(hosts.run)


def test_the_same_partition_with_ppfleet_launch(hosts):
    hosts.ppfleet(0)
    hosts.ppfleet(1)
    hosts.goes_on_with(2)
    with namespaces.cut(hosts.before):
        time.sleep(30)  # the partition itself; etcd's lease would be 10 s
    assert hosts.ended() == [0, 0]
    assert counted.every_sample_once(hosts.run)
    assert {line[1] for line in counted.kept(hosts.run)} == {2}
