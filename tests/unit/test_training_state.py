"""Where in training a job is, through every way in which a loop can end."""

import pytest

from ppfleet.errors import CheckpointError
from ppfleet.training.state import TrainingState

ORDER = {"samples": 100, "shuffle": True}


def at(epoch, loop=0, position=0):
    return {"epoch": epoch, "loop": loop, "position": position}


def inside(epoch=2, position=30):
    place = TrainingState()
    place.enter_epoch(epoch)
    assert place.begin_loop(ORDER)
    place.position = place.ahead = position
    return place


def resumed(facts):
    place = TrainingState()
    place.restore(facts)
    place.enter_epoch(place.epoch)
    return place


def test_after_the_loop_of_an_epoch_comes_the_next_epoch_but_not_before_its_body_is_over():
    place = inside()
    place.end_loop()
    assert place.to_save() == at(3) and place.epoch == 2
    place.leave_epoch()
    assert place.to_save() == at(3) and place.epoch == 3


def test_without_epochs_each_loop_is_one():
    place = TrainingState()
    for epoch in range(2):
        assert place.begin_loop(ORDER) and place.epoch == epoch
        place.position = 96
        place.end_loop()
        assert place.epoch == epoch + 1 and place.to_save() == at(epoch + 1)


def test_what_follows_a_loop_can_be_done_again():
    place = inside(position=96)
    place.end_loop()
    assert place.to_save(repeat=True) == at(2, loop=1) and place.repeats(repeat=True)
    again = resumed(place.facts(repeat=True))
    assert not again.begin_loop(ORDER) and again.repeats_loop
    bare = TrainingState()
    bare.begin_loop(ORDER)
    bare.position = 96
    bare.end_loop()
    assert bare.to_save(repeat=True) == at(0, position=96) and bare.repeats(repeat=True)


def test_inside_of_a_loop_nothing_is_repeated():
    place = inside()
    assert place.to_save(repeat=True) == at(2, position=30) and not place.repeats(repeat=True)


def test_a_break_ends_the_loop_an_exception_does_not():
    place = inside()
    place.leave_loop()
    assert place.to_save() == at(3) and not place.interrupted
    place.leave_epochs()  # the exception went on, out of job.epochs
    assert place.to_save() == at(2, position=30) and place.interrupted


def test_an_interrupted_loop_goes_on_when_it_is_run_again():
    place = inside()
    place.leave_loop()
    place.leave_epochs()
    place.enter_epoch(place.epoch)
    assert place.begin_loop(ORDER) and (place.epoch, place.position) == (2, 30)


def test_several_loops_in_an_epoch():
    place = inside(epoch=0)
    keys = [place.order_key]
    place.end_loop()
    assert place.begin_loop(ORDER) and place.position == 0
    keys.append(place.order_key)
    assert place.to_save() == at(0, loop=1)  # begun, nothing consumed
    place.position = 40
    middle = place.facts()
    place.end_loop()
    place.leave_epoch()
    assert place.loops == 2
    place.enter_epoch(1)
    place.begin_loop(ORDER)
    keys.append(place.order_key)
    place.end_loop()
    assert place.to_save() == at(1, loop=1) and place.repeats()  # another loop is to come, as it is known by now
    assert len(set(keys)) == 3 and keys[0] == 0 and keys[2] == 1

    again = resumed(middle)
    assert not again.begin_loop(ORDER) and again.begin_loop(ORDER)
    assert (again.epoch, again.loop, again.position) == (0, 1, 40) and again.order_key == keys[1]


def test_a_break_leads_to_the_next_loop_of_the_epoch():
    place = inside()
    place.leave_loop()
    assert place.begin_loop(ORDER) and (place.epoch, place.loop, place.position) == (2, 1, 0)


def test_an_epoch_that_was_wrongly_taken_for_over_is_doubted():
    place = inside(epoch=0)
    place.end_loop()
    again = resumed(place.facts())
    again.begin_loop(ORDER)
    assert not again.doubt
    again.end_loop()
    again.begin_loop(ORDER)
    assert "saved after loop 1 over job.steps of epoch 0" in again.doubt


def test_a_restored_state_goes_on_in_the_same_order_only():
    old = {"epoch": 4, "position": 30, "order": ORDER, "step": 7, "skipped": 0}  # as version 0.1.0 wrote it
    place = resumed(old)
    with pytest.raises(CheckpointError, match="within an epoch"):
        place.begin_loop({**ORDER, "samples": 101})
    place = resumed(old)
    assert place.begin_loop(dict(ORDER))
    place.leave_epoch()
    place.enter_epoch(5)
    assert place.begin_loop({**ORDER, "samples": 101})  # another epoch may have other data


def test_its_words_tell_the_batch_at_hand():
    place = inside(position=0)
    place.ahead = 64
    assert str(place) == "epoch 2, samples up to 64"


def test_a_step_counts_when_all_ranks_have_exchanged_and_its_samples_when_it_is_made():
    state = inside(position=0)
    state.ahead = 16
    state.begin_step(2)
    assert not state.batch_done() and state.done == 1
    state.ahead = 32
    assert state.batch_done()
    state.exchange_done(preempted=False)
    state.begin_update()
    assert state.torn and state.position == 0 and (state.step, state.done) == (1, 0)
    state.step_made()
    assert not state.torn and state.position == 32 and state.unsaved
    state.saved()
    assert not state.unsaved


def test_a_step_that_is_not_finite_is_skipped_or_refused():
    state = inside(position=0)
    state.ahead = 16
    state.begin_step(1)
    state.batch_done()
    state.exchange_done(preempted=True)
    state.step_refused()
    assert (state.step, state.skipped, state.position) == (0, 0, 0) and state.preempted
    state.begin_step(1)
    state.batch_done()
    state.exchange_done(preempted=False)
    state.step_skipped()
    assert (state.step, state.skipped, state.position) == (1, 1, 16) and not state.preempted


def test_what_is_stored_brings_all_of_it_back():
    state = inside(position=48)
    state.step, state.skipped, state.torn, state.unsaved = 9, 2, True, True
    again = resumed(state.facts())
    assert (again.step, again.skipped, again.epoch, again.position) == (9, 2, 2, 48)
    assert not again.torn and not again.unsaved
