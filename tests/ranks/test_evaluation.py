"""Exact evaluation: every sample once, the same figures on any number of ranks."""

from tests.harness import DEVICE, run


def evaluate(path, length, workers):
    import paddle

    import ppfleet
    from ppfleet import metrics
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3)
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

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = blocks.with_batch_norm()
    wrapped, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()), sync_bn=False)
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


def counts(path):
    """What evaluation gives where the number of values is not the number of samples, or says."""
    import numpy as np
    import paddle

    import ppfleet
    from ppfleet import metrics
    from ppfleet.errors import FleetError
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = blocks.mlp()
    net, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))

    def stack(samples):
        return [np.stack([np.asarray(part) for part in parts]) for parts in zip(*samples)]

    def without_bad(samples):  # one class has "broken" pictures
        return stack([sample for sample in samples if sample[1] != 4])

    def one_left(samples):
        return stack(samples[:1])

    def larger(samples):
        return stack([*samples, *samples])

    def ones(output, label):
        return paddle.ones([label.shape[0]])

    def of_batch(output, label):
        return ones(output, label).mean().reshape([1])

    def listed(output, label):
        return [1.0 if n % 2 else 0 for n in range(label.shape[0])]

    def short_weights(output, label):
        return ones(output, label), paddle.ones([2])

    def nan_weights(output, label):
        return ones(output, label), ones(output, label) * float("nan")

    def three(output, label):
        return ones(output, label), ones(output, label), ones(output, label)

    class OneRow(paddle.nn.Layer):  # pools over the batch by mistake
        def forward(self, points):
            return net(points).mean(0, keepdim=True)

    def right(output, label):
        return (output.argmax(-1) == label).astype("float32")

    one_row, found = OneRow(), {}
    for name, model, collate, metric in (
        ("mean of shape [1]", net, None, of_batch),
        ("dropped", net, without_bad, metrics.top1),
        ("one left", net, one_left, ones),
        ("larger", net, larger, ones),
        ("list", net, None, listed),
        ("short weights", net, None, short_weights),
        ("nan weights", net, None, nan_weights),
        ("three", net, None, three),
        ("own name", net, None, None),
        ("one row", one_row, None, right),
        ("one row, top1", one_row, None, metrics.top1),
    ):
        loader = job.loader(blocks.Points(101), 8, collate=collate)
        try:
            found[name] = job.evaluate(model, loader, **({"samples": ones} if metric is None else {"value": metric}))
        except FleetError as failure:
            found[name] = [type(failure).__name__, str(failure)]
    return found


def test_the_number_of_values_must_be_the_number_of_samples(tmp_path):
    for size in (1, 2):
        for rank, found in enumerate(run(counts, size, tmp_path / "out", str(tmp_path / str(size)))):
            print(found)
            assert found["list"]["samples"] == 101 and abs(found["list"]["value"] - 0.5) < 0.02
            for name, parts in {
                "mean of shape [1]": ("'value'", "1 value ", "8 samples", "reduction='none'"),
                "dropped": ("collate", "got 8 samples", "a batch of 7", "weight of 0"),
                "one left": ("collate", "got 8 samples", "a batch of 1"),
                "larger": ("collate", "got 8 samples", "a batch of 16"),
                "short weights": ("'value'", "2 weights", "8 samples"),
                "nan weights": ("'value'", "finite"),
                "three": ("'value'", "(values, weights)"),
                "own name": ("'samples'", "another name"),
                "one row": ("shape [1, 10]", "8 samples"),
                "one row, top1": ("shape [1, 10]", "8 samples"),
            }.items():
                kind, message = found[name]
                assert kind == "DataError", (name, found[name])
                assert all(part in message for part in parts), (name, message)
                if name in ("mean of shape [1]", "larger"):
                    assert f"rank {rank}" in message
