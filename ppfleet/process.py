"""What Linux and Python say of a process: which machine, how it ended, where its code is. Pure."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

from ppfleet.flight import short, users

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
    """Which start of which machine, or container, this is: where it is the same, so are the numbers of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid"))])
    except OSError:
        return platform.node()


def oom_kills() -> int:
    """How many processes Linux has killed for want of memory since it was started."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def process_state(pid: int) -> tuple[str, int]:
    """Its state, and when it is a zombie its exit code as wait() would give it; "" if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[-1])
    except (OSError, ValueError, IndexError):
        return "", 0


def launcher() -> int:
    """The parent, if it is Paddle's launcher."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace")
    except OSError:
        return 0
    return os.getppid() if any(name in words for name in _LAUNCHERS) else 0
