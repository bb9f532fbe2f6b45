import itertools
import random

import numpy as np
import pytest

from ppfleet.data.sampler import Plan, mix, permutation
from ppfleet.errors import DataError


def real(plan, epoch=0, position=0):
    return [batch.indices[: batch.real] for batch in plan.batches(epoch, position)]


def ranks(size, **options):
    return [Plan(rank=rank, size=size, **options) for rank in range(size)]


@pytest.mark.parametrize(
    ("length", "size", "batch"), list(itertools.product((1, 7, 64, 1030), (1, 2, 3, 4), (1, 5, 16)))
)
def test_padded_every_sample_once_and_equal_steps(length, size, batch):
    plans = ranks(size, length=length, batch_size=batch, seed=3, shuffle=True, tail="pad")
    assert len({plan.steps() for plan in plans}) == 1
    for plan in plans:
        batches = list(plan.batches(0))
        assert len(batches) == plan.steps()
        assert all(len(b.indices) == batch for b in batches)
    seen = [i for plan in plans for part in real(plan) for i in part]
    assert sorted(seen) == list(range(length))


def test_dropped_tail_is_the_only_loss():
    plans = ranks(3, length=100, batch_size=8, seed=1, shuffle=True, tail="drop")
    seen = [i for plan in plans for part in real(plan) for i in part]
    assert len(seen) == len(set(seen)) == 96
    assert {plan.steps() for plan in plans} == {4}


def test_global_batches_are_the_same_on_any_number_of_ranks():
    def global_batches(size):
        plans = ranks(size, length=96, batch_size=24 // size, seed=5, shuffle=True, tail="drop")
        return [sorted(sum(parts, ())) for parts in zip(*(real(plan, epoch=2) for plan in plans))]

    assert global_batches(1) == global_batches(2) == global_batches(3) == global_batches(4)


def test_order_is_decided_by_seed_and_epoch():
    def order(seed, epoch):
        return tuple(Plan(length=50, batch_size=1, seed=seed, shuffle=True).order(epoch))

    assert order(1, 1) == order(1, 1)
    assert len({order(1, 1), order(1, 2), order(2, 1), order(2, 2)}) == 4
    assert tuple(Plan(length=4, batch_size=1).order(9)) == (0, 1, 2, 3)


def test_order_is_the_one_that_old_checkpoints_rely_on():
    assert permutation(10, mix(42, 0)).tolist() == [4, 9, 1, 6, 0, 8, 2, 3, 7, 5]
    assert mix(42, 0) == 18201609923829866926


def test_permutation_is_even():
    """Each sample comes to each place about equally often: chi-squared over 3000 shuffles of 8."""
    counts = np.zeros((8, 8))
    for key in range(3000):
        counts[np.arange(8), permutation(8, mix(key))] += 1
    chi = ((counts - 375) ** 2 / 375).sum()
    assert chi < 100  # 49 degrees of freedom: above 100 once in 40,000 fair shuffles


def test_position_goes_on_on_another_number_of_ranks():
    """4, then 2, then 3 ranks within one epoch, cut at random steps: every sample exactly once."""
    for seed in range(20):
        choose = random.Random(seed)
        position, seen = 0, []
        for number, size in enumerate((4, 2, 3)):
            plans = ranks(size, length=1030, batch_size=8, seed=seed, shuffle=True, tail="pad")
            steps = plans[0].steps(position)
            stop = steps if number == 2 else choose.randint(0, steps // 2)
            for plan in plans:
                for batch in itertools.islice(plan.batches(0, position), stop):
                    seen += batch.indices[: batch.real]
            position = min(1030, position + stop * plans[0].global_batch)
        assert sorted(seen) == list(range(1030)), f"seed {seed}"


def test_positions_and_totals():
    batches = list(Plan(length=10, batch_size=2, rank=1, size=2).batches(0))
    assert [b.position for b in batches] == [4, 8, 10]
    assert [b.total_real for b in batches] == [4, 4, 2]
    assert [b.real for b in batches] == [2, 2, 0]
    assert Plan(length=10, batch_size=2, size=2).steps(10) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0, "batch_size": 1}, "empty"),
        ({"length": 5, "batch_size": 0}, "batch_size must be >= 1"),
        ({"length": 5, "batch_size": 2, "tail": "keep"}, "drop, pad"),
        ({"length": 5, "batch_size": 2, "size": 3, "tail": "drop"}, "smaller batch_size"),
    ],
)
def test_impossible_plans_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        Plan(**options)
