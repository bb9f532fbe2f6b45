"""What Linux and Python know about a process: its machine, its state, how it ended, where its code is. Pure."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ppfleet.watchdog.events import Code
from ppfleet.watchdog.recorder import Pulse, short, users

_LAUNCHERS = ("paddle.distributed.launch", "fleetrun")


def user_place(thread: int) -> str:
    """Where the user's code is in that thread: `evaluate` (tools/train.py:71)."""
    frame: Any = sys._current_frames().get(thread)
    while frame is not None and not users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    function = frame.f_code.co_name
    line = f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
    return line if function.startswith("<") else f"`{function}` ({line})"


def user_line(trace: Any) -> str:
    """file:line of the user's code where an exception came through last."""
    found = ""
    while trace is not None:
        if users(trace.tb_frame.f_code.co_filename):
            found = f"{short(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def this_host() -> str:
    """Identifies this boot of this machine, or container: where it is the same, process ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid"))])
    except OSError:
        return platform.node()


def oom_kills() -> int:
    """How many processes the OOM killer has killed since Linux was started."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())["oom_kill"])
    return 0


def process_state(pid: int, started: float = float("inf")) -> tuple[str, int | None]:
    """`running`, `stopped` or `gone`: the process that had that id at that time; of a zombie also its wait() status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if psutil.Process(pid).create_time() > started + 2:  # the id was reused
            return "gone", None
        if fields[0] in ("Z", "X"):
            return "gone", int(fields[-1])
    except (OSError, ValueError, IndexError, psutil.Error):
        return "gone", None
    return "stopped" if fields[0] in ("T", "t") else "running", None


def launcher() -> psutil.Process | None:
    """Paddle's launcher, if it is anywhere above this process: a shell script may be between."""
    try:
        for process in psutil.Process().parents():
            if any(name in word for word in process.cmdline() for name in _LAUNCHERS):
                return process
    except psutil.Error:
        return None
    return None


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def was_launched() -> bool:
    """Whether Paddle's launcher started this process: it sets the log directory of each trainer."""
    return all(os.environ.get(name) for name in ("PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT", "PADDLE_LOG_DIR"))


def is_orphan() -> bool:
    """Whether the launcher that started this process has ended: nobody would end the job."""
    return was_launched() and launcher() is None


class Health:
    """State of this process; the training loop runs in the thread that creates this."""

    def __init__(self) -> None:
        self._trainer = threading.get_native_id()
        self.oom_kills = oom_kills()  # when it was last looked at
        self._process = psutil.Process()
        self._idle = (0.0, 0.0, 0.0)  # since when without progress; when that was first seen; CPU seconds by then

    def pulse(self) -> Pulse:
        self.oom_kills = oom_kills()
        used = sum(self._process.cpu_times()[:2])
        memory, available = self._process.memory_info().rss, psutil.virtual_memory().available
        return Pulse(time.time(), used, memory, available, self.oom_kills)

    def busy(self, progress: float) -> float:
        """The share of a core that the loop's thread and the process's children have used since they were first seen
        idle. Not the other threads: the store's and the watchdog's never rest; those that compute follow the loop."""
        used, now = _thread_seconds(self._trainer), time.monotonic()
        for each in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used += sum(each.cpu_times()[:2])
        if self._idle[0] != progress:
            self._idle = (progress, now, used)
            return 1.0
        return (used - self._idle[2]) / max(1e-3, now - self._idle[1])


def _thread_seconds(thread: int) -> float:
    """CPU seconds that a thread of this process has used."""
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def how_it_ended(who: Mapping[str, Any], oom_before: int) -> tuple[Code, dict[str, Any]]:
    """How a process of this host ended: Linux keeps that until its parent has asked. Unknown for other hosts."""
    for _ in range(20) if who.get("boot") == this_host() else ():
        state, status = process_state(who["pid"])
        if status is not None:
            if number := status & 0x7F:
                oom = number == signal.SIGKILL and oom_kills() > oom_before
                return Code.OOM if oom else Code.KILLED, {"signal": number}
            return Code.EXIT, {"exit_code": status >> 8}
        if state == "gone":
            break
        time.sleep(0.02)
    return Code.KILLED, {}
