"""Hosts meet at the start of a job and wherever they need each other; whoever dies in between is noticed.

The first node listens at its listed address; the others stay connected to it for as long as the job runs. A message is
one line of JSON. Whoever waits says for whom.
"""

from __future__ import annotations

import errno
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Callable

from ppfleet import errors, limits
from ppfleet.cluster import hosts
from ppfleet.errors import CommError

_LONGEST = 4096
_HELLO = "ppfleet meeting"
UNKNOWN = "another machine"
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_NO_MESSAGE = (ValueError, RecursionError)  # of json.loads


class Link:
    """A connection to another node: messages out, messages in."""

    def __init__(self, peer: socket.socket, unreachable: float = 0.0) -> None:
        """`unreachable`: seconds after which a host whose kernel does not answer counts as gone."""
        self.peer = peer
        self._received = b""
        peer.settimeout(10)
        if unreachable:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unreachable))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # a host that vanishes is noticed after about 30 s
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        ):
            peer.setsockopt(level, option, value)

    def fileno(self) -> int:
        return self.peer.fileno()

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # that it is gone is noticed by whoever waits for it
            self.peer.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come, once something has; an EOFError when there will be no more, which says so where
        the other host did not answer."""
        try:
            piece = self.peer.recv(_LONGEST)
        except OSError as failure:
            if failure.errno in _UNREACHABLE:
                raise EOFError(failure.strerror) from None
            piece = b""
        self._received += piece
        if not piece or len(self._received) > 16 * _LONGEST:
            raise EOFError
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except _NO_MESSAGE:
                raise EOFError from None
            if not isinstance(message, dict):
                raise EOFError
            yield message

    def close(self) -> None:
        self.peer.close()


@dataclass
class Meeting:
    """All nodes of a job. `digest` is of what must be the same on all of them, which `same` names."""

    nodes: list[str]  # names; UNKNOWN where only the number of nodes is known
    node: int  # this one's place; -1: the first node says
    port: int
    digest: str
    patience: float  # seconds for the others to come at the start
    say: Callable[[str], None]
    same: str = "command"
    links: dict[int, Link] = field(default_factory=dict, init=False)
    ended: dict[int, int] = field(default_factory=dict, init=False)  # with which code the job ended there
    final: bool = field(default=False, init=False)  # whether somebody wants it to stay ended
    at: dict[int, str] = field(default_factory=dict, init=False)  # what each was last heard to do
    _here: dict[int, str] = field(default_factory=dict, init=False)  # who has come to which command
    _brought: dict[int, str] = field(default_factory=dict, init=False)
    _said: float = field(default=0.0, init=False)

    def start(self, prepare: Callable[[str], None]) -> str:
        """Wait for all nodes; a token that is the same on all. The first node calls `prepare` with it before the others
        go on, and with nothing before they learn that it failed. A CommError names who did not join."""
        self._said = time.monotonic() - limits.SAY_WAITING + 2  # the first time soon
        return self._join() if self.node else self._collect(prepare)

    def gather(self, what: str, members: Sequence[str]) -> None:
        """Wait for those nodes at a command, for as long as they live."""
        self._said = time.monotonic() - limits.SAY_WAITING + 2
        if self.node:
            self.links[0].send(here=what)
            self._wait(lambda: [] if self._here.pop(0, "") == what else [0], what)
            return
        others = [number for number, name in enumerate(self.nodes) if number and name in members]
        self._wait(lambda: [number for number in others if self._here.get(number) != what], what)
        for number in others:
            self.links[number].send(here=what)

    def exchange(self, text: str, what: str = "exchange", all_hear: bool = True) -> list[str]:
        """What every node brought, in their order. If not all hear all, the first node does, and the others what that
        one brought. `what` is for whoever waits."""
        self._said = time.monotonic() - limits.SAY_WAITING + 2
        if self.node:
            self.links[0].send(brought=text)
            self._wait(lambda: [] if 0 in self._brought else [0], what)
            return [str(each) for each in json.loads(self._brought.pop(0))]
        others = range(1, len(self.nodes))
        self._wait(lambda: [number for number in others if number not in self._brought], what)
        everything = [text, *(self._brought.pop(number) for number in others)]
        for number in others:
            self.links[number].send(brought=json.dumps(everything if all_hear else [text]))
        return everything

    def tell(self, doing: str) -> None:
        """Let the others know what this node is at."""
        for link in self.links.values():
            link.send(at=doing)

    def close(self) -> None:
        for link in self.links.values():
            link.close()

    def _wait(self, missing: Callable[[], list[int]], what: str) -> None:
        while numbers := missing():
            for number in numbers:
                if number not in self.links:
                    raise CommError(f"{self.nodes[number]} has ended before {what}: its own output tells why")
            self.hear(1.0)
            doing = [f"{self.nodes[n]} ({self.at[n]})" if n in self.at else self.nodes[n] for n in numbers]
            self._waiting(f"waiting for {', '.join(doing)}")

    def hear(self, seconds: float) -> None:
        """Take in what the others say, for at most that long; a link that broke is dropped."""
        if not self.links:
            time.sleep(seconds)
            return
        with selectors.DefaultSelector() as ready:
            for number in self.links:
                ready.register(self.links[number], selectors.EVENT_READ, number)
            for key, _ in ready.select(seconds):
                self._hear(key.data)

    def _hear(self, number: int) -> None:
        try:
            for message in self.links[number].receive():
                if isinstance(brought := message.get("brought"), str):
                    self._brought[number] = brought
                if isinstance(code := message.get("ended"), int):
                    self.ended[number] = code
                    self.final = self.final or bool(message.get("final"))
                self.at[number] = str(message.get("at", self.at.get(number, "")))
                self._here[number] = str(message.get("here", self._here.get(number, "")))
        except EOFError:
            self.links.pop(number).close()

    def _waiting(self, text: str) -> None:
        if time.monotonic() - self._said >= limits.SAY_WAITING:
            self._said = time.monotonic()
            self.say(text)

    # The start, on the first node

    def _collect(self, prepare: Callable[[str], None]) -> str:
        began = time.monotonic()
        with listen(self.nodes[0], self.port) as listener, selectors.DefaultSelector() as ready:
            ready.register(listener, selectors.EVENT_READ)
            strangers: list[Link] = []
            try:
                while missing := [name for n, name in enumerate(self.nodes) if n and n not in self.links]:
                    waited = time.monotonic() - began
                    if waited >= self.patience:
                        raise CommError(
                            f"{', '.join(missing)} did not join within {self.patience:g} s", code="not_joined"
                        )
                    for key, _ in ready.select(0.5):
                        if key.fileobj is listener:
                            strangers.append(Link(listener.accept()[0]))
                            ready.register(strangers[-1], selectors.EVENT_READ)
                        else:
                            self._greet(key.fileobj, strangers, ready)
                    so_far = f"{waited:.0f} of at most {self.patience:g} s"
                    self._waiting(f"waiting for {', '.join(missing)}: start the same command there ({so_far})")
                token = secrets.token_hex(8)
                prepare(token)
            except CommError as failure:
                prepare("")
                for link in self.links.values():
                    link.send(error=errors.pack(failure))
                raise
            finally:
                for link in strangers:
                    link.close()
        for number, link in self.links.items():
            link.send(token=token, node=number)
        return token

    def _greet(self, link: Any, strangers: list[Link], ready: selectors.BaseSelector) -> None:
        """What somebody said who connected: another node's hello, the end of a node that was here, or noise."""
        known = next((number for number, other in self.links.items() if other is link), 0)
        try:
            hello: dict[str, Any] = next(iter(link.receive()), {})
        except EOFError:
            hello = {"hello": ""}
        if hello and (known or hello.get("hello") != _HELLO):
            ready.unregister(link)
            link.close()
            self.links.pop(known, None)
            return
        number = hello.get("node")
        if number == -1:  # its name is not listed: it gets the next place
            number = next((n for n, name in enumerate(self.nodes) if name == UNKNOWN and n not in self.links), None)
        if not hello or not isinstance(number, int) or not 0 < number < len(self.nodes):
            return
        if self.nodes[number] == UNKNOWN:
            self.nodes[number] = str(link.peer.getpeername()[0])
        strangers.remove(link)
        before = self.links.pop(number, None)
        if before is not None:  # it was started anew
            ready.unregister(before)
            before.close()
        self.links[number] = link
        if hello.get("digest") != self.digest:
            name = self.nodes[number]
            raise CommError(f"{name} has another {self.same} than {self.nodes[0]}")

    # The start, on the others

    def _join(self) -> str:
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self.patience:
            with suppress(OSError, EOFError):
                link = Link(socket.create_connection((self.nodes[0].strip("[]"), self.port), timeout=limits.CONNECT))
                link.send(hello=_HELLO, node=self.node, digest=self.digest)
                return self._told(link)
            so_far = f"{waited:.0f} of at most {self.patience:g} s"
            self._waiting(f"waiting for {self.nodes[0]}: start the same command there ({so_far})")
            time.sleep(0.5)
        raise CommError(f"{self.nodes[0]} did not join within {self.patience:g} s", code="not_joined")

    def _told(self, link: Link) -> str:
        """The first node's word, for as long as it lives; its own patience limits how long that takes."""
        with selectors.DefaultSelector() as ready:
            ready.register(link, selectors.EVENT_READ)
            while True:
                for message in link.receive() if ready.select(1.0) else ():
                    if "token" in message:
                        self.links[0] = link
                        self.node = int(message["node"])
                        return str(message["token"])
                    if "error" in message:
                        link.close()
                        raise errors.unpack(message["error"])
                self._waiting(f"{self.nodes[0]} is there; waiting for the others")


def listen(node: str, port: int) -> socket.socket:
    """At this host's listed address."""
    host = next(iter(hosts.resolve(node)), node)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as failure:
        listener.close()
        raise CommError(
            f"cannot listen at {node} port {port} for the other nodes ({failure.strerror}); "
            f"on all nodes, export FLAGS_START_PORT=17000 takes other ports"
        ) from None
    listener.listen()
    return listener
