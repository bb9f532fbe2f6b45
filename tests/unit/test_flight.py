"""The flight record: what is in the ring is there after SIGKILL, whole, the newest entries, and says whose it is."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from ppfleet.commands.why import sentences
from ppfleet.watchdog import events, recorder
from ppfleet.watchdog.events import Code, Event, Kind, Operation, Waiting
from ppfleet.watchdog.recorder import KINDS, Flight, Pulse, read
from tests.harness import ROOT

WHO = {"rank": 3, "size": 4, "pid": 5}


@pytest.fixture
def ring(tmp_path):
    return tmp_path / "flight" / "1-rank0.ring"


def test_an_entry_comes_back_as_it_was(ring):
    record = Flight(ring, {**WHO, "host": "wörld"})
    record.step = 640
    outer = record.enter("step", "step 641", "epoch 2")
    inner = record.enter("collective", "all-reduce", "[10, 3] float32", waits=True, numbered=True)
    record.leave(inner)
    record.mark("resumed", "from 000012")
    told = read(ring)
    assert told.facts["rank"] == 3 and told.facts["host"] == "wörld"
    assert [(e.kind, e.what, e.detail, e.waits, e.operation, e.step) for e in told.entries] == [
        ("step", "step 641", "epoch 2", False, 0, 640),
        ("collective", "all-reduce", "[10, 3] float32", True, 1, 640),
        ("mark", "resumed", "from 000012", False, 0, 640),
    ]
    step, collective, mark = told.entries
    assert step.left == 0 < step.entered <= collective.entered <= collective.left <= mark.entered
    assert all(e.where.startswith("tests/unit/test_flight.py:") for e in told.entries)  # not a line of the library's
    record.leave(outer)
    assert read(ring).entries[0].left >= mark.entered and record.open == []


def test_only_the_newest_entries_stay(ring):
    record = Flight(ring, WHO, slots=16)
    for number in range(100):
        with record.during("data", f"batch {number}"):
            pass
    assert [e.what for e in read(ring).entries] == [f"batch {number}" for number in range(84, 100)]


def test_what_was_inside_ends_with_its_outside(ring):
    record = Flight(ring, WHO)
    outer = record.enter("save", "saving")
    record.enter("collective", "gather", waits=True)
    record.leave(outer)
    assert record.open == [] and all(e.left for e in read(ring).entries)
    record.enter("step", "step 1")
    record.enter("data", "next batch")
    record.unwind(0)
    assert record.open == []


def test_a_mark_is_no_progress(ring):
    record = Flight(ring, WHO)
    record.progress = 5.0
    record.mark("SIGTERM")
    assert record.progress == 5.0


def test_the_first_event_stays(ring):
    record = Flight(ring, WHO)
    assert read(ring).event is None
    record.record(events.exception(OSError("die Platte ist voll: 磁盘已满 " * 500), 3, "", "t.py:1"))
    record.record(Event(Code.ENDED))
    event = read(ring).event
    assert event.code == Code.EXCEPTION and event.fields["type"] == "OSError" and event.rank == 3
    assert event.fields["text"].startswith("die Platte ist voll: 磁")


def test_an_event_comes_back_as_it_was(ring):
    record = Flight(ring, WHO)
    inside = Operation(12, Kind.MEETING, "saving", "", "t.py:1", 3, "`save` (t.py:2)")
    waiting = Waiting((0, 2), replace(inside, kind=Kind.COLLECTIVE), "b", after=inside)
    event = Event(Code.STALL, 1, "a", inside, 4.5, (waiting,), {"silent": True})
    record.record(event)
    told = read(ring).event
    assert replace(told, time=0.0) == event and told.time > 0


@pytest.mark.parametrize(
    ("words", "code", "rank", "shown"),
    [
        (
            {"kind": "lost", "text": "rank 1 went", "culprit": 1, "how": "killed", "signal": 9},
            "killed",
            1,
            "rank 1 went",
        ),
        ({"kind": "lost", "text": "no memory", "culprit": 1, "how": "killed", "oom": True}, "oom", 1, "no memory"),
        ({"kind": "lost", "text": "no host", "culprit": 2, "how": "unreachable"}, "host", 2, "no host"),
        (
            {"kind": "stall", "text": "rank 0 is stopped", "culprit": 0, "how": "stopped"},
            "stopped",
            0,
            "rank 0 is stopped",
        ),
        ({"kind": "mismatch", "text": "different ways", "culprit": -1}, "mismatch", -1, "different ways"),
        ({"kind": "exception", "text": "no", "type": "CommError", "where": "t.py:1"}, "exception", -1, "CommError: no"),
        ({"kind": "ended", "text": ""}, "ended", -1, "finished"),
    ],
)
def test_the_last_words_of_version_0_1_0_are_an_event(ring, words, code, rank, shown):
    record = Flight(ring, WHO)
    record._put(recorder._EVENT, recorder._SLOTS, {**words, "time": 5.0})
    event = read(ring).event
    assert (event.code, event.rank, event.time) == (code, rank, 5.0) and shown in sentences.text(event)


def test_the_pulse_and_later_facts(ring):
    record = Flight(ring, {**WHO, "run": ""})
    record.describe(run="token")
    record.pulse(Pulse(1.5, 2.5, 3, 4, 5))
    told = read(ring)
    assert told.facts["run"] == "token" and told.pulse == Pulse(1.5, 2.5, 3, 4, 5)


def test_facts_that_are_too_long_do_not_hide_who_it_is(ring):
    Flight(ring, {**WHO, "script": "x" * 20_000})
    assert read(ring).facts["rank"] == 3


def test_a_killed_writer_leaves_everything(ring):
    code = (
        "import os, sys; from pathlib import Path; from ppfleet.watchdog.recorder import Flight\n"
        f"record = Flight(Path({str(ring)!r}), {WHO})\n"
        "for number in range(1000):\n"
        "    entry = record.enter('collective', f'number {number}', numbered=True); record.leave(entry)\n"
        "record.enter('save', 'saving')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    told = read(ring)
    assert told.entries[-1].what == "saving" and told.entries[-1].left == 0 and told.entries[-2].what == "number 999"


@pytest.mark.parametrize("content", [b"", b"PPFLEET1", b"x" * 100_000])
def test_something_else_is_no_ring(tmp_path, content):
    (tmp_path / "a.ring").write_bytes(content)
    with pytest.raises(ValueError, match="not a flight record"):
        read(tmp_path / "a.ring")


def test_rings_of_earlier_starts_do_not_pile_up(tmp_path):
    Flight(tmp_path / "0000000000000-rank11.ring", slots=8)
    for number in range(20):
        last = Flight(tmp_path / f"{number:013d}-rank1.ring", slots=8)
    assert len(list(tmp_path.glob("*-rank1.ring"))) == 20  # without the lock nothing is removed
    last.remove_old()
    assert len(list(tmp_path.glob("*-rank1.ring"))) == recorder.KEPT
    assert (tmp_path / "0000000000019-rank1.ring").exists() and (tmp_path / "0000000000000-rank11.ring").exists()


def test_a_full_disk_is_an_error_at_once_and_no_signal_later(ring, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Flight(ring)


def test_every_kind_fits(ring):
    record = Flight(ring, WHO)
    for kind in KINDS:
        record.leave(record.enter(kind, "w" * 200, "d" * 200))
    assert [e.kind for e in read(ring).entries] == list(KINDS)


def test_a_long_path_that_is_not_ascii(tmp_path, ring):
    script = tmp_path / ("训练脚本目录很长的名字" * 6) / "训练.py"
    script.parent.mkdir()
    code = compile("def go(record):\n    return record.enter('step', '步' * 30, '第' * 60)", str(script), "exec")
    names = {}
    exec(code, names)  # noqa: S102
    record = Flight(ring, WHO)
    assert names["go"](record).where.endswith("训练.py:2")
    assert read(ring).entries[0].where.endswith("训练.py:2") and read(ring).entries[0].what == "步" * 16


def test_a_mark_of_another_thread_leaves_open_entries_alone(ring):
    record = Flight(ring, WHO)
    inside = record.enter("save", "saving")
    record.mark("SIGTERM", "from the watch")
    assert record.open == [inside] and [e.kind for e in read(ring).entries] == ["save", "mark"]


@pytest.mark.parametrize(
    "facts", [{"rank": "x"}, {"rank": None}, {"rank": [1]}, {"size": "x"}, {"size": 10**9}, {"pid": -1}, {"rank": 0.5}]
)
def test_a_ring_that_does_not_say_whose_it_is(ring, facts):
    Flight(ring, {**WHO, **facts})
    with pytest.raises(ValueError, match="damaged"):
        read(ring)


def test_no_damage_gets_through(tmp_path):
    """Random bytes anywhere: a ValueError, or a record whose times and types can be relied on."""
    import random
    import time

    path = tmp_path / "flight" / "1-rank0.ring"
    record = Flight(path, {**WHO, "started": time.time()}, slots=16)
    for number in range(20):
        record.leave(record.enter("collective", f"number {number}", numbered=True))
    record.record(Event(Code.KILLED, 1))
    good, choose = bytearray(path.read_bytes()), random.Random(1)
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(choose.choice([1, 8, 200])):
            bad[
                choose.choice([choose.randrange(len(bad)), choose.randrange(28672, len(bad)), choose.randrange(600)])
            ] = choose.randrange(256)
        path.write_bytes(bad)
        try:
            told = read(path)
        except ValueError:
            continue
        assert isinstance(told.facts["rank"], int) and 0 <= told.facts["started"] < 4.1e9
        assert all(0 <= moment < 4.1e9 for e in told.entries for moment in (e.entered, e.left))
        assert 0 <= told.pulse.time < 4.1e9 and (not told.event or 0 <= told.event.time < 4.1e9)


def test_lines_of_the_whole_library_are_not_the_users():
    from ppfleet.distributed import world

    assert not recorder.users(world.__file__) and not recorder.users(recorder.__file__) and recorder.users(__file__)
