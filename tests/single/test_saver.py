"""Saving and restoring, in this process: what a checkpoint holds, which one is the best, when it is written again."""

import json
import math

import numpy as np
import pytest

from tests.one_process import Training

pytestmark = pytest.mark.essential
CARD = {"model": "line"}
POINTS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], "float32")


def schedule():
    import paddle

    return paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5)


@pytest.fixture
def training():
    made = []

    def make(directory, **options):
        made.append(Training(directory=directory, **{"rate": schedule(), "adam": True, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def one(training, tmp_path):
    """After one step."""
    made = training(tmp_path / "run")
    made.batch(POINTS)
    return made


def save(training, mode="max", **metrics):
    training.saver.save(CARD, mode, metrics)


def checkpoints(training):
    return sorted(path.name for path in training.run.checkpoints.glob("0*"))


def stored(training):
    """What the newest checkpoint says of the progress."""
    return json.loads((training.run.checkpoints / checkpoints(training)[-1] / "state.json").read_text())


def test_what_is_restored_goes_on_to_the_same_bits(training, one, tmp_path):
    save(one, top1=0.5)
    one.run.release()
    other = training(tmp_path / "run")
    assert other.saver.restore(CARD, "auto") == str(one.run.checkpoints / checkpoints(one)[-1])
    assert (other.state.step, other.state.position, other.saver.best) == (1, 4, 0.5)
    for each in (one, other):  # the moments of Adam, too
        each.stepper.optimizer._learning_rate.step()
        each.batch(POINTS)
    np.testing.assert_array_equal(one.weights(), other.weights())


def test_a_save_makes_the_state_saved(one):
    assert one.state.unsaved and not one.saver.is_current()
    save(one)
    assert not one.state.unsaved and one.saver.is_current()
    one.batch(POINTS)
    assert one.state.unsaved and not one.saver.is_current()


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("max", [0.5, 0.7, 0.6], 0.7),
        ("min", [0.5, 0.3, 0.4], 0.3),
        ("max", [math.nan, 0.2, math.nan], 0.2),
        ("max", [0.5, 0.5], 0.5),
    ],
)
def test_the_best_is_the_first_metrics_best(one, mode, scores, best):
    kept = {}
    for score in scores:
        one.batch(POINTS)
        save(one, mode, top1=score, other=-score)
        kept.setdefault(score, one.weights())
    assert one.saver.best == best and stored(one)["best"] == best
    import paddle

    weights = paddle.load(str(one.run.path / "best.pdparams"))["weight"].numpy()[:, 0]
    np.testing.assert_array_equal(weights, kept[best])


def test_without_a_metric_nothing_is_the_best(one):
    save(one)
    assert one.saver.best is None and not (one.run.path / "best.pdparams").exists()


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(one):
    from ppfleet.errors import FleetError

    with pytest.raises(FleetError):
        save(one, mode="highest")
    one.state.begin_step(2)
    one.state.batch_done()
    with pytest.raises(FleetError):
        save(one)
    one.state.drop_batches()
    one.state.begin_update()
    with pytest.raises(FleetError):
        save(one)
    assert not checkpoints(one)


# Where it is restored from


def test_nothing_to_restore(training, tmp_path):
    made = training(tmp_path / "run")
    assert made.saver.restore(CARD, "auto") == "" and made.state.step == 0


def test_none_restores_nothing_though_there_is_a_checkpoint(training, one, tmp_path):
    save(one)
    one.run.release()
    made = training(tmp_path / "run")
    assert made.saver.restore(CARD, "none") == "" and made.state.step == 0


def test_another_runs_best_is_not_this_ones(training, one, tmp_path):
    save(one, top1=0.9)
    made = training(tmp_path / "second")
    made.saver.restore(CARD, str(one.run.path))
    assert (made.saver.best, made.state.step) == (None, 1)
    np.testing.assert_array_equal(made.weights(), one.weights())


def test_a_directory_with_a_run_is_only_trained_in_after_a_restore_from_it(training, one, tmp_path):
    from ppfleet.errors import FleetError

    save(one)
    one.run.release()
    made = training(tmp_path / "run")
    made.saver.restore(CARD, "none")
    with pytest.raises(FleetError):
        made.saver.own_directory()
    made.saver.restore(CARD, "auto")
    made.saver.own_directory()


# Written again


def test_a_schedule_that_is_stepped_after_the_save_is_in_the_checkpoint(training, one, tmp_path):
    save(one, top1=0.5)
    one.stepper.optimizer._learning_rate.step()
    one.saver.amend()
    assert len(checkpoints(one)) == 1 and stored(one)["metrics"] == {"top1": 0.5}
    one.run.release()
    other = training(tmp_path / "run")
    other.saver.restore(CARD, "auto")
    assert other.stepper.optimizer.get_lr() == one.stepper.optimizer.get_lr() == 0.05


def test_what_has_not_changed_is_not_written_again(one):
    save(one)
    before = checkpoints(one)
    one.saver.amend()
    assert checkpoints(one) == before


def test_after_another_step_the_checkpoint_stays_as_it_is(one):
    save(one)
    rate = stored(one)["schedule"]
    one.batch(POINTS)
    one.stepper.optimizer._learning_rate.step()
    one.saver.amend()
    assert (stored(one)["step"], stored(one)["schedule"]) == (1, rate)


def test_a_loop_that_is_repeated_begins_with_the_schedule_of_its_end(one):
    """A resume does again what follows a loop: the schedule must not be stepped twice by that."""
    one.saver.loop_ended()
    one.stepper.optimizer._learning_rate.step()
    one.saver.loop_repeated()
    assert one.stepper.optimizer.get_lr() == 0.1
