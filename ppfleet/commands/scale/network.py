"""Bandwidth and latency between the first host and the others, measured over TCP: what a projection reckons with."""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import suppress

from ppfleet import limits
from ppfleet.cluster.rendezvous import Meeting
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
        meeting.exchange("")  # from here on, until it is measured, the connection carries no messages
        if not meeting.node:
            try:
                found.append(_receive(meeting.links[number].peer))
            except (OSError, KeyError) as failure:
                raise CommError(f"the network to {meeting.nodes[number]} cannot be measured: {failure}") from None
        elif number == meeting.node:
            with suppress(OSError):  # the first host says what went wrong
                _send(meeting.links[0].peer)
    if meeting.node:
        return None
    return Network(min(each.bandwidth for each in found), max(each.latency for each in found))


def _receive(peer: socket.socket) -> Network:
    peer.settimeout(limits.MEASURE)
    _read(peer, bytearray(1))  # the other host has read its last message, and would take no ping for a part of it
    turns = []
    for _ in range(_PINGS):
        asked = time.perf_counter()
        peer.sendall(b"p")
        _read(peer, bytearray(1))
        turns.append(time.perf_counter() - asked)
    peer.sendall(b"d")
    piece, began, ended, total = bytearray(_PIECE), 0.0, 0.0, 0
    while _read(peer, bytearray(1)) == b"m":  # more
        _read(peer, piece)
        ended = time.perf_counter()
        if began:  # the first piece starts the clock
            total += _PIECE
        else:
            began = ended
    return Network(total / (ended - began), statistics.median(turns) / 2)


def _send(peer: socket.socket) -> None:
    peer.settimeout(limits.MEASURE)
    peer.sendall(b"r")  # ready
    while _read(peer, bytearray(1)) == b"p":
        peer.sendall(b"p")
    piece, sent, deadline = b"m" + bytes(_PIECE), 0, time.monotonic() + _SECONDS
    while sent < 2 * _PIECE or (sent < _MOST and time.monotonic() < deadline):
        peer.sendall(piece)
        sent += _PIECE
    peer.sendall(b"e")


def _read(peer: socket.socket, buffer: bytearray) -> bytearray:
    """Fill the buffer."""
    rest = memoryview(buffer)
    while rest:
        count = peer.recv_into(rest)
        if not count:
            raise OSError("the other host closed the connection")
        rest = rest[count:]
    return buffer
