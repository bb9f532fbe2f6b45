"""Bitwise resume: killed anywhere, as often as you like; on another number of ranks; with other workers."""

import json
import random
import time

import pytest

from tests.harness import DEVICE, run, run_raising, start


def train(directory, options):
    from tests import blocks

    return blocks.train(directory, **options)


def train_slowly(directory, options):
    """As `train`, with time enough in each step for a kill to come in the middle of it."""
    from tests import blocks

    return blocks.train(directory, pause=0.02, **options)


def steps_done(directory):
    """How far the newest checkpoint is; 0 without one."""
    states = sorted((directory / "checkpoints").glob("0*/state.json"))
    try:
        return json.loads(states[-1].read_text())["step"] if states else 0
    except (OSError, ValueError):
        return 0


def killed_again_and_again(tmp_path, ranks, kills, options, seed):
    """Kill a random rank with SIGKILL after a random time, restart; then let the last run end. Returns its result."""
    choose = random.Random(seed)
    directory, progress = tmp_path / "killed", []
    for kill in range(kills):
        now = {**options, "workers": kill % 3} if options["workers"] is None else options
        running = start(train_slowly, ranks, tmp_path / "out", str(directory), now)
        target = steps_done(directory) + choose.randint(1, 5)
        deadline = time.monotonic() + 60
        while steps_done(directory) < target and time.monotonic() < deadline:
            if all(process.poll() is not None for process in running.processes):
                break
            time.sleep(0.005)
        time.sleep(choose.uniform(0, 0.06))  # in the middle of a step, a save, anything
        running.kill(choose.randrange(ranks))
        running.kill()
        progress.append(steps_done(directory))
    print(f"seed {seed}: steps on disk after each kill: {progress}")
    assert progress[-1] > 0
    return run(
        train, ranks, tmp_path / "out", str(directory), {**options, "workers": options["workers"] or 0}
    ), progress


OPTIONS = {"epochs": 3, "length": 320, "save_every": 1}


