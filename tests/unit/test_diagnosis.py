"""Whose doing it is that nothing goes on: `diagnose` over what all ranks say of themselves, and its sentence."""

from dataclasses import replace

import pytest

from ppfleet.watchdog import render
from ppfleet.watchdog.diagnosis import Beat, Limits, diagnose
from ppfleet.watchdog.events import Code, Event, Operation

LIMITS = Limits(stall=25, long=600)
NOW = 1000.0
GRADIENTS = "all-reduce of gradients"


def verdict(*beats, limits=LIMITS):
    return diagnose(beats, NOW, limits)


def waiting(rank, seconds, operation=1284, what=GRADIENTS, kind="collective", step=0, **more):
    inside = Operation(operation, kind, what, "[10] float32", "train.py:66", step)
    more.setdefault("recent", [Operation(operation - 1, "work", "saving"), inside])
    more.setdefault("in_step", True)
    return Beat(rank, NOW - 0.5, f"host{rank}", operation, inside, True, age=seconds, idle=seconds, step=step, **more)


def working(rank, seconds, operation=1283, kind="step", what="step 641", at="", where="", **more):
    inside = Operation(0, kind, what, where=where, at=at)
    more.setdefault("in_step", kind == "step")
    return Beat(rank, NOW - 0.5, f"host{rank}", operation, inside, idle=seconds, step=640, **more)


def test_nothing_is_wrong():
    assert verdict(waiting(0, 3), working(1, 4)) is None
    assert verdict(waiting(0, 24), working(1, 24)) is None
    assert verdict(working(0, 500), working(1, 500)) is None  # long, but nobody waits


def test_a_first_step_may_take_longer_on_an_accelerator():
    limits = replace(LIMITS, first=300)
    assert verdict(waiting(0, 100), working(1, 100, warm=False), limits=limits) is None
    assert verdict(waiting(0, 100), working(1, 100), limits=limits).rank == 1
    assert verdict(waiting(0, 301), working(1, 301, warm=False), limits=limits).rank == 1


def test_the_late_one_is_named_with_its_line_and_those_who_wait():
    told = verdict(
        waiting(0, 26, step=640), waiting(1, 28, step=640), waiting(2, 27, step=640),
        working(3, 30.6, at="`evaluate` (tools/train.py:71)"),
    )  # fmt: skip
    assert told.code == Code.STALL and told.rank == 3
    assert render.text(told) == (
        "rank 3 on host3 has been in `evaluate` (tools/train.py:71) for 31 s while ranks 0–2 wait in "
        "all-reduce of gradients #1284 ([10] float32, step 640, train.py:66)"
    )


def test_of_several_late_ones_the_one_that_stands_still_longest():
    told = verdict(waiting(0, 26), working(1, 2), working(2, 27), working(3, 5))
    assert told.rank == 2


def test_a_rank_that_is_late_in_data_or_saving_is_told_so():
    told = verdict(waiting(0, 26), working(1, 26, kind="data", what="next batch", where="train.py:60"))
    assert "has been in next batch (train.py:60) for 26 s" in render.text(told)


def test_a_section_through_the_store_may_take_as_long_as_work_is_done():
    def beats(seconds, busy=0.0):
        works = working(0, seconds, 1284, kind="work", what="saving", busy=busy)
        return works, waiting(1, seconds, kind="meeting", what="saving")

    assert verdict(*beats(300)) is None
    assert verdict(*beats(601)).rank == 0
    assert verdict(*beats(601, busy=0.5)) is None
    silent = beats(0, busy=0.5)[0]
    assert verdict(replace(silent, heard=NOW - 40), beats(40)[1]) is None  # a large pickle, perhaps
    told = verdict(replace(silent, heard=NOW - 51), beats(51)[1])  # twice the limit of collectives
    assert told.rank == 0 and "has not answered for 51 s" in render.text(told)


def test_a_rank_that_does_not_answer():
    silent = replace(working(1, 0), heard=NOW - 26)
    told = verdict(waiting(0, 25.6), silent)
    assert told.rank == 1
    assert "has not answered for 26 s (its process is stopped, or its Python is blocked" in render.text(told)
    assert verdict(working(0, 1), silent) is None  # a library may hold Python up, and nobody waits
    assert verdict(working(0, 1), replace(silent, heard=NOW - 601)).rank == 1


