"""Connections of ranks to rank 0: who knows the token is a rank, noise is nobody, an end is noticed at once."""

import json
import socket
import time

import pytest

from ppfleet.distributed.world import World
from ppfleet.errors import CommError
from ppfleet.watchdog.hub import Gone, Hub


def star(rank, size=3):
    endpoints = tuple(f"127.0.0.1:{6000 + each}" for each in range(size))
    return Hub(World(rank, size, rank, size, endpoints, "127.0.0.1:6000"), {"pid": 100 + rank, "boot": "here"})


@pytest.fixture
def hub():
    made = star(0)
    made.port = made.listen()
    made.join("token", made.port)
    yield made
    made.close()


def heard(one, seconds=2.0, until=1):
    found, deadline = [], time.monotonic() + seconds
    while len(found) < until and time.monotonic() < deadline:
        found += [(rank, message) for rank, message in one.hear(0.05) if rank >= 0]
    return found


def joined(hub, rank):
    one = star(rank)
    one.join("token", hub.port)
    heard(hub)
    heard(one)
    return one


def test_messages_go_both_ways_and_everybody_is_known(hub):
    first, second = joined(hub, 1), joined(hub, 2)
    assert set(hub.who) == {0, 1, 2} and hub.who[2]["pid"] == 102
    first.send(beat={"step": 3})
    assert heard(hub) == [(1, {"beat": {"step": 3}})]
    hub.send(apart=1, news="x")
    assert heard(second) == [(0, {"news": "x"})] and heard(first, 0.2) == []


def test_an_end_is_noticed_at_once(hub):
    joined(hub, 1).close()
    with pytest.raises(Gone) as gone:
        heard(hub)
    assert gone.value.rank == 1 and not gone.value.unreachable
    assert heard(hub, 0.2) == []  # once


HELLO = {"hello": "token", "rank": 2, "who": {"pid": 5, "boot": "there"}}


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 5000,
        b"[" * 100_000 + b"\n",
        b"7\n",
        b"x" * 200_000,
        json.dumps({**HELLO, "hello": "guess"}).encode() + b"\n",
        json.dumps({**HELLO, "rank": 0}).encode() + b"\n",
        json.dumps({**HELLO, "rank": 3}).encode() + b"\n",
        json.dumps({**HELLO, "rank": "2"}).encode() + b"\n",
        json.dumps({**HELLO, "who": {"pid": "x"}}).encode() + b"\n",
        json.dumps({**HELLO, "who": 7}).encode() + b"\n",
        json.dumps({**HELLO, "rank": 1}).encode() + b"\n",  # a rank that is there already
        json.dumps({"doom": {"kind": "stall", "text": "you are dead"}}).encode() + b"\n",
    ],
)
def test_noise_is_nobody(hub, noise):
    real = joined(hub, 1)
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.sendall(noise)
        assert heard(hub, 0.3) == [] and set(hub.who) == {0, 1}
    assert heard(hub, 0.2) == []
    real.send(fine=1)
    assert heard(hub) == [(1, {"fine": 1})]


def test_strangers_do_not_pile_up(hub):
    crowd = []
    for _ in range(200):
        crowd.append(socket.create_connection(("127.0.0.1", hub.port)))
        heard(hub, 0.01)
    heard(hub, 0.3)
    assert len(hub._strangers) <= 3 + 64
    assert joined(hub, 1) and 1 in hub.who
    for each in crowd:
        each.close()


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(CommError, match="rank 0 .* did not answer rank 1 on 127.0.0.1"):
        star(1).join("token", port)


def test_the_bell(hub):
    hub.ring()
    assert [rank for rank, _ in hub.hear(1)] == [-1]
