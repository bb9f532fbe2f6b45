"""Threads that draw samples into their rows: same bytes as without, in order, not too far ahead, gone at the end."""

import pytest

from tests.harness import run, run_raising, wait_for

PLAN = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}


def numbers(length=64, each=lambda index: None):
    """Index and a drawn number; `each` is called in the thread that draws."""
    import numpy as np

    from ppfleet.data.threads import ThreadedDataset

    class Numbers(ThreadedDataset):
        fields = [((3,), np.float32), ((), np.int64)]

        def __len__(self):
            return length

        def draw_into(self, sample, index, chance):
            each(index)
            values, label = sample
            values[:] = index, chance.random(), chance.gauss(0, 1)
            label[...] = index

    return Numbers()


def threads_left():
    import threading

    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ppfleet-loader")]


def passes(threads, shuffle, start, how):
    """Two ranks' batches with masks and positions, of the data set itself or of one that draws in `__getitem__`."""
    import numpy as np
    from paddle.io import Dataset

    from ppfleet.data.create import make_loader

    dataset = numbers(27)

    class Plain(Dataset):
        def __len__(self):
            return len(dataset)

        def __getitem__(self, index):
            return dataset[index]

    seen = []
    for rank in range(2):
        plan = {**PLAN, "rank": rank, "size": 2, "shuffle": shuffle}
        loader = make_loader(Plain() if how == "plain" else dataset, plan, threads)
        loader.epoch, loader.start = 1, start
        for values, labels in loader:
            seen.append([values.tolist(), labels.tolist(), np.asarray(loader.mask).tolist(), loader.position])
    return seen


@pytest.mark.parametrize("shuffle", [False, True])
def test_any_number_of_threads_gives_what_a_plain_data_set_gives(tmp_path, shuffle):
    (expected,) = run(passes, 1, tmp_path, 0, shuffle, 0, "plain")
    assert len(expected) == 8 and len({values[1] for batch in expected for values in batch[0]}) == 27
    for threads in (0, 1, 2, 7):
        assert run(passes, 1, tmp_path, threads, shuffle, 0, "in place") == [expected]
    (resumed,) = run(passes, 1, tmp_path, 2, shuffle, 16, "in place")
    assert resumed == expected[2:4] + expected[6:8]


def failing(threads, bad):
    from ppfleet.data.create import make_loader

    def refuse(index):
        if index in bad:
            raise ValueError(f"sample {index} after {len(handed)} batches")

    handed = []
    for batch in make_loader(numbers(each=refuse), PLAN, threads):
        handed.append(batch)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_the_first_failure_comes_with_its_batch(tmp_path, threads):
    ((kind, message),) = run_raising(failing, 1, tmp_path, threads, [15, 14, 13, 22])
    assert kind == "ValueError" and message.startswith("sample 13 ")


def ends(how):
    """A pass that is left early: what was drawn and which threads are there, after it."""
    import os
    import signal

    from ppfleet.data.create import make_loader

    drawn, handed = [], []

    def note(index):
        drawn.append(index)
        if how == "failure" and index == 21:
            raise ValueError("no sample 21")
        if how == "Ctrl-C" and index == 21:
            os.kill(os.getpid(), signal.SIGINT)  # the loop is waiting for a batch, or about to

    try:
        for batch in make_loader(numbers(10**6, note), PLAN, 2):
            handed.append(batch)
            if how == "break" and len(handed) == 5:
                break
            if how == "error in the loop" and len(handed) == 5:
                raise ValueError("in the loop")
    except (ValueError, KeyboardInterrupt):
        pass
    return [threads_left(), len(handed), len(drawn)]


@pytest.mark.parametrize("how", ["break", "failure", "error in the loop", "Ctrl-C"])
def test_threads_end_with_their_pass(tmp_path, how):
    ((left, handed, drawn),) = run(ends, 1, tmp_path, how)
    assert left == []
    if how != "Ctrl-C":  # which comes when it comes
        assert handed == 5 and drawn <= 8 * 4


def unfinished():
    from ppfleet.data.create import make_loader

    kept = iter(make_loader(numbers(10**6), PLAN, 2))
    next(kept)
    globals()["kept"] = kept
    return len(threads_left())


def test_a_pass_that_nobody_ends_does_not_keep_the_process(tmp_path):
    assert run(unfinished, 1, tmp_path) == [2]


def ahead():
    """The largest number of samples drawn beyond the batch in hand, once the threads could do no more."""

    from ppfleet.data.create import make_loader

    drawn = []
    loader, beyond = make_loader(numbers(each=drawn.append), PLAN, 2), []
    for number, _ in enumerate(loader, 1):
        wanted = min(64, 4 * (number + 2))
        wait_for(lambda: len(drawn) >= wanted, 5, f"{wanted} samples")  # noqa: B023
        beyond.append(len(drawn) - 4 * number)
    return beyond


def test_threads_are_two_batches_ahead_and_no_more(tmp_path):
    assert run(ahead, 1, tmp_path) == [[8] * 14 + [4, 0]]


def kept(threads):
    """A view of each batch of a pass, when the batches themselves are gone, and others were drawn since."""
    import gc

    from ppfleet.data.create import make_loader

    loader = make_loader(numbers(), PLAN, threads)
    parts = [values[1:2].reshape([-1]) for values, _ in loader]
    for _ in loader:
        gc.collect()
    return [part.tolist()[0] for part in parts]


@pytest.mark.parametrize("threads", [0, 2])
def test_a_batch_lives_as_long_as_a_tensor_over_it(tmp_path, threads):
    assert run(kept, 1, tmp_path, threads) == [[4.0 * number + 1 for number in range(16)]]


def shared():
    """Whether a tensor is the array's own memory, and what it says of itself."""
    import numpy as np

    from ppfleet.data.transfer import over

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = over(array)
    array[1, 2] = 50
    return [tensor.tolist(), tensor.stop_gradient, str(tensor.dtype), str(tensor.place)]


def test_a_tensor_is_the_arrays_memory(tmp_path):
    assert run(shared, 1, tmp_path) == [[[[0, 1, 2], [3, 4, 50]], True, "paddle.float32", "Place(cpu)"]]


def own_getitem(workers):
    import numpy as np

    from ppfleet.data.create import make_loader

    class Doubled(type(numbers())):
        def __getitem__(self, index):
            values, label = super().__getitem__(index)
            return 2 * values, label

    return [values.tolist() for values, _ in make_loader(Doubled(), PLAN, workers)], [
        (2 * np.asarray(values)).tolist() for values, _ in make_loader(numbers(), PLAN, workers)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_getitem_of_its_own_is_respected(tmp_path, workers):
    ((doubled, expected),) = run(own_getitem, 1, tmp_path, workers)
    assert doubled == expected


def with_collate(workers):
    import numpy as np

    from ppfleet.data.create import make_loader

    def labels(samples):
        return [np.array([label for _, label in samples])]

    return [batch.tolist() for (batch,) in make_loader(numbers(8), PLAN, workers, labels)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_gets_samples(tmp_path, workers):
    assert run(with_collate, 1, tmp_path, workers) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
