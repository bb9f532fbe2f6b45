"""Rank 0's side of the handshake: who is accepted, what must be the same, and strangers that do not hold it up."""

import socket
import threading

import pytest

from ppfleet.distributed import handshake
from ppfleet.distributed.handshake import Register
from ppfleet.distributed.world import World
from ppfleet.errors import CommError, MismatchError
from tests.harness import free_ports, wait_for


def world(rank, size, port):
    endpoints = tuple(f"127.0.0.1:{port + each}" for each in range(size))
    return World(rank, size, rank, size, endpoints, endpoints[0])


def facts(process, **more):
    return {"process": f"process {process} on a", "Python": "3.11", **more}


class Peer:
    """A link that keeps what is sent through it."""

    def __init__(self):
        self.sent = []

    def send(self, **message):
        self.sent.append(message)


def hello(rank, **more):
    return {"hello": handshake._HELLO, "rank": rank, "facts": facts(10 + rank, **more)}


@pytest.fixture
def register():
    return Register(world(0, 3, 6000), facts(10), 5.0)


def test_who_is_a_rank(register):
    assert register.greet(Peer(), hello(2)) == 2 and set(register.facts) == {0, 2}
    for wrong in ({"hello": "hi"}, {"rank": "1"}, {"rank": None}, {"facts": [1]}):
        assert register.greet(Peer(), {**hello(1), **wrong}) is None
    assert set(register.facts) == {0, 2}


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (1, "two processes claim to be rank 1: process 11 on a and process 11 on a"),
        (0, "two processes claim to be rank 0: process 10 on a and process 10 on a"),
        (3, "process 13 on a claims to be rank 3 of a job of 3"),
        (-1, "process 9 on a claims to be rank -1"),
    ],
)
def test_a_rank_that_cannot_be_is_refused_and_learns_why(register, rank, words):
    register.greet(Peer(), hello(1))
    peer = Peer()
    with pytest.raises(MismatchError, match=words):
        register.greet(peer, hello(rank))
    assert words in peer.sent[0]["error"]["text"]


def test_what_must_be_the_same(register):
    register.facts[1] = facts(11, **{"code of mine": "abc"})  # rank 0 has not loaded it
    register.compare()
    register.facts[0]["code of mine"] = "abc"
    register.facts[2] = facts(12)  # a rank may lack a module
    register.compare()
    register.facts[1]["code of mine"] = "xyz"
    with pytest.raises(MismatchError, match="the same code of mine: rank 0 on 127.0.0.1: abc; rank 1 .*: xyz"):
        register.compare()
    register.facts[1] = {**facts(11), "Python": "3.9"}
    with pytest.raises(MismatchError, match="the same Python: rank 0 on 127.0.0.1: 3.11; rank 1 on 127.0.0.1: 3.9"):
        register.compare()


def called(results, *arguments):
    try:
        results.append(handshake.call(*arguments))
    except Exception as failure:  # noqa: BLE001 - whatever it is, the test shows it
        results.append(failure)


def start(*arguments):
    results = []
    thread = threading.Thread(target=called, args=(results, *arguments), daemon=True)
    thread.start()
    return thread, results


def stranger(port):
    """Connected to rank 0, and has begun to say something."""
    while True:
        try:
            line = socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            continue
        line.sendall(b" ")
        return line


def dribble(line, stop):
    with line:
        while not stop.wait(0.1):
            try:
                line.sendall(b" ")
            except OSError:
                return


def test_a_stranger_that_sends_a_byte_now_and_then_does_not_hold_rank_0_up():
    (port,) = free_ports(1)
    first, told = start(world(0, 2, port), facts(10), 20.0, {"run": "abc"})
    stop = threading.Event()
    slow = threading.Thread(target=dribble, args=(stranger(port), stop))
    slow.start()
    try:
        second, heard = start(world(1, 2, port), facts(11, more="x" * 200_000), 20.0, {})
        first.join(10)
        second.join(10)
        assert told == heard == [{"run": "abc"}], (told, heard)
    finally:
        stop.set()
        slow.join()


def test_nor_past_its_limit():
    (port,) = free_ports(1)
    first, told = start(world(0, 2, port), facts(10), 1.0, {})
    stop = threading.Event()
    slow = threading.Thread(target=dribble, args=(stranger(port), stop))
    slow.start()
    try:
        first.join(10)
        assert isinstance(told[0], CommError) and told[0].code == "not_joined" and told[0].fields == {"ranks": [1]}
    finally:
        stop.set()
        slow.join()


def test_a_rank_that_disconnects_may_join_again():
    (port,) = free_ports(1)
    register = Register(world(0, 2, port), facts(10), 20.0)
    register._peers.listen("127.0.0.1", port)

    def joined():
        register._hear(0.1)
        return 1 in register.facts

    line = handshake.link.connect("127.0.0.1", port, hello(1))
    wait_for(joined, 10, "rank 1 joins")
    line.close()
    wait_for(lambda: not joined(), 10, "its end is noticed")
    again = handshake.link.connect("127.0.0.1", port, hello(1))
    wait_for(joined, 10, "rank 1 joins again")
    again.close()
    register._peers.close()
