"""Which of a list of hosts is this machine."""

import socket

import pytest

from ppfleet.cluster import hosts
from ppfleet.errors import WorldError

ADDRESSES = {"127.0.0.1": "lo", "192.168.7.1": "eth7", "fd00::7": "eth7"}
NAMES = {"me": ["192.168.7.1"], "debian": ["127.0.1.1"], "peer": ["192.168.7.2"], "nobody": []}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with these addresses and names: a test cannot give itself others without root."""
    real = hosts.resolve
    monkeypatch.setattr(hosts, "addresses", lambda: dict(ADDRESSES))
    monkeypatch.setattr(hosts, "resolve", lambda host: NAMES[host] if host in NAMES else real(host))


@pytest.mark.parametrize(
    ("listed", "mine", "interface"),
    [
        (["192.168.7.1", "192.168.7.2"], "192.168.7.1", "eth7"),
        (["192.168.7.2", "192.168.7.1"], "192.168.7.1", "eth7"),
        (["peer", "me"], "me", "eth7"),
        (["fd00::8", "fd00:0::7"], "fd00:0::7", "eth7"),
        (["[fd00::7]", "[fd00::8]"], "[fd00::7]", "eth7"),
        (["127.0.0.2"], "127.0.0.2", "lo"),
        (["debian"], "debian", "lo"),
    ],
)
def test_own_address(listed, mine, interface):
    assert hosts.own(listed, {}) == mine and hosts.interface_of(mine) == interface


@pytest.mark.parametrize(
    ("listed", "env", "words"),
    [
        (
            ["192.168.7.2", "nobody"],
            {},
            "none of 192.168.7.2, nobody is an address of this machine, which has 192.168.7.1",
        ),
        (["192.168.7.1", "me"], {}, "192.168.7.1 and me are both this machine"),
        (["192.168.7.1"], {"POD_IP": "192.168.7.2"}, "POD_IP=192.168.7.2 is not one of 192.168.7.1"),
        (["debian", "peer"], {}, "debian is 127.0.1.1 on this machine, where no other can reach it"),
    ],
)
def test_no_own_address(listed, env, words):
    with pytest.raises(WorldError, match=words):
        hosts.own(listed, env)


def test_pod_ip_decides():
    assert hosts.own(["127.0.0.2", "127.0.0.3"], {"POD_IP": "127.0.0.3"}) == "127.0.0.3"


def test_this_very_machine():
    assert hosts.resolve("no.such.host.invalid") == [] and hosts.resolve("::1") == ["::1"]
    assert socket.gethostname() and hosts.own(["127.0.0.1"], {}) == "127.0.0.1"
