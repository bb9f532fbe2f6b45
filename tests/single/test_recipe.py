"""The recipe: learning rate, weight decay, loss, and the pictures of a run."""

import pytest

from tests.harness import run


def schedules():
    from models.mobilenet_v3_small.recipe import Schedule

    def rates(*arguments):
        schedule, found = Schedule(*arguments), []
        for _ in range(arguments[2] * arguments[3] + 3):
            found.append(schedule())
            schedule.step()
        return found

    class Half:  # a loader of 20 steps an epoch, in the middle of its third epoch
        class plan:  # noqa: N801
            global_batch = 8

        position = 80 + 4

        def __len__(self):
            return 20

    followed = Schedule(0.1, 512, 10, 20)
    followed.follow(2, Half())
    return {
        "followed": followed(),
        "by_count": rates(0.1, 512, 10, 20)[49:51],
        "rates": rates(0.1, 512, 10, 10),
        "small": rates(0.1, 256, 1, 1),
        "rule": Schedule(0.1, 512, 10, 10).rule,
        "long": Schedule(0.1, 256, 100, 10).rule,
    }


def test_learning_rate_rule(tmp_path):
    (value,) = run(schedules, 1, tmp_path)
    rates = value["rates"]
    assert value["rule"] == (
        "0.1 at a global batch of 256, so 0.2 at 512; linear warm-up over 10 batches, cosine to 0 over 90"
    )
    assert "warm-up over 50 batches" in value["long"]  # five epochs at most
    assert rates[10] == max(rates) == 0.2 and rates[0] == pytest.approx(0.2 / 11)
    assert all(a < b for a, b in zip(rates[:10], rates[1:11])) and all(a > b for a, b in zip(rates[10:99], rates[11:]))
    assert rates[55] == pytest.approx(0.1) and rates[100:] == [pytest.approx(0, abs=1e-12)] * 3
    assert value["small"][0] == 0.1
    # The rate follows from the place in training, also between two steps, where a change of batch size may put it.
    before, after = value["by_count"]
    assert after < value["followed"] < before


def decays():
    """One step without gradients: only what decays changes."""
    import paddle

    from models.mobilenet_v3_small import recipe
    from models.mobilenet_v3_small.net import MobileNetV3Small

    net = MobileNetV3Small(4)
    for parameter in net.parameters():
        parameter.set_value(paddle.ones_like(parameter))
    optimizer = recipe.optimizer(net, 1.0)
    (sum(p.sum() for p in net.parameters() if not p.stop_gradient) * 0.0).backward()
    optimizer.step()
    kept = {name: bool((p == 1).all()) for name, p in net.named_parameters() if not p.stop_gradient}
    return {
        "kept": [n for n, same in kept.items() if same],
        "decayed": [n for n, same in kept.items() if not same],
        "value": float(net.classifier[3].weight[0, 0]),
        "dropout": net.classifier[2].p,
        "momentum": net.conv[1]._momentum,
    }


def test_biases_and_batch_norm_do_not_decay(tmp_path):
    (value,) = run(decays, 1, tmp_path)
    # One step of Nesterov's momentum 0.9 along a decay of 2e-5.
    assert 1 - value["value"] == pytest.approx(1.9 * 2e-5, rel=0.01)
    assert (value["dropout"], value["momentum"]) == (0.2, 0.9)
    assert "conv.0.weight" in value["decayed"] and "classifier.3.weight" in value["decayed"]
    assert "conv.1.weight" in value["kept"] and "classifier.3.bias" in value["kept"]
    assert all(
        name.endswith((".0.weight", "fc1.weight", "fc2.weight", "classifier.3.weight")) for name in value["decayed"]
    )


def losses():
    import numpy as np
    import paddle
    import paddle.nn.functional as F

    from models.mobilenet_v3_small import recipe

    scores = paddle.to_tensor(np.random.RandomState(0).standard_normal((6, 4)).astype("float32"))
    labels = paddle.to_tensor([0, 1, 2, 3, 0, 1])
    target = F.one_hot(labels, 4) * 0.9 + 0.1 / 4
    by_hand = -(target * F.log_softmax(scores)).sum(-1).mean()
    plain = recipe.loss(lambda x: x, scores, labels)
    np.random.seed(3)
    share = np.random.beta(0.2, 0.2)
    mixed_target = share * target + (1 - share) * target.flip(0)
    mixed = -(mixed_target * F.log_softmax(share * scores + (1 - share) * scores.flip(0))).sum(-1).mean()
    np.random.seed(3)
    return [float(x) for x in (plain, by_hand, recipe.loss(lambda x: x, scores, labels, 0.2), mixed)]


def test_loss_and_mixup_are_what_the_papers_say(tmp_path):
    ((plain, by_hand, mixup, mixed),) = run(losses, 1, tmp_path)
    assert plain == pytest.approx(by_hand, rel=1e-5) and mixup == pytest.approx(mixed, rel=1e-5)
    assert abs(plain - mixup) > 1e-3


TRUTH = [0, 1, 2, 2, 1, 0, 2, 0, 1]
GUESS = [0, 1, 2, 0, 1, 1, 2, 2, 1]
SURE = [1, 2, 3, 5, 3, 4, 3, 5, 6]  # samples 3 and 7 are equally wrong


def confused(directory):
    import json
    from pathlib import Path

    import numpy as np
    import paddle

    import ppfleet
    from models.mobilenet_v3_small.pictures import confusion, inputs
    from ppfleet.evaluation.confusion import Confusion, Seen

    class Answers(paddle.io.Dataset):
        def __len__(self):
            return len(TRUTH)

        def __getitem__(self, index):
            return SURE[index] * np.eye(3, dtype="float32")[GUESS[index]], np.int64(TRUTH[index])

    job = ppfleet.Job(directory, device="cpu")
    found = []
    for shuffle in (False, True):
        loader = job.loader(Answers(), 2, shuffle=shuffle, tail="pad")
        metric = Confusion(loader, ["ant", "bee", "cow"])
        scores = job.evaluate(paddle.nn.Identity(), loader, top1=metric)
        seen = metric.gather(job.comm)
        seen.write(job, "the test", lambda sample: (f"sample {sample}", b"PNG" * sample))
        found.append([scores["top1"], json.loads(Path(directory, "evaluation.json").read_text())])
    many = confusion(Seen([str(n) for n in range(1000)], {(n, n): 1 for n in range(1000)}))
    how = {"mean": [0.5] * 3, "std": [0.25] * 3}
    strip = inputs(paddle.to_tensor([[[[0.0]], [[2.0]], [[-2.0]]]]), how)
    return [found, list(confusion(seen).shape), list(many.shape), strip.tolist()]


def test_confusion_is_exact_on_any_number_of_ranks(tmp_path):
    for ranks in (1, 2, 3):
        for found, shown, many, strip in run(confused, ranks, tmp_path / "out", str(tmp_path / f"run{ranks}")):
            for top1, told in found:
                pairs = [[0, 0, 1], [0, 1, 1], [0, 2, 1], [1, 1, 3], [2, 0, 1], [2, 2, 2]]
                assert top1 == 6 / 9 and told["pairs"] == pairs
                assert [tuple(each.values()) for each in told["mistakes"]] == [
                    (3, 2, 0, 0.9867, "sample 3", "UE5HUE5HUE5H"),
                    (7, 0, 2, 0.9867, "sample 7", "UE5H" * 7),
                    (5, 0, 1, 0.9647, "sample 5", "UE5H" * 5),
                ]
            assert shown[2] == many[2] == 3 and min(shown[:2]) > 100 and many == [1000, 1000, 3]
            assert strip == [[[128, 255, 0]]]
