"""Every rank's connection to rank 0, for as long as the job runs: messages, and who is lost. Pure: plain sockets.

A process that dies closes its connection, so its end is known at once. A host that vanishes is noticed by TCP itself, a
few seconds after it stopped answering.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ppfleet import limits
from ppfleet.cluster import link
from ppfleet.cluster.link import Link, Peers
from ppfleet.errors import CommError

if TYPE_CHECKING:
    from ppfleet.distributed.world import World


class Hub:
    """This rank's connections. `processes` are process and host of the ranks, as they said themselves."""

    def __init__(self, world: World, process: dict[str, Any]) -> None:
        self.world = world
        self.processes: dict[int, dict[str, Any]] = {world.rank: process}
        self._host = world.master.rpartition(":")[0].strip("[]")
        self._token = ""
        self._peers = Peers(self._greet, world.size, unreachable=limits.UNREACHABLE)
        self._wakeups, self.wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # a byte written there ends `hear`
        self._peers.selector.register(self._wakeups, selectors.EVENT_READ, None)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.wakeup_fd, b"\0")

    def listen(self) -> int:
        """Rank 0: the port where the others will find it."""
        return self._peers.listen(self._host)

    def join(self, token: str, port: int) -> None:
        """The others: connect. On all ranks: only a process that knows the token belongs to the job."""
        self._token = token
        if self.world.first:
            return
        hello = {"hello": token, "rank": self.world.rank, "process": self.processes[self.world.rank]}
        try:
            self._peers.add(0, link.connect(self._host, port, hello, unreachable=limits.UNREACHABLE))
        except OSError as failure:
            why = f"rank 0's watchdog at {self._host}:{port} did not answer {self.world.name()} ({failure})"
            raise CommError(why) from None

    def send(self, but: int = -1, **message: Any) -> None:
        """To rank 0; from rank 0 to all but one."""
        self._peers.send(but, **message)

    def hear(self, seconds: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """As `Peers.hear`; rank -1 for the bytes that were written to `wakeup_fd`: numbers of signals."""
        for rank, message in self._peers.hear(seconds):
            if rank >= 0:
                yield rank, message
            else:
                with contextlib.suppress(OSError):
                    yield -1, {"signals": os.read(self._wakeups, 4096)}

    def _greet(self, peer: Link, hello: dict[str, Any]) -> int | None:
        rank, process = hello.get("rank"), hello.get("process")
        if hello.get("hello") != self._token or not isinstance(rank, int) or not isinstance(process, dict):
            return None
        if not 0 < rank < self.world.size or rank in self.processes or not isinstance(process.get("pid"), int):
            return None
        self.processes[rank] = process
        peer.send(process=self.processes[0])
        return rank

    def close(self) -> None:
        """Also in a forked child, to which its parent's connections do not belong."""
        self._peers.close()

    def end(self) -> None:
        """Release everything."""
        self.close()
        self._peers.selector.close()
        os.close(self._wakeups)
        os.close(self.wakeup_fd)
