"""The commands of the Kubernetes manifests, run as pods would: each in its network, with its name, as process 1.

There is no Kubernetes here: what the kubelet and the operator set (names, hosts file, environment) is set by hand.
"""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.harness import ROOT, wait_for
from tests.hosts import counted, namespaces
from tests.tipc_files import surroundings

pytestmark = pytest.mark.two_hosts
DOMAIN = ".ppfleet.default.svc.cluster.local"


class Pods:
    """Two pods of a manifest, with its command and another script."""

    def __init__(self, manifest, place, before):
        documents = list(yaml.safe_load_all((ROOT / f"deploy/cluster/kubernetes/{manifest}").read_text()))
        spec = next(each["spec"] for each in documents if each["kind"] in ("Job", "PaddleJob"))
        operator = "paddleReplicaSpecs" in spec
        template = spec["paddleReplicaSpecs"]["Worker"]["template"] if operator else spec["template"]
        self.container = template["spec"]["containers"][0]
        self.names = ["ppfleet-worker-0", "ppfleet-worker-1"] if operator else ["ppfleet-0", "ppfleet-1"]
        self.operator, self.place, self.before, self.run = operator, place, before, place / "run"
        self.pods = [None, None]
        # A pod's own name is in its hosts file; the others' are the business of the cluster's DNS.
        for words in before:
            with Path(f"/etc/netns/{words[3]}/hosts").open("a") as hosts:
                for address, name in zip(namespaces.ADDRESSES, self.names):
                    print(address, name if operator else f"{name}{DOMAIN} {name}", file=hosts)

    def environment(self, number):
        env = {each["name"]: each["value"] for each in self.container.get("env", ())}
        env.update(
            HOSTNAME=self.names[number], GLOO_SOCKET_IFNAME="", PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"
        )
        if self.operator:
            master = (namespaces.ADDRESSES[0], self.names[0])[number]
            return {**env, "PADDLE_NNODES": "2", "PADDLE_JOB_ID": "ppfleet", "PADDLE_MASTER": f"{master}:36543"}
        return {**env, "JOB_COMPLETION_INDEX": str(number)}

    def start(self, number):
        shell, *arguments = self.container["args"]
        own = arguments[: arguments.index("tools/train.py")]
        words = [*self.container["command"], shell.replace("/runs/", f"{self.place}/"), *own]
        pod = ["sh", "-c", 'hostname "$HOSTNAME" && exec unshare --pid --fork --kill-child --mount-proc "$@"', "sh"]
        with (self.place / f"{self.names[number]}.out").open("a") as out:
            self.pods[number] = subprocess.Popen(
                [*self.before[number], *pod, *words, "tests/hosts/counted.py", str(self.run), "0.1"],
                cwd=ROOT, env={**surroundings(), **self.environment(number)}, stdout=out, stderr=out,
            )  # fmt: skip

    def signal(self, number, which):
        """To process 1 of a pod."""
        psutil.Process(self.pods[number].pid).children()[0].send_signal(which)

    def train(self, steps=6):
        """Wait until so many steps more were made."""
        goal = len(counted.lines(self.run)) + steps
        wait_for(lambda: len(counted.lines(self.run)) >= goal, 60, f"{goal} steps", self.output)

    def output(self):
        return "\n\n".join((self.place / f"{name}.out").read_text()[-3000:] for name in self.names)

    def codes(self):
        return [pod.wait(120) for pod in self.pods]


@pytest.fixture
def pods(request, tmp_path):
    with namespaces.two_hosts("") as before:
        made = Pods(request.param, tmp_path, before)
        for number in range(2):
            made.start(number)
        try:
            yield made
        finally:
            for pod in made.pods:
                pod.kill()
                pod.wait(20)


BOTH = pytest.mark.parametrize(
    "pods", ["job.yaml", pytest.param("paddlejob.yaml", marks=pytest.mark.slow)], indirect=True
)
ONE = pytest.mark.parametrize("pods", ["job.yaml"], indirect=True)


@BOTH
def test_they_find_each_other(pods):
    assert pods.codes() == [0, 0], pods.output()
    assert counted.every_sample_once(pods.run) and {line[1] for line in counted.kept(pods.run)} == {4}
    assert {path.name for path in (pods.place / "log").iterdir()} == set(pods.names)


@ONE
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_pod_that_is_lost_is_awaited_and_replaced(pods, lost):
    pods.train()
    pods.signal(lost, signal.SIGKILL)
    assert pods.pods[lost].wait(20) != 0
    pods.start(lost)
    assert pods.codes() == [0, 0], pods.output()
    assert counted.every_sample_once(pods.run) and "resumed from" in pods.output()


@ONE
@pytest.mark.slow
def test_sigterm_to_one_pod_ends_both_with_the_code_that_is_not_counted(pods):
    pods.train()
    pods.signal(1, signal.SIGTERM)
    assert pods.codes() == [75, 75], pods.output()
    for number in range(2):
        pods.start(number)
    assert pods.codes() == [0, 0] and counted.every_sample_once(pods.run) and "resumed from" in pods.output()
