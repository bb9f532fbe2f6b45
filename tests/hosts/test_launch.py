"""`python -m ppfleet launch`: the documents' commands on two hosts, missing hosts, restarts, nothing left behind."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import psutil
import pytest

from tests.harness import ROOT, free_ports, wait_for, wait_for_the_end_of
from tests.hosts import namespaces
from tests.tipc_files import surroundings

needs_hosts = pytest.mark.two_hosts
LOOPBACK = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def data(lite_data, tmp_path_factory):
    """Few of the digits: what is tested here does not need many."""
    path = tmp_path_factory.mktemp("few") / "lite_data"
    shutil.copytree(lite_data, path)
    for folder in path.glob("*/?"):
        for image in sorted(folder.glob("*.png"))[40:]:
            image.unlink()
    return path


class Host:
    """`ppfleet launch` of tools/train.py, started on one host."""

    def __init__(self, place, name, data, flags, before=(), env=None, script=None):
        self.log_dir = place / f"log_{name}"
        train = ["tools/train.py", "--device=cpu", f"--data-path={data}", f"--output-dir={place}/run", "--epochs=2",
                 "--image-size=32", "--batch-size=8", "--workers=0", "--save-every=5"]  # fmt: skip
        command = [sys.executable, "-m", "ppfleet", "launch", *flags, f"--log_dir={self.log_dir}", *(script or train)]
        self.out = (place / f"{name}.out").open("w+")
        env = {"GLOO_SOCKET_IFNAME": "", **(env or {})} if before else env  # the harness's own is for loopback
        self.process = subprocess.Popen(
            [*before, *command], cwd=ROOT, env=surroundings(env), stdout=self.out, stderr=subprocess.STDOUT
        )

    def output(self):
        self.out.seek(0)
        return self.out.read()

    def end(self, seconds=150):
        try:
            return self.process.wait(seconds), self.output()
        finally:
            self.process.kill()

    def tree(self):
        """Everything below: guard, Paddle's launcher, trainers."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.Error:  # it has just ended
                continue
            found.append((process, "guard" if "process_tree.py" in " ".join(words[:3]) else
                          "launcher" if "paddle.distributed.launch" in words else
                          "trainer" if any("train.py" in word for word in words) else "other"))  # fmt: skip
        return found

    def of_kind(self, kind):
        return [process for process, found in self.tree() if found == kind]


SLOW_VICTIMS = [pytest.param(*each, marks=pytest.mark.slow) for each in ((0, "guard"), (0, "trainer"), (1, "launcher"))]


