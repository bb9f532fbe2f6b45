"""What Linux says of a process: whether its loop works, how it ended."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ppfleet.watchdog import process
from ppfleet.watchdog.events import Code, Event
from ppfleet.watchdog.process import Health, how_it_ended, oom_kills, this_host, user_place, was_launched
from ppfleet.watchdog.render import death


def test_a_loop_that_sleeps_does_no_work_though_other_threads_do(monkeypatch):
    """By CPU seconds, which do not depend on what else the machine does; the clock is the test's."""

    def compute(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            sum(range(1000))

    health, now = Health(), 100.0
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    assert health.busy(progress=1.0) == 1.0  # nothing is known yet
    other = threading.Thread(target=compute, args=(0.3,))
    other.start()
    other.join()
    now += 1.0
    assert health.busy(progress=1.0) < 0.05
    compute(0.3)
    assert 0.25 < health.busy(progress=1.0) < 0.45
    assert health.busy(progress=2.0) == 1.0  # something went on: counting starts again


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 6)", "was killed by SIGABRT"),
        ("import os; os._exit(3)", "exited with code 3 without reporting a reason"),
    ],
)
def test_how_a_process_of_this_host_ended(code, told):
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended, fields = how_it_ended({"pid": child.pid, "boot": this_host()}, oom_kills())
    assert death(Event(ended, fields=fields)) == told
    child.wait()  # its parent has asked
    assert how_it_ended({"pid": child.pid, "boot": this_host()}, oom_kills()) == (Code.KILLED, {})
    assert how_it_ended({"pid": child.pid, "boot": "elsewhere"}, 0) == (Code.KILLED, {})


def test_killed_for_want_of_memory(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr("ppfleet.watchdog.process.oom_kills", lambda: 4)
    assert how_it_ended({"pid": child.pid, "boot": this_host()}, 3) == (Code.OOM, {"signal": 9})
    assert how_it_ended({"pid": child.pid, "boot": this_host()}, 4) == (Code.KILLED, {"signal": 9})
    assert death(Event(Code.OOM)) == "was killed by the OOM killer (SIGKILL)"
    child.wait()


def test_where_the_users_code_is():
    assert user_place(threading.get_ident()).startswith("`test_where_the_users_code_is` (tests/unit/test_process.py:")


def test_a_launched_process_knows_it(monkeypatch):
    for name in ("PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT", "PADDLE_LOG_DIR"):
        monkeypatch.setenv(name, "1")
    assert was_launched()
    monkeypatch.delenv("PADDLE_LOG_DIR")
    assert not was_launched()
