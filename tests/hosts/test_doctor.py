"""The doctor against planted faults: each is found and named, and a healthy pair is all green."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from tests.harness import ROOT, free_ports
from tests.hosts import namespaces
from tests.tipc_files import surroundings

needs_hosts = pytest.mark.two_hosts
LOOPBACK = ("127.0.0.2", "127.0.0.3")


class Doctor:
    def __init__(self, *flags, before=(), where=ROOT, env=None):
        env = surroundings({"PYTHONPATH": str(ROOT), **(env or {})})
        command = [*before, sys.executable, "-m", "ppfleet", "doctor", "--json", *flags]
        self.process = subprocess.Popen(
            command, cwd=where, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self):
        out, err = self.process.communicate(timeout=40)
        assert "Traceback" not in err, err
        return self.process.returncode, json.loads(out) if out else err


def pair(*flags, first=(), second=(), places=(ROOT, ROOT), envs=({}, {}), before=((), ()), ips=LOOPBACK, hosts=True):
    port = free_ports(4)[-1]
    doctors = []
    for number, more in enumerate((first, second)):
        own = [f"--host={ips[number]}"] if hosts else []
        doctors.append(Doctor(f"--ips={','.join(ips)}", *own, f"--start_port={port}", *flags, *more,
                              before=before[number], where=places[number], env=envs[number]))  # fmt: skip
    return [doctor.end() for doctor in doctors]


def problems(findings, level="error"):
    return [f"{f['check']}: {f['host']}: {f['text']}" for f in findings if f["level"] == level]


@needs_hosts
def test_a_healthy_pair_is_all_green(tmp_path):
    with namespaces.two_hosts("right") as before:
        for code, findings in pair("--gpus=0,1", before=before, ips=namespaces.ADDRESSES, hosts=False):
            assert code == 0 and problems(findings) + problems(findings, "warning") == []
            checks = {f["check"] for f in findings}
            assert {"own address", "ports", "reachable", "speed", "clock", "code", "PaddlePaddle", "/dev/shm"} <= checks


def test_an_address_that_is_not_listed():
    code, findings = Doctor("--ips=198.51.100.1,198.51.100.2").end()
    assert code == 1 and "none of 198.51.100.1, 198.51.100.2 is an address of this machine" in problems(findings)[0]


def test_a_missing_peer():
    port = free_ports(2)[-1]
    for mine, other in (LOOPBACK, LOOPBACK[::-1]):
        flags = (f"--ips={','.join(LOOPBACK)}", f"--host={mine}", f"--start_port={port}", "--wait=3")
        code, findings = Doctor(*flags).end()
        assert code == 1 and f"{other} did not join within 3 s" in problems(findings)[0]


def test_a_port_that_is_taken():
    port = free_ports(2)[-1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", port))
        taken.listen()
        flags = (f"--ips={','.join(LOOPBACK)}", "--host=127.0.0.2", f"--start_port={port}")
        code, findings = Doctor(*flags).end()
    assert code == 1 and f"port {port} is in use by process {os.getpid()} (" in problems(findings)[0]


@needs_hosts
def test_a_blocked_port():
    """The second host's packets to one port of the first one go nowhere."""
    with namespaces.two_hosts("right") as before:
        name = before[1][3]
        rule = ["ip", "-n", name, "rule", "add", "ipproto", "tcp", "dport", "6071", "blackhole"]
        subprocess.run(rule, check=True, capture_output=True)
        ends = []
        for words in before:
            flags = (f"--ips={','.join(namespaces.ADDRESSES)}", "--nproc_per_node=2", "--start_port=6070")
            ends.append(Doctor(*flags, before=words))
        for code, findings in [doctor.end() for doctor in ends]:
            assert code == 1
            assert problems(findings) == ["reachable: 192.168.0.2: 192.168.0.1 does not answer at 6071"]


@needs_hosts
def test_names_that_stand_for_loopback():
    with namespaces.two_hosts("127.0.1.1") as before:
        for code, findings in pair(before=before, ips=namespaces.ADDRESSES, hosts=False):
            warnings = problems(findings, "warning")
            assert code == 0 and len(warnings) == 2 and all("resolves to 127.0.1.1" in text for text in warnings)
        names = [words[3] for words in before]
        code, findings = Doctor(f"--ips={','.join(names)}", before=before[0]).end()
        assert code == 1 and f"{names[0]} is 127.0.1.1 on this machine" in problems(findings)[0]


def copies(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / "tools/train.py", tmp_path / name)
        (tmp_path / name / "data").mkdir()
        (tmp_path / name / "data/1.jpg").write_text("1")
        (tmp_path / name / "config.yml").write_text("a: 1")
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("code", lambda place: (place / "train.py").write_text("other = True")),
        ("data", lambda place: (place / "data/2.jpg").write_text("2")),
        ("config", lambda place: (place / "config.yml").write_text("a: 2")),
    ],
)
def test_what_is_not_the_same_on_both(tmp_path, what, change):
    places = copies(tmp_path)
    flags = ("--data-path=data", "--config=config.yml")
    assert [problems(findings) for _, findings in pair(*flags, places=places)] == [[], []]
    change(places[1])
    for code, findings in pair(*flags, places=places):
        (problem,) = problems(findings)
        assert code == 1 and problem.startswith(f"{what}: : not the same: 127.0.0.2: ")


def test_another_version_of_paddle(tmp_path):
    info = tmp_path / "paddlepaddle-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paddlepaddle\nVersion: 9.9\n")
    other = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for code, findings in pair(envs=({}, other)):
        (problem,) = problems(findings)
        assert (
            code == 1 and problem.startswith("PaddlePaddle: : not the same") and "127.0.0.3: 9.9 (for CPU)" in problem
        )


def test_other_numbers_of_processes():
    for code, findings in pair(first=["--nproc_per_node=1"], second=["--gpus=0,1"]):
        assert code == 1 and any(
            "processes: : not the same: 127.0.0.2: 1; 127.0.0.3: 2" in p for p in problems(findings)
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root; CI runs this as root")
def test_a_small_shared_memory():
    before = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]
    code, findings = Doctor(before=before).end()
    assert code == 0 and problems(findings, "warning") == ["/dev/shm: : 64 MB free: loader workers need more"]


def test_proxies_limits_and_inputs():
    env = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.2"}
    flags = (
        "--ips=127.0.0.2,127.0.0.3",
        "--host=127.0.0.2",
        f"--start_port={free_ports(2)[-1]}",
        "--wait=1",
        "--data-path=none",
    )
    before = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    _, findings = Doctor(*flags, env=env, before=before).end()
    warnings = " ".join(problems(findings, "warning"))
    assert "http_proxy set, but 127.0.0.3 not in no_proxy" in warnings and "limit of 256" in warnings
    assert any("--data-path=none does not exist" in problem for problem in problems(findings))


def test_as_a_table_and_wrong_commands():
    command = [sys.executable, "-m", "ppfleet", "doctor"]
    done = subprocess.run(
        command, cwd=ROOT, env=surroundings(), capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("all checks passed\n")
    for words in (["--ips=a b"], ["--start_port=1"], ["--wait=x"]):
        wrong = subprocess.run(
            [*command, *words], cwd=ROOT, env=surroundings(), capture_output=True, text=True, timeout=40
        )
        assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
