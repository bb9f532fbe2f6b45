"""Streams on several ranks: every rank must read the same samples, and a stream that does not give them is refused."""

import pytest

from tests.harness import DEVICE, run, run_raising, start


def stream(kind, length=96):
    """`length` points: the same on all ranks, or in one of the ways in which streams differ."""
    import os
    import random

    import numpy as np
    import paddle

    from tests import blocks

    rank, size = int(os.environ.get("PADDLE_TRAINER_ID", 0)), int(os.environ.get("PADDLE_TRAINERS_NUM", 1))
    points = blocks.Points(length)

    class Stream(paddle.io.IterableDataset):
        def __iter__(self):
            if kind == "split":  # as the documents of other libraries advise
                places = range(rank, length, size)
            elif kind == "empty on rank 1":
                places = range(0 if rank else length)
            elif kind == "three batches fewer":
                places = range(length - 3 * 16 * rank)
            elif kind == "three samples fewer":
                places = range(length - 3 * rank)
            else:
                places = range(length)
            for place in places:
                point, label = points[place]
                noise = np.random.default_rng() if kind == "own randomness" else np.random
                yield point + np.float32(noise.normal(0, 0.01)) + np.float32(random.random()), label

    return Stream()


def train(path, kind):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = blocks.mlp()
    net, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    data, seen = job.loader(stream(kind), 16 // job.world.size), 0
    if job.world.first:
        next(iter(data))  # a look by one rank alone waits for nobody
    for _ in job.epochs(2):
        for points, labels in job.steps(data):
            job.backward(F.cross_entropy(net(points), labels))
            seen += int(data.mask.sum())
    return seen


def evaluate(path, kind):
    import paddle

    import ppfleet
    from ppfleet import metrics
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = blocks.mlp()
    net, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    return job.evaluate(net, job.loader(stream(kind), 8), top1=metrics.top1)["samples"]


def test_every_sample_of_a_stream_is_seen_once(tmp_path):
    assert sum(run(train, 2, tmp_path / "out", str(tmp_path / "train"), "same")) == 2 * 96
    assert run(evaluate, 2, tmp_path / "out", str(tmp_path / "evaluate"), "same") == [96, 96]


@pytest.mark.parametrize("kind", ["split", "own randomness", "empty on rank 1"])
@pytest.mark.parametrize("how", [train, evaluate])
def test_a_stream_that_differs_between_ranks_is_refused_on_all(tmp_path, kind, how):
    for error, message in run_raising(how, 2, tmp_path / "out", str(tmp_path / "run"), kind):
        assert error == "DataError", message
        assert "rank 0" in message and "rank 1" in message
        assert "the whole stream" in message and "PADDLE_TRAINER_ID" in message and "numpy.random" in message


def test_a_stream_that_ends_a_few_samples_earlier_is_refused_on_all(tmp_path):
    for how in (train, evaluate):
        for error, message in run_raising(how, 2, tmp_path / "out", str(tmp_path / "run"), "three samples fewer"):
            assert error == "DataError" and "96 on rank 0" in message and "93 on rank 1" in message, message
            assert "the whole stream" in message


def test_a_stream_that_ends_batches_earlier_ends_the_job_with_a_reason(tmp_path):
    for error, message in run_raising(evaluate, 2, tmp_path / "out", str(tmp_path / "run"), "three batches fewer"):
        assert error == "DataError" and "96 on rank 0" in message and "48 on rank 1" in message, message
    ends = start(train, 2, tmp_path / "out", str(tmp_path / "run2"), "three batches fewer").wait(60)
    assert all(end.code not in (0, None) for end in ends)
    assert any("end of the stream" in end.output for end in ends), [end.output[-600:] for end in ends]
