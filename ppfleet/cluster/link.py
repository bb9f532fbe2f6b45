"""Connections between the processes of a job: the one place where they are accepted and where they say hello.

A message is one line of JSON. Nothing here blocks on a peer: a connection that is silent, slow or noisy costs the
others no time. Pure: plain sockets.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Callable

from ppfleet import limits
from ppfleet.errors import FleetError

LONGEST = 1 << 16  # bytes of a message
_SPARE = 64  # connections without a hello, beside those that are expected
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

Message = dict[str, Any]
Greet = Callable[["Link", Message], "int | None"]


class Lost(EOFError):
    """A connection has ended, or its peer sends no messages; `unreachable`: because its host does not answer."""

    def __init__(self, unreachable: bool = False, number: int = -1) -> None:
        super().__init__("its host does not answer" if unreachable else "the connection was closed")
        self.unreachable, self.number = unreachable, number


class Link:
    """One connection: messages out, messages in."""

    def __init__(self, peer: socket.socket, longest: int = LONGEST, unreachable: float = 0.0) -> None:
        """`unreachable`: seconds after which a host whose kernel does not answer counts as lost (default: about 30)."""
        self.peer, self.longest = peer, longest
        self.number: int | None = None  # of the peer, once it has said hello
        self._unfinished, self._since = b"", 0.0  # the beginning of a message, and when it came
        self._failed: OSError | None = None
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unreachable)),
        ):
            peer.setsockopt(level, option, value)

    def fileno(self) -> int:
        return self.peer.fileno()

    def send(self, **message: Any) -> None:
        """Failures show in the next `receive`."""
        try:
            self.peer.settimeout(limits.MESSAGE)
            self.peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError as failure:
            self._failed = self._failed or failure
            with suppress(OSError):  # half a message would spoil the next one
                self.peer.shutdown(socket.SHUT_RDWR)

    def receive(self, seconds: float = 0.0) -> list[Message]:
        """The messages that have come, after waiting at most that long; Lost when there will be no more."""
        try:
            self.peer.settimeout(seconds)
            piece = self.peer.recv(LONGEST)
        except OSError as failure:
            if isinstance(failure, (BlockingIOError, socket.timeout)) and failure.errno != errno.ETIMEDOUT:
                return []
            self._failed, piece = self._failed or failure, b""
        if not piece:
            raise Lost(self._failed is not None and self._failed.errno in _UNREACHABLE)
        *lines, rest = (self._unfinished + piece).split(b"\n")
        if lines or not self._unfinished:  # `rest` begins in this piece
            self._since = time.monotonic()
        self._unfinished = rest
        late = rest and time.monotonic() - self._since > limits.MESSAGE
        if late or max(map(len, (*lines, rest))) > self.longest:
            raise Lost
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise Lost from None
        if not all(isinstance(message, dict) for message in messages):
            raise Lost
        return messages

    def close(self) -> None:
        self.peer.close()


class Peers:
    """Connections to numbered peers: ranks or nodes.

    A process that connects must say hello within `limits.HELLO` seconds; `greet` gets its link and first message and
    returns its number, or nothing: then the connection is closed. It may also raise.
    """

    def __init__(self, greet: Greet, expected: int, longest: int = LONGEST, unreachable: float = 0.0) -> None:
        """`expected`: how many peers there may be."""
        self.links: dict[int, Link] = {}
        self.selector = selectors.DefaultSelector()
        self._greet, self._longest, self._unreachable = greet, longest, unreachable
        self._strangers: dict[Link, float] = {}  # who has not said hello, and until when it may; the oldest first
        self._most_strangers = expected + _SPARE
        self._listener: socket.socket | None = None

    def listen(self, host: str, port: int = 0) -> int:
        """At that address; the port, which the kernel chooses if it is 0."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.accept_from(socket.create_server((host, port), family=family, backlog=self._most_strangers))
        return int(self._listener.getsockname()[1])  # type: ignore[union-attr]

    def accept_from(self, listener: socket.socket) -> None:
        self._listener = listener
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, listener)

    def add(self, number: int, link: Link) -> None:
        """A connection that was made from here, or that has been greeted. It replaces an older one."""
        if number in self.links:
            self._drop(self.links[number])
        self.links[number], link.number = link, number
        if self._strangers.pop(link, None) is None:
            self.selector.register(link, selectors.EVENT_READ, link)

    def take(self, number: int) -> Link:
        """The connection to that peer, which belongs to the caller from here on."""
        link = self.links.pop(number)
        self.selector.unregister(link)
        return link

    def send(self, but: int = -1, **message: Any) -> None:
        """To all peers but one."""
        for number, link in list(self.links.items()):
            if number != but:
                link.send(**message)

    def hear(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """What comes within that time: messages, each with its sender's number, hellos too. Lost, with the number, when
        a peer's connection ends. -1 stands for what the caller has registered with `selector` itself."""
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                yield -1, {}
            elif key.data is self._listener:
                self._accept()
            elif key.data.fileno() >= 0:  # not dropped a moment ago
                yield from self._hear(key.data)
        now = time.monotonic()
        for link in [link for link, until in self._strangers.items() if now > until]:
            self._drop(link)

    def _hear(self, link: Link) -> Iterator[tuple[int, Message]]:
        try:
            for message in link.receive():
                if link.number is None:
                    number = self._greet(link, message)
                    if number is None:
                        raise Lost
                    self.add(number, link)
                yield link.number, message  # type: ignore[misc]
        except Lost as lost:
            self._drop(link)
            if link.number is not None:
                raise Lost(lost.unreachable, link.number) from None
        except FleetError:
            if link.number is None:  # raised by `greet`
                self._drop(link)
            raise

    def _accept(self) -> None:
        with suppress(OSError):
            peer, _ = self._listener.accept()  # type: ignore[union-attr]
            link = Link(peer, self._longest, self._unreachable)
            self._strangers[link] = time.monotonic() + limits.HELLO
            self.selector.register(link, selectors.EVENT_READ, link)
        if len(self._strangers) > self._most_strangers:
            self._drop(next(iter(self._strangers)))

    def _drop(self, link: Link) -> None:
        self.selector.unregister(link)
        link.close()
        self._strangers.pop(link, None)
        if link.number is not None and self.links.get(link.number) is link:
            del self.links[link.number]

    def stop_listening(self) -> None:
        """No new peers from here on; those who have not said hello are dropped."""
        for link in list(self._strangers):
            self._drop(link)
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """Close all descriptors without touching the selector, which a forked child shares with its parent."""
        for each in (*self.links.values(), *self._strangers, self._listener):
            if each is not None:
                each.close()


def connect(host: str, port: int, hello: Message, longest: int = LONGEST, unreachable: float = 0.0) -> Link:
    """Connect and say hello."""
    peer = socket.create_connection((host.strip("[]"), port), timeout=limits.CONNECT)
    link = Link(peer, longest, unreachable)
    link.send(**hello)
    return link


def ask(
    host: str, port: int, hello: Message, seconds: float, answer_within: float, waiting: Callable[[bool], None]
) -> tuple[Link, Message]:
    """Say hello, again and again for that long, until somebody answers: the connection and the first message.

    `waiting` is called about once a second, with whether there is a connection. An OSError or Lost says why nobody did.
    """
    began = time.monotonic()
    while True:
        try:
            link = connect(host, port, hello)
            while time.monotonic() - began < answer_within:
                if messages := link.receive(1.0):
                    return link, messages[0]
                waiting(True)
            link.close()
            raise OSError(errno.ETIMEDOUT, "no answer")
        except (OSError, Lost):
            if time.monotonic() - began >= seconds:
                raise
        waiting(False)
        time.sleep(0.05)
