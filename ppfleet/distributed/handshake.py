"""Before the ranks talk through Paddle: are all there, and do they agree on the job? Pure: plain sockets, no Paddle.

Rank 0 listens where its store will listen later. Every other rank tells who it is and what must be the same on all;
rank 0 answers all of them with one verdict. So a missing rank, a rank that is there twice, or another version of Paddle
on one host is an error on every rank after seconds, where Paddle would wait for minutes or continue.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppfleet import errors, limits, log
from ppfleet.cluster import link
from ppfleet.cluster.link import Link, Lost, Peers
from ppfleet.distributed.world import World
from ppfleet.errors import CommError, MismatchError
from ppfleet.watchdog.process import is_orphan

_HELLO = "ppfleet handshake"
_LONGEST = 1 << 20  # bytes of a rank's facts
_CODE = "code of "
_HARDWARE = "hardware: "


def call(
    world: World, facts: dict[str, str], wait: float, news: dict[str, Any], hardware: dict[str, str] | None = None
) -> dict[str, Any]:
    """Meet all ranks within `wait` seconds; `facts` must be the same on all of them, and where `hardware` is not, that
    is said. All get rank 0's `news`."""
    host, _, port = world.master.rpartition(":")
    facts = {**facts, **{f"{_HARDWARE}{name}": value for name, value in (hardware or {}).items()}}
    if not world.first:
        return _report(world, facts, wait, host, int(port))
    Register(world, facts, wait).run(host.strip("[]"), int(port), news)
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


class Register:
    """Rank 0's side: the ranks that have joined, and their facts."""

    def __init__(self, world: World, facts: dict[str, str], wait: float) -> None:
        self.world, self.wait = world, wait
        self.facts: dict[int, dict[str, str]] = {0: facts}
        self._peers = Peers(self.greet, world.size, _LONGEST)

    def run(self, host: str, port: int, news: dict[str, Any]) -> None:
        self._peers.listen(host, port)
        verdict: CommError | MismatchError | None = None
        try:
            self._collect()
            self.compare()
        except (CommError, MismatchError) as failure:
            verdict = failure
        finally:
            # A rank that has the verdict and tries this port must find the store, or nothing.
            self._peers.stop_listening()
        self._peers.send(error=errors.pack(verdict) if verdict else None, news=news)
        deadline = time.monotonic() + limits.CONNECT
        while self._peers.links and time.monotonic() < deadline:  # they close first: this port is needed again at once
            self._hear(0.1)
        self._peers.close()
        if verdict:
            raise verdict

    def _collect(self) -> None:
        deadline = time.monotonic() + self.wait
        while len(self.facts) < self.world.size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                missing = [rank for rank in range(self.world.size) if rank not in self.facts]
                shown = ", ".join(map(self.world.name, missing))
                text = f"{shown} did not join within {self.wait:g} s: was it started, and is the address right?"
                raise CommError(text, code="not_joined", ranks=missing)
            _check_launcher(self.world)
            self._hear(min(remaining, 1.0))

    def _hear(self, seconds: float) -> None:
        try:
            for _ in self._peers.hear(seconds):
                pass
        except Lost as lost:
            self.facts.pop(lost.number, None)  # it may connect again

    def greet(self, peer: Link, hello: dict[str, Any]) -> int | None:
        rank, facts = hello.get("rank"), hello.get("facts")
        if hello.get("hello") != _HELLO or not isinstance(rank, int) or not isinstance(facts, dict):
            return None
        if rank in self.facts or not 0 < rank < self.world.size:
            text = (
                f"two processes claim to be rank {rank}: {self.facts[rank]['process']} and {facts.get('process')}"
                if rank in self.facts
                else f"{facts.get('process')} claims to be rank {rank} of a job of {self.world.size}"
            )
            failure = MismatchError(f"{text}. Was the job started twice, or with another list of hosts?")
            peer.send(error=errors.pack(failure))
            raise failure
        self.facts[rank] = facts
        return rank

    def compare(self) -> None:
        own = self.facts[0]
        for name in own:
            if name == "process":  # never the same
                continue
            values = {rank: facts.get(name) for rank, facts in self.facts.items()}
            if name.startswith(_CODE):  # a module may be loaded on some ranks only
                values = {rank: value for rank, value in values.items() if value}
            if len(set(values.values())) > 1:
                odd = [rank for rank, value in values.items() if value != own[name]]
                shown = "; ".join(f"{self.world.name(rank)}: {values[rank]}" for rank in [0, *odd][:4])
                if name.startswith(_HARDWARE):
                    different = name[len(_HARDWARE) :]
                    log.say(f"the ranks do not have the same {different}, and may round differently: {shown}")
                    continue
                raise MismatchError(f"the ranks do not have the same {name}: {shown}")


def _report(world: World, facts: dict[str, str], wait: float, host: str, port: int) -> dict[str, Any]:
    """The other ranks' side: find rank 0, say who this is, get the verdict."""
    hello = {"hello": _HELLO, "rank": world.rank, "facts": facts}
    try:  # rank 0 may have started later than this one
        peer, answer = link.ask(host, port, hello, wait, wait + limits.CONNECT, lambda _: _check_launcher(world))
    except (OSError, Lost) as failure:
        raise CommError(
            f"rank 0 did not answer {world.name()} at {world.master} within {wait:g} s ({failure}): was it started, "
            f"and is the address right?",
            code="not_joined",
            ranks=[0],
        ) from None
    peer.close()
    if answer["error"] is not None:
        raise errors.unpack(answer["error"])
    return dict(answer["news"])


def _check_launcher(world: World) -> None:
    if is_orphan():
        raise CommError(f"the launcher of {world.name()} is gone: nobody would end this job")