def weights(place):
    return hashlib.sha256((place / "run/latest.pdparams").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """The weights of two ranks on one host, without anything that happens to them."""
    place = tmp_path_factory.mktemp("undisturbed")
    code, output = Host(place, "a", data, ["--nproc_per_node=2"]).end()
    assert code == 0, output[-3000:]
    return weights(place)


@needs_hosts
@pytest.mark.parametrize("own_name", ["127.0.1.1", *(pytest.param(n, marks=pytest.mark.slow) for n in ("right", ""))])
def test_the_documents_command_on_two_hosts(tmp_path, data, undisturbed, own_name):
    """Host names that stand for the right address, for loopback, for nothing: the same weights as on one host."""
    flags = ["--ips=192.168.0.1,192.168.0.2", "--gpus=0"]
    with namespaces.two_hosts(own_name) as before:
        hosts = [Host(tmp_path, name, data, flags, words) for name, words in zip("ab", before)]
        ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [0, 0], ends[0][1][-3000:] + ends[1][1][-3000:]
    assert "no card here: --gpus=0 starts a CPU process" in ends[0][1]
    assert weights(tmp_path) == undisturbed


def cpu_seconds_of_children():
    """Of those that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def pair(tmp_path, data, *flags, env=None):
    port = free_ports(3)[-1]
    more = [f"--ips={','.join(LOOPBACK)}", f"--start_port={port}", *flags]
    return [Host(tmp_path, f"{n}", data, [*more, f"--host={host}"], env=env) for n, host in enumerate(LOOPBACK)]


def test_hosts_with_another_script_or_list(tmp_path, data):
    port = free_ports(3)[-1]
    flags = [f"--ips={','.join(LOOPBACK)}", f"--start_port={port}"]
    other = tmp_path / "other.py"
    other.write_text("")
    hosts = [Host(tmp_path, "a", data, [*flags, "--host=127.0.0.2"]),
             Host(tmp_path, "b", data, [*flags, "--host=127.0.0.3"], script=[str(other)])]  # fmt: skip
    for code, output in [host.end(60) for host in hosts]:
        assert (
            code == 1 and "127.0.0.3 has another list of hosts, script or version of ppfleet than 127.0.0.2" in output
        )


@pytest.mark.parametrize("here", [0, 1])
def test_a_missing_host_is_named_without_burning_a_core(tmp_path, data, here):
    flags = [f"--ips={','.join(LOOPBACK)}", f"--host={LOOPBACK[here]}", f"--start_port={free_ports(3)[-1]}", "--wait=5"]
    before = cpu_seconds_of_children()
    code, output = Host(tmp_path, "a", data, flags).end()
    used = cpu_seconds_of_children() - before
    assert code == 1 and f"{LOOPBACK[1 - here]} did not join within 5 s" in output
    assert "start the same command there" in output and used < 2.5  # a busy loop would use the 5 s
    assert not list(tmp_path.glob("log_a/*"))  # no trainer was started


@needs_hosts
@pytest.mark.parametrize("here", [0, 1])
def test_a_missing_host_that_is_counted_and_not_listed(tmp_path, data, here):
    """Paddle's own launcher waits for ever there, and burns a core."""
    with namespaces.two_hosts() as before:
        flags = ["--master=192.168.0.1:8090", "--nnodes=2", "--wait=4"]
        code, output = Host(tmp_path, "a", data, flags, before[here]).end(60)
    assert code == 1 and f"{('another machine', '192.168.0.1')[here]} did not join within 4 s" in output


@needs_hosts
def test_hosts_that_are_counted_and_not_listed(tmp_path, data, undisturbed):
    flags = ["--master=192.168.0.1:8090", "--nnodes=2", "--nproc_per_node=1"]
    with namespaces.two_hosts("right") as before:
        hosts = [Host(tmp_path, name, data, flags, words) for name, words in zip("ab", before)]
        ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [0, 0], ends[0][1][-3000:] + ends[1][1][-3000:]
    assert weights(tmp_path) == undisturbed


def running(hosts, place):
    """Both hosts train, and a checkpoint is there."""
    wait_for(
        lambda: list(place.glob("run/checkpoints/*step*/manifest.json")) and all(h.of_kind("trainer") for h in hosts),
        60, "a checkpoint, and trainers on both hosts", lambda: [host.output()[-3000:] for host in hosts],
    )  # fmt: skip


@pytest.mark.parametrize(("victim", "kind"), [(1, "trainer"), *SLOW_VICTIMS])
def test_a_job_that_dies_is_started_again(tmp_path, data, undisturbed, victim, kind):
    hosts = pair(tmp_path, data, "--restarts=3")
    running(hosts, tmp_path)
    hosts[victim].of_kind(kind)[0].kill()
    ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [0, 0], ends[0][1][-3000:] + ends[1][1][-3000:]
    assert all("restarting, 3 restarts left" in output for _, output in ends)
    assert "resumed from" in ends[0][1] and weights(tmp_path) == undisturbed


def test_sigterm_on_one_host_saves_and_ends_the_job_on_both(tmp_path, data, undisturbed):
    """Whoever sends SIGTERM wants the machine: no restart; the same command later goes on to the same weights."""
    hosts = pair(tmp_path, data, "--restarts=3")
    running(hosts, tmp_path)
    hosts[1].process.terminate()
    ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [75, 75], ends[0][1][-3000:] + ends[1][1][-3000:]
    assert all("starting again" not in output for _, output in ends)
    assert "all ranks save at the next step boundary" in ends[0][1]
    ends = [host.end() for host in pair(tmp_path, data)]
    assert [code for code, _ in ends] == [0, 0] and "resumed from" in ends[0][1] and weights(tmp_path) == undisturbed


@needs_hosts
@pytest.mark.slow
def test_a_link_that_is_cut_for_a_minute(tmp_path, data, undisturbed):
    flags = ["--ips=192.168.0.1,192.168.0.2", "--nproc_per_node=1", "--restarts=3"]
    with namespaces.two_hosts() as before:
        hosts = [Host(tmp_path, name, data, flags, words) for name, words in zip("ab", before)]
        wait_for(lambda: list(tmp_path.glob("run/checkpoints/*step*/manifest.json")), 60, "a checkpoint")
        with namespaces.cut(before):
            time.sleep(60)
        ends = [host.end(300) for host in hosts]
    assert [code for code, _ in ends] == [0, 0], ends[0][1][-3000:] + ends[1][1][-3000:]
    assert all("starting again" in output for _, output in ends) and weights(tmp_path) == undisturbed


def test_without_restarts_left_it_ends(tmp_path, data):
    hosts = pair(tmp_path, data)
    running(hosts, tmp_path)
    hosts[1].of_kind("trainer")[0].kill()
    ends = [host.end() for host in hosts]
    assert all(code != 0 for code, _ in ends)
    told = (
        r"launch: (the job on 127.0.0.\d exited with code|the trainers on this host exited with code|"
        r"lost the connection to 127.0.0.\d)"
    )
    assert all(re.search(told, output) and "; restarting, " not in output for _, output in ends), ends


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("launch", signal.SIGKILL),
        ("launch", signal.SIGINT),
        ("launcher", signal.SIGKILL),
        ("guard", signal.SIGKILL),
    ],
)
def test_no_trainer_is_left_behind(tmp_path, data, who, number):
    host = Host(tmp_path, "a", data, ["--nproc_per_node=2"])
    wait_for(lambda: len(host.of_kind("trainer")) >= 2, 60, "two trainers", host.output)
    everybody = [process for process, _ in host.tree()]
    (psutil.Process(host.process.pid) if who == "launch" else host.of_kind(who)[0]).send_signal(number)
    code, _ = host.end(60)
    assert code != 0 and (number != signal.SIGINT or code == 130)
    wait_for_the_end_of(everybody)


