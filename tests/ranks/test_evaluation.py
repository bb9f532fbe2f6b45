"""Exact evaluation: every sample once, the same figures on any number of ranks."""

from tests.harness import run


def evaluate(path, length, workers):
    import paddle

    import ppfleet
    from ppfleet import metrics
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=3)
    net = blocks.with_batch_norm()
    net, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    val = job.loader(blocks.Points(length), 64, workers=workers)

    def two_halves(output, label):  # an own metric with its own counts: only even labels weigh
        weight = (label % 2 == 0).astype("float32")
        return metrics.top1(output, label) * weight, weight

    def ones(output, label):
        return paddle.ones([label.shape[0]], dtype="bfloat16")

    net.train()
    inside = net._layers if job.world.size > 1 else net
    inside[1].eval()  # frozen on purpose
    scores = job.evaluate(
        net, val, top1=metrics.top1, top5=metrics.top5, loss=metrics.cross_entropy, even_top1=two_halves, ones=ones
    )
    assert [layer.training for layer in inside.sublayers()] == [True, False, True, True, True]
    return scores


def test_1030_samples_on_1_2_3_4_ranks_give_identical_figures(tmp_path):
    figures = [run(evaluate, ranks, tmp_path / "out", str(tmp_path / str(ranks)), 1030, 0) for ranks in (1, 2, 3, 4)]
    print(figures[0][0])
    assert figures[0][0]["samples"] == 1030
    assert figures[0][0]["ones"] == 1.0
    assert 0 < figures[0][0]["top1"] < figures[0][0]["top5"] < 1
    for per_rank in figures:
        for scores in per_rank:
            assert scores == figures[0][0]


def test_fewer_samples_than_ranks_and_with_workers(tmp_path):
    one, three = (run(evaluate, ranks, tmp_path / "out", str(tmp_path / str(ranks)), 2, 1) for ranks in (1, 3))
    assert one[0]["samples"] == 2
    assert three == [one[0]] * 3


def statistics(path):
    """A forward pass outside of a step gives each rank other BatchNorm statistics; evaluation must not use rank 0's."""
    import paddle

    import ppfleet
    from ppfleet import metrics
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=3)
    net = blocks.with_batch_norm()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    wrapped(paddle.full([8, 16], float(job.world.rank)))
    before = net[1]._mean.numpy().tolist()
    scores = job.evaluate(wrapped, job.loader(blocks.Points(64), 8), loss=metrics.cross_entropy)
    return {"before": before, "after": net[1]._mean.numpy().tolist(), "loss": scores["loss"]}


def test_batch_norm_statistics_are_averaged_before_evaluation(tmp_path):
    import numpy as np

    ranks = run(statistics, 2, tmp_path / "out", str(tmp_path / "run"))
    assert ranks[0]["before"] != ranks[1]["before"]
    assert ranks[0]["after"] == ranks[1]["after"]
    assert np.allclose(ranks[0]["after"], (np.array(ranks[0]["before"]) + ranks[1]["before"]) / 2)
    assert ranks[0]["loss"] == ranks[1]["loss"]
