"""From a loss to a step of the optimizer, in this process: what a step is made of, and what is refused."""

import math

import numpy as np
import pytest

from tests.one_process import Training

pytestmark = pytest.mark.essential
RATE = 0.5


@pytest.fixture
def training():
    made = []

    def make(**options):
        made.append(Training(rate=RATE, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rows(*values):
    return np.array([[value, 1.0] for value in values], "float32")


def gradient(points):
    """Of the mean of x·w over the points."""
    return points.mean(0)


def test_a_batch_is_a_step(training):
    one = training()
    before, points = one.weights(), rows(1, 2, 3, 4)
    loss = one.batch(points)
    np.testing.assert_allclose(one.weights(), before - RATE * gradient(points), rtol=1e-6)
    assert (one.state.step, one.state.position, one.state.unsaved) == (1, 4, True)
    assert one.stepper.loss == pytest.approx(loss)


def test_accumulated_batches_are_one_step_with_the_mean_of_all_samples(training):
    """By samples, not by batches: the last batch of an epoch may be smaller."""
    one = training(accumulate=2, samples=6)
    before = one.weights()
    one.batch(rows(1, 2, 3, 4), left=2)
    np.testing.assert_array_equal(one.weights(), before)
    assert one.state.step == 0
    one.batch(rows(10, 20), left=1)
    np.testing.assert_allclose(one.weights(), before - RATE * gradient(rows(1, 2, 3, 4, 10, 20)), rtol=1e-6)
    assert one.state.step == 1 and one.state.position == 6


def test_at_the_end_of_an_epoch_a_step_has_fewer_batches(training):
    one = training(accumulate=3, samples=4)
    before = one.weights()
    one.batch(rows(1, 2, 3, 4), left=1)
    np.testing.assert_allclose(one.weights(), before - RATE * gradient(rows(1, 2, 3, 4)), rtol=1e-6)
    assert one.state.step == 1


def test_batches_of_a_loop_that_was_left_are_dropped(training):
    one = training(accumulate=2, samples=8)
    before = one.weights()
    one.batch(rows(100, 100, 100, 100), left=2)
    one.stepper.abandon()
    one.batch(rows(1, 2, 3, 4), left=1)
    np.testing.assert_allclose(one.weights(), before - RATE * gradient(rows(1, 2, 3, 4)), rtol=1e-6)
    assert one.stepper.loss == pytest.approx(float((rows(1, 2, 3, 4) @ before).mean()))


def test_an_interrupted_batch_leaves_no_gradients(training):
    one = training()
    one.loss(rows(5, 5, 5, 5)).backward()
    one.stepper.drop_batch()
    before = one.weights()
    one.batch(rows(1, 2, 3, 4))
    np.testing.assert_allclose(one.weights(), before - RATE * gradient(rows(1, 2, 3, 4)), rtol=1e-6)


# What is not finite


def infinite_gradient(loss):
    """A finite loss whose gradient is not."""
    return (loss - loss.detach()).sqrt() + 1.0


@pytest.mark.parametrize("change", [lambda loss: loss * math.nan, infinite_gradient], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_with_the_weights_of_the_step_before(training, change):
    from ppfleet.errors import NonFiniteError

    one = training()
    one.batch(rows(1, 2, 3, 4))
    before = one.weights()
    with pytest.raises(NonFiniteError) as raised:
        one.batch(rows(1, 2, 3, 4), change=change)
    np.testing.assert_array_equal(one.weights(), before)
    assert raised.value.fields == {"ranks": [0]} and (one.state.step, one.state.skipped) == (1, 0)


@pytest.mark.parametrize("change", [lambda loss: loss * math.nan, infinite_gradient], ids=["loss", "gradient"])
def test_or_it_is_skipped_and_the_next_is_made(training, change):
    one = training(on_nan="skip")
    before = one.weights()
    one.batch(rows(1, 2, 3, 4), change=change)
    np.testing.assert_array_equal(one.weights(), before)
    assert (one.state.step, one.state.skipped, one.state.position) == (1, 1, 4)
    one.batch(rows(1, 2, 3, 4))
    np.testing.assert_allclose(one.weights(), before - RATE * gradient(rows(1, 2, 3, 4)), rtol=1e-6)


# What the ranks tell each other


def told(rates=(RATE, RATE), sums=(7, 7), bad=(0, 0), end=(0, 0)):
    """In place of the exchange between two ranks."""
    from ppfleet.training.gradients import Vitals

    table = np.array([[1.0, bad[rank], rates[rank], end[rank], sums[rank]] for rank in range(2)])
    return Vitals(table, "weight")


@pytest.mark.parametrize("difference", [{"rates": (RATE, 0.1)}, {"sums": (7, 8)}])
def test_ranks_that_differ_make_no_step(training, difference):
    from ppfleet.errors import MismatchError

    one = training(told=told(**difference))
    before = one.weights()
    with pytest.raises(MismatchError):
        one.batch(rows(1, 2, 3, 4))
    np.testing.assert_array_equal(one.weights(), before)


def test_the_odd_one_of_three_is_named(training):
    from ppfleet.errors import MismatchError
    from ppfleet.training.gradients import Vitals

    one = training(told=Vitals(np.array([[1.0, 0, rate, 0, 7] for rate in (0.5, 0.1, 0.5)]), "weight"))
    with pytest.raises(MismatchError) as raised:
        one.batch(rows(1, 2, 3, 4))
    assert raised.value.fields["ranks"] == [1]


def test_a_number_that_is_not_finite_elsewhere_stops_here_too(training):
    from ppfleet.errors import NonFiniteError

    one = training(told=told(bad=(0, 1)))
    with pytest.raises(NonFiniteError) as raised:
        one.batch(rows(1, 2, 3, 4))
    assert raised.value.fields == {"ranks": [1]}


@pytest.mark.parametrize("end", [(0, 0), (0, 1)])
def test_sigterm_of_one_rank_is_known_to_all_at_the_same_step(training, end):
    one = training(told=told(end=end))
    one.batch(rows(1, 2, 3, 4))
    assert one.state.preempted == any(end) and one.state.step == 1


# What is refused


def test_backward_belongs_to_a_batch_and_once(training):
    from ppfleet.errors import FleetError

    one = training()
    with pytest.raises(FleetError):
        one.stepper.backward(one.loss(rows(1)))
    one.batch(rows(1, 2, 3, 4))
    with pytest.raises(FleetError):
        one.stepper.backward(one.loss(rows(1)))


def test_a_batch_without_backward(training):
    from ppfleet.errors import FleetError

    one = training()
    one.begin(4)
    with pytest.raises(FleetError):
        one.stepper.end()


def test_a_loss_of_several_numbers(training):
    from ppfleet.errors import FleetError

    one = training()
    with pytest.raises(FleetError, match=r"\[4, 1\]"):
        one.batch(rows(1, 2, 3, 4), reduce=lambda losses: losses)


def test_gradients_of_another_loss_are_refused_and_zeros_are_not(training):
    from ppfleet.errors import FleetError

    one = training()
    one.loss(rows(1)).backward()
    with pytest.raises(FleetError, match="weight"):
        one.batch(rows(1, 2, 3, 4))
    one.stepper.optimizer.clear_grad(set_to_zero=True)
    one.batch(rows(1, 2, 3, 4))
    assert one.state.step == 1


def test_weights_between_two_steps_are_not_trained_on(training):
    from ppfleet.errors import FleetError

    one = training()
    own = one.stepper.optimizer.step

    def interrupted():
        own()
        raise KeyboardInterrupt

    one.stepper.optimizer.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        one.batch(rows(1, 2, 3, 4))
    one.stepper.optimizer.step = own
    one.stepper.drop_batch()
    assert one.state.torn
    with pytest.raises(FleetError):
        one.batch(rows(1, 2, 3, 4))
    assert one.state.step == 1
