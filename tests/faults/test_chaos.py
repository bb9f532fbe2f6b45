"""Every fault of `chaos.py` once: found in time, named, nothing left behind, and resumed to the same bits."""

import random

import pytest

from tests.faults import chaos
from tests.hosts import namespaces

# What `make test` has time for; `make test-all` takes the others, too, `make chaos` all of them at random.
QUICK = {("cut", 2)}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        pytest.param(fault.name, hosts, marks=[] if (fault.name, hosts) in QUICK else [pytest.mark.slow])
        for fault in chaos.FAULTS
        for hosts in fault.hosts
    ],
)
def test_a_fault_is_found_named_and_survived(scratch, name, hosts):
    if hosts == 2 and (lacking := namespaces.missing()):
        pytest.skip(lacking)
    if name == "memory" and (lacking := chaos.no_memory_limits()):
        pytest.skip(lacking)
    fault = next(each for each in chaos.FAULTS if each.name == name)
    told = chaos.one(fault, hosts, 2, random.Random(f"{name} {hosts}"), scratch, f"{name} on {hosts}", slack=4)
    print(told)
    assert told["ok"], told


@pytest.mark.slow
def test_kills_at_any_moment(scratch):
    told = chaos.kills(10, 5, scratch)
    assert told["kills"] == 10 and told["runs"] == told["same"] > 0 and told["left"] == told["torn"] == 0
