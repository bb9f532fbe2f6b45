import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from ppfleet.errors import DataError
from ppfleet.evaluation.metrics import ExactSum, Totals


def test_sum_is_exact_whatever_the_order():
    choose = random.Random(0)
    values = [choose.uniform(-1, 1) * 10.0 ** choose.randint(-300, 300) for _ in range(500)] + [
        5e-324,
        1.7e308,
        -1.7e308,
    ]
    exact = float(sum(map(Fraction, values)))
    for _ in range(5):
        choose.shuffle(values)
        total = ExactSum()
        total.add(np.array(values))
        assert float(total) == exact


def test_nan_and_infinity_are_carried():
    total = ExactSum()
    total.add(np.array([1.0, math.inf]))
    assert float(total) == math.inf
    total.add(np.array([math.nan]))
    assert math.isnan(float(total))


def test_parts_of_ranks_join_to_the_same_mean():
    values = np.random.RandomState(0).standard_normal(1030).astype(np.float32)

    def joined(ranks):
        parts = []
        for rank in range(ranks):
            totals = Totals()
            totals.add("loss", values[rank::ranks])
            parts.append(json.loads(json.dumps(totals.to_json())))
        return Totals.merged(parts).means()["loss"]

    assert (
        joined(1)
        == joined(2)
        == joined(3)
        == joined(4)
        == float(Fraction(float(sum(map(Fraction, values.tolist())))) / 1030)
    )


def test_padding_does_not_count():
    totals = Totals()
    totals.add("right", np.array([1.0, 0.0, 1.0, 1.0]), real=2)
    assert totals.means() == {"right": 0.5}


def test_weights_are_counts():
    totals = Totals()
    totals.add("per_token", np.array([10.0, 2.0]), np.array([5, 1]))
    assert totals.means() == {"per_token": 2.0}


def test_nothing_counted_is_nan():
    totals = Totals()
    totals.add("right", np.array([1.0]), real=0)
    assert math.isnan(totals.means()["right"])


def test_a_mean_is_refused():
    with pytest.raises(DataError, match="one value per sample"):
        Totals().add("accuracy", np.float32(0.9))


@pytest.mark.parametrize("values", [["a", "b"], [[1.0], [2.0]], [np.zeros(2), np.zeros(2)], 0.5, None])
def test_only_numbers_are_values(values):
    with pytest.raises(DataError, match="one value per sample"):
        Totals().add("accuracy", values)


def test_a_list_of_numbers_is_as_good_as_an_array():
    totals = Totals()
    totals.add("per_token", [10, np.float32(2.0), True], [5, 1, 0.5])
    assert totals.means() == {"per_token": 13 / 6.5}


def test_weights_must_be_as_many_as_values_and_finite():
    with pytest.raises(DataError, match="2 values and 1 weights"):
        Totals().add("loss", [1.0, 2.0], [1.0])
    totals = Totals()
    totals.add("loss", [1.0, 2.0], [1.0, math.inf])
    with pytest.raises(DataError, match="finite"):
        totals.means()
