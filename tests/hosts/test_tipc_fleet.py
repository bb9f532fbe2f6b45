"""Several nodes: the same command on each. Two addresses of loopback, and two hosts in network namespaces."""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.harness import free_ports, wait_for
from tests.hosts import namespaces
from tests.tipc_files import FLEET_FILE as CONFIG
from tests.tipc_files import SHORT, edited, model_repository, repository, surroundings

LITE = "lite_train_lite_infer"
NODES = ("127.0.0.2", "127.0.0.3")
FLEET = ("gpu_list:0|0,1", f"gpu_list:{','.join(NODES)};0,1")


class Node:
    """A runner that was started, by `python -m ppfleet tipc run` or by the shell script."""

    def __init__(self, directory, command, env, before=()):
        self.directory = directory
        before_this = len(list(directory.glob("node*.out")))
        self.output = (directory / f"node{before_this}.out").open("w+")
        self.process = subprocess.Popen(
            [*before, *command], cwd=directory, env=surroundings(env), stdout=self.output, stderr=subprocess.STDOUT
        )

    def end(self, seconds=150):
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
        self.output.seek(0)
        text = self.output.read()
        self.output.close()
        return code, text


def start(directory, address, port, *options, config="file.txt"):
    command = [sys.executable, "-m", "ppfleet", "tipc", "run", config, LITE, *options]
    return Node(directory, command, {"POD_IP": address, "FLAGS_START_PORT": str(port)})


def run(directories, *options, configs=("file.txt", "file.txt")):
    port = free_ports(4)[-1]
    nodes = [start(d, a, port, *options, config=c) for d, a, c in zip(directories, NODES, configs)]
    return [node.end() for node in nodes]


def results(path):
    return [(e["stage"], e["status"], e["reason"]) for e in json.loads((path / "results.json").read_text())["commands"]]


@pytest.fixture
def repo(tmp_path):
    (repository(tmp_path / "a") / "file.txt").write_text(edited(SHORT, FLEET))
    return tmp_path / "a"


def test_nodes_that_share_a_directory(repo):
    (code, output), (other, _) = run([repo, repo])
    assert (code, other) == (0, 0), output
    root = repo / "test_tipc/output/toy" / LITE
    assert [entry[:2] for entry in results(root)] == [(s, "ok") for s in ("train", "eval", "export", *["infer"] * 4)]
    away = "the model is on 127.0.0.2"
    assert results(root / "node_1") == [
        ("train", "ok", ""), *((s, "skipped", away) for s in ("eval", "export", *["infer"] * 4))
    ]  # fmt: skip
    told = json.loads((root / "results.json").read_text())["nodes"]["127.0.0.3"]
    assert told["node"]["number"] == 1 and "Other nodes" in (root / "report.html").read_text()
    assert f"skipped: {away} - toy - " in (root / "node_1/results_python.log").read_text()
    workers = sorted(str(path.relative_to(root)) for path in root.rglob("workerlog.*"))
    assert len(workers) == 4 and workers[2].startswith("node_1/logs/")


def test_nodes_with_directories_of_their_own(repo, tmp_path):
    other = tmp_path / "b"
    shutil.copytree(repo, other)
    (code, output), (second, _) = run([repo, other])
    assert (code, second) == (0, 0), output
    root = "test_tipc/output/toy/" + LITE
    assert [status for _, status, _ in results(other / root)] == ["ok", *["skipped"] * 6]
    assert "results are on that machine" in (repo / root / "report.html").read_text()


def test_a_broken_export_on_the_first_node(repo):
    (repo / "file.txt").write_text(
        edited(SHORT, FLEET, ("norm_export:export.py", "norm_export:export.py --break=fail"))
    )
    (code, output), (other, _) = run([repo, repo])
    assert (code, other) == (1, 0)
    assert "failed: norm_train_gpus_0,1_nodes_2.export: exit code 3" in output


def test_a_failure_on_the_other_node_is_red_there(repo):
    body = "\nif os.environ['PADDLE_TRAINER_ID'] == '3': sys.exit('trainer 3 fails')\n"
    (repo / "train.py").write_text((repo / "train.py").read_text() + body)
    (code, first), (other, output) = run([repo, repo])
    root = repo / "test_tipc/output/toy" / LITE
    assert other == 1 and "trainer 3 fails" in (root / "node_1/results.json").read_text(), output
    assert code == 1 and "failed: 127.0.0.3: norm_train_gpus_0,1_nodes_2.train" in first  # they share the directory
    assert '<span class="pill failed">failed</span></h1>' in (root / "report.html").read_text()