def test_a_rank_that_was_held_up_is_not_accused_of_going_another_way():
    """The word of one that had just begun to wait when Python was held up for 3 s says nothing about now."""
    assert verdict(waiting(0, 2.9, operation=290), replace(waiting(1, 0.01, operation=288), heard=NOW - 2.8)) is None
    assert verdict(waiting(0, 2.9, operation=290), replace(waiting(1, 2.6, operation=288), heard=NOW - 2.8)) is None


def test_a_stopped_rank_that_last_said_it_was_waiting_is_still_the_late_one():
    """Its last word came from inside of a collective, which it will never leave; the others wait in the next."""
    stopped = replace(waiting(1, 0.1, operation=1283), heard=NOW - 26)
    told = verdict(waiting(0, 25.5), stopped)
    assert told.code == Code.STALL and told.rank == 1 and "network" not in render.text(told)
    same = replace(waiting(1, 0.1), heard=NOW - 26)
    assert verdict(waiting(0, 25.9), same).rank == 1


def test_everybody_in_the_same_operation_is_nobodys_fault():
    told = verdict(waiting(0, 26), waiting(1, 26))
    assert told.code == Code.STALL and told.rank == -1 and "the network between them fails" in render.text(told)


def in_other(**other):
    beat = waiting(1, 3)
    inside = replace(beat.inside, **other)
    return replace(beat, inside=inside, recent=[inside])


@pytest.mark.parametrize(
    "other", [{"name": "broadcast"}, {"detail": "[11] float32"}, {"name": "evaluation", "kind": "meeting"}]
)
def test_ranks_that_wait_in_different_operations_are_found_long_before_the_limit(other):
    told = verdict(waiting(0, 3), in_other(**other))
    assert told.code == Code.MISMATCH and told.rank == -1
    assert "rank 0 on host0 waits in all-reduce of gradients #1284" in render.text(
        told
    ) and "rank 1 on host1 in " in render.text(told)
    assert verdict(waiting(0, 0.5), in_other(**other)) is None  # it may just be leaving
    assert verdict(waiting(0, 3), replace(in_other(**other), heard=NOW - 5)) is None  # that was 5 s ago


def test_a_rank_that_went_another_way_and_on_from_there():
    """What it did there needs nobody else: rank 0 saved, and waits in the next operation."""
    ahead = waiting(0, 3, 1285, "evaluation", recent=[Operation(1284, "work", "saving")])
    told = verdict(ahead, waiting(1, 3))
    assert (
        told.code == Code.MISMATCH
        and "evaluation #1285" in render.text(told)
        and "after saving #1284" in render.text(told)
    )


def test_a_rank_that_is_behind_in_the_same_operation_waits_for_the_network():
    """Rank 0 has all of #1284; what rank 1 lacks of it is on a link that is down."""
    ahead = waiting(0, 3, 1285, recent=[Operation(1284, "collective", GRADIENTS, "[10] float32")])
    assert verdict(ahead, waiting(1, 3)) is None


def test_a_rank_that_does_nothing_though_nobody_waits():
    idle = working(1, 601, kind="data", what="next batch", busy=0.0)
    told = verdict(working(0, 1), idle)
    assert told.rank == 1 and "has been in next batch for 60" in render.text(told)
    assert verdict(working(0, 1), replace(idle, busy=0.9)) is None  # it computes
    assert verdict(replace(idle, rank=0)).rank == 0  # alone, too
    assert verdict(replace(idle, rank=0, inside=Operation())) is None  # outside of everything: a person at a notebook


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [([2], "rank 2"), ([0, 1], "ranks 0, 1"), ([0, 1, 2, 5], "ranks 0–2 and 5"), ([3, 1, 7], "ranks 1, 3 and 7")],
)
def test_ranks_are_listed_as_a_person_would(ranks, shown):
    assert render.ranks(ranks) == shown


