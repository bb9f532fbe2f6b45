"""The roles of a parameter-server job, with scripts that end in the ways scripts do. Real processes, no Paddle."""

import os
import signal
import subprocess
import sys

import pytest

from ppfleet.commands.launch import ps_roles
from tests.harness import wait_for


@pytest.fixture
def directory(tmp_path):
    return ps_roles.Roles(tmp_path / "roles", 1)


def start(tmp_path, directory, code, role="TRAINER"):
    script = tmp_path / f"{role}.py"
    script.write_text(code)
    env = {**os.environ, "TRAINING_ROLE": role, "PADDLE_TRAINER_ID": "0", "PADDLE_PORT": "6170"}
    command = directory.wrap([sys.executable, str(script), "--x"], 1)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_worker_waits_for_all_others(tmp_path, directory):
    process = start(tmp_path, directory, "import sys; print(sys.argv, __name__); sys.exit()")
    wait_for(directory.done, 20, "the worker is done")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert not directory.failed()
    directory.release()
    shown, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and shown == f"{[str(tmp_path / 'TRAINER.py'), '--x']} __main__\n"
    assert not directory.failed()


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("raise ValueError('no data')", 1, "worker 0 failed: ValueError: no data"),
        ("import sys; sys.exit('not so')", 1, "worker 0 failed: not so"),
        ("import sys; sys.exit(3)", 3, "worker 0 failed: exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV, "worker 0 died"),
        ("import os; os.fork() or os.execlp('sleep', 'sleep', '5'); os._exit(0)", 0, "worker 0 died"),
    ],
)
def test_a_worker_that_ends_badly(tmp_path, directory, code, ended, said):
    process = start(tmp_path, directory, code)
    assert process.wait(20) == ended
    assert directory.failed() == said and (not directory.done() or said.startswith("worker 0 failed"))


def test_a_server_may_die_when_all_is_over(tmp_path, directory):
    process = start(tmp_path, directory, "print('ready', flush=True); import time; time.sleep(60)", "PSERVER")
    assert process.stdout.readline() == "ready\n" and not directory.failed()
    process.terminate()
    process.wait(20)
    assert directory.failed() == "server 6170 died"
    directory.release()
    assert not directory.failed()