@pytest.mark.parametrize(
    ("ranks", "kills", "workers", "save_every"),
    [
        (2, 10, 2, 1),
        pytest.param(1, 10, 1, 3, marks=pytest.mark.slow),
        pytest.param(2, 10, None, 2, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "alone", "another number of workers each time"],
)
def test_killed_at_random_steps_ends_with_the_same_bits(tmp_path, ranks, kills, workers, save_every):
    options = {**OPTIONS, "batch": 16 // ranks, "workers": workers, "save_every": save_every}
    whole = run(train, ranks, tmp_path / "out", str(tmp_path / "whole"), {**options, "workers": workers or 1})
    resumed, progress = killed_again_and_again(tmp_path, ranks, kills, options, seed=ranks * 1000 + kills)
    assert whole[0]["step"] == resumed[0]["step"] == 60
    assert progress[-1] < 60, "the last kill came too late to prove anything"
    assert {end["weights"] for end in resumed} == {end["weights"] for end in whole}
    assert len({end["weights"] for end in whole}) == 1


def test_the_number_of_workers_changes_nothing(tmp_path):
    ends = [
        run(
            train,
            2,
            tmp_path / "out",
            str(tmp_path / f"workers{workers}"),
            {**OPTIONS, "epochs": 1, "batch": 8, "workers": workers},
        )
        for workers in (0, 1, 3)
    ]
    assert len({end["weights"] for per_rank in ends for end in per_rank}) == 1


def test_saves_change_nothing(tmp_path):
    """Neither how often a checkpoint is written, nor that BatchNorm statistics are averaged for it."""
    ends = [
        run(train, 3, tmp_path / "out", str(tmp_path / f"every{every}"), {"epochs": 1, "batch": 8, "save_every": every})
        for every in (0, 1)
    ]
    assert ends[0] == ends[1]


def part_of_an_epoch(directory, batch, steps):
    """Train `steps` steps (or to the end) of one epoch, then save and stop; record every real index."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(directory, device=DEVICE, seed=5)
    net = blocks.mlp()
    wrapped, adam = job.prepare(net, paddle.optimizer.Adam(0.01, parameters=net.parameters()))
    data = job.loader(blocks.Points(1030), batch, shuffle=True, tail="pad")
    resumed = job.resume()
    epoch = job.epoch
    # Which samples these are: found by their content, not by asking the sampler.
    table = {blocks.Points()[index][0].tobytes(): index for index in range(1030)}
    indices = []
    for number, (points, labels) in enumerate(job.steps(data)):
        real = int(data.mask.sum())
        indices += [table[point.tobytes()] for point in points.numpy()[:real]]
        losses = F.cross_entropy(wrapped(points), labels, reduction="none").reshape([-1])
        job.backward((losses * data.weights).mean())
        if number + 1 == steps:
            break
    job.save()
    return {"indices": indices, "resumed": resumed, "epoch": epoch, "after": job.epoch}


def test_4_then_2_then_3_ranks_in_one_epoch_see_every_sample_once(tmp_path):
    seen = []
    for ranks, steps in ((4, 9), (2, 13), (3, 10**9)):
        ends = run(part_of_an_epoch, ranks, tmp_path / "out", str(tmp_path / "run"), 8, steps)
        assert all(end["epoch"] == 0 for end in ends)
        assert ends[0]["resumed"] == (ranks != 4)
        seen += [index for end in ends for index in end["indices"]]
        print(f"{ranks} ranks: {sum(len(end['indices']) for end in ends)} samples")
    assert len(seen) == 1030 and sorted(seen) == list(range(1030))
    assert ends[0]["after"] == 1


def with_other_data(directory, length, shuffle):
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(directory, device=DEVICE, seed=5, save_every=3)
    net = blocks.mlp()
    job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    job.resume()
    for number, (points, labels) in enumerate(job.steps(job.loader(blocks.Points(length), 8, shuffle=shuffle))):
        job.backward(F.cross_entropy(net(points), labels))
        if number == 4:
            break
    return job.step


def test_an_epoch_is_not_continued_with_other_data(tmp_path):
    assert run(with_other_data, 1, tmp_path / "out", str(tmp_path / "run"), 64, True) == [5]
    for length, shuffle in ((72, True), (64, False)):
        ((kind, message),) = run_raising(with_other_data, 1, tmp_path / "out", str(tmp_path / "run"), length, shuffle)
        assert kind == "CheckpointError" and "saved within an epoch over {'samples': 64, 'shuffle': True}" in message
    assert run(with_other_data, 1, tmp_path / "out", str(tmp_path / "run"), 64, True) == [8]


def left_in_the_middle_of_a_step(directory):
    import json
    from pathlib import Path

    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(directory, device=DEVICE, seed=5, accumulate=2)
    net = blocks.mlp()
    job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    for number, (points, labels) in enumerate(job.steps(job.loader(blocks.Points(64), 8, shuffle=True))):
        job.backward(F.cross_entropy(net(points), labels))
        if number == 2:
            break
    job.save()
    saved = json.loads(Path(directory, "checkpoints/latest/state.json").read_text())
    return [saved["epoch"], saved["position"], saved["step"]]


def test_batches_that_made_no_step_are_not_lost(tmp_path):
    assert run(left_in_the_middle_of_a_step, 1, tmp_path / "out", str(tmp_path / "run")) == [[0, 16, 1]]


def explicit(directory, options):
    from tests import blocks

    first = blocks.train(directory, **{**options, "epochs": 1})
    return [first, blocks.train(directory, resume=f"{directory}/checkpoints/000001-step-5", **{**options, "epochs": 1})]


def test_an_explicit_checkpoint_goes_back_and_becomes_the_newest(tmp_path):
    options = {"batch": 16, "length": 160, "save_every": 5}
    ((first, again),) = run(explicit, 1, tmp_path / "out", str(tmp_path / "run"), {**options, "keep": 9})
    assert first == again
    assert (tmp_path / "run/checkpoints/latest").resolve().name == "000005-step-10"


def with_paddles_numbers(directory, workers, stop):
    """Augmentation and dropout draw from Paddle's generator, and so does the evaluation in the middle of the epoch."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet import metrics
    from ppfleet.checkpoint import tensors
    from tests import blocks

    class Noisy(blocks.Points):
        def __getitem__(self, index):
            point, label = super().__getitem__(index)
            return point + paddle.uniform([16]).numpy(), label

    job = ppfleet.Job(directory, device=DEVICE, seed=7)
    net = blocks.mlp(dropout=0.3)
    net, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    train = job.loader(Noisy(64), 16 // job.world.size, shuffle=True, workers=workers)
    val = job.loader(Noisy(24), 8, workers=workers)
    job.resume()
    for _ in job.epochs(2):
        for points, labels in job.steps(train):
            job.backward(F.cross_entropy(net(points), labels))
            if job.step % 3 == 0:
                job.evaluate(net, val, top1=metrics.top1)
            if job.step == stop:
                job.save()
                return "stopped"
    return tensors.fingerprint(job._net)


def test_resume_with_augmentation_by_paddle(tmp_path):
    whole = run(with_paddles_numbers, 1, tmp_path / "out", str(tmp_path / "whole"), 0, 0)
    assert run(with_paddles_numbers, 1, tmp_path / "out", str(tmp_path / "parts"), 0, 5) == ["stopped"]
    assert run(with_paddles_numbers, 1, tmp_path / "out", str(tmp_path / "parts"), 2, 0) == whole