def test_a_node_that_does_not_come_is_named(repo):
    node = start(repo, NODES[0], free_ports(4)[-1], "--wait", "4")
    code, output = node.end()
    assert code == 1 and "waiting for 127.0.0.3: start the same command there" in output
    assert "127.0.0.3 did not join within 4 s" in output
    root = repo / "test_tipc/output/toy" / LITE
    assert [s for _, s, _ in results(root)] == ["failed", *["skipped"] * 6]
    node = start(repo, NODES[1], free_ports(4)[-1], "--wait", "4")
    code, output = node.end()
    assert code == 1 and "waiting for 127.0.0.2" in output and "127.0.0.2 did not join" in output


def test_ctrl_c_while_waiting(repo):
    """It ends without a word too many, and the last run's results are untouched."""
    kept = repo / "test_tipc/output/toy" / LITE / "results_python.log"
    kept.parent.mkdir(parents=True)
    kept.write_text("of the last run")
    node = start(repo, NODES[0], free_ports(4)[-1])
    wait_for(lambda: "waiting for" in (repo / "node0.out").read_text(), 30, "the node waits for the other")
    node.process.send_signal(signal.SIGINT)
    code, output = node.end(20)
    assert code == 130 and "Traceback" not in output and kept.read_text() == "of the last run"


def test_a_taken_meeting_port_leaves_the_last_results_whole(repo):
    import socket

    kept = repo / "test_tipc/output/toy" / LITE / "old_run/latest.pdparams"
    kept.parent.mkdir(parents=True)
    kept.write_text("of the last run")
    port = free_ports(4)[-1]
    with socket.socket() as taken:
        taken.bind((NODES[0], port - 1))
        taken.listen()
        code, output = start(repo, NODES[0], port).end()
    assert code == 1 and f"cannot listen at 127.0.0.2 port {port - 1}" in output
    moved = repo / f"test_tipc/output/toy/{LITE}.previous/old_run/latest.pdparams"
    assert moved.read_text() == "of the last run" and not kept.exists()


def test_nodes_wait_for_each_other_for_as_long_as_it_takes(repo):
    """The first node evaluates, exports and infers between two runs, longer than --wait; the other one waits for it."""
    (repo / "eval.py").write_text("import time; time.sleep(6)")
    text = edited(SHORT, ("gpu_list:0|0,1", f"gpu_list:-1|{','.join(NODES)};0,1|{','.join(NODES)};0"))
    (repo / "file.txt").write_text(text)
    (code, output), (other, second) = run([repo, repo], "--wait", "4")
    assert (code, other) == (0, 0), second
    assert "waiting for 127.0.0.2 (norm_train_gpus_" in second  # and at what it is


def test_a_node_that_dies_is_noticed(repo):
    body = "\nif 'gpus_0_' in options['output-dir']: print('now I hang', flush=True); time.sleep(60)\n"
    (repo / "train.py").write_text((repo / "train.py").read_text() + body)
    (repo / "file.txt").write_text(edited(SHORT, ("gpu_list:0|0,1", f"gpu_list:0|{','.join(NODES)};0,1")))
    port = free_ports(4)[-1]
    first, second = (start(repo, address, port) for address in NODES)
    log = repo / f"test_tipc/output/toy/{LITE}/logs/norm_train_gpus_0_nodes_1.train.log"
    wait_for(lambda: log.exists() and "now I hang" in log.read_text(), 60, "the first node's own run hangs")
    first.process.kill()
    code, output = second.end(30)
    assert code == 1 and "127.0.0.2 ended before norm_train_gpus_0,1_nodes_2.train" in output
    first.end()


def test_nodes_with_different_files(repo):
    (repo / "other.txt").write_text(edited(SHORT, FLEET, ("eval:eval.py", "eval:null")))
    (code, output), (other, second) = run([repo, repo], configs=("file.txt", "other.txt"))
    assert (code, other) == (1, 1)
    for text in (output, second):
        assert "127.0.0.3 has another TIPC file, mode or version of ppfleet than 127.0.0.2" in text


