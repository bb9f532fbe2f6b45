"""What the judge decides: on a lost rank, a stall, a rank that never came, ranks that cannot hear. A clock and
connections that the test moves; then a real process."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest

from ppfleet.cluster import link
from ppfleet.cluster.link import Lost
from ppfleet.distributed.world import World
from ppfleet.limits import END_SILENT, RAISE, UNREACHABLE
from ppfleet.watchdog import judge
from ppfleet.watchdog.diagnosis import Beat, Limits
from ppfleet.watchdog.events import Code, Event, Kind, Operation
from tests.harness import wait_for

HERE = "this host"
GRADIENTS = Operation(7, Kind.COLLECTIVE, "all-reduce of gradients", "[10] float32", "train.py:66")


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


class Court:
    """A judge of three ranks, who are all there."""

    def __init__(self, monkeypatch, joined=(0, 1, 2), ended=(Code.KILLED, {"signal": 9}), rules=None):
        self.clock, self.sent, self.kills, self.states = Clock(), [], [], {}
        monkeypatch.setattr(judge, "time", self.clock)
        monkeypatch.setattr(judge, "how_it_ended", lambda who, kills: ended)
        monkeypatch.setattr(judge, "this_host", lambda: HERE)
        monkeypatch.setattr(judge, "process_state", lambda pid: (self.states.get(pid, "running"), None))
        monkeypatch.setattr(os, "kill", lambda pid, number: self.kills.append((pid, number)))
        hosts = ["127.0.0.1"] * 3
        self.judge = judge.Judge(hosts, rules or Limits(stall=25, long=1800), "token", {"pid": 100, "boot": HERE})
        self.judge.peers.send = lambda but=-1, **message: self.sent.append((but, message))
        for rank in joined:
            hello = {"hello": "token", "rank": rank, "process": {"pid": 100 + rank, "boot": HERE}}
            assert self.judge.greet(Peer(), hello) == rank
            self.judge.peers.links[rank] = None
        self.joined = joined

    def later(self, seconds, **beats):
        """So many seconds later; these ranks have just said where they are, and the others nothing."""
        self.clock.now += seconds
        for name, beat in beats.items():
            rank = int(name[-1])
            self.judge.handle(rank, {"beat": asdict(Beat(rank, **beat))})
        self.judge.look(self.clock.now)

    @property
    def verdict(self):
        return self.judge.verdict

    def told(self, name):
        return [(but, message[name]) for but, message in self.sent if name in message]


class Peer:
    def __init__(self):
        self.sent = []

    def send(self, **message):
        self.sent.append(message)


@pytest.fixture
def court(monkeypatch):
    return lambda **options: Court(monkeypatch, **options)


def waits(age, operations=7, **more):
    return {"operations": operations, "waits": True, "inside": GRADIENTS, "age": float(age), "in_step": True, **more}


def works(idle, operations=6, **more):
    inside = Operation(0, Kind.STEP, "step 3", at="`load` (train.py:60)")
    return {"operations": operations, "inside": inside, "idle": float(idle), "in_step": True, **more}


@pytest.mark.parametrize(("unreachable", "code"), [(False, Code.KILLED), (True, Code.HOST)])
def test_all_hear_who_was_lost_and_how(court, unreachable, code):
    made = court()
    made.judge.lost(1, unreachable)
    ((but, verdict),) = made.told("verdict")
    assert (but, verdict["code"], verdict["rank"]) == (-1, code, 1)
    made.judge.lost(2, unreachable)
    assert len(made.told("verdict")) == 1  # only the first cause counts


@pytest.mark.parametrize(("exit_code", "doomed"), [(0, False), (3, True)])
def test_an_exit_without_a_goodbye_is_a_loss_unless_it_was_0(court, exit_code, doomed):
    made = court(ended=(Code.EXIT, {"exit_code": exit_code}))
    made.judge.lost(1, False)
    assert (made.verdict is not None) == doomed and (1 in made.judge.departed) != doomed
    assert bool(made.told("departed")) != doomed


def test_a_goodbye_is_passed_on_and_the_end_that_follows_is_no_loss(court):
    made = court()
    bye = Event(Code.ENDED, 1, "127.0.0.1", Operation(5)).to_json()
    made.judge.handle(1, {"departed": bye})
    made.judge.lost(1, False)
    assert made.verdict is None and made.told("departed") == [(1, bye)]


def test_who_comes_late_hears_who_has_left_and_why_the_job_ends(court):
    made = court(joined=(0, 1))
    bye, end = Event(Code.ENDED, 1).to_json(), Event(Code.STALL, 0).to_json()
    made.judge.handle(1, {"departed": bye})
    made.judge.handle(0, {"verdict": end})
    peer = Peer()
    assert made.judge.greet(peer, HELLO) == 2
    assert peer.sent == [{"process": made.judge.processes[0]}, {"departed": bye}, {"verdict": end}]


def test_verdicts_and_sigterm_of_a_rank_are_passed_on(court):
    made = court()
    made.judge.handle(2, {"stop": "rank 2 got SIGTERM"})
    made.judge.handle(2, {"verdict": Event(Code.ORPHAN, 2).to_json()})
    assert made.told("stop") == [(2, "rank 2 got SIGTERM")] and made.told("verdict")[0][0] == 2
    assert made.verdict.code == Code.ORPHAN


def test_a_rank_that_never_came_was_killed_early(court):
    made = court(joined=(0, 1))
    made.later(UNREACHABLE - 1, rank0=works(1), rank1=works(1))
    assert made.verdict is None
    made.later(2, rank0=works(1), rank1=works(1))
    assert (made.verdict.code, made.verdict.rank, made.verdict.fields) == (Code.KILLED, 2, {"early": True})


def test_ranks_may_take_long_to_meet(court):
    """The judge is started before they do."""
    made = court(joined=())
    made.later(10 * UNREACHABLE)
    assert made.verdict is None and not made.judge._done()
    made.states[100] = "gone"
    assert made.judge._done()  # rank 0 has given up


def test_a_judge_that_starts_late_waits_for_those_who_have_connected(court):
    """Rank 2 connected and was killed before the judge ran: the others, whom it greets next, must hear of that."""
    made = court(joined=(2,))
    del made.judge.peers.links[2]
    made.judge.lost(2, False)
    assert made.verdict.rank == 2 and not made.judge._done()
    late = Peer()
    assert made.judge.greet(late, {"hello": "token", "rank": 0, "process": {"pid": 100, "boot": HERE}}) == 0
    assert [message["verdict"]["rank"] for message in late.sent if "verdict" in message] == [2]
    made.clock.now += UNREACHABLE + 1
    assert made.judge._done()


def test_a_rank_that_lets_others_wait_too_long(court):
    made = court()
    made.later(24, rank0=waits(24), rank1=works(24), rank2=waits(24))
    assert made.verdict is None
    for second in (26, 27, 28):  # said by two beats
        made.later(1, rank0=waits(second), rank1=works(second), rank2=waits(second))
    assert (made.verdict.code, made.verdict.rank, made.verdict.waiting[0].ranks) == (Code.STALL, 1, (0, 2))


ASYNCHRONOUS = Limits(stall=25, long=1800, asynchronous=True)


def test_a_rank_that_a_device_blocks_is_not_the_culprit(court):
    """Rank 0 reads its loss, which waits for rank 1, and Paddle holds its Python meanwhile: it does not beat."""
    made = court(rules=ASYNCHRONOUS)
    made.later(1, rank0=works(0), rank1=works(1), rank2=works(0))
    made.later(25, rank1=works(25))
    assert made.verdict is None
    made.later(2, rank1=works(27))
    assert (made.verdict.code, made.verdict.rank) == (Code.STALL, 1)
    assert made.verdict.waiting[0].ranks == (0, 2)
    other = court()  # without such a device: somebody's own affair, nobody waits
    other.later(1, rank0=works(0), rank1=works(1), rank2=works(0))
    other.later(27, rank1=works(27), rank2=works(1))
    assert other.verdict is None


def test_a_silent_rank_is_the_culprit_where_others_wait_for_it(court):
    made = court(rules=ASYNCHRONOUS)
    made.later(1, rank0=works(0), rank1=waits(1), rank2=waits(1))
    made.later(27, rank1=waits(28), rank2=waits(28))
    assert (made.verdict.code, made.verdict.rank) == (Code.STALL, 0)


def test_ranks_that_all_are_blocked_blame_nobody(court):
    made = court(rules=ASYNCHRONOUS)
    made.later(1, rank0=works(0), rank1=works(0), rank2=works(0))
    made.later(27)
    assert (made.verdict.code, made.verdict.rank) == (Code.STALL, -1)


def test_those_who_cannot_hear_the_verdict_are_killed_and_only_those(court):
    made = court(rules=ASYNCHRONOUS)
    made.later(1, rank0=works(0), rank1=works(1), rank2=works(0))
    made.judge.processes[2]["boot"] = "another host"
    made.later(27, rank1=works(27))
    assert made.verdict is not None and not made.kills
    made.later(RAISE + END_SILENT + 1, rank1=works(30))
    assert made.kills == [(100, signal.SIGKILL)]  # not rank 1, which answers, nor rank 2, on another host


def test_after_a_loss_nobody_is_killed(court):
    made = court()
    made.later(1, rank0=works(0), rank2=works(0))
    made.judge.lost(1, False)
    made.later(RAISE + END_SILENT + 10)
    assert not made.kills  # a rank that does not wait for the lost one may finish


HELLO = {"hello": "token", "rank": 2, "process": {"pid": 5, "boot": "there"}}


@pytest.mark.parametrize(
    "change",
    [
        {"hello": "guess"},
        {"rank": 1},  # has joined already
        {"rank": 3},
        {"rank": -1},
        {"rank": "2"},
        {"rank": None},
        {"process": {"pid": "x"}},
        {"process": 7},
    ],
)
def test_who_is_refused(court, change):
    made = court(joined=(0, 1)).judge
    assert made.greet(Peer(), {**HELLO, **change}) is None and 2 not in made.processes
    peer = Peer()
    assert made.greet(peer, HELLO) == 2 and made.processes[2] == HELLO["process"]
    assert peer.sent == [{"process": made.processes[0]}]


def test_a_real_process_hears_ranks_and_ends_with_them():
    endpoints = ("127.0.0.1:6000", "127.0.0.1:6001")
    rank0 = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process = {"pid": rank0.pid, "boot": judge.this_host()}
        port = judge.start(World(0, 2, 0, 2, endpoints, endpoints[0]), Limits(), "token", process)
        links = []
        for rank in (0, 1):
            hello = {"hello": "token", "rank": rank, "process": {"pid": os.getpid(), "boot": "x"}}
            links.append(link.connect("127.0.0.1", port, hello))
        assert links[0].receive(5.0)[0] == {"process": process | {"pid": os.getpid(), "boot": "x"}}
        links[1].send(departed=Event(Code.ENDED, 1).to_json())
        wait_for(lambda: any("departed" in message for message in links[0].receive(0.5)), 5, "a goodbye is passed on")
        links[1].close()
        links[0].send(departed=Event(Code.ENDED, 0).to_json())
        links[0].close()

        def over():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) != 0

        wait_for(over, 10, "the judge ends when all ranks have")
    finally:
        rank0.kill()
        rank0.wait()


def test_what_rank_0_tells_its_judge_is_in_no_argument_list(monkeypatch):
    seen = {}

    class Process:
        returncode = None

        def __init__(self, command, **options):
            seen.update(command=command, **options)
            self.stdin = io.BytesIO()

    monkeypatch.setattr(judge.subprocess, "Popen", Process)
    judge.start(World(0, 2, 0, 2, ("127.0.0.1:1", "127.0.0.1:2"), "127.0.0.1:1"), Limits(), "secret", {})
    assert "secret" not in json.dumps(seen["command"])


def test_a_lost_connection_reaches_the_judge(court, monkeypatch):
    made = court()

    def fails(seconds):
        raise Lost(False, 2)
        yield

    made.judge.peers.hear = fails
    made.judge.hear(0.1)
    assert made.verdict.rank == 2


def test_ranks_that_have_not_beaten_yet_may_be_blocked_for_longer(court):
    """Paddle holds their Python while it starts."""
    made = court(rules=Limits(stall=4, long=30, first=300, asynchronous=True))
    made.later(20)
    assert made.verdict is None
