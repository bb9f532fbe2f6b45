"""Runs a command and leaves none of its processes behind: not when it ends, and not when the process above dies.

    python process_tree.py <pid of the parent> <seconds of grace> <command> …

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
    adopt()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before prctl
        return 128 + signal.SIGTERM

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)  # noqa: PLW1509 - one thread
    except OSError as failure:
        print(f"cannot start {command[0]}: {failure.strerror}", file=sys.stderr, flush=True)
        return 126 if isinstance(failure, PermissionError) else 127
    stopped, deadline = 0, float("inf")
    while child.poll() is None:
        got = signal.sigtimedwait(_WAITED, max(0.0, min(5.0, deadline - time.monotonic())))
        if got is not None and got.si_signo in _STOP and not stopped:
            stopped, deadline = got.si_signo, time.monotonic() + grace
            child.send_signal(signal.SIGTERM)
        _reap(child.pid)
        if time.monotonic() >= deadline:
            break
    end_below(0 if stopped else _LEFTOVER_GRACE, child)
    if stopped:
        return 128 + stopped  # whatever its exit code, it did not finish
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _reap(spare: int) -> None:
    """Take the exit codes of adopted processes; the one of `spare` is for its own `Popen`."""
    for pid in below(os.getpid()):
        if pid != spare:
            with contextlib.suppress(ChildProcessError):  # a grandchild
                os.waitpid(pid, os.WNOHANG)


def end_below(grace: float, child: subprocess.Popen[bytes] | None = None) -> None:
    """End everything below this process: SIGTERM, and after the grace SIGKILL, until nothing is there."""
    deadline = time.monotonic() + grace
    number: signal.Signals | None = signal.SIGTERM
    while left := below(os.getpid()):
        if number is not None:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        number = signal.SIGKILL if time.monotonic() >= deadline else None
        if child is not None:
            child.poll()
        _reap(child.pid if child is not None else 0)
        time.sleep(0.02)


def adopt() -> None:
    """From now on, processes below this one whose parents die become its children."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
