"""Measuring the network between nodes (threads): the first gets a result, and messages still arrive."""

import socket
import threading

import pytest

from ppfleet.cluster.rendezvous import Meeting
from ppfleet.commands.scale import network
from ppfleet.errors import CommError
from tests.harness import free_ports


@pytest.fixture
def meetings(monkeypatch):
    monkeypatch.setattr(network, "_SECONDS", 0.05)
    (port,) = free_ports(1)
    made = [Meeting(["127.0.0.1", "b", "c"], node, port, "digest", 20.0, lambda text: None) for node in range(3)]
    on_all(made, lambda meeting: meeting.start(lambda token: None))
    yield made
    for meeting in made:
        meeting.close()


def on_all(meetings, work):
    results = {}

    def run(meeting):
        try:
            results[meeting.node] = work(meeting)
        except CommError as failure:
            results[meeting.node] = failure
            meeting.close()

    threads = [threading.Thread(target=run, args=(meeting,), daemon=True) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_the_first_node_learns_the_result_and_messages_still_arrive(meetings):
    results = on_all(meetings, network.measure)
    assert results[0].bandwidth > 0 and results[0].latency > 0 and results[1] is results[2] is None
    assert on_all(meetings, lambda meeting: meeting.exchange(str(meeting.node)))[2] == ["0", "1", "2"]


def test_a_node_that_ends_meanwhile_is_named(meetings, monkeypatch):
    monkeypatch.setattr(network, "_send", lambda peer: peer.shutdown(socket.SHUT_RDWR))
    results = on_all(meetings, network.measure)
    assert "the network to b cannot be measured" in str(results[0])
