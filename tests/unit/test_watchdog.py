"""What a rank's watchdog does: on a verdict, a lost judge, SIGTERM, a goodbye. Its own thread, with a hub and a clock
that the test moves. What the judge decides is in test_judge.py."""

import os
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest

from ppfleet.cluster.link import Lost
from ppfleet.distributed.world import World
from ppfleet.errors import PREEMPTED, STALLED, CommError, Preempted, Stalled
from ppfleet.limits import END_FROZEN, RAISE, SAVE_AFTER_SIGTERM
from ppfleet.training.state import TrainingState
from ppfleet.watchdog import recorder, watchdog
from ppfleet.watchdog.diagnosis import Limits
from ppfleet.watchdog.events import Code, Event, Kind, Operation
from ppfleet.watchdog.process import this_host

GRADIENTS = "all-reduce of gradients"


class Clock:
    """In place of the module `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.now += seconds


class FakeHub:
    """In place of the connections: the test says what is heard, and sees what is sent. The watchdog's thread makes one
    round for each `turn`."""

    wakeup_fd = -1

    def __init__(self, world, process):
        self.process = process
        self.sent = []
        self._rounds, self._made, self._changed = [], -1, threading.Condition()

    def join(self, token, port):
        pass

    def wake(self):
        self._give({"signals": b"\0"})

    def send(self, **message):
        self.sent.append(message)

    def messages(self, name):
        return [message[name] for message in self.sent if name in message]

    def hear(self, seconds):
        with self._changed:
            self._made += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self._rounds) > self._made, 30)
            heard = self._rounds[self._made]
        for each in heard:
            if isinstance(each, Exception):
                raise each
            yield each

    def _give(self, *heard):
        with self._changed:
            self._rounds.append(heard)
            self._changed.notify_all()

    def turn(self, *heard):
        """Let this be heard, and wait until the watchdog has done whatever it does then."""
        self._give(*heard)
        with self._changed:
            assert self._changed.wait_for(lambda: self._made == len(self._rounds), 10), "the watchdog does not go on"

    def close(self):
        pass

    end = close


class Rank:
    """One rank of a job of three, and its watchdog."""

    def __init__(self, monkeypatch, rank=0, limits=None, ring=None, **patched):
        self.clock, self.said, self.exits = Clock(), [], []
        monkeypatch.setattr(watchdog, "time", self.clock)
        monkeypatch.setattr(recorder, "time", self.clock)
        monkeypatch.setattr(watchdog, "Hub", FakeHub)
        monkeypatch.setattr(watchdog.log, "say", self.said.append)
        monkeypatch.setattr(os, "_exit", self.exits.append)
        for name, value in patched.items():
            monkeypatch.setattr(watchdog, name, value)
        endpoints = tuple(f"127.0.0.1:{6000 + number}" for number in range(3))
        self.flight = recorder.Flight(ring, {"rank": rank, "size": 3, "pid": os.getpid()})
        world = World(rank, 3, rank, 3, endpoints, endpoints[0])
        self.watch = watchdog.Watchdog(world, self.flight, limits or Limits(stall=25, long=1800))
        self.hub = self.watch._hub
        self.watch.start()
        self.hub.turn()

    def later(self, seconds, *heard):
        """So many seconds later; the judge has just beaten."""
        self.clock.now += seconds
        self.hub.turn({"beat": {}}, *heard)

    @contextmanager
    def waits_in(self, what=GRADIENTS, kind=Kind.COLLECTIVE):
        entry = self.flight.enter(kind, what, waits=True, numbered=True)
        yield entry
        self.flight.leave(entry)


@pytest.fixture
def rank(monkeypatch):
    """Makes one; ends its watchdog and gives SIGTERM back."""
    made, before = [], signal.getsignal(signal.SIGTERM)

    def make(*arguments, **options):
        made.append(Rank(monkeypatch, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.watch.stop()
    signal.signal(signal.SIGTERM, before)


LOSS = {"verdict": Event(Code.KILLED, 1, "127.0.0.1", fields={"signal": 9}).to_json()}


# A lost peer


def killed(who, oom_kills):
    return Code.KILLED, {"signal": 9}


def test_a_loss_that_the_judge_tells_of_is_one_here_too(rank, tmp_path):
    other = rank(2, ring=tmp_path / "0-rank2.ring")
    other.hub.turn(LOSS)
    with pytest.raises(CommError) as raised:
        other.watch.check(GRADIENTS, 7)
    assert (raised.value.code, raised.value.fields) == ("peer_lost", {"ranks": [1], "operation": 7})
    recorded = recorder.read(tmp_path / "0-rank2.ring").event
    assert (recorded.code, recorded.rank) == (Code.KILLED, 1)


def test_where_a_lost_rank_was_is_in_its_record(rank, tmp_path):
    """Its last beat may be a second old."""
    lost = recorder.Flight(tmp_path / "1.ring", {"rank": 1, "size": 3, "pid": 1})
    lost.step = 8
    lost.enter(Kind.COLLECTIVE, GRADIENTS, waits=True, numbered=True)
    there = {"pid": 1, "ring": str(tmp_path / "1.ring"), "signal": 9}
    for boot, shown in ((this_host(), "at step 8 (in all-reduce of gradients #1"), ("another", "at step 7")):
        first = rank()
        first.flight.step = 7
        first.hub.turn({"verdict": Event(Code.KILLED, 1, "127.0.0.1", fields={**there, "boot": boot}).to_json()})
        assert shown in first.said[0]


@pytest.mark.parametrize(("unreachable", "code"), [(False, Code.KILLED), (True, Code.HOST)])
def test_the_judge_goes_with_rank_0_or_its_host(rank, unreachable, code):
    other = rank(2, how_it_ended=killed)
    other.hub.turn(Lost(unreachable, 0))
    assert (other.watch.verdict.code, other.watch.verdict.rank) == (code, 0) and not other.hub.messages("verdict")
    assert "the watchdog process" not in other.said[-1]


def test_a_judge_that_is_killed_alone_is_said(rank):
    other = rank(2, how_it_ended=lambda who, kills: (Code.KILLED, {}))
    other.hub.turn({"process": {"pid": 1, "boot": watchdog.this_host()}})
    other.hub.turn(Lost(False, 0))
    assert "the watchdog process of rank 0 on 127.0.0.1 was killed" in other.said[-1]


def test_only_the_first_cause_counts(rank):
    first = rank(how_it_ended=killed)
    first.hub.turn(LOSS)
    first.hub.turn({"verdict": Event(Code.STALL, 2).to_json()})
    first.hub.turn(Lost(False, 0))
    assert (first.watch.verdict.code, first.watch.verdict.rank) == (Code.KILLED, 1)


def test_after_a_loss_only_a_rank_that_waits_is_ended(rank):
    """One that computes may come to its own end, or to the next operation, which raises."""
    first = rank()
    first.hub.turn(LOSS)
    first.later(100 * RAISE)
    assert not first.exits
    with first.waits_in():
        first.later(0.5 * RAISE)
        assert not first.exits
        first.later(RAISE)
        assert first.exits and set(first.exits) == {STALLED}


def test_a_main_thread_that_raised_is_not_ended(rank):
    first = rank()
    with first.waits_in() as entry:
        first.hub.turn(LOSS)
        with pytest.raises(CommError):
            first.watch.check(GRADIENTS, entry.operation)
        first.later(10 * RAISE)
    assert not first.exits


def test_a_lost_launcher_makes_an_orphan_and_all_hear_of_it(rank):
    gone = []
    first = rank(launcher=lambda: type("Launcher", (), {"pid": 77}), is_gone=lambda process: bool(gone))
    first.later(1)
    assert first.watch.verdict is None
    gone.append(True)
    first.later(1)
    assert (first.watch.verdict.code, first.watch.verdict.fields) == (Code.ORPHAN, {"launcher": 77})
    assert [verdict["code"] for verdict in first.hub.messages("verdict")] == [Code.ORPHAN]


# Ranks that end in order


def test_a_goodbye_fails_only_what_would_wait_for_that_rank(rank):
    first = rank()
    first.hub.turn({"departed": Event(Code.ENDED, 1, "127.0.0.1", Operation(5)).to_json()})
    assert first.watch.verdict is None
    first.watch.check("a gather", 5)
    with pytest.raises(CommError) as raised:
        first.watch.check("a gather", 6)
    assert raised.value.code == "peer_lost" and raised.value.fields["ranks"] == [1]
    with pytest.raises(CommError):
        first.watch.check("a sum", 5, missing=[1])  # it came, and is gone in the middle of it


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_exception_of_a_rank_fails_what_its_device_left_undone(rank, asynchronous):
    """Its device may have failed before the operation, and the rank noticed only behind it."""
    first = rank(limits=Limits(stall=25, long=1800, asynchronous=asynchronous))
    event = Event(Code.EXCEPTION, 1, "127.0.0.1", Operation(5), fields={"type": "OSError", "text": "a card's"})
    first.hub.turn({"departed": event.to_json()})
    first.watch.check(GRADIENTS, 5)  # it may still be done
    first.later(RAISE + 0.5)
    with pytest.raises(CommError) if asynchronous else nullcontext():
        first.watch.check(GRADIENTS, 5)


def test_a_rank_that_ended_after_sigterm_takes_those_along_who_wait_for_it(rank):
    other = rank(2)
    other.hub.turn({"departed": Event(Code.PREEMPTED, 1, "127.0.0.1", Operation(5)).to_json()})
    with pytest.raises(Preempted) as raised:
        other.watch.check(GRADIENTS, 6)
    assert raised.value.code == PREEMPTED


@pytest.mark.parametrize("event", [None, Event(Code.EXCEPTION, 0, "127.0.0.1")])
def test_a_goodbye_says_why(rank, event):
    first = rank()
    first.watch.close(event)
    assert [sent["code"] for sent in first.hub.messages("departed")] == [event.code if event else Code.ENDED]


# Stalls


def test_a_stall_ends_the_process_that_does_not_raise(rank):
    first = rank()
    first.hub.turn({"verdict": Event(Code.STALL, 1, "127.0.0.1", seconds=26.0).to_json()})
    assert not first.exits
    first.later(RAISE + 1)
    assert first.exits and set(first.exits) == {STALLED}


def test_a_stall_raises_where_the_main_thread_asks(rank, tmp_path):
    other = rank(2)
    other.watch.stacks = tmp_path / "stacks"
    stall = Event(Code.STALL, 2, "127.0.0.1", Operation(4, kind=Kind.COLLECTIVE), 26.0)
    other.hub.turn({"verdict": stall.to_json()})
    with pytest.raises(Stalled) as raised:
        other.watch.check(GRADIENTS, 5)
    assert raised.value.code == STALLED and "test_watchdog.py" in other.watch.stacks.read_text()


def test_a_judge_that_says_nothing_is_a_stall_of_rank_0(rank):
    other = rank(1)
    with other.waits_in():
        other.clock.now += 25
        other.hub.turn()
        assert other.watch.verdict is None
        other.clock.now += 2
        other.hub.turn()
    assert (other.watch.verdict.code, other.watch.verdict.rank) == (Code.STALL, 0)


def test_a_judge_that_beats_is_not_a_stall(rank):
    other = rank(1)
    with other.waits_in():
        for _ in range(40):
            other.clock.now += 1
            other.hub.turn({"beat": {}})
    assert other.watch.verdict is None


def test_a_round_that_fails_is_said_once_and_the_watchdog_goes_on(rank):
    first = rank()
    first.hub.turn(ValueError("noise"))
    first.hub.turn(ValueError("noise"))
    assert len(first.said) == 1 and "ValueError: noise" in first.said[0]
    first.hub.turn(LOSS)
    assert first.watch.verdict.rank == 1


# SIGTERM


SIGTERM = {"signals": bytes([signal.SIGTERM])}


def test_sigterm_reaches_all_ranks_once(rank):
    other = rank(2)
    other.watch.training = TrainingState(running=True)
    other.hub.turn(SIGTERM)
    other.hub.turn(SIGTERM, {"stop": "SIGTERM came to rank 0"})
    assert other.watch.stop_requested and len(other.hub.messages("stop")) == 1
    assert len(other.said) == 1 and str(PREEMPTED) in other.said[0]


def test_sigterm_of_another_rank_is_wanted_here_too(rank):
    other = rank(2)
    other.hub.turn({"stop": "SIGTERM came to rank 1"})
    assert other.watch.stop_requested and other.watch.verdict is None


@pytest.mark.parametrize("saving", [False, True])
def test_no_step_boundary_in_time_is_said_unless_it_saves(rank, saving):
    first = rank()
    first.hub.turn(SIGTERM)
    entry = first.flight.enter(Kind.SAVE if saving else Kind.STEP, "something")
    first.later(SAVE_AFTER_SIGTERM - 1)
    assert not first.said
    first.later(2)
    first.later(2)
    first.flight.leave(entry)
    assert len(first.said) == (not saving)


def test_sigterm_in_the_loop_waits_for_the_step_boundary(rank):
    first = rank()
    first.watch.take_sigterm()
    first.watch.training = TrainingState(running=True)
    signal.raise_signal(signal.SIGTERM)
    first.hub.turn()
    assert first.watch.stop_requested and first.hub.messages("stop")


def test_sigterm_outside_of_the_loop_waits_where_there_is_something_to_save(rank):
    first = rank()
    first.watch.take_sigterm()
    first.watch.training = TrainingState(unsaved=True)
    signal.raise_signal(signal.SIGTERM)
    assert first.watch.stop_requested


def test_sigterm_where_there_is_nothing_to_save_ends_at_once(rank):
    first = rank()
    first.watch.take_sigterm()
    with pytest.raises(Preempted) as raised:
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == PREEMPTED and first.hub.messages("departed")[0]["code"] == Code.PREEMPTED


def test_sigterm_after_a_failure_is_no_preemption(rank):
    first = rank(how_it_ended=killed)
    first.watch.take_sigterm()
    first.watch.training = TrainingState(running=True)
    first.hub.turn(LOSS)
    with pytest.raises(Stalled):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("unsaved", "code"), [(False, PREEMPTED), (True, 128 + signal.SIGTERM)])
def test_the_exit_code_tells_whether_everything_was_saved(rank, unsaved, code):
    first = rank()
    first.watch.training = TrainingState(unsaved=unsaved)
    with pytest.raises(Preempted) as raised:
        first.watch.preempted("ending")
    assert raised.value.code == code


def test_a_handler_of_the_scripts_own_stays(rank):
    def own(number, frame):
        pass

    signal.signal(signal.SIGTERM, own)
    rank().watch.take_sigterm()
    assert signal.getsignal(signal.SIGTERM) is own


# A rank whose Python is blocked, on a host where the judge cannot kill it


@pytest.mark.parametrize("far", [True, False])
def test_a_rank_on_another_host_ends_itself_if_its_python_is_blocked(rank, monkeypatch, far):
    armed = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda after, exit: armed.append((after, exit)))
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", lambda: armed.append("cancelled"))
    if far:
        monkeypatch.setattr(World, "host_of", lambda self, number: "192.168.0.1" if number == 0 else "192.168.0.2")
    second = rank(1, limits=Limits(stall=25, long=1800, first=300))
    second.later(1.5)
    second.flight.spent.steps = 1  # the first step is over
    second.later(1.5)
    second.watch.close()
    arms = [(300 + END_FROZEN, True)] * 2 + [(50 + END_FROZEN, True)] if far else []
    assert armed[: len(arms) + 1] == [*arms, "cancelled"]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("verdict", "code"), [(Code.KILLED, 1), (Code.STALL, STALLED)])
def test_a_rank_that_was_told_of_a_failure_does_not_wait_for_its_device_at_the_end(
    rank, monkeypatch, verdict, code, asynchronous
):
    first = rank(limits=Limits(stall=25, long=1800, asynchronous=asynchronous))
    first.hub.turn({"verdict": Event(verdict, 1, "127.0.0.1", fields={"signal": 9}).to_json()})
    with pytest.raises((CommError, Stalled)) as raised:
        first.watch.check(GRADIENTS, 6)
    monkeypatch.setattr(sys, "last_value", raised.value, raising=False)  # as after an exception that nobody caught
    first.watch._at_exit()
    assert first.exits == ([code] if asynchronous else [])


def test_a_rank_whose_own_code_failed_ends_in_pythons_way(rank, monkeypatch):
    """Rank 0's store must live until the others have read it."""
    first = rank(limits=Limits(stall=25, long=1800, asynchronous=True))
    monkeypatch.setattr(sys, "last_value", ValueError("its own"), raising=False)
    first.watch._at_exit()
    assert first.exits == []
