"""Runs a command and sees to it that nothing of it is left behind: not when it ends, not when whoever started it dies.

    python guard.py <pid of the parent> <seconds of grace> <command> …

It adopts what the command's processes leave behind (Paddle's launcher puts its trainers into sessions of their own, so
that killing a process group does not reach them). On SIGTERM, which also comes when the parent dies, the command gets
SIGTERM, and after the grace everything below gets SIGKILL. The exit code is the command's, 128 + n after signal n.
Run by its path, without the package: it starts in milliseconds. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WAITED = {signal.SIGCHLD, *_STOP}
_LEFTOVER_GRACE = 2.0  # for what is still there when the command itself has ended


def below(pid: int) -> list[int]:
    """All processes that descend from that one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, ahead = [], [pid]
    while ahead:
        ahead = [child for parent in ahead for child in children.get(parent, [])]
        found += ahead
    return found


def main(parent: int, grace: float, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked to be told
        return 128 + signal.SIGTERM

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)  # noqa: PLW1509 - one thread
    except OSError as failure:
        print(f"cannot start {command[0]}: {failure.strerror}", file=sys.stderr, flush=True)
        return 126 if isinstance(failure, PermissionError) else 127
    deadline = float("inf")
    while child.poll() is None:
        got = signal.sigtimedwait(_WAITED, max(0.0, min(5.0, deadline - time.monotonic())))
        if got is not None and got.si_signo in _STOP and deadline == float("inf"):
            deadline = time.monotonic() + grace
            child.send_signal(signal.SIGTERM)
        _reap(child.pid)
        if time.monotonic() >= deadline:
            _end(0)
    _end(_LEFTOVER_GRACE)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _reap(spare: int = 0) -> None:
    """Take the exit codes of adopted processes; the command's own is left to `Popen`."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == spare:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _end(grace: float) -> None:
    """End everything below: SIGTERM, and after the grace SIGKILL, until nothing is there."""
    deadline = time.monotonic() + grace
    _signal(signal.SIGTERM)
    while below(os.getpid()):
        if time.monotonic() >= deadline:
            _signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _signal(number: signal.Signals) -> None:
    for pid in below(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
