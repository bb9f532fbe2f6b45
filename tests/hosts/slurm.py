"""A Slurm of two nodes on this machine: one daemon a node, in the network namespaces of `namespaces.py`.

Everything it writes is in one directory; no service of the machine is used. Debian's packages: `make debian-packages`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

from tests.harness import wait_for
from tests.hosts import namespaces
from tests.tipc_files import surroundings

CONFIGURATION = """\
ClusterName=ppfleet
SlurmctldHost={a}({ADDRESSES[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=1
SlurmdTimeout=15
SlurmctldTimeout=10
KillWait=30
MinJobAge=3600
SchedulerParameters=sched_interval=2
NodeName={a} NodeAddr={ADDRESSES[0]} CPUs=2
NodeName={b} NodeAddr={ADDRESSES[1]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    programs = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    return namespaces.missing() or (f"needs {', '.join(programs)}: make debian-packages" if programs else "")


class Cluster:
    """What an administrator and a user do: nodes that come and go, `sbatch`, `scontrol`."""

    def __init__(self, place: Path, before: list[list[str]]) -> None:
        self.place, self.before = place, before
        self.nodes = [words[3] for words in before]
        self.env = surroundings(
            {"SLURM_CONF": f"{place}/slurm.conf", "GLOO_SOCKET_IFNAME": "", "PYTHON": sys.executable}
        )
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> None:
        with (self.place / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(words, stdout=log, stderr=log, env=self.env, cwd=self.place))

    def start_node(self, number: int) -> None:
        self.start(*self.before[number], "slurmd", "-D")

    def crash(self, number: int) -> None:
        """Everything that runs on a node is gone: Slurm's daemon, its steps, the job."""
        name = self.nodes[number]
        while pids := subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for daemon in self._daemons:
                daemon.poll()
            time.sleep(0.05)

    def run(self, *words: str) -> str:
        """What a command prints on the first node."""
        done = subprocess.run(
            [*self.before[0], *words], cwd=self.place, env=self.env, text=True, capture_output=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, what: str, condition: Callable[[], object], seconds: float = 120) -> None:
        wait_for(
            condition,
            seconds,
            what,
            lambda: self.run("scontrol", "show", "job") + self.run("sinfo", "--Node", "--long"),
        )

    def idle(self) -> int:
        """How many nodes are up and free."""
        with contextlib.suppress(AssertionError):  # the controller does not answer yet
            return self.run("sinfo", "--Node", "--noheader", "--format=%T").split().count("idle")
        return 0

    def end(self) -> None:
        for number in range(len(self.nodes)):
            self.crash(number)
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(20)


@contextlib.contextmanager
def cluster(place: Path) -> Iterator[Cluster]:
    """Two idle nodes; at the end, the daemons and whatever still runs on the nodes are gone."""
    (place / "state").mkdir()
    key, socket = place / "munge.key", place / "munge.socket"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    with namespaces.two_hosts() as before:
        made = Cluster(place, before)
        a, b = made.nodes
        text = CONFIGURATION.format(a=a, b=b, place=place, ADDRESSES=namespaces.ADDRESSES)
        (place / "slurm.conf").write_text(text)
        (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        try:
            files = [f"--{name}-file={place}/munge.{name}" for name in ("key", "pid", "seed", "log")]
            made.start("munged", "--foreground", "--force", f"--socket={socket}", *files)
            made.wait_for("munge", socket.exists, 20)
            made.start(*before[0], "slurmctld", "-D")
            for number in range(2):
                made.start_node(number)
            made.wait_for("two idle nodes", lambda: made.idle() == 2, 60)
            yield made
        finally:
            made.end()
