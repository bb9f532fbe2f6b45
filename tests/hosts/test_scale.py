"""`python -m ppfleet scale` on two hosts: one command on both, one result; and its projection against a capped link."""

import re

import pytest

from tests.harness import free_ports
from tests.hosts import namespaces
from tests.ranks.test_scale import end, facts, start

LOOPBACK = ("127.0.0.2", "127.0.0.3")


def pair(tmp_path, *words, **more):
    """Each host in a directory of its own, as without a common disk."""
    flags = [f"--ips={','.join(LOOPBACK)}", f"--start_port={free_ports(4)[-1]}", *words]
    hosts = [(tmp_path / name, start(tmp_path / name, *flags, f"--host={host}", **more)) for name, host in
             zip("ab", LOOPBACK)]  # fmt: skip
    return [end(process, place) for place, process in hosts]


def test_one_command_on_both_hosts_one_result_on_the_first(tmp_path):
    words = ("--ranks=1", "--seeds=0", "--batch=rank", "--bandwidth=1000", "--latency=0.1")
    (code, told), (other, heard) = pair(tmp_path, *words)
    assert code == other == 0, told + heard
    one, two = facts(tmp_path / "a")["tables"]["rank"]
    assert (one["machines"], two["machines"], two["ranks"], two["batch"]) == (1, 2, 1, 16)
    assert two["parts"]["looked_at"] == 8 and two["parts"]["communication"] > 0  # both hosts told of their exchanges
    found = facts(tmp_path / "a")
    assert found["network"]["bandwidth"] > 1e6 and found["projection"]["network_is"] == "given"
    assert 0.94 * 125e6 < found["projection"]["network"]["bandwidth"] < 0.96 * 125e6  # the rest are headers
    assert "done; the result is on 127.0.0.2" in heard and not list(tmp_path.glob("b/out/scale.*"))
    assert re.search(r"scale: 2 machines × 1 rank, .*; log: ", heard) and "scale: 1 machine" not in heard
    (code, told), (other, heard) = pair(tmp_path, *words)
    assert code == other == 0 and told.count("already done") == 2 and "log:" not in told + heard


@pytest.mark.slow
def test_a_failure_on_both_hosts_ends_the_series_on_both(tmp_path):
    (code, told), (other, heard) = pair(tmp_path, "--ranks=1", "--seeds=0", "--batch=rank", script=["--fail=1"])
    assert code == other == 1 and "raised RuntimeError: this goes wrong" in told, told + heard
    assert "scale: [2/2] 2 machines × 1 rank" in told and "error: " in heard


@pytest.mark.slow
@pytest.mark.two_hosts
def test_the_projection_holds_on_a_slower_link(tmp_path):
    """From a run on the fast link, the step on one of 50 Mbit/s: within 15 % of what is then measured there."""
    words = [f"--ips={','.join(namespaces.ADDRESSES)}", "--ranks=1", "--seeds=0", "--batch=rank", "--bandwidth=50"]

    def series(name, before):
        places = [tmp_path / f"{name}{side}" for side in "ab"]
        hosts = [
            start(place, *words, script=["--width=1000", "--rows=8"], before=each)
            for place, each in zip(places, before)
        ]
        ends = [end(process, place) for process, place in zip(hosts, places)]
        assert [code for code, _ in ends] == [0, 0], ends
        return facts(places[0])

    with namespaces.two_hosts() as before:
        projected = series("fast", before)["projection"]["points"][0]["step"]
        with namespaces.capped(before, 50):
            found = series("slow", before)
    parts = found["tables"]["rank"][1]["parts"]
    names = ("compute", "communication", "stragglers", "data", "other")
    measured = sum(parts[name] for name in names) / parts["steps"]
    assert projected == pytest.approx(measured, rel=0.15)
    assert found["network"]["bandwidth"] * 8e-6 == pytest.approx(50, rel=0.15)
    print(f"projected {1e3 * projected:.1f} ms a step, measured {1e3 * measured:.1f} ms")
