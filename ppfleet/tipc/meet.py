"""Nodes wait for each other before a command that needs them all. The first node listens at its listed address.

Each message is one line of JSON, at most 4 kB. Whoever waits says for whom.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Callable

from ppfleet import hosts
from ppfleet.errors import CommError

_LONGEST = 4096
_SAY_EVERY = 10.0


@dataclass
class Meeting:
    """The nodes of one run. `digest` is of what must be the same on all of them."""

    nodes: Sequence[str]
    node: int
    port: int
    digest: str
    patience: float
    say: Callable[[str], None]
    _said: float = field(default=0.0, init=False)

    def gather(self, what: str, prepare: Callable[[str], None] = lambda token: None) -> str:
        """Wait until every node is at `what`; a token that is the same on all. The first node calls `prepare` with it
        before the others go on, and with nothing before they learn that it failed. A CommError names who did not come.
        """
        self._said = time.monotonic() - _SAY_EVERY + 2  # the first time soon
        deadline = time.monotonic() + self.patience
        if self.node == 0:
            return _Host(self, what, deadline, prepare).gather()
        return self._join(what, deadline)

    def waiting(self, for_whom: str, deadline: float) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY:
            self._said = now
            so_far = f"{self.patience - (deadline - now):.0f} of at most {self.patience:.0f} s"
            self.say(f"waiting for {for_whom}: start the same command there ({so_far})")

    def _join(self, what: str, deadline: float) -> str:
        missing = [self.nodes[0]]
        while time.monotonic() < deadline:
            with suppress(OSError), self._connect() as peer:
                peer.sendall(_line({"what": what, "node": self.node, "digest": self.digest}))
                with peer.makefile("rb") as answers:
                    while time.monotonic() < deadline:
                        told = _message(answers.readline(_LONGEST + 1))
                        if "token" in told:
                            return str(told["token"])
                        if "error" in told:
                            raise CommError(str(told["error"]))
                        missing = [str(name) for name in told.get("missing", missing)]
                        if self.nodes[self.node] in missing:  # an answer that is not meant for us
                            break
                        self.waiting(", ".join(missing), deadline)
            self.waiting(", ".join(missing), deadline)
            time.sleep(0.5)
        raise CommError(f"{', '.join(missing)} did not come to {what} within {self.patience:.0f} s")

    def _connect(self) -> socket.socket:
        peer = socket.create_connection((self.nodes[0].strip("[]"), self.port), timeout=5)
        peer.settimeout(15)  # the first node writes at least every few seconds
        return peer


class _Host:
    """The first node's side: collects the others, tells them who is missing, then lets all go."""

    def __init__(self, meeting: Meeting, what: str, deadline: float, prepare: Callable[[str], None]) -> None:
        self.meeting, self.what, self.deadline, self.prepare = meeting, what, deadline, prepare
        self.present: dict[int, socket.socket] = {}
        self.unheard: set[socket.socket] = set()
        self.ready = selectors.DefaultSelector()

    def gather(self) -> str:
        meeting = self.meeting
        with self._listen() as listener, self.ready as ready:
            ready.register(listener, selectors.EVENT_READ)
            told = time.monotonic()
            try:
                while missing := self._missing():
                    if time.monotonic() >= self.deadline:
                        self._fail(f"{', '.join(missing)} did not come to {self.what} within {meeting.patience:.0f} s")
                    for key, _ in ready.select(0.5):
                        peer: Any = key.fileobj
                        if peer is listener:
                            peer = listener.accept()[0]
                            peer.setblocking(False)
                            self.unheard.add(peer)
                            ready.register(peer, selectors.EVENT_READ)
                        elif not self._hear(peer):
                            self._drop(peer)
                    if time.monotonic() - told > 2:
                        told = time.monotonic()
                        self._tell({"missing": missing})
                    meeting.waiting(", ".join(missing), self.deadline)
                token = secrets.token_hex(8)
                self.prepare(token)
                self._tell({"token": token})
                return token
            finally:
                for peer in [*self.present.values(), *self.unheard]:
                    peer.close()

    def _listen(self) -> socket.socket:
        meeting = self.meeting
        host = hosts.resolve(meeting.nodes[0])[:1] or [meeting.nodes[0]]
        family = socket.AF_INET6 if ":" in host[0] else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host[0], meeting.port))
        except OSError as failure:
            listener.close()
            raise CommError(
                f"cannot listen at {meeting.nodes[0]} port {meeting.port} for the other nodes ({failure.strerror}); "
                f"on all nodes, export FLAGS_START_PORT=17000 takes other ports"
            ) from None
        listener.listen()
        listener.setblocking(False)
        return listener

    def _missing(self) -> list[str]:
        return [name for number, name in enumerate(self.meeting.nodes) if number and number not in self.present]

    def _hear(self, peer: socket.socket) -> bool:
        """Read what a peer sent; whether it stays."""
        try:
            told = _message(peer.recv(_LONGEST))
        except OSError:
            return False
        number = told.get("node")
        if not (isinstance(number, int) and 0 < number < len(self.meeting.nodes)):
            return False
        name = self.meeting.nodes[number]
        if told.get("digest") != self.meeting.digest:
            self.present[number] = peer
            self._fail(f"{name} has another TIPC file, mode or version of ppfleet than {self.meeting.nodes[0]}")
        if told.get("what") != self.what:
            self.present[number] = peer
            self._fail(f"{name} is at {told.get('what')}, {self.meeting.nodes[0]} at {self.what}: start both anew")
        if self.present.get(number) is not peer:
            self._drop(self.present.get(number))
        self.present[number] = peer
        self.unheard.discard(peer)
        return True

    def _drop(self, peer: socket.socket | None) -> None:
        if peer is not None:
            self.present = {number: other for number, other in self.present.items() if other is not peer}
            self.unheard.discard(peer)
            self.ready.unregister(peer)
            peer.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self.present.values():
            with suppress(OSError):
                peer.setblocking(True)
                peer.settimeout(5)
                peer.sendall(_line(message))
                peer.setblocking(False)

    def _fail(self, text: str) -> None:
        self.prepare("")
        self._tell({"error": text})
        raise CommError(text)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(data: bytes) -> dict[str, Any]:
    """One line of JSON; an OSError for anything else, as for a connection that broke."""
    if not data.endswith(b"\n") or len(data) > _LONGEST:
        raise OSError("no message")
    try:
        found = json.loads(data)
    except ValueError:
        raise OSError("no message") from None
    if not isinstance(found, dict):
        raise OSError("no message")
    return found
