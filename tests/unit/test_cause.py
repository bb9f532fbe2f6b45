"""What `ppfleet why` takes for the cause, for everything that happens to jobs. The rings are real, the clock is not."""

import os
import signal
import subprocess
import sys

import pytest

from ppfleet.commands.why import cause, record_reader
from ppfleet.errors import CheckpointError, CommError, DataError, MismatchError, NonFiniteError
from ppfleet.watchdog.events import Mark, Operation, Waiting
from ppfleet.watchdog.process import this_host
from tests.story import GRADIENTS, A, B


def gone_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


# Deaths


def test_killed_is_told_by_the_watch_of_a_peer(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.step(end), second.step(end)
    old = Operation(0, "step", "step 2", where="train.py:66", step=1)  # of its last beat: its own record knows better
    first.say(end + 0.1, "killed", 1, operation=old, signal=9)
    found = story.look(60)
    text = f"rank 1 on {A} was killed by SIGKILL at step 3 (in all-reduce of gradients #4, tests/story.py:31)"
    assert (found.kind, found.ranks, found.sentence) == ("killed", (1,), text)
    assert any("rank 1 on 192.168.0.1 used 2.0 GB of memory, 1.0 GB were available" in each for each in found.evidence)
    assert any("rank 0 on 192.168.0.1: ended by the watchdog (killed)" in each for each in found.evidence)


def test_out_of_memory_told_by_the_watch(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.say(end + 0.1, "oom", 1, signal=9)
    found = story.look(60)
    assert found.kind == "oom" and "was killed by the OOM killer (SIGKILL) at step 3" in found.sentence


def test_death_that_nobody_saw(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    second.step(end)
    first.fail(end + 4, RuntimeError("all-reduce failed: Connection closed by peer"))
    found = story.look(60)
    assert (found.kind, found.ranks) == ("killed", (1,))
    shown = f"rank 1 on {A} exited without reporting a reason (SIGKILL?) at step 3 (in {GRADIENTS} #4, tests/story.py:"
    assert found.sentence.startswith(shown)


def test_more_kills_for_want_of_memory_than_the_dead_rank_counted(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.pulse(end + 2, kills=1)
    first.fail(end + 2, CommError("…"))
    found = story.look(60)
    assert (found.kind, found.ranks) == ("oom", (1,)) and "probably by the OOM killer" in found.sentence


def test_own_host_is_asked_for_kills_and_processes(story, monkeypatch):
    ranks = [story.rank(0, boot=this_host(), pid=os.getpid()), story.rank(1, boot=this_host(), pid=gone_process())]
    story.train(ranks, 3)
    monkeypatch.setattr(record_reader, "oom_kills", lambda: 7)
    found = story.look(1)
    assert (found.kind, found.ranks) == ("oom", (1,))
    assert [rank.state for rank in found.attempt.ranks] == ["running", "gone"]


def test_a_number_of_a_process_that_went_to_another_is_a_dead_rank(story):
    story.began -= 3600
    only = story.rank(0, 1, boot=this_host(), pid=os.getpid())  # this process began later than that
    story.train([only], 2)
    assert [rank.state for rank in story.look(3600).attempt.ranks] == ["gone"]


def test_two_died_and_the_first_is_named(story):
    first, second, third = ranks = story.ranks(3)
    end = story.train(ranks, 3)
    second.pulse(end + 3)
    first.fail(end + 5, CommError("…"))
    assert story.look(60).ranks == (2,)
    third.pulse(end + 4)
    assert story.look(60).ranks == (1,)


def test_all_gone_at_once(story):
    end = story.train(story.ranks(3), 3)
    found = story.look(end + 60)
    assert (found.kind, found.ranks) == ("gone", ()) and "all 3 ranks were gone at once" in found.sentence
    assert f"{A} went down, or all were killed" in found.sentence


def test_all_gone_but_one_of_them_first(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.pulse(end + 20)
    found = story.look(end + 60)
    assert (found.kind, found.ranks) == ("killed", (1,))


def test_dead_host_is_named_with_all_its_ranks(story):
    near = [story.rank(n, 4) for n in (0, 1)]
    far = [story.rank(n, 4, boot="other", address=B) for n in (2, 3)]
    end = story.train([*near, *far], 3)
    for rank in near:
        rank.pulse(end + 8)
        rank.say(end + 8, "host", 2, B)
    found = story.look(60)
    assert (found.kind, found.ranks) == ("host", (2, 3)) and f"host {B} was lost with ranks 2, 3" in found.sentence
    assert any("the host of rank 2" in each for each in found.evidence)


def test_ranks_of_a_host_that_died_one_after_the_other_are_no_dead_host(story):
    near = [story.rank(n, 4) for n in (0, 1)]
    far = [story.rank(n, 4, boot="other", address=B) for n in (2, 3)]
    end = story.train([*near, *far], 3)
    far[0].pulse(end + 10)
    for rank in near:
        rank.fail(end + 20, CommError("…"))
    found = story.look(60)
    assert (found.kind, found.ranks) == ("killed", (3,))


def test_rank_of_another_host_is_gone_while_the_others_live(story):
    first, second = ranks = [story.rank(0), story.rank(1, boot="other", address=B)]
    end = story.train(ranks, 3)
    first.pulse(end + 20)
    found = story.look(end + 20)
    assert [rank.state for rank in found.attempt.ranks] == ["running", "gone"] and found.ranks == (1,)


def test_lost_rank_counts_from_its_last_sign_of_life(story):
    first, second, third = ranks = story.ranks(3)
    end = story.train(ranks, 3)
    third.fail(end + 4, ValueError("nothing came"))
    first.say(end + 10, "killed", 1)
    assert story.look(60).sentence == f"rank 1 on {A} exited without reporting a reason (SIGKILL?) at step 3"


def test_unreachable_host_without_its_rings(story):
    near = story.rank(0)
    text = f"the host of rank 1 on {B} no longer answers"
    near.say(8, "host", 1, B)
    found = story.look(60)
    assert (found.kind, found.ranks, found.sentence) == ("host", (1,), text)
    assert any(note.startswith("no record of rank 1 of 2") for note in found.notes)


def test_last_line_of_the_workers_log(story, tmp_path):
    first, second = story.ranks()
    log = tmp_path / "log"
    log.mkdir()
    for rank in (first, second):
        (log / f"rank{rank.number}.ring").symlink_to(rank.path)
    (log / "workerlog.1").write_text("step 3\nFatalError: `Segmentation fault` is detected\n\nFLAGS(default_value=0)\n")
    first.fail(8, CommError("…"))
    story.now = story.began + 60
    found = cause.answer([log])
    assert "workerlog.1: FatalError: `Segmentation fault` is detected" in found.evidence


# Words of the ranks themselves


def test_exception_wins_over_its_consequences(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    second.fail(end + 0.1, ValueError("labels out of range\nmore"), "tools/train.py:71")
    first.fail(end + 0.05, CommError("rank 1 left before it came there"), "tools/train.py:70")
    found = story.look(60)
    assert (found.kind, found.ranks) == ("exception", (1,))
    assert found.sentence == f"rank 1 on {A} raised ValueError: labels out of range (tools/train.py:71, at step 3)"


def test_exception_wins_over_ranks_that_were_killed_for_it(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.fail(end + 0.5, ValueError("no"))
    second.pulse(end + 0.2)  # killed by the launcher, less than a beat later
    assert story.look(60).kind == "exception"


def test_own_words_of_a_lost_rank_win(story):
    first, second = story.ranks()
    first.say(1, "exit", 1, exit_code=1)
    second.fail(1.5, KeyError("no"))
    assert story.look(60).sentence.startswith(f"rank 1 on {A} raised KeyError: 'no'")


def test_error_that_travelled_is_not_the_cause(story):
    first, second = story.ranks()
    second.fail(1, CheckpointError("the save failed there: disk full", origin=0))
    first.fail(1.2, CheckpointError("disk full"))
    assert story.look(60).ranks == (0,)


def test_comm_error_alone_is_told(story):
    first, second = story.ranks()
    for rank in (first, second):
        rank.fail(1, CommError("the backend cannot do that"))
    found = story.look(60)
    assert found.sentence == "ranks 0, 1 raised CommError: the backend cannot do that (t.py:1)"


@pytest.mark.parametrize(
    ("type_", "text", "kind", "culprits"),
    [
        (NonFiniteError, f"the loss of rank 1 on {A} is nan at step 5", "nan", (1,)),
        (MismatchError, f"rank 1 on {A} has another model", "mismatch", (1,)),
        (MismatchError, f"not the same: [3] on rank 0 on {A}; [4] on rank 1 on {A}", "mismatch", ()),
    ],
)
def test_the_same_error_everywhere_names_the_culprit(story, type_, text, kind, culprits):
    for rank in story.ranks():
        rank.fail(1, type_(text, ranks=culprits), "t.py:9")
    found = story.look(60)
    assert (found.kind, found.ranks, found.sentence) == (kind, culprits, f"{text} (t.py:9)")


def test_interrupted(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.fail(end + 1, KeyboardInterrupt(""))
    second.fail(end + 2, CommError("rank 0 left before it came there"))
    found = story.look(60)
    assert (found.kind, found.sentence) == ("interrupted", f"rank 0 on {A} got Ctrl-C (t.py:1, at step 3)")


def test_loader_worker(story):
    first, second = story.ranks()
    second.pulse(0.9)
    second.fail(1, DataError("whatever it says", code="worker_died"))
    first.fail(1.2, CommError("…"))
    found = story.look(60)
    assert (found.kind, found.ranks) == ("worker", (1,)) and any("of memory" in each for each in found.evidence)


DIVERGED = tuple(Waiting((rank,), Operation(4, "meeting", name, step=3), A) for rank, name in enumerate("ab"))


@pytest.mark.parametrize(
    ("kind", "culprit", "shown"),
    [
        ("stall", 1, f"rank 1 on {A} has been in next batch (t.py:1) for 0 s: a slow disk or data set?"),
        ("stall", -1, "all ranks have waited in next batch (step 3, t.py:1) for 0 s: the network between them fails"),
        ("mismatch", -1, f"the ranks diverged: rank 0 on {A} waits in a #4 (step 3), rank 1 on {A} in b #4 (step 3); "),
    ],
)
def test_the_watchdog_has_the_last_word(story, kind, culprit, shown):
    inside, waiting = Operation(0, "data", "next batch", where="t.py:1", step=3), DIVERGED if kind == "mismatch" else ()
    for rank in story.ranks():
        rank.say(30, kind, culprit, operation=inside, waiting=waiting)
    found = story.look(60)
    assert found.kind == kind and found.sentence.startswith(shown) and found.ranks == ((1,) if culprit == 1 else ())


def test_stalled_rank_that_was_killed_afterwards(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)  # the second one is stopped then: not even a pulse
    first.say(end + 30, "stopped", 1, silent=True, pid=7)
    found = story.look(90)
    assert found.kind == "stopped" and "(its process 7 is stopped by SIGSTOP)" in found.sentence


def test_rank_that_fell_silent_long_before_a_stall_that_is_nobodys(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.say(end + 30, "stall", -1)
    found = story.look(90)
    assert (found.kind, found.ranks) == ("stopped", (1,)) and "gave no sign of life from" in found.sentence


def test_two_hosts_that_lost_each_other(story):
    first, second = story.rank(0), story.rank(1, boot="other", address=B)
    first.say(5, "host", 1, B)
    second.say(6, "host", 0, A)
    assert story.look(60).sentence == f"the host of rank 1 on {B} no longer answers"


def test_port_taken(story):
    first, second = story.ranks(run="")
    second.fail(0.1, CommError("nobody there", code="not_joined"))
    first.fail(1, CommError("somebody listens at 6070", code="port_taken"))
    found = story.look(90)
    assert (found.kind, found.sentence) == ("port", f"rank 0 on {A}: somebody listens at 6070")


def test_missing_rank(story):
    story.rank(0, run="").fail(60, CommError(f"rank 1 on {B}: nothing heard", code="not_joined"))
    found = story.look(90)
    assert (found.kind, found.sentence) == ("missing", f"rank 0 on {A}: rank 1 on {B}: nothing heard")


def test_rank_that_failed_before_the_roll_call_explains_why_it_did_not_join(story):
    first, second = story.ranks(run="")
    second.fail(2, FileNotFoundError("no such file"))
    first.fail(1, CommError("nothing heard of rank 1", code="not_joined"))
    assert story.look(90).ranks == (1,)


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("orphan", "", f"rank 0 on {A} is an orphan: its launcher (process 7) is gone"),
        ("preempted", "", "ranks 0, 1 got SIGTERM and ended at step 3, after a checkpoint"),
        ("terminated", "SIGTERM, and no step boundary in time", "without a new checkpoint"),
    ],
)
def test_ended_by_others(story, kind, text, shown):
    ranks = story.ranks()
    end = story.train(ranks, 3)
    for rank in ranks:
        rank.say(end, kind, text=text, launcher=7)
    found = story.look(60)
    assert found.kind == kind and shown in found.sentence


def test_death_wins_over_the_sigterm_that_followed(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.say(end + 0.3, "terminated")
    assert story.look(60).ranks == (1,)


def test_a_job_ended_by_hand_while_it_hung_says_so(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.step(end)
    second.enter(end, "data", "next batch")
    for rank in ranks:
        rank.say(end + 40, "terminated")
    found = story.look(90)
    assert found.kind == "terminated"
    assert any(each.startswith(f"before that: rank 1 on {A} has been in next batch") for each in found.evidence)


# Standstill without a verdict


def hung(story, ranks, end):
    for rank in ranks:
        rank.pulse(end + 31)
    return story.look(end + 31)


def test_stall_in_the_users_code(story):
    *others, last = ranks = story.ranks(4)
    end = story.train(ranks, 3)
    for rank in others:
        rank.step(end)
    last.enter(end, "step", "step 4")
    found = hung(story, ranks, end)
    assert (found.kind, found.ranks) == ("stall", (3,))
    assert found.sentence.startswith(f"rank 3 on {A} has been in step 4 (") and "for 31 s while ranks 0–2 wait in" in (
        found.sentence
    )
    assert f"{GRADIENTS} #4 ([10] float32, step 3, " in found.sentence


@pytest.mark.parametrize(("kind", "hint"), [("data", "a slow disk or data set?"), ("work", "a slow disk?")])
def test_stall_in_data_or_work(story, kind, hint):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.enter(end, "meeting", "wait for rank 1", waits=True, numbered=True)
    second.enter(end, kind, "something slow")
    found = hung(story, ranks, end)
    assert (found.kind, found.ranks) == ("stall", (1,)) and found.sentence.endswith(hint)


def test_stall_outside_of_everything(story):
    only = story.rank(0, 1)
    end = story.train([only], 3)
    assert "has been in its own code after" in hung(story, [only], end).sentence


def test_slow_steps_are_no_stall(story):
    ranks = story.ranks()
    end = story.train(ranks, 3, work=(8, 8))
    for rank in ranks:
        rank.step(end, work=8)
    for rank in ranks:
        rank.pulse(end + 18)
    assert story.look(end + 18).kind == "running"


def test_all_wait_in_the_same_operation(story):
    ranks = story.ranks()
    end = story.train(ranks, 3)
    for rank in ranks:
        rank.step(end)
    found = hung(story, ranks, end)
    assert (found.kind, found.ranks) == ("stall", ()) and "the network between them fails" in found.sentence


def test_one_waits_in_what_the_others_have_left(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.leave(end, first.reduce(end))
    first.reduce(end), second.reduce(end)
    found = hung(story, ranks, end)
    assert (found.kind, found.ranks) == ("stall", (1,)) and f"has been in {GRADIENTS} #4" in found.sentence


def test_different_branches(story):
    first, second = ranks = story.ranks()
    first.reduce(1, "broadcast of state"), second.reduce(1, "all-reduce of loss")
    found = hung(story, ranks, 1)
    assert found.kind == "mismatch" and "rank 1 on 192.168.0.1 in all-reduce of loss #1" in found.sentence


def test_different_shapes(story):
    first, second = ranks = story.ranks()
    first.reduce(1, detail="[10] float32"), second.reduce(1, detail="[12] float32")
    found = hung(story, ranks, 1)
    assert found.kind == "mismatch" and "#1 ([12] float32, " in found.sentence


def test_uneven_data_where_one_goes_on_to_save(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.step(end)
    second.enter(end, "save", "save of latest")
    found = hung(story, ranks, end)
    assert (found.kind, found.ranks) == ("uneven", (1,)) and "it is in save of latest" in found.sentence


@pytest.mark.parametrize(("after", "kind", "culprits"), [(True, "uneven", (1,)), (False, "mismatch", ())])
def test_diverged_because_one_has_left_the_loop(story, after, kind, culprits):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    first.step(end)
    step = second.enter(end, "step", "step 4")
    if after:
        second.leave(end, step)
    second.reduce(end + 0.1, "check of buffers")
    found = hung(story, ranks, end)
    assert (found.kind, found.ranks) == (kind, culprits) and found.sentence.startswith(
        "the ranks diverged after step 3"
    )
    assert ("rank 1 on 192.168.0.1 had left the training loop" in found.sentence) == after


def test_a_link_that_is_cut_during_a_save_is_not_uneven_data(story):
    """Rank 1 still waited in the meeting of a save when the link went; rank 0 was in the next step by then."""
    first, second = ranks = [story.rank(0), story.rank(1, boot="further", address=B)]
    end = story.train(ranks, 5)
    first.step(end)
    second.enter(end, "save", "saving a checkpoint", waits=True, numbered=True)
    first.say(end + 8, "host", 1, host=B), second.say(end + 8, "host", 0)
    found = story.look(60)
    assert found.kind == "host", found.sentence


def test_uneven_data_where_one_has_ended(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    second.say(end, "ended")
    first.step(end)
    first.fail(end + 0.2, CommError("it cannot go on: rank 1 left before it", code="peer_lost", operation=4))
    found = story.look(60)
    assert (found.kind, found.ranks) == ("uneven", (1,)) and "it has finished" in found.sentence


def test_one_has_ended_while_the_other_waits_elsewhere(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    second.say(end, "ended")
    first.reduce(end, "sum of metrics")
    found = hung(story, ranks[:1], end)
    assert found.sentence.startswith(f"rank 1 on {A} has finished while rank 0 on {A} waits in sum of metrics #4")


def test_stopped_process_of_this_host(story):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        story.began += 1  # it was started before its ring
        ranks = [story.rank(0, boot=this_host(), pid=os.getpid()), story.rank(1, boot=this_host(), pid=child.pid)]
        story.train(ranks, 3)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        found = story.look(1)
    finally:
        child.kill()
        child.wait()
    assert (found.kind, found.ranks) == ("stopped", (1,)) and f"process {child.pid}" in found.sentence


# Nothing failed


def test_finished(story):
    ranks = story.ranks()
    end = story.train(ranks, 30)
    for rank in ranks:
        rank.say(end, "ended")
    found = story.look(60)
    assert (found.kind, found.sentence) == ("finished", "nothing failed: all 2 ranks finished, after 30 steps")


def test_running(story):
    end = story.train(story.ranks(), 30)
    found = story.look(end + 1)
    assert (found.kind, found.sentence) == ("running", "nothing failed: ranks 0, 1 still run, at step 30")


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        (
            {"data": (0.003, 0.031, 0.003)},
            "53 % slower than the others: its data takes 31 ms of a step's 81 (others 3)",
        ),
        (
            {"work": (0.05, 0.09, 0.05)},
            "67 % slower than the others: its computing takes 90 ms of a step's 100 (others 50)",
        ),
    ],
)
def test_straggler(story, more, shown):
    end = story.train(story.ranks(3), 25, **more)
    found = story.look(end + 1)
    assert (found.kind, found.ranks) == ("straggler", (1,)) and shown in found.sentence


def test_nobody_is_slow_by_few_steps_or_little(story):
    assert story.look(story.train(story.ranks(), 15, work=(0.05, 0.09)) + 1).kind == "running"
    assert story.look(story.train(story.ranks(run="b"), 25, work=(0.05, 0.055)) + 1).kind == "running"


def test_killed_because_no_step_boundary_came_after_sigterm(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 3)
    for rank in ranks:
        rank.step(end)
        rank.at(end + 1).flight.mark(Mark.SIGTERM, "SIGTERM came to rank 0")
        rank.pulse(end + 30)
    found = story.look(60)
    assert (
        found.kind == "terminated" and "was killed after 29 s without a step boundary at step 3 (in " in found.sentence
    )