def test_strangers_at_the_meeting_do_not_disturb(repo):
    import socket

    port = free_ports(4)[-1]
    first = start(repo, NODES[0], port)
    noise = (b"GET / HTTP/1.1\r\n\r\n", b"x" * 100000, b'{"node": 1}\n', b"[]\n", b"", b"[" * 4000 + b"\n")

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex((NODES[0], port - 1)) == 0

    wait_for(listens, 30, "the first node listens")
    for message in noise:
        with socket.create_connection((NODES[0], port - 1), 2) as stranger:
            stranger.sendall(message)
    second = start(repo, NODES[1], port)
    assert [first.end()[0], second.end()[0]] == [0, 0]


def test_which_node_this_is(repo):
    env = {"FLAGS_START_PORT": "17000"}
    command = [sys.executable, "-m", "ppfleet", "tipc", "run", "file.txt", LITE]
    code, output = Node(repo, command, env).end()
    assert code == 2 and "127.0.0.2 and 127.0.0.3 are both this machine" in output and "POD_IP=127.0.0.2" in output
    (repo / "file.txt").write_text(edited(SHORT, ("gpu_list:0|0,1", "gpu_list:198.51.100.1,198.51.100.2;0")))
    code, output = Node(repo, command, env).end()
    assert code == 2 and "none of 198.51.100.1, 198.51.100.2 is an address of this machine" in output
    code, output = Node(repo, command, {"POD_IP": "198.51.100.9"}).end()
    assert code == 2 and "POD_IP=198.51.100.9 is not one of" in output


@pytest.mark.two_hosts
def test_the_documents_commands_on_two_hosts(tmp_path):
    """`gpu_list:192.168.0.1,192.168.0.2;0,1`, prepare.sh and test_train_inference_python.sh on each host, for real."""
    hosts = [model_repository(tmp_path / side) for side in "ab"]
    env = {"PYTHON": sys.executable, "PYTHONPATH": ""}
    with namespaces.two_hosts() as before:
        for script in ("prepare", "test_train_inference_python"):
            command = ["bash", f"test_tipc/{script}.sh", CONFIG, LITE]
            nodes = [Node(host, command, env, words) for host, words in zip(hosts, before)]
            ends = [node.end(240) for node in nodes]
            assert [code for code, _ in ends] == [0, 0], "\n".join(text[-3000:] for _, text in ends)
    roots = [host / "test_tipc/output/mobilenet_v3_small" / LITE for host in hosts]
    assert [status for _, status, _ in results(roots[0])] == ["ok"] * 7
    assert [status for _, status, _ in results(roots[1])] == ["ok", *["skipped"] * 6]
    assert {reason for _, status, reason in results(roots[1]) if status == "skipped"} == {"the model is on 192.168.0.1"}
    train = (roots[0] / "results_python.log").read_text()
    assert re.search(r"--ips=192.168.0.1,192.168.0.2 --gpus=0,1 .*nodes_2 .*!", train)


@pytest.mark.slow
def test_the_real_chain_on_two_addresses_without_root(tmp_path, lite_data):
    """MobileNetV3-small through the launcher on 127.0.0.2 and 127.0.0.3: trained, evaluated, exported, benchmarked."""
    repo = model_repository(tmp_path / "repo")
    text = edited(
        (repo / CONFIG).read_text(), ("gpu_list:192.168.0.1,192.168.0.2;0,1", f"gpu_list:{','.join(NODES)};0")
    )
    (repo / "file.txt").write_text(text)
    shutil.copytree(lite_data, repo / "lite_data")
    (code, output), (other, _) = run([repo, repo])
    assert (code, other) == (0, 0), output[-3000:]
    root = repo / "test_tipc/output/mobilenet_v3_small" / LITE
    commands = json.loads((root / "results.json").read_text())["commands"]
    assert [c["status"] for c in commands] == ["ok"] * 7
    assert all(c["figures"]["inference_ms"] > 0 and c["figures"]["data_num"] == 10 for c in commands[3:])
    assert "top1: " in commands[1]["tail"] and commands[2]["tail"].startswith("exported to")
