"""Where in training a job is, through every way in which a loop can end."""

import pytest

from ppfleet.errors import CheckpointError
from ppfleet.training.state import Place

ORDER = {"samples": 100, "shuffle": True}


def at(epoch, loop=0, position=0):
    return {"epoch": epoch, "loop": loop, "position": position}


def inside(epoch=2, position=30):
    place = Place()
    place.enter_epoch(epoch)
    assert place.begin_loop(ORDER)
    place.position = place.ahead = position
    return place


def resumed(facts):
    place = Place()
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
    place = Place()
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
    assert not again.begin_loop(ORDER) and again.skipped
    bare = Place()
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


def test_a_restored_place_goes_on_in_the_same_order_only():
    place = resumed({"epoch": 4, "position": 30, "order": ORDER})  # as the first version wrote it
    with pytest.raises(CheckpointError, match="middle of an epoch"):
        place.begin_loop({**ORDER, "samples": 101})
    place = resumed({"epoch": 4, "position": 30, "order": ORDER})
    assert place.begin_loop(dict(ORDER))
    place.leave_epoch()
    place.enter_epoch(5)
    assert place.begin_loop({**ORDER, "samples": 101})  # another epoch may have other data


def test_its_words_tell_the_batch_at_hand():
    place = inside(position=0)
    place.ahead = 64
    assert str(place) == "epoch 2, samples up to 64"
