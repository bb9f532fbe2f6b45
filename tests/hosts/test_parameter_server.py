"""Parameter servers through `python -m ppfleet launch`: one host and two, modes that Paddle cannot run, deaths."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from tests.harness import ROOT, free_ports
from tests.hosts import namespaces
from tests.hosts.test_launch import LOOPBACK, Host, needs_hosts, wait_for
from tests.tipc_files import surroundings

pytestmark = pytest.mark.skipif(
    version("paddlepaddle").startswith("3."), reason="PaddlePaddle 3's wheel for CPU has no parameter server"
)
EXAMPLE = str(ROOT / "examples/parameter_server.py")
LOCAL = ["--server_num=1", "--worker_num=2"]


STARTED = []


@pytest.fixture(autouse=True)
def nothing_goes_on_after_a_test():
    yield
    while STARTED:
        STARTED.pop().process.kill()


def start(place, name, flags, before=(), script=EXAMPLE):
    """One host of the job; the directory's name is in the command line of all its processes."""
    STARTED.append(Host(place, name, None, flags, before, script=[str(script), f"--save={place}/{name}.npz"]))
    return STARTED[-1]


def variant(place, changes):
    """The example, changed."""
    text = Path(EXAMPLE).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (place / "variant.py").write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "examples/mnist.py", place)
    return place / "variant.py"


def roles(host):
    """Its servers and workers."""
    found = {}
    for process in psutil.Process(host.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            env = process.environ()
            if kind := {"TRAINER": "worker", "PSERVER": "server"}.get(env.get("TRAINING_ROLE")):
                found[f"{kind} {env['PADDLE_TRAINER_ID']}" if kind == "worker" else kind] = process
    return found


def left(place):
    """Processes of the job that are still there."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if str(place) in " ".join(process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def level(text):
    """The loss of all training images at the end, as the example prints it."""
    return float(re.findall(r"the loss of all 1437 images is ([\d.]+)", text)[0])


@pytest.fixture(scope="module")
def collective():
    """The same samples with the same global batches in one process: what summed gradients come to on any number."""
    command = [sys.executable, EXAMPLE]
    done = subprocess.run(command, env=surroundings(), capture_output=True, text=True, timeout=150, check=True)
    return level(done.stdout)


def check(place, ends, collective):
    """Without any exchange the loss would be 38 % above that of collective training."""
    assert [code for code, _ in ends] == [0] * len(ends), "".join(output[-3000:] for _, output in ends)
    assert not left(place)
    losses = [level(path.read_text(errors="replace")) for path in place.glob("log_*/workerlog.*")]
    assert losses == pytest.approx([collective] * 2, rel=0.1)


def test_one_host(tmp_path, collective):
    ends = [start(tmp_path, "a", LOCAL).end()]
    check(tmp_path, ends, collective)


def listed(hosts, places):
    """A server on the first of the hosts, workers on those places."""
    return [f"--servers={hosts[0]}:{free_ports(2)[-1]}", f"--workers={','.join(hosts[place] for place in places)}"]


@pytest.mark.parametrize("places", [(1, 1), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_two_hosts_without_root(tmp_path, collective, places):
    """Also a host with nothing but the server, which ends when the workers on the other one have."""
    flags = listed(LOOPBACK, places)
    hosts = [start(tmp_path, f"{n}", [*flags, f"--host={name}"]) for n, name in enumerate(LOOPBACK)]
    check(tmp_path, [host.end() for host in hosts], collective)


@needs_hosts
def test_two_hosts(tmp_path, collective):
    flags = listed(namespaces.ADDRESSES, (0, 1))
    with namespaces.two_hosts() as before:
        hosts = [start(tmp_path, name, flags, words) for name, words in zip("ab", before)]
        check(tmp_path, [host.end() for host in hosts], collective)


GEO = 'strategy.a_sync, strategy.a_sync_configs = True, {"k_steps": 4}'
BARRIER = "fleet.fleet._runtime_handle._worker.barrier(0)"  # of GEO mode only: elsewhere it crashes
DENSE = {"sparse=True": "sparse=False"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({GEO: "strategy.a_sync = False"}, "sync mode (a_sync=False) crash in this PaddlePaddle"),
        ({GEO: "strategy.a_sync = True", BARRIER: "pass", **DENSE}, "async mode learn nothing through Executor.run"),
        (DENSE, "GEO mode exchange nothing unless"),
    ],
    ids=["sync", "async", "geo"],
)
def test_modes_that_paddle_cannot_run(tmp_path, changes, said):
    """The example refuses them, and the job fails. Paddle's own launcher returns 0 in all three modes."""
    code, output = start(tmp_path, "a", LOCAL, script=variant(tmp_path, changes)).end()
    assert code == 1 and said in output and "use GEO mode" in output, output[-3000:]
    assert not left(tmp_path)


def training(hosts):
    """All workers are in the midst of it."""
    logs = [host.log_dir / f"workerlog.{n}" for host in hosts for n in range(2 // len(hosts))]
    wait_for(
        lambda: all(log.exists() and "epoch 0" in log.read_text(errors="replace") for log in logs),
        150,
        "both workers train",
    )
    return {name: process for host in hosts for name, process in roles(host).items()}


@pytest.fixture
def endless(tmp_path):
    return variant(tmp_path, {"range(chosen.epochs)": "range(10**6)"})


@pytest.mark.parametrize("victim", ["server", pytest.param("worker 1", marks=pytest.mark.slow)])
def test_a_death_ends_the_job(tmp_path, endless, victim):
    """Paddle's own launcher goes on with the other worker, or waits for ever."""
    host = start(tmp_path, "a", LOCAL, script=endless)
    training([host])[victim].kill()
    code, output = host.end()
    assert code == 1 and re.search(rf"launch: {victim}( \d+)? died; the trainers' logs are in", output), output
    assert not left(tmp_path)


def test_a_death_ends_the_job_on_both_hosts(tmp_path, endless):
    flags = listed(LOOPBACK, (0, 1))
    hosts = [start(tmp_path, f"{n}", [*flags, f"--host={name}"], script=endless) for n, name in enumerate(LOOPBACK)]
    training(hosts)["worker 1"].kill()
    ends = [host.end() for host in hosts]
    assert [code for code, _ in ends] == [1, 1]
    assert "the job on 127.0.0.3 exited with code 1" in ends[0][1] and "worker 1 died" in ends[1][1]
    assert not left(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_nothing_is_left_behind(tmp_path, endless, number, code):
    host = start(tmp_path, "a", LOCAL, script=endless)
    assert len(training([host])) == 3
    host.process.send_signal(number)
    assert host.end()[0] == code
    wait_for(lambda: not left(tmp_path), 60, "every process of the job ends")
