"""Every rank connected to rank 0, for as long as the job runs: messages, and who is gone. Pure: plain sockets.

A process that dies closes its connection, so that its end is known at once. A host that vanishes is noticed by TCP
itself, a few seconds after it has stopped to answer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ppfleet import limits
from ppfleet.cluster.rendezvous import Link
from ppfleet.errors import CommError

if TYPE_CHECKING:
    from ppfleet.distributed.world import World

_STRANGERS = 64  # connections of whoever has not said who it is


class Gone(Exception):
    """That rank's connection has ended; `unreachable`: because its host does not answer."""

    def __init__(self, rank: int, unreachable: bool) -> None:
        super().__init__(rank)
        self.rank, self.unreachable = rank, unreachable


class Hub:
    """This rank's connections. `who` are process and host of those that have come, as they said themselves."""

    def __init__(self, world: World, me: dict[str, Any]) -> None:
        self.world = world
        self.who: dict[int, dict[str, Any]] = {world.rank: me}
        self._links: dict[int, Link] = {}
        self._strangers: list[Link] = []
        self._listener: socket.socket | None = None
        self._token = ""
        self._ready = selectors.DefaultSelector()
        self._bell, self._rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ready.register(self._bell, selectors.EVENT_READ, None)

    @property
    def bell(self) -> int:
        """A descriptor: what is written to it wakes `hear` up."""
        return self._rope

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._rope, b"\0")

    def listen(self) -> int:
        """Rank 0: the port at which the others will find it."""
        host = self.world.master.rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=self.world.size + _STRANGERS)
        self._ready.register(self._listener, selectors.EVENT_READ, self._listener)
        return int(self._listener.getsockname()[1])

    def join(self, token: str, port: int) -> None:
        """The others: connect. All: only who knows the token is of this job."""
        self._token = token
        if self.world.first:
            return
        host = self.world.master.rpartition(":")[0].strip("[]")
        try:
            link = Link(socket.create_connection((host, port), timeout=10), limits.UNREACHABLE)
        except OSError as failure:
            why = f"the watch of rank 0 at {host}:{port} did not answer {self.world.name()} ({failure})"
            raise CommError(why) from None
        link.send(hello=token, rank=self.world.rank, who=self.who[self.world.rank])
        self._links[0] = link
        self._ready.register(link, selectors.EVENT_READ, link)

    def send(self, apart: int = -1, **message: Any) -> None:
        """To rank 0; from rank 0 to all but one."""
        for rank, link in list(self._links.items()):
            if rank != apart:
                link.send(**message)

    def hear(self, seconds: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """The messages that come within that time, and from whom; rank -1 for what was written to the bell."""
        for key, _ in self._ready.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):
                    yield -1, {"bell": os.read(self._bell, 4096)}
            elif key.data is self._listener:
                self._accept()
            else:
                yield from self._hear(key.data)

    def _hear(self, link: Link) -> Iterator[tuple[int, dict[str, Any]]]:
        rank = next((number for number, other in self._links.items() if other is link), -1)
        try:
            for message in link.receive():
                if rank < 0:
                    rank = self._greet(link, message)
                yield rank, message
        except EOFError as end:
            self._drop(link)
            if self._links.get(rank) is link:
                del self._links[rank]
                raise Gone(rank, bool(end.args)) from None

    def _greet(self, link: Link, message: dict[str, Any]) -> int:
        """The first message of a connection says who it is. Anything else is noise, or somebody else's."""
        rank, who = message.get("rank"), message.get("who")
        if message.get("hello") != self._token or not isinstance(rank, int) or not isinstance(who, dict):
            raise EOFError
        if not 0 < rank < self.world.size or rank in self.who or not isinstance(who.get("pid"), int):
            raise EOFError
        self._strangers.remove(link)
        self._links[rank], self.who[rank] = link, who
        link.send(hello=self._token, rank=0, who=self.who[0])
        return rank

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link = Link(self._listener.accept()[0], limits.UNREACHABLE)  # type: ignore[union-attr]
            self._strangers.append(link)
            self._ready.register(link, selectors.EVENT_READ, link)
        if len(self._strangers) > self.world.size + _STRANGERS:
            self._drop(self._strangers[0])

    def _drop(self, link: Link) -> None:
        self._ready.unregister(link)
        link.close()
        if link in self._strangers:
            self._strangers.remove(link)

    def close(self) -> None:
        """Also in a forked child, to which its parent's connections do not belong."""
        for link in [*self._links.values(), *self._strangers]:
            link.close()
        if self._listener is not None:
            self._listener.close()

    def end(self) -> None:
        """Give everything back."""
        self.close()
        self._ready.close()
        os.close(self._bell)
        os.close(self._rope)
