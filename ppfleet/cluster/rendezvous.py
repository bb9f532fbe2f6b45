"""Nodes meet at the start of a job and wherever they need each other; a node that ends in between is noticed.

The first node listens at its listed address; the others stay connected to it for as long as the job runs. A node that
waits says for whom.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ppfleet import errors, limits
from ppfleet.cluster import hosts, link
from ppfleet.cluster.link import Link, Lost, Peers
from ppfleet.errors import CommError

_HELLO = "ppfleet rendezvous"
UNKNOWN = "another machine"


@dataclass
class Meeting:
    """All nodes of a job. `digest` is of what must be the same on all of them, which `same` names."""

    nodes: list[str]  # names; UNKNOWN where only the number of nodes is known
    node: int  # the number of this one; -1: the first node assigns it
    port: int
    digest: str
    timeout: float  # seconds for the others to join
    say: Callable[[str], None]
    same: str = "command"
    ended: dict[int, int] = field(default_factory=dict, init=False)  # nodes where the job has ended: the exit code
    final: bool = field(default=False, init=False)  # a node asked that the job is not restarted
    at: dict[int, str] = field(default_factory=dict, init=False)  # what each node said it is doing
    _brought: dict[int, Any] = field(default_factory=dict, init=False)
    _said: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._peers = Peers(self._greet, len(self.nodes))

    @property
    def links(self) -> dict[int, Link]:
        """On the first node, those to all others; elsewhere the one to the first."""
        return self._peers.links

    def start(self, prepare: Callable[[str], None]) -> str:
        """Wait for all nodes; a token that is the same on all. The first node calls `prepare` with it before the others
        continue, and with "" before they learn that it failed. A CommError names the nodes that did not join."""
        self._begin_wait()
        return self._join() if self.node else self._collect(prepare)

    def gather(self, what: str, members: Sequence[str]) -> None:
        """Wait for those nodes at a command, for as long as they live."""
        self._exchange(what, what, [number for number, name in enumerate(self.nodes) if name in members])

    def exchange(self, text: str, what: str = "exchange", all_hear: bool = True) -> list[str]:
        """The text of every node, in their order. Without `all_hear`, only the first node gets all; the others get the
        first node's. `what` is for messages."""
        return self._exchange(text, what, range(len(self.nodes)), all_hear)

    def _exchange(self, text: str, what: str, members: Iterable[int], all_hear: bool = True) -> list[str]:
        others = [number for number in members if number] if not self.node else [0]
        if self.node:
            self._peers.send(brought=text)
        self._wait(lambda: [number for number in others if number not in self._brought], what)
        brought = [self._brought.pop(number) for number in others]
        if self.node:
            return list(map(str, brought[0]))
        for number in others:
            self.links[number].send(brought=[text, *brought] if all_hear else [text])
        return [text, *map(str, brought)]

    def tell(self, doing: str) -> None:
        """Let the others know what this node is doing."""
        self._peers.send(at=doing)

    def close(self) -> None:
        self._peers.close()

    def _wait(self, missing: Callable[[], list[int]], what: str) -> None:
        self._begin_wait()
        while numbers := missing():
            for number in numbers:
                if number not in self.links:
                    raise CommError(f"{self.nodes[number]} ended before {what}: see its own output")
            self.hear(1.0)
            doing = [f"{self.nodes[n]} ({self.at[n]})" if n in self.at else self.nodes[n] for n in numbers]
            self._say_waiting(f"waiting for {', '.join(doing)}")

    def hear(self, seconds: float) -> None:
        """Process the messages of the next seconds, until some have come; a connection that broke is dropped."""
        try:
            for number, message in self._peers.hear(seconds):
                if "brought" in message:
                    self._brought[number] = message["brought"]
                if isinstance(code := message.get("ended"), int):
                    self.ended[number] = code
                    self.final = self.final or bool(message.get("final"))
                if "at" in message:
                    self.at[number] = str(message["at"])
        except Lost:
            pass

    def _begin_wait(self) -> None:
        self._said = time.monotonic() - limits.SAY_WAITING + 2  # the first message comes soon

    def _say_waiting(self, text: str) -> None:
        if time.monotonic() - self._said >= limits.SAY_WAITING:
            self._said = time.monotonic()
            self.say(text)

    def _join_progress(self, began: float, names: Sequence[str]) -> None:
        so_far = f"{time.monotonic() - began:.0f} of at most {self.timeout:g} s"
        self._say_waiting(f"waiting for {', '.join(names)}: start the same command there ({so_far})")

    # The start, on the first node

    def _collect(self, prepare: Callable[[str], None]) -> str:
        began = time.monotonic()
        listen(self._peers, self.nodes[0], self.port)
        try:
            while missing := [name for n, name in enumerate(self.nodes) if n and n not in self.links]:
                if time.monotonic() - began >= self.timeout:
                    raise CommError(f"{', '.join(missing)} did not join within {self.timeout:g} s", code="not_joined")
                self.hear(0.5)
                self._join_progress(began, missing)
            token = secrets.token_hex(8)
            prepare(token)
        except CommError as failure:
            prepare("")
            self._peers.send(error=errors.pack(failure))
            raise
        finally:
            self._peers.stop_listening()
        for number, peer in self.links.items():
            peer.send(token=token, node=number)
        return token

    def _greet(self, peer: Link, hello: link.Message) -> int | None:
        """The number of a node that joins; one that was restarted replaces its old connection."""
        number = hello.get("node")
        if number == -1:  # its name is not listed: it gets the next free number
            number = next((n for n, name in enumerate(self.nodes) if name == UNKNOWN and n not in self.links), None)
        if hello.get("hello") != _HELLO or not isinstance(number, int) or not 0 < number < len(self.nodes):
            return None
        if self.nodes[number] == UNKNOWN:
            self.nodes[number] = str(peer.peer.getpeername()[0])
        if hello.get("digest") != self.digest:
            failure = CommError(f"{self.nodes[number]} has another {self.same} than {self.nodes[0]}")
            peer.send(error=errors.pack(failure))
            raise failure
        return number

    # The start, on the others

    def _join(self) -> str:
        began = time.monotonic()
        hello = {"hello": _HELLO, "node": self.node, "digest": self.digest}

        def waiting(connected: bool) -> None:
            if connected:
                self._say_waiting(f"{self.nodes[0]} is there; waiting for the others")
            else:
                self._join_progress(began, self.nodes[:1])

        try:  # once connected, the first node's own limit decides
            peer, answer = link.ask(self.nodes[0], self.port, hello, self.timeout, math.inf, waiting)
        except (OSError, Lost):
            text = f"{self.nodes[0]} did not join within {self.timeout:g} s"
            raise CommError(text, code="not_joined") from None
        if "error" in answer:
            peer.close()
            raise errors.unpack(answer["error"])
        self._peers.add(0, peer)
        self.node = int(answer["node"])
        return str(answer["token"])


def listen(peers: Peers, node: str, port: int) -> None:
    """At this host's listed address."""
    try:
        peers.listen(next(iter(hosts.resolve(node)), node), port)
    except OSError as failure:
        raise CommError(
            f"cannot listen at {node} port {port} for the other nodes ({failure.strerror}); "
            f"to use other ports, set FLAGS_START_PORT=17000 on all nodes"
        ) from None
