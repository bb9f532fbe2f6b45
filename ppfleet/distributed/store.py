"""Rank 0's TCP store: checks before Paddle starts it, the wait for it, and calls that no signal interrupts."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle

from ppfleet import limits
from ppfleet.distributed.world import World
from ppfleet.errors import CommError, WorldError


class Store:
    """Paddle's store. A signal during a call would make it fail (EINTR), and with it the save that SIGTERM asks for: so
    signals are blocked in this thread for the time of a call."""

    def __init__(self, world: World) -> None:
        """The one that `init_parallel_env` has made."""
        self._store: Any = paddle.base.core.create_or_get_global_tcp_store()
        _send_at_once(world)

    def set(self, key: str, value: bytes) -> None:
        with signals_blocked():
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with signals_blocked():
            return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        with signals_blocked():
            return int(self._store.add(key, amount))


@contextmanager
def signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_master(world: World) -> None:
    """Raise a clear error where Paddle would abort in C++, or hang."""
    host, _, port = world.master.rpartition(":")
    if not world.first:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as failure:
            if failure.errno == errno.EADDRINUSE:
                raise CommError(
                    f"port {port} of {host}, where rank 0's store must listen, is in use by another process; "
                    f"end that one, or choose other ports with `--start_port`",
                    code="port_taken",
                ) from None
            # Paddle's launcher makes a host rank 0 if it does not find it in the list.
            raise WorldError(
                f"this process is rank 0 at {host}, but {host} is not an address of this machine ({failure.strerror}): "
                f"start it with `python -m ppfleet launch`, or add `--host <own address in the list>`"
            ) from None


def join_timeout(usual: float = limits.JOIN) -> float:
    """Seconds for all ranks to join."""
    text = os.environ.get("PPFLEET_WAIT", str(usual))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise WorldError(f"PPFLEET_WAIT must be a positive number of seconds, got {text!r}")
    return seconds


def await_master(world: World, seconds: float) -> None:
    """Wait until rank 0's store listens, which it does right after the handshake."""
    host, _, port = world.master.rpartition(":")
    if world.first:
        return
    # A connection attempt before rank 0 listens would make Paddle sleep 3 s; a refused probe costs nothing.
    began = time.monotonic()
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=limits.CONNECT).close()
            return
        except OSError as failure:
            if time.monotonic() - began > seconds:
                raise CommError(f"rank 0's store at {world.master} did not answer {world.name()} ({failure})") from None
            time.sleep(0.05)


def _send_at_once(world: World) -> None:
    """Turn off Nagle's algorithm on the store's connections: with it, as Paddle leaves them, an answer takes 44 ms.
    Paddle's TCPStore has neither an option for it nor a way to its sockets (checked up to 3.3)."""
    port = int(world.master.rpartition(":")[2])
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(descriptor.stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                if port in (connection.getpeername()[1], connection.getsockname()[1]):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
