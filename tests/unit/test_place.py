"""Where in training a job is, through every way in which a loop can end."""

import pytest

from ppfleet.errors import CheckpointError
from ppfleet.place import Place

ORDER = {"samples": 100, "shuffle": True}


def inside(epoch=2, position=30):
    place = Place()
    place.start_of(epoch)
    place.in_epochs = True
    place.begin_loop(ORDER)
    place.position = place.ahead = position
    return place


def test_a_loop_that_ends_begins_the_next_epoch():
    place = inside()
    place.end_loop()
    assert place.to_save() == {"epoch": 3, "position": 0}


def test_what_follows_an_epoch_can_be_done_again():
    place = inside(position=96)
    place.end_loop()
    place.back_to_end()
    assert place.to_save() == {"epoch": 2, "position": 96}


def test_before_any_loop_has_ended_there_is_nothing_to_go_back_to():
    place = inside()
    place.back_to_end()
    assert place.to_save() == {"epoch": 2, "position": 30}


def test_a_break_ends_the_epoch_an_exception_does_not():
    place = inside()
    place.left = True
    assert place.to_save() == {"epoch": 3, "position": 0}
    place.in_epochs = False  # the exception went on, out of job.epochs
    assert place.to_save() == {"epoch": 2, "position": 30}


def test_a_restored_place_goes_on_in_the_same_order_only():
    place = Place()
    place.restore({"epoch": 4, "position": 30, "order": ORDER})
    place.begin_loop(dict(ORDER))
    with pytest.raises(CheckpointError, match="middle of an epoch"):
        place.begin_loop({**ORDER, "samples": 101})
    place.start_of(5)
    place.begin_loop({**ORDER, "samples": 101})  # another epoch may have other data


def test_its_words_tell_the_batch_at_hand():
    place = inside(position=0)
    place.ahead = 64
    assert str(place) == "epoch 2, samples up to 64"
