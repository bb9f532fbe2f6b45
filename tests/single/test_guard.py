"""The guard: nothing of a command outlives it, nor it whoever started it. Real processes, real signals."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from ppfleet.cluster import process_tree
from tests.harness import wait_for


def guarded(tmp_path, code, grace="1", parent=None):
    """Start `python -c code` under a guard, in a directory by which its processes can be found."""
    command = [sys.executable, process_tree.__file__, str(parent or os.getpid()), grace, sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def alive(tmp_path):
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        if process.info["cwd"] == str(tmp_path) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("code", "ended"), [("", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_commands_exit_code(tmp_path, code, ended):
    assert guarded(tmp_path, code).wait(20) == ended


DAEMON = (
    "import subprocess, time; "
    "subprocess.Popen(['sh', '-c', '{} sleep 62 & sleep 62; sleep 62'], start_new_session=True); time.sleep(0.3)"
)


@pytest.mark.parametrize("ignoring", ["", 'trap "" TERM;'])
def test_daemons_end_with_the_command(tmp_path, ignoring):
    process = guarded(tmp_path, DAEMON.format(ignoring))
    assert process.wait(20) == 0
    assert not alive(tmp_path)


def test_a_command_gets_its_grace(tmp_path):
    code = (
        "import signal, sys, time\n"
        "def end(*_): open('saved', 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    )
    process = guarded(tmp_path, code, grace="20")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM and (tmp_path / "saved").exists()


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    process = guarded(tmp_path, code)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM and not alive(tmp_path)


def test_the_command_receives_signals_as_usual(tmp_path):
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    process = guarded(tmp_path, code)
    assert process.communicate(timeout=20)[0].strip() == "set()"


def test_the_guard_is_killed(tmp_path):
    process = guarded(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    wait_for(lambda: not alive(tmp_path), 20, "every process below ends")


def test_the_parent_is_killed(tmp_path):
    """Also with trainers in sessions of their own below."""
    code = f"import os; {DAEMON.format('')}; print('ready', flush=True); time.sleep(60)"
    starter = [sys.executable, "-c", f"import os, subprocess, sys\n{_starter()}", code]
    parent = subprocess.Popen(starter, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    assert len(alive(tmp_path)) >= 4
    parent.kill()
    wait_for(lambda: not alive(tmp_path), 20, "every process below ends")


def _starter():
    command = f"[sys.executable, {process_tree.__file__!r}, str(os.getpid()), '1', sys.executable, '-c', sys.argv[1]]"
    return f"subprocess.run({command})"


def test_a_parent_that_is_gone_already(tmp_path):
    assert guarded(tmp_path, "print('ran')", parent=1).communicate(timeout=20)[0] == ""


def test_what_cannot_be_started(tmp_path):
    (tmp_path / "script").write_text("")
    for path, code, words in (("/nowhere/python", 127, "No such file"), (str(tmp_path / "script"), 126, "Permission")):
        command = [sys.executable, process_tree.__file__, str(os.getpid()), "1", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == code and done.stderr.startswith(f"cannot start {path}: {words}")
