"""Connections of ranks to rank 0: a process that knows the token is a rank, others are dropped, an end is noticed."""

import socket
import time

import pytest

from ppfleet.cluster.link import Lost
from ppfleet.distributed.world import World
from ppfleet.errors import CommError
from ppfleet.watchdog.hub import Hub


def make(rank, size=3):
    endpoints = tuple(f"127.0.0.1:{6000 + each}" for each in range(size))
    return Hub(World(rank, size, rank, size, endpoints, "127.0.0.1:6000"), {"pid": 100 + rank, "boot": "here"})


@pytest.fixture
def hub():
    made = make(0)
    made.port = made.listen()
    made.join("token", made.port)
    yield made
    made.end()


def heard(one, count=1):
    """The next messages, or fewer if they do not come."""
    found, deadline = [], time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        found += [(rank, message) for rank, message in one.hear(0.05) if rank >= 0]
    return found


def joined(hub, rank):
    one = make(rank)
    one.join("token", hub.port)
    assert [rank for rank, _ in heard(hub)] == [rank]
    assert heard(one) == [(0, {"process": {"pid": 100, "boot": "here"}})]
    return one


def test_messages_go_both_ways_and_every_process_is_known(hub):
    first, second = joined(hub, 1), joined(hub, 2)
    assert set(hub.processes) == {0, 1, 2} and hub.processes[2]["pid"] == 102
    first.send(beat={"step": 3})
    assert heard(hub) == [(1, {"beat": {"step": 3}})]
    hub.send(but=1, news="x")
    hub.send(news="y")
    assert heard(second, 2) == [(0, {"news": "x"}), (0, {"news": "y"})] and heard(first) == [(0, {"news": "y"})]


def test_an_end_is_noticed_once(hub):
    joined(hub, 1).close()
    with pytest.raises(Lost) as lost:
        heard(hub)
    assert lost.value.number == 1 and not lost.value.unreachable
    hub.wake()
    assert [rank for rank, _ in hub.hear(5)] == [-1]


HELLO = {"hello": "token", "rank": 2, "process": {"pid": 5, "boot": "there"}}


class Peer:
    """A link that keeps what is sent through it."""

    def __init__(self):
        self.sent = []

    def send(self, **message):
        self.sent.append(message)


@pytest.mark.parametrize(
    "change",
    [
        {"hello": "guess"},
        {"rank": 0},
        {"rank": 1},  # has joined already
        {"rank": 3},
        {"rank": "2"},
        {"rank": None},
        {"process": {"pid": "x"}},
        {"process": 7},
    ],
)
def test_who_is_refused(hub, change):
    hub.processes[1] = {"pid": 101}
    assert hub._greet(Peer(), {**HELLO, **change}) is None and 2 not in hub.processes
    peer = Peer()
    assert hub._greet(peer, HELLO) == 2 and hub.processes[2] == HELLO["process"]
    assert peer.sent == [{"process": hub.processes[0]}]


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(CommError, match="rank 0's watchdog .* did not answer rank 1 on 127.0.0.1"):
        make(1).join("token", port)


def test_waking_it_up(hub):
    hub.wake()
    assert list(hub.hear(5)) == [(-1, {"signals": b"\0"})]
