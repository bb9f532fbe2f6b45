"""The start of a job on several hosts, as the first node sees it: real sockets on one machine."""

import socket
import threading
import time

import pytest

from ppfleet.cluster import rendezvous
from ppfleet.cluster.rendezvous import Link, Meeting
from ppfleet.errors import CommError
from tests.harness import free_ports


@pytest.fixture
def meeting():
    """Three nodes, of which this is the first; the others are what a test connects."""
    nodes = ["127.0.0.1", "b", "c"]
    (port,) = free_ports(1)
    return Meeting(nodes, 0, port, "digest", 20.0, lambda text: None)


def connect(meeting, number, digest="digest"):
    for _ in range(100):
        try:
            link = Link(socket.create_connection(("127.0.0.1", meeting.port), timeout=5))
        except OSError:
            time.sleep(0.05)
            continue
        link.send(hello=rendezvous._HELLO, node=number, digest=digest)
        return link
    raise AssertionError("nobody listens")


def start(meeting):
    """In a thread: the token, or what was raised."""
    ended = []

    def run():
        try:
            ended.append(meeting.start(lambda token: None))
        except Exception as failure:  # noqa: BLE001 - whatever it is, the test shows it
            ended.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_a_second_hello_on_the_same_connection_drops_that_node_until_it_comes_again(meeting):
    thread, ended = start(meeting)
    twice = connect(meeting, 1)
    while 1 not in meeting.links and thread.is_alive():
        pass
    twice.send(hello=rendezvous._HELLO, node=1, digest="digest")
    with pytest.raises(EOFError):  # it is told by the end of the connection
        list(twice.receive())
    others = [connect(meeting, number) for number in (1, 2)]
    thread.join(20)
    assert len(ended) == 1 and isinstance(ended[0], str), ended
    assert all(next(iter(link.receive()))["token"] == ended[0] for link in others)


def test_an_error_keeps_its_code_on_the_way_to_the_other_nodes(meeting):
    meeting.patience = 1.0
    thread, ended = start(meeting)
    other = Meeting(list(meeting.nodes), 1, meeting.port, "digest", 20.0, lambda text: None)
    with pytest.raises(CommError, match=r"c did not join within 1 s") as told:
        other.start(lambda token: None)
    thread.join(20)
    assert told.value.code == ended[0].code == "not_joined"
