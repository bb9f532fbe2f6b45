"""The start of a job on several hosts and what they exchange: decisions of the first node, and threads as nodes."""

import threading
import time

import pytest

from ppfleet import limits
from ppfleet.cluster import link, rendezvous
from ppfleet.cluster.rendezvous import UNKNOWN, Meeting
from ppfleet.errors import CommError
from tests.harness import free_ports


def make(node, port, nodes=("127.0.0.1", "b", "c"), digest="digest", timeout=20.0, said=None):
    return Meeting(list(nodes), node, port, digest, timeout, (said if said is not None else []).append, "list of hosts")


@pytest.fixture
def port():
    return free_ports(1)[0]


def start(work, *arguments):
    """In a thread: what it returned, or raised."""
    results = []

    def run():
        try:
            results.append(work(*arguments))
        except Exception as failure:  # noqa: BLE001 - whatever it is, the test shows it
            results.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def started(meetings):
    threads = [start(meeting.start, lambda token: None) for meeting in meetings]
    for thread, _ in threads:
        thread.join(20)
    return [results[0] for _, results in threads]


@pytest.fixture
def three(port):
    meetings = [make(node, port) for node in range(3)]
    tokens = started(meetings)
    assert len(set(tokens)) == 1 and isinstance(tokens[0], str), tokens
    yield meetings
    for meeting in meetings:
        meeting.close()


class Peer:
    """A link from 10.0.0.9 that keeps what is sent through it."""

    def __init__(self):
        self.sent, self.peer = [], self

    def getpeername(self):
        return ("10.0.0.9", 1)

    def send(self, **message):
        self.sent.append(message)


def hello(node, **more):
    return {"hello": rendezvous._HELLO, "node": node, "digest": "digest", **more}


def test_who_is_a_node(port):
    meeting = make(0, port)
    assert meeting._greet(Peer(), hello(2)) == 2
    for wrong in (hello(0), hello(3), hello("1"), hello(None), hello(-1), hello(1, hello="hi"), {}):
        assert meeting._greet(Peer(), wrong) is None, wrong


def test_nodes_without_names_are_numbered_as_they_come(port):
    meeting = make(0, port, ("127.0.0.1", UNKNOWN, UNKNOWN))
    assert meeting._greet(Peer(), hello(-1)) == 1 and meeting.nodes == ["127.0.0.1", "10.0.0.9", UNKNOWN]
    assert meeting._greet(Peer(), hello(-1)) == 2 and meeting._greet(Peer(), hello(-1)) is None


def test_a_node_that_was_started_with_something_else_is_refused_and_learns_why(port):
    peer = Peer()
    with pytest.raises(CommError, match="c has another list of hosts than 127.0.0.1"):
        make(0, port)._greet(peer, hello(2, digest="other"))
    assert peer.sent[0]["error"]["text"] == "c has another list of hosts than 127.0.0.1"


def joins(port, number):
    """A node's connection, once the first node listens."""
    while True:
        try:
            return link.connect("127.0.0.1", port, hello(number))
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_a_second_hello_on_the_same_connection_changes_nothing(port):
    first = make(0, port)
    thread, ended = start(first.start, lambda token: None)
    links = [joins(port, 1)]
    links[0].send(**hello(1))
    links.append(joins(port, 2))
    thread.join(20)
    assert [each.receive(5.0)[0]["token"] for each in links] == ended * 2
    first.close()


def test_a_node_that_was_restarted_replaces_its_old_connection(port):
    first = make(0, port)
    thread, ended = start(first.start, lambda token: None)
    old = joins(port, 1)
    new = joins(port, 1)
    with pytest.raises(link.Lost):
        old.receive(10.0)
    other = joins(port, 2)
    thread.join(20)
    assert [each.receive(5.0)[0]["token"] for each in (new, other)] == ended * 2
    first.close()


def test_an_error_keeps_its_code_on_the_way_to_the_other_nodes(port):
    prepared = []
    first, second = make(0, port, timeout=1.0), make(1, port)
    threads = [start(first.start, prepared.append), start(second.start, lambda token: None)]
    for thread, _ in threads:
        thread.join(20)
    for _, (failure,) in threads:
        assert str(failure) == "c did not join within 1 s" and failure.code == "not_joined"
    assert prepared == [""]


def test_nobody_listens(port):
    with pytest.raises(CommError, match="127.0.0.1 did not join within 0.2 s") as told:
        make(1, port, timeout=0.2).start(lambda token: None)
    assert told.value.code == "not_joined"


def test_an_exchange_reaches_all_nodes_or_the_first_alone(three):
    def exchanged(all_hear):
        threads = [start(meeting.exchange, f"of {meeting.node}", "a test", all_hear) for meeting in three]
        for thread, _ in threads:
            thread.join(20)
        return [results[0] for _, results in threads]

    everything = ["of 0", "of 1", "of 2"]
    assert exchanged(True) == [everything] * 3
    assert exchanged(False) == [everything, ["of 0"], ["of 0"]]


def test_only_the_members_wait_for_each_other(three):
    """Node 2 is at the second command while the others are still at the first, to which it does not belong."""
    early, done = start(three[2].gather, "second", ["127.0.0.1", "c"])
    while 2 not in three[0]._brought:
        three[0].hear(0.05)
    other, _ = start(three[1].gather, "first", ["127.0.0.1", "b"])
    three[0].gather("first", ["127.0.0.1", "b"])
    other.join(20)
    assert not done and not other.is_alive()
    three[0].gather("second", ["127.0.0.1", "c"])
    early.join(20)
    assert done == [None]


def test_a_node_that_ends_is_named(three):
    three[1].close()
    with pytest.raises(CommError, match="b ended before a test: see its own output"):
        three[0].exchange("x", "a test")


def test_who_is_waited_for_is_said_with_what_it_does(three, monkeypatch):
    said = three[0].say.__self__
    monkeypatch.setattr(limits, "SAY_WAITING", 2.0)  # the first message comes 2 s earlier: at once
    three[1].tell("step 3")
    while 1 not in three[0].at:
        three[0].hear(0.05)
    thread, _ = start(three[0].exchange, "x")
    while not said and thread.is_alive():
        time.sleep(0.01)
    assert said[0] == "waiting for b (step 3), c"
    for meeting in three[1:]:
        start(meeting.exchange, "y")
    thread.join(20)
    assert not thread.is_alive()


def test_how_the_job_ended_elsewhere(three):
    three[1].links[0].send(ended=3)
    three[2].links[0].send(ended=0, final=True)
    while set(three[0].ended) != {1, 2}:
        three[0].hear(0.05)
    assert three[0].ended == {1: 3, 2: 0} and three[0].final
