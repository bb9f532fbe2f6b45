"""Sums through shared memory, with a thread for each rank."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ppfleet.distributed import shared_memory
from ppfleet.errors import CommError


class Ranks:
    """Runs a function as several ranks that can gather."""

    def __init__(self, size):
        self.size, self.brought = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank):
        def gathered(value, what):
            self.brought[rank] = value
            self.barrier.wait()
            values = list(self.brought)
            self.barrier.wait()
            return values

        return gathered

    def share(self, rank, length, dtype="float32"):
        return shared_memory.share(rank, self.size, length, dtype, self.gather(rank))

    def run(self, function):
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(function, range(self.size)))


@pytest.mark.parametrize(
    ("size", "length", "dtype"), [(2, 1, "float32"), (2, 100_003, "float32"), (3, 70_001, "float64"), (5, 7, "float32")]
)
def test_every_rank_gets_the_sum_in_the_order_of_ranks_and_the_same_bits_each_time(size, length, dtype):
    ranks, rounds, means = Ranks(size), 20, length - length // 3
    brought = np.random.RandomState(0).standard_normal((rounds, size, length)).astype(dtype)
    expected = brought[:, 0].copy()
    for rank in range(1, size):
        expected += brought[:, rank]
    expected[:, :means] *= np.dtype(dtype).type(1 / size)

    def work(rank):
        memory, why = ranks.share(rank, length, dtype)
        assert memory is not None, why
        for number in range(rounds):
            memory.mine[:] = brought[number, rank]
            memory.all_reduce(means, lambda: None)
            assert memory.total.tobytes() == expected[number].tobytes(), (rank, number)
        return True

    assert all(ranks.run(work))


def test_a_rank_that_waits_in_vain_is_told_for_whom_and_sums_no_more():
    ranks, told = Ranks(3), []

    def work(rank):
        memory, _ = ranks.share(rank, 8)
        if rank == 1:
            return None

        def check():
            told.append(memory.late())
            if [1] in told:
                raise CommError("rank 1 is gone")

        for message in ("rank 1 is gone", "out of step"):
            with pytest.raises(CommError, match=message):
                memory.all_reduce(8, check)
        return True

    assert ranks.run(work) == [True, None, True]


def fails(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


class Host:
    """Threads of one process that believe to be on hosts of their own."""

    def __call__(self):
        return str(threading.get_ident())


@pytest.mark.parametrize(
    ("owner", "name", "stub", "why"),
    [
        (shared_memory, "this_host", Host(), "several hosts"),
        (os, "posix_fallocate", fails, "no room for 0 MB of shared memory (No space left on device)"),
        (shared_memory.platform, "machine", lambda: "aarch64", "aarch64 may show"),
        (shared_memory.os, "memfd_create", None, "no memfd_create"),
    ],
)  # fmt: skip
def test_where_it_is_not_safe_there_is_none_and_all_ranks_know_why(monkeypatch, owner, name, stub, why):
    if stub is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, stub)
    ranks = Ranks(2)
    answers = ranks.run(lambda rank: ranks.share(rank, 8))
    assert [memory for memory, _ in answers] == [None, None] and all(why in reason for _, reason in answers), answers


@pytest.mark.parametrize("spoilt", ["number", "nonce", "size"])
def test_a_rank_that_finds_something_else_takes_nothing(spoilt):
    """Where the number of a process or descriptor means another one, as in a container."""
    ranks, other = Ranks(2), os.memfd_create("other")
    os.ftruncate(other, 1 << 20)

    def work(rank):
        plain = ranks.gather(rank)

        def gather(value, what):
            values = plain(value, what)
            if rank == 1 and isinstance(values[0], list):
                offer = values[0][2]
                values[0][2] = {
                    "number": [offer[0], 987654, offer[2]],
                    "nonce": [offer[0], offer[1], "00" * 16],
                    "size": [offer[0], other, offer[2]],
                }[spoilt]
            return values

        return shared_memory.share(rank, 2, 8, "float32", gather)

    answers = ranks.run(work)
    os.close(other)
    assert [memory for memory, _ in answers] == [None, None]
    assert all("rank 1 cannot open rank 0's memory" in why for _, why in answers), answers


def test_no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    ranks = Ranks(2)
    assert all(memory is not None for memory, _ in ranks.run(lambda rank: ranks.share(rank, 1000)))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
