"""A rank's connection to the judge: messages both ways, its end, and a way to wake the thread that listens."""

import socket

import pytest

from ppfleet.cluster.link import Lost, Peers
from ppfleet.distributed.world import World
from ppfleet.errors import CommError
from ppfleet.watchdog.hub import Hub
from tests.harness import wait_for


def make(rank, size=3):
    endpoints = tuple(f"127.0.0.1:{6000 + each}" for each in range(size))
    return Hub(World(rank, size, rank, size, endpoints, "127.0.0.1:6000"), {"pid": 100 + rank, "boot": "here"})


def test_messages_go_both_ways_and_an_end_is_noticed():
    hellos = []
    judge = Peers(lambda peer, hello: hellos.append(hello) or hello["rank"], 3)
    one = make(1)
    one.join("token", judge.listen("127.0.0.1"))
    wait_for(lambda: list(judge.hear(0.1)), 5, "a hello")
    assert hellos == [{"hello": "token", "rank": 1, "process": {"pid": 101, "boot": "here"}}]
    one.send(beat={"step": 3})
    assert wait_for(lambda: list(judge.hear(0.1)), 5, "a beat") == [(1, {"beat": {"step": 3}})]
    judge.send(news="x")
    assert wait_for(lambda: list(one.hear(0.1)), 5, "news") == [{"news": "x"}]
    judge.close()
    with pytest.raises(Lost) as lost:
        wait_for(lambda: list(one.hear(0.1)), 5, "the end")
    assert not lost.value.unreachable
    one.end()


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(CommError, match="rank 0's watchdog .* did not answer rank 1 on 127.0.0.1"):
        make(1).join("token", port)


def test_waking_it_up():
    one = make(0)
    one.wake()
    assert list(one.hear(5)) == [{"signals": b"\0"}]
    one.end()
