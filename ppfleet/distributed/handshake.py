"""Before the ranks talk through Paddle: who is there, and do they mean the same job? Pure: plain sockets, no Paddle.

Rank 0 listens where its store will listen later. Every other rank tells who it is and what it brings; rank 0 answers
all of them with one verdict. So a missing rank, a rank that is there twice, or another version of Paddle on one host is
a sentence on every rank after seconds, where Paddle would wait for minutes or go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import selectors
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppfleet import errors, limits
from ppfleet.distributed.world import World
from ppfleet.errors import CommError, MismatchError
from ppfleet.watchdog.process import is_orphan

_HELLO = "ppfleet roll call"
_LONGEST = 1 << 20
_CODE = "code of "


def call(world: World, facts: dict[str, str], wait: float, news: dict[str, Any]) -> dict[str, Any]:
    """Meet all ranks within `wait` seconds; `facts` must be the same on all of them. All get rank 0's `news`."""
    host, _, port = world.master.rpartition(":")
    if not world.first:
        return _report(world, facts, wait, host.strip("[]"), int(port))
    _Register(world, facts, wait, news).take(host.strip("[]"), int(port))
    return news


def facts(paddle: str) -> dict[str, str]:
    """What must be the same on all hosts: versions, and the code that is loaded and not installed."""
    found = {
        "process": f"process {os.getpid()} on {platform.node()}",
        "PaddlePaddle": paddle,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "list of ranks": os.environ.get("PADDLE_TRAINER_ENDPOINTS", ""),
    }
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.endswith(".py") and (name.partition(".")[0] == "ppfleet" or not _installed(path)):
            with suppress(OSError):
                found[f"{_CODE}{name}"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
    return found


def _installed(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path or path.startswith((sys.prefix, sys.base_prefix))


class _Register:
    """Rank 0's side: who has come, with what, on which connection."""

    def __init__(self, world: World, facts: dict[str, str], wait: float, news: dict[str, Any]) -> None:
        self.world, self.wait, self.news = world, wait, news
        self.facts: dict[int, dict[str, str]] = {0: facts}
        self.lines: dict[int, socket.socket] = {}

    def take(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener, selectors.DefaultSelector() as ready:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(self.world.size)
            ready.register(listener, selectors.EVENT_READ)
            try:
                verdict = self._collect(listener, ready)
            except (CommError, MismatchError) as failure:
                verdict = failure
        # Nobody listens now: whoever has heard the verdict and tries this port finds the store, or nothing.
        self._answer(verdict)
        if verdict is not None:
            raise verdict

    def _collect(self, listener: socket.socket, ready: selectors.BaseSelector) -> CommError | MismatchError | None:
        deadline = time.monotonic() + self.wait
        while len(self.facts) < self.world.size:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [rank for rank in range(self.world.size) if rank not in self.facts]
                shown = ", ".join(map(self.world.name, missing))
                text = f"{shown} did not join within {self.wait:g} s: was it started, and is the address right?"
                return CommError(text, code="not_joined", ranks=missing)
            if is_orphan():  # the others have seen it too, and will not come
                return CommError(f"the launcher of {self.world.name()} is gone: nobody would end this job")
            for key, _ in ready.select(min(left, 1.0)):
                if key.fileobj is listener:
                    line, _ = listener.accept()
                    line.settimeout(5)
                    ready.register(line, selectors.EVENT_READ)
                else:
                    ready.unregister(key.fileobj)
                    self._enter(key.fileobj)  # type: ignore[arg-type]
        return self._compare()

    def _enter(self, line: socket.socket) -> None:
        message = _receive(line)
        rank, facts = message.get("rank"), message.get("facts")
        if message.get("hello") != _HELLO or not isinstance(rank, int) or not isinstance(facts, dict):
            line.close()
            return
        if rank in self.facts or not 0 < rank < self.world.size:
            text = (
                f"two processes say that they are rank {rank}: {self.facts[rank]['process']} and {facts.get('process')}"
                if rank in self.facts
                else f"{facts.get('process')} says that it is rank {rank} of a job that has {self.world.size}"
            )
            text += ". Was the job started twice, or with another list of hosts?"
            failure = MismatchError(text)
            _send(line, error=errors.pack(failure))
            line.close()
            raise failure
        self.facts[rank], self.lines[rank] = facts, line

    def _compare(self) -> MismatchError | None:
        own = self.facts[0]
        for name in own:
            if name == "process":  # which one it is; never the same
                continue
            values = {rank: facts.get(name) for rank, facts in self.facts.items()}
            if name.startswith(_CODE):  # one rank alone may load a module
                values = {rank: value for rank, value in values.items() if value}
            if len(set(values.values())) > 1:
                odd = [rank for rank, value in values.items() if value != own[name]]
                shown = "; ".join(f"{self.world.name(rank)}: {values[rank]}" for rank in [0, *odd][:4])
                return MismatchError(f"the ranks do not have the same {name}: {shown}")
        return None

    def _answer(self, verdict: Exception | None) -> None:
        error = errors.pack(verdict) if verdict is not None else None
        for line in self.lines.values():
            _send(line, error=error, news=self.news)
        for line in self.lines.values():  # they close first: this port is needed again at once
            with suppress(OSError):
                line.recv(1)
            line.close()


def _report(world: World, facts: dict[str, str], wait: float, host: str, port: int) -> dict[str, Any]:
    """A rank's side: find rank 0, say who this is, hear the verdict."""
    deadline = time.monotonic() + wait
    why: object = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=limits.CONNECT) as line:
                _send(line, hello=_HELLO, rank=world.rank, facts=facts)
                line.settimeout(max(1.0, deadline + 5 - time.monotonic()))  # rank 0 may have begun later than this one
                message = _receive(line)
        except OSError as failure:
            why = failure
            message = {}
        if "error" in message:
            if message["error"] is None:
                return dict(message["news"])
            raise errors.unpack(message["error"])
        if is_orphan():
            raise CommError(f"the launcher of {world.name()} is gone: nobody would end this job")
        time.sleep(0.05)
    raise CommError(
        f"rank 0 did not answer {world.name()} at {world.master} within {wait:g} s ({why}): was it started, and is the "
        f"address right?",
        code="not_joined",
        ranks=[0],
    )


def _send(line: socket.socket, **message: Any) -> None:
    with suppress(OSError):
        line.sendall(json.dumps(message).encode() + b"\n")


def _receive(line: socket.socket) -> dict[str, Any]:
    """One line of JSON; nothing at all for anything else."""
    data = b""
    with suppress(OSError):
        while not data.endswith(b"\n") and len(data) < _LONGEST:
            piece = line.recv(4096)
            if not piece:
                break
            data += piece
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
