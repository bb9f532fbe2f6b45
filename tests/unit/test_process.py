"""What Linux says of a process: whether its loop works, how it ended."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ppfleet.watchdog.events import Code, Event
from ppfleet.watchdog.process import Health, how_it_ended, oom_kills, this_host, user_place, was_launched
from ppfleet.watchdog.render import death


def busy_after(work):
    """The share of a core that `work` takes in this thread, as another thread sees it."""
    health, found = Health(), []

    def look():
        health.busy(1.0)
        time.sleep(0.5)
        found.append(health.busy(1.0))

    watch = threading.Thread(target=look)
    watch.start()
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        work()
    watch.join()
    return found[0]


def test_a_loop_that_sleeps_does_no_work_though_other_threads_do():
    over = threading.Event()

    def spin():
        while not over.is_set():
            sum(range(1000))

    other = threading.Thread(target=spin)
    other.start()
    try:
        assert busy_after(lambda: time.sleep(0.6)) < 0.05
    finally:
        over.set()
        other.join()
    assert busy_after(lambda: sum(range(1000))) > 0.2


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
