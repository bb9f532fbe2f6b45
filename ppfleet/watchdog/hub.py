"""A rank's connection to the judge, for as long as the job runs: messages, and that it is lost. Pure: plain sockets.

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
from ppfleet.cluster.link import Peers
from ppfleet.errors import CommError

if TYPE_CHECKING:
    from ppfleet.distributed.world import World


class Hub:
    """This rank's side. `process` is its process and host; a job of one has no connection."""

    def __init__(self, world: World, process: dict[str, Any]) -> None:
        self.world, self.process = world, process
        self._host = world.master.rpartition(":")[0].strip("[]")
        self._peers = Peers(lambda *_: None, 1, unreachable=limits.UNREACHABLE)
        self._wakeups, self.wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # a byte written there ends `hear`
        self._peers.selector.register(self._wakeups, selectors.EVENT_READ, None)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.wakeup_fd, b"\0")

    def join(self, token: str, port: int) -> None:
        """Connect to the judge, which accepts only those who know the token."""
        hello = {"hello": token, "rank": self.world.rank, "process": self.process}
        try:
            self._peers.add(0, link.connect(self._host, port, hello, unreachable=limits.UNREACHABLE))
        except OSError as failure:
            why = f"rank 0's watchdog at {self._host}:{port} did not answer {self.world.name()} ({failure})"
            raise CommError(why) from None

    def send(self, **message: Any) -> None:
        self._peers.send(**message)

    def hear(self, seconds: float) -> Iterator[dict[str, Any]]:
        """As `Peers.hear`; `signals` are the bytes that were written to `wakeup_fd`: numbers of signals."""
        for number, message in self._peers.hear(seconds):
            if number >= 0:
                yield message
            else:
                with contextlib.suppress(OSError):
                    yield {"signals": os.read(self._wakeups, 4096)}

    def close(self) -> None:
        """Also in a forked child, to which its parent's connections do not belong."""
        self._peers.close()

    def end(self) -> None:
        """Release everything."""
        self.close()
        self._peers.selector.close()
        os.close(self._wakeups)
        os.close(self.wakeup_fd)
