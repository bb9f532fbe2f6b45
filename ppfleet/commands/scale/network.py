"""Bandwidth and latency between the first host and the others, measured over TCP: what a projection reckons with."""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import suppress

from ppfleet import limits
from ppfleet.cluster.rendezvous import Meeting, listen
from ppfleet.commands.scale.projection import Network
from ppfleet.errors import CommError

_SECONDS = 1.0  # of sending, to each host
_MOST = 1 << 28  # bytes: a network that takes these within a second is fast enough to be known by them
_PIECE = 1 << 18
_PINGS = 50


def measure(meeting: Meeting) -> Network | None:
    """On all hosts at the same time; the first learns the result, which is that of its slowest connection."""
    found = []
    for number in range(1, len(meeting.nodes)):
        if not meeting.node:
            with listen(meeting.nodes[0], meeting.port) as listener:
                meeting.exchange("")  # who connects now finds somebody
                listener.settimeout(limits.MEASURE)
                try:
                    found.append(_receive(listener))
                except OSError as failure:
                    raise CommError(f"the network to {meeting.nodes[number]} cannot be measured: {failure}") from None
        else:
            meeting.exchange("")
            if number == meeting.node:
                with suppress(OSError):  # the first host says what went wrong
                    _send(meeting.nodes[0], meeting.port)
    if meeting.node:
        return None
    return Network(min(each.bandwidth for each in found), max(each.latency for each in found))


def _receive(listener: socket.socket) -> Network:
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(limits.MEASURE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        turns = []
        for _ in range(_PINGS):
            asked = time.perf_counter()
            peer.sendall(b"p")
            if not peer.recv(1):
                raise OSError("the other host closed the connection")
            turns.append(time.perf_counter() - asked)
        peer.sendall(b"d")
        buffer = bytearray(_PIECE)
        count = peer.recv_into(buffer)
        began = ended = time.perf_counter()
        total = 0
        while count := peer.recv_into(buffer):
            total += count
            ended = time.perf_counter()
    if not total:
        raise OSError("the other host closed the connection")
    return Network(total / (ended - began), statistics.median(turns) / 2)


def _send(host: str, port: int) -> None:
    with socket.create_connection((host.strip("[]"), port), timeout=limits.MEASURE) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while peer.recv(1) == b"p":
            peer.sendall(b"p")
        piece, sent, deadline = bytes(_PIECE), 0, time.monotonic() + _SECONDS
        while sent < _MOST and time.monotonic() < deadline:
            peer.sendall(piece)
            sent += len(piece)