def test_secrets_do_not_reach_the_log_directory(tmp_path, data):
    """And the script has them all the same."""
    script = tmp_path / "shows.py"
    script.write_text("import os, sys\nprint('the script got', len(os.environ['MY_TOKEN']), sys.argv[1:], __file__)\n")
    env = {"MY_TOKEN": "hunter2" * 3, "http_proxy": "http://me:hunter2@127.0.0.1:9"}
    host = Host(tmp_path, "a", data, ["--nproc_per_node=2"], env=env, script=[str(script), "--x"])
    code, output = host.end()
    assert code == 0 and f"the script got 21 ['--x'] {script}" in output
    logs = [path for path in host.log_dir.rglob("*") if path.is_file()]
    assert len(logs) >= 3 and not any(b"hunter2" in path.read_bytes() for path in logs)


def test_what_is_wrong_here_is_said_before_anything_starts(tmp_path, data):
    import socket

    def ended(*flags, script=None):
        return Host(tmp_path, "a", data, flags, script=script).end(30)

    code, output = ended(script=["no_such_script.py"])
    assert code == 1 and "script no_such_script.py not found in" in output
    port = free_ports(1)[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", port))
        taken.listen()
        code, output = ended("--ips=127.0.0.2", f"--start_port={port}")
    assert code == 1 and f"port {port} of 127.0.0.2 is in use by process" in output
    if version("paddlepaddle").startswith("3."):
        code, output = ended("--server_num=1", "--worker_num=1")
        assert code == 1 and "built without the parameter server" in output
