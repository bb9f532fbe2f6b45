"""Connections: framing, bounds, and strangers that are silent, slow or noisy. Real sockets, no processes."""

import json
import socket
import threading
import time

import pytest

from ppfleet import limits
from ppfleet.cluster.link import LONGEST, Link, Lost, Peers, ask, connect
from ppfleet.errors import MismatchError


def greet(link, hello):
    return hello.get("number")


@pytest.fixture
def peers():
    made = Peers(greet, 2)
    made.port = made.listen("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        mine = Link(listener.accept()[0], longest=1000)
    yield mine, theirs
    mine.close()
    theirs.close()


def hear(peers, until):
    """All messages until a condition holds."""
    found, deadline = [], time.monotonic() + 10
    while not until(found) and time.monotonic() < deadline:
        found += peers.hear(0.02)
    assert until(found), found
    return found


def is_closed(stranger):
    """Whether the other end has closed the connection, waiting for it a little."""
    stranger.settimeout(0.05)
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True
    except socket.timeout:
        return False


def test_messages_arrive_whole_however_they_are_cut(pair):
    mine, theirs = pair
    text = json.dumps({"a": "ä" * 100}).encode() + b"\n"
    assert mine.receive() == []
    for start in range(0, len(text), 7):
        theirs.sendall(text[start : start + 7])
    theirs.sendall(b'{"b": 1}\n{"c": 2}\n')
    found = []
    while len(found) < 3:
        found += mine.receive(5.0)
    assert found == [{"a": "ä" * 100}, {"b": 1}, {"c": 2}]
    theirs.close()
    with pytest.raises(Lost) as lost:
        mine.receive(5.0)
    assert not lost.value.unreachable


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"x" * 1001, b"[" * 900 + b"\n", b"7\n", b"\xff\n", b'"' + b"x" * 1001 + b'"\n'],
)
def test_noise_ends_the_connection(pair, noise):
    mine, theirs = pair
    theirs.sendall(noise)
    with pytest.raises(Lost):
        for _ in range(3):
            mine.receive(5.0)


def test_a_message_that_takes_too_long_ends_the_connection(pair, monkeypatch):
    mine, theirs = pair
    now = [100.0]
    monkeypatch.setattr("ppfleet.cluster.link.time.monotonic", lambda: now[0])
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert mine.receive(5.0) == [{"a": 1}]
    now[0] += limits.MESSAGE - 1
    theirs.sendall(b": 2}\n{")  # in time; the next message begins here
    assert mine.receive(5.0) == [{"b": 2}]
    now[0] += limits.MESSAGE - 1
    theirs.sendall(b'"c"')
    assert mine.receive(5.0) == []
    now[0] += 2
    theirs.sendall(b":")
    with pytest.raises(Lost):
        mine.receive(5.0)


def test_a_failed_send_shows_in_the_next_receive(pair):
    mine, theirs = pair
    theirs.close()
    for _ in range(3):
        mine.send(a=1)
    with pytest.raises(Lost):
        mine.receive(5.0)


def test_peers_are_known_by_their_numbers(peers):
    one, two = connect("127.0.0.1", peers.port, {"number": 1}), connect("127.0.0.1", peers.port, {"number": 2})
    hellos = hear(peers, lambda found: len(found) == 2)
    assert sorted(hellos, key=lambda each: each[0]) == [(1, {"number": 1}), (2, {"number": 2})]
    two.send(a=1)
    assert hear(peers, bool) == [(2, {"a": 1})]
    peers.send(but=1, b=2)
    assert two.receive(5.0) == [{"b": 2}] and one.receive() == []
    one.close()
    with pytest.raises(Lost) as lost:
        hear(peers, lambda found: False)
    assert lost.value.number == 1 and list(peers.links) == [2]


def test_a_peer_that_connects_again_replaces_its_old_connection(peers):
    old = connect("127.0.0.1", peers.port, {"number": 1})
    hear(peers, bool)
    new = connect("127.0.0.1", peers.port, {"number": 1})
    hear(peers, bool)
    with pytest.raises(Lost):
        old.receive(5.0)
    peers.send(a=1)
    assert new.receive(5.0) == [{"a": 1}]


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * (LONGEST + 1)])
def test_a_stranger_is_dropped(peers, noise):
    known = connect("127.0.0.1", peers.port, {"number": 1})
    hear(peers, bool)
    with socket.create_connection(("127.0.0.1", peers.port)) as stranger:
        stranger.sendall(noise)
        assert hear(peers, lambda found: is_closed(stranger)) == []
    known.send(a=1)
    assert hear(peers, bool) == [(1, {"a": 1})]


@pytest.mark.parametrize("dribbles", [False, True])
def test_a_stranger_without_a_hello_is_dropped_after_its_time(peers, monkeypatch, dribbles):
    monkeypatch.setattr(limits, "HELLO", 0.3)
    with socket.create_connection(("127.0.0.1", peers.port)) as stranger:
        hear(peers, lambda found: peers._strangers)
        while peers._strangers:  # a byte now and then does not prolong it
            if dribbles:
                stranger.sendall(b" ")
            assert list(peers.hear(0.02)) == []
        assert is_closed(stranger)


def test_strangers_do_not_pile_up(peers):
    crowd = []
    for _ in range(100):
        crowd.append(socket.create_connection(("127.0.0.1", peers.port)))
        assert list(peers.hear(0.0)) == []
    hear(peers, lambda found: all(map(is_closed, crowd[:20])))
    assert len(peers._strangers) == 2 + 64
    connect("127.0.0.1", peers.port, {"number": 1})
    assert hear(peers, bool) == [(1, {"number": 1})]
    for each in crowd:
        each.close()


def test_an_error_of_greet_is_raised_and_drops_the_connection(peers):
    def refuse(link, hello):
        link.send(error="no")
        raise MismatchError("twice")

    peers._greet = refuse
    refused = connect("127.0.0.1", peers.port, {"number": 1})
    with pytest.raises(MismatchError):
        hear(peers, lambda found: False)
    assert refused.receive(5.0) == [{"error": "no"}] and not peers.links and not peers._strangers


def test_asking_until_somebody_answers(peers):
    """The first connection is closed without an answer; the second one is answered."""
    tries, asked = [], []

    def answer(link, hello):
        tries.append(hello)
        if len(tries) > 1:
            link.send(fine=True)
        return 1 if len(tries) > 1 else None

    peers._greet = answer
    caller = threading.Thread(
        target=lambda: asked.append(ask("127.0.0.1", peers.port, {"who": 7}, 20.0, 20.0, lambda connected: None))
    )
    caller.start()
    hear(peers, bool)
    caller.join(10)
    assert asked[0][1] == {"fine": True} and tries == [{"who": 7}] * 2


def test_asking_in_vain():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        with pytest.raises(OSError, match="no answer"):
            ask("127.0.0.1", silent.getsockname()[1], {}, 0.0, 0.0, lambda connected: None)
        port = silent.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        ask("127.0.0.1", port, {}, 0.0, 0.0, lambda connected: None)
