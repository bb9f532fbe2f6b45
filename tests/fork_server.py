"""Processes with Paddle imported, from which `tests/harness.py` forks ranks: a start of 30 ms instead of 2 s.

A server has one thread, and so has a rank as it begins. Each rank number has its own server, so that ranks differ in
their hash seed, as they do under a launcher. A server waits for a rank's end only when it is asked to: until then
Linux tells the other ranks how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent


def paddle_version() -> str:
    """Of whichever wheel is installed: that for CPUs, or that for cards (make test-cuda-wheel)."""
    try:
        return version("paddlepaddle")
    except PackageNotFoundError:
        return version("paddlepaddle-gpu")


_FORKS = not paddle_version().startswith("2.")  # whose import leaves a thread behind, which a fork would lose


class Forked:
    """A rank that was forked: what tests use of `subprocess.Popen`."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server, self.pid, self.returncode = server, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _Server:
    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness", "serve"],
            cwd=_ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


_servers: dict[int, _Server] = {}


def start(
    rank: int, words: list[str], env: dict[str, str], output: Path, fresh: bool = False, session: bool = False
) -> Forked | subprocess.Popen[bytes]:
    """A rank with these arguments of `tests.harness` (a function, or a script and its own arguments), this environment,
    and its output in that file. With `fresh` in an interpreter of its own, with `session` in a process group."""
    if fresh or not _FORKS:
        command = [sys.executable, "-m", "tests.harness", *words]
        with output.open("wb") as out:
            return subprocess.Popen(
                command, cwd=_ROOT, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=session
            )
    if rank not in _servers:
        _servers[rank] = _Server({name: value for name, value in env.items() if not name.startswith("PADDLE_")})
    return Forked(_servers[rank], _servers[rank].ask(words=words, env=env, output=str(output), session=session))


def serve() -> list[str]:
    """Answer requests until the tests end; in a forked rank, return its arguments."""
    import numpy as np

    import tests.blocks  # noqa: F401 - Paddle and ppfleet with it

    assert len(os.listdir("/proc/self/task")) == 1, "a thread that runs already would be missing in the ranks"  # noqa: PTH208
    for line in sys.stdin:
        request = json.loads(line)
        if pid := request.get("wait"):
            found, status = os.waitpid(pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = os.fork()
            if answer == 0:
                os.environ.clear()
                os.environ.update(request["env"])
                _redirect("/dev/null", os.O_RDONLY, 0)
                for number in (1, 2):
                    _redirect(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, number)
                if request["session"]:
                    os.setsid()
                np.random.seed()  # Python's own generator is seeded by os.fork itself
                return list(request["words"])
        print(json.dumps(answer), flush=True)
    os._exit(0)


def _redirect(path: str, flags: int, number: int) -> None:
    descriptor = os.open(path, flags, 0o644)
    os.dup2(descriptor, number)
    os.close(descriptor)