POST_MORTEM = Limits(5, 5, stopped=0.0, outside=True)
SAVING = working(1, 700, kind="work", what="saving", where="train.py:80", busy=0.0, in_step=True)
# fault of docs/reliability.md, beats, code, rank, what the sentence says
FAULTS = [
    (
        "stall",
        [waiting(0, 26), working(1, 26, at="`wait` (t.py:1)")],
        Code.STALL,
        1,
        "has been in `wait` (t.py:1) for 26 s",
    ),
    (
        "data-stall",
        [waiting(0, 26), working(1, 26, kind="data", what="next batch")],
        Code.STALL,
        1,
        "a slow disk or data set?",
    ),
    ("slow-save", [waiting(0, 700, kind="meeting", what="saving"), SAVING], Code.STALL, 1, "waits in saving #1284"),
    (
        "stop",
        [waiting(0, 26), replace(working(1, 0), heard=NOW - 26, stopped=7)],
        Code.STOPPED,
        1,
        "process 7 is stopped",
    ),
    ("held up", [waiting(0, 26), replace(working(1, 0), heard=NOW - 26)], Code.STALL, 1, "has not answered for 26 s"),
    ("cut", [waiting(0, 26), waiting(1, 26)], Code.STALL, -1, "the network between them fails"),
    (
        "branch",
        [waiting(0, 3), in_other(name="all-reduce of a branch")],
        Code.MISMATCH,
        -1,
        "the ranks diverged after step 0",
    ),
    ("shape", [waiting(0, 3), in_other(detail="[11] float32")], Code.MISMATCH, -1, "#1284 ([11] float32, "),
    (
        "uneven",
        [waiting(0, 3), replace(in_other(name="saving"), in_step=False)],
        Code.UNEVEN,
        1,
        "had left the training loop",
    ),
]


@pytest.mark.parametrize(("fault", "beats", "code", "rank", "shown"), FAULTS, ids=[each[0] for each in FAULTS])
def test_each_fault_is_named_live_and_post_mortem(fault, beats, code, rank, shown):
    for limits in (LIMITS, replace(POST_MORTEM, stopped=float("inf"))):
        told = verdict(*beats, limits=limits)
        assert (told.code, told.rank) == (code, rank) and shown in render.text(told)


def test_a_stopped_process_is_told_at_once_post_mortem():
    told = verdict(working(0, 1), replace(working(1, 0), heard=NOW - 1, stopped=7), limits=POST_MORTEM)
    assert told.code == Code.STOPPED and render.text(told).endswith("; `kill -CONT 7` lets it go on")
    assert verdict(working(0, 1), replace(working(1, 0), heard=NOW - 1, stopped=7)) is None  # live, it has its time


@pytest.mark.parametrize(
    ("other", "code", "shown"),
    [
        ({"ended": True}, Code.UNEVEN, "left its loop after step 640 (it has finished) while rank 0 on host0 waits in"),
        ({"inside": Operation(0, "save", "saving")}, Code.UNEVEN, "(it is in saving)"),
        ({"inside": Operation(0, "data", "next batch")}, Code.STALL, "has been in next batch"),
        ({"inside": Operation(0, "save", "saving"), "in_step": True}, Code.STALL, "has been in saving"),
    ],
)
def test_a_rank_that_left_its_loop_is_told_from_one_that_is_late(other, code, shown):
    told = verdict(waiting(0, 30), replace(working(1, 30, in_step=False), **other), limits=POST_MORTEM)
    assert (told.code, told.rank) == (code, 1) and shown in render.text(told)


@pytest.mark.parametrize(
    ("code", "fields", "shown"),
    [
        (Code.KILLED, {"signal": 9}, "rank 1 on b was killed by SIGKILL"),
        (Code.KILLED, {"signal": 11}, "rank 1 on b was killed by SIGSEGV"),
        (Code.KILLED, {}, "rank 1 on b exited without reporting a reason (SIGKILL?)"),
        (Code.OOM, {"signal": 9}, "rank 1 on b was killed by the OOM killer (SIGKILL)"),
        (Code.EXIT, {"exit_code": 3}, "rank 1 on b exited with code 3 without reporting a reason"),
        (Code.HOST, {}, "the host of rank 1 on b no longer answers"),
        (Code.ORPHAN, {"launcher": 7}, "rank 1 on b is an orphan: its launcher (process 7) is gone"),
    ],
)
def test_each_death_has_its_sentence(code, fields, shown):
    assert render.text(Event(code, 1, "b", fields=fields)) == shown
