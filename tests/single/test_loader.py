"""Loading in one process and with workers."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.harness import DEVICE, run, run_raising, start, wait_for


def batches(workers, epoch):
    from ppfleet.data.create import make_loader
    from tests import blocks

    plan = {"batch_size": 8, "rank": 0, "size": 1, "seed": 3, "shuffle": True, "tail": "drop"}
    loader = make_loader(blocks.Points(64, augment=True), plan, workers)
    loader.epoch = epoch
    return [points.numpy().tolist() for points, _ in loader]


@pytest.mark.essential
def test_augmentation_depends_on_seed_epoch_and_index_alone(tmp_path):
    (none,), (two,), (other,) = (run(batches, 1, tmp_path, *arguments) for arguments in ((0, 0), (2, 0), (0, 1)))
    assert none == two
    assert none != other
    flat = [tuple(point) for batch in none for point in batch]
    assert len(set(flat)) == 64


def draws(epoch, seed, stream):
    """What each sample draws from both generators."""
    import random

    import paddle

    from ppfleet.data.create import make_loader

    def draw(index):
        return [index, random.random(), float(np.random.rand())]

    class Draws(paddle.io.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return np.array(draw(index))

    class Stream(paddle.io.IterableDataset):
        def __iter__(self):
            for index in range(32):
                yield np.array(draw(index))

    plan = {"batch_size": 8, "rank": 0, "size": 1, "seed": seed, "shuffle": False, "tail": "pad"}
    loader = make_loader(Stream() if stream else Draws(), plan)
    loader.epoch = epoch
    return [row for batch in loader for row in batch.numpy().tolist()]


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_has_randomness_of_its_own(tmp_path, stream):
    tables = [run(draws, 1, tmp_path, epoch, seed, stream)[0] for epoch, seed in ((0, 3), (1, 3), (0, 4), (0, 3))]
    assert tables[0] == tables[3]
    for column in (1, 2):
        values = [row[column] for table in tables[:3] for row in table]
        assert len(set(values)) == 96  # neither index, nor epoch, nor seed is left out


def weights(rank):
    from ppfleet.data.create import make_loader
    from tests import blocks

    plan = {"batch_size": 6, "rank": rank, "size": 2, "seed": 3, "shuffle": False, "tail": "pad"}
    loader = make_loader(blocks.Points(29), plan)
    return [[loader.weights.tolist() for _ in loader] for _ in range(2)]


def test_weights_make_a_mean_over_the_real_samples(tmp_path):
    scale = float(np.float32(12 / 5))
    for rank, last in enumerate(([scale] * 5 + [0.0], [0.0] * 6)):
        assert run(weights, 1, tmp_path, rank) == [[[[1.0] * 6, [1.0] * 6, last]] * 2]


def streams(rank, size, tail, position):
    import paddle

    from ppfleet.data.create import make_loader

    class Stream(paddle.io.IterableDataset):
        def __iter__(self):
            for number in np.random.permutation(29):  # its own order, drawn when it is opened
                yield np.float32(number), np.float32(np.random.uniform())

    loader = make_loader(
        Stream(), {"batch_size": 4, "rank": rank, "size": size, "seed": 3, "shuffle": False, "tail": tail}
    )
    loader.start = position
    np.random.seed(rank)  # what a training step leaves behind differs from rank to rank
    out = []
    for numbers, noise in loader:
        real = int(loader.mask.sum())
        out.append([numbers.numpy()[:real].tolist(), noise.numpy()[:real].tolist()])
    return out


def test_a_stream_is_cut_into_equal_steps_without_loss(tmp_path):
    one = run(streams, 1, tmp_path, 0, 1, "pad", 0)[0]
    parts = [run(streams, 1, tmp_path, rank, 3, "pad", 0)[0] for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    seen = dict(pair for part in parts for numbers, noise in part for pair in zip(numbers, noise))
    assert seen == dict(pair for numbers, noise in one for pair in zip(numbers, noise))
    assert sorted(seen) == list(range(29))
    assert [len(part) for part in (run(streams, 1, tmp_path, rank, 3, "drop", 0)[0] for rank in range(3))] == [2, 2, 2]
    resumed = run(streams, 1, tmp_path, 0, 1, "pad", 24)[0]
    assert resumed == one[6:]


def left_early():
    from ppfleet.data.create import make_loader
    from tests import blocks

    plan = {"batch_size": 8, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    loader = make_loader(blocks.Points(32), plan)
    for _ in loader:
        break
    first = len(list(loader))
    loader.start = 16
    return [first, len(list(loader)), len(list(loader))]


def test_a_pass_begins_at_the_beginning_after_one_that_was_left(tmp_path):
    assert run(left_early, 1, tmp_path) == [[4, 2, 4]]


def lazy(path, workers):
    from pathlib import Path

    import paddle

    from ppfleet.data.create import make_loader

    class Lazy(paddle.io.Dataset):
        """Opens its file at the first use, as LMDB and HDF5 readers do."""

        opened = None

        def __len__(self):
            return 64

        def __getitem__(self, index):
            if self.opened is None:
                self.opened = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115
            self.opened.seek(index)
            return np.frombuffer(self.opened.read(1), dtype=np.uint8).astype("int64")[0]

    Path(path).write_bytes(bytes(range(64)))
    dataset = Lazy()
    plan = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    seen = [int(value) for batch in make_loader(dataset, plan, workers) for value in batch]
    return [seen, dataset.opened is None]


def test_a_file_opened_at_first_use_is_opened_in_the_workers(tmp_path):
    assert run(lazy, 1, tmp_path / "out", str(tmp_path / "data"), 2) == [[list(range(64)), True]]


def refusals():
    import paddle

    from ppfleet.data.create import make_loader
    from ppfleet.errors import DataError
    from tests import blocks

    class Stream(paddle.io.IterableDataset):
        def __iter__(self):
            yield 1

    plan = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    said = []
    for dataset, changes, workers in (
        (Stream(), {"shuffle": True}, 0),
        (Stream(), {}, 2),
        (7, {}, 0),
        (blocks.Points(8), {}, -1),
        (blocks.Points(8), {"batch_size": 0}, 0),
    ):
        try:
            make_loader(dataset, {**plan, **changes}, workers)
            said.append("nothing")
        except DataError as failure:
            said.append(str(failure))
    return said


@pytest.mark.essential
def test_what_cannot_work_is_refused_with_advice(tmp_path):
    (said,) = run(refusals, 1, tmp_path)
    for message, part in zip(
        said,
        (
            "map-style Dataset",
            "map-style Dataset",
            "int is not a data set",
            "workers must be >= 0, got -1",
            "batch_size must be >= 1, got 0",
        ),
    ):
        assert part in message


def shared_memory(free_batches, workers, local_size):
    """A host whose /dev/shm has room for that many batches: what is said, and what Paddle's loader is told."""
    import shutil
    from collections import namedtuple

    from ppfleet import log
    from ppfleet.data import create
    from ppfleet.data import workers as module
    from tests import blocks

    said, told = [], []
    log.say = said.append
    batch = 8 * (3 * 32 * 32 * 4 + 8)
    usage = namedtuple("usage", "free")
    real, real_loader = shutil.disk_usage, module.DataLoader
    module.shutil.disk_usage = lambda path: usage(int(free_batches * batch)) if path == "/dev/shm" else real(path)

    def recording(*arguments, **options):
        told.append(options["use_shared_memory"])
        return real_loader(*arguments, **options)

    module.DataLoader = recording
    plan = {"batch_size": 8, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    small = create.make_loader(blocks.Pictures(32), plan, workers=workers, local_size=local_size)
    count = sum(len(labels) for _, labels in small) + sum(len(labels) for _, labels in small)
    return [count, len(said), told, " ".join(said)]


def test_too_little_shared_memory_is_said_once_and_avoided(tmp_path):
    ((count, times, told, message),) = run(shared_memory, 1, tmp_path, 5, 2, 1)
    assert [count, times, told] == [64, 1, [False, False]]
    assert "/dev/shm has 0 MB free, 2 loader workers need" in message and "pipes" in message


@pytest.mark.parametrize(("free", "workers", "ranks", "used"), [(6, 2, 1, True), (6, 2, 2, False), (4, 1, 1, True)])
def test_shared_memory_is_counted_for_all_workers_of_all_ranks(tmp_path, free, workers, ranks, used):
    ((_, times, told, _),) = run(shared_memory, 1, tmp_path, free, workers, ranks)
    assert told == [used, used] and times == (not used)


def orphans(path):
    import os
    import signal
    from pathlib import Path

    from ppfleet.data.create import make_loader
    from tests import blocks

    plan = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    for _ in make_loader(blocks.Points(4096), plan, workers=2):
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        workers = [c for c in children if "tests.harness" in Path(f"/proc/{c}/cmdline").read_text()]
        Path(path).write_text(" ".join(workers))
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_die_with_a_killed_training_process(tmp_path):
    (end,) = start(orphans, 1, tmp_path / "out", str(tmp_path / "workers")).wait(60)
    assert end.code == -9
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 10, "both workers end")


def passes_with_workers(left_early):
    """Three passes, each to its end or left in the middle; no children of this process after each."""
    import psutil

    from ppfleet.data.create import make_loader
    from tests import blocks

    plan = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    loader = make_loader(blocks.Points(64), plan, workers=2)
    for _ in range(3):
        for number, _ in enumerate(loader):
            if left_early and number == 3:
                break
        wait_for(lambda: not psutil.Process().children(), 5, "the workers of a pass end", psutil.Process().children)


@pytest.mark.parametrize("left_early", [False, True])
def test_workers_end_with_their_pass(tmp_path, left_early):
    run(passes_with_workers, 1, tmp_path, left_early)


def killed_worker(in_step):
    """A worker is killed while the loop waits for a batch, or while it computes: Python code runs then, and a signal
    handler may raise in the midst of it."""
    import signal

    import psutil

    from ppfleet.data.create import make_loader
    from tests import blocks

    class Deadly(blocks.Points):
        def __getitem__(self, index):
            if index == 13 and not in_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    plan = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    for number, _ in enumerate(make_loader(Deadly(64), plan, workers=2)):
        if in_step and number == 3:
            worker = psutil.Process().children()[0]
            worker.kill()
            try:
                deadline = time.monotonic() + 1
                while time.monotonic() < deadline:
                    pass  # the handler of SIGCHLD runs here
            except SystemError:
                return "raised in the midst of a step"
    return "nothing"


@pytest.mark.parametrize("in_step", [False, True])
def test_a_killed_worker_is_a_sentence(tmp_path, in_step):
    ((kind, message),) = run_raising(killed_worker, 1, tmp_path, in_step)
    assert kind == "DataError" and message.startswith("a loader worker died") and "\n" not in message


def failing_worker():
    from ppfleet.data.create import make_loader
    from tests import blocks

    class Broken(blocks.Points):
        def __getitem__(self, index):
            if index == 13:
                raise ValueError("picture 13 is broken")
            return super().__getitem__(index)

    plan = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    return [len(labels) for _, labels in make_loader(Broken(32), plan, workers=2)]


def test_an_exception_in_a_worker_reaches_the_loop(tmp_path):
    (end,) = start(failing_worker, 1, tmp_path).wait(60)
    kind, message = end.error
    assert kind == "DataError" and message.startswith("the data set failed") and "picture 13 is broken" in message


@pytest.mark.parametrize("workers", [0, 2])
def test_dictionaries_and_strings_pass_through(tmp_path, workers):
    (seen,) = run(dictionaries, 1, tmp_path, workers)
    assert seen == {"x": [[0.0, 1.0, 2.0, 3.0]], "tensor": True, "names": ["a0", "a1", "a2", "a3"]}


def dictionaries(workers):
    import paddle

    from ppfleet.data.create import make_loader

    class Named(paddle.io.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": np.float32(index), "name": f"a{index}"}

    plan = {"batch_size": 4, "rank": 0, "size": 1, "seed": 3, "shuffle": False, "tail": "pad"}
    (batch,) = list(make_loader(Named(), plan, workers))
    return {
        "x": [batch["x"].numpy().tolist()],
        "tensor": isinstance(batch["x"], paddle.Tensor),
        "names": list(batch["name"]),
    }


def paddle_draws(workers, rank, size, start, stream):
    """Index, and what each sample draws from Paddle's generator: in the data set and, as a tensor, in a transform."""
    import paddle

    from ppfleet.data.create import make_loader

    def draw(index):
        noise = paddle.uniform([2], min=0, max=1).numpy().tolist()
        return np.array([index, *noise, paddle.randint(0, 1 << 30, [1]).item()], dtype="float64")

    class Draws(paddle.io.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return draw(index)

    class Stream(paddle.io.IterableDataset):
        def __iter__(self):
            for index in range(32):
                yield draw(index)

    plan = {"batch_size": 8 // size, "rank": rank, "size": size, "seed": 3, "shuffle": not stream, "tail": "drop"}
    loader = make_loader(Stream() if stream else Draws(), plan, workers)
    loader.epoch, loader.start = 1, start
    paddle.seed(100 + rank)  # what the training loop has left behind
    rows, undisturbed = [], []
    for batch in loader:
        rows += batch.numpy().tolist()
        undisturbed += paddle.rand([1]).tolist()  # dropout of the training step
    paddle.seed(100 + rank)
    return {"rows": sorted(rows), "undisturbed": undisturbed == [paddle.rand([1]).item() for _ in undisturbed]}


@pytest.mark.parametrize("stream", [False, True])
def test_draws_from_paddles_generator_belong_to_the_sample(tmp_path, stream):
    (whole,) = run(paddle_draws, 1, tmp_path, 0, 0, 1, 0, stream)
    assert len({tuple(row[1:]) for row in whole["rows"]}) == 32
    (again,) = run(paddle_draws, 1, tmp_path, 0 if stream else 2, 0, 1, 0, stream)
    halves = [run(paddle_draws, 1, tmp_path, 0, rank, 2, 0, stream)[0] for rank in range(2)]
    (resumed,) = run(paddle_draws, 1, tmp_path, 0, 0, 1, 16, stream)
    assert again["rows"] == whole["rows"]
    assert sorted(row for half in halves for row in half["rows"]) == whole["rows"]
    assert len(resumed["rows"]) == 16 and all(row in whole["rows"] for row in resumed["rows"])
    assert all(part["undisturbed"] for part in (whole, again, *halves, resumed))


def passes_by_hand(path, resumed):
    """The order of each pass that a script makes by itself: outside of job.epochs, and twice in each epoch."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = blocks.mlp()
    net, sgd = job.prepare(net, paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    other = job.loader(Numbers(12), 4, shuffle=True)
    train = job.loader(blocks.Points(16), 8, shuffle=True)

    def order():
        return [int(number) for batch in other for number in batch]

    orders = {} if resumed else {"before": [order() for _ in range(3)]}
    job.resume()
    order()  # a look at the data, which must not change what the epochs see
    for epoch in job.epochs(4):
        orders[f"epoch {epoch}"] = [order()]
        for points, labels in job.steps(train):
            job.backward(F.cross_entropy(net(points), labels))
        orders[f"epoch {epoch}"].append(order())
        if not resumed:
            job.save()
            if epoch == 1:
                break
    return orders


class Numbers:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.int64(index)


def test_passes_by_hand_are_shuffled_anew_and_the_same_after_a_resume(tmp_path):
    (first,) = run(passes_by_hand, 1, tmp_path / "out", str(tmp_path / "run"), False)
    (rest,) = run(passes_by_hand, 1, tmp_path / "out", str(tmp_path / "run"), True)
    (whole,) = run(passes_by_hand, 1, tmp_path / "out", str(tmp_path / "other"), True)  # from the start to the end
    orders = [tuple(order) for orders in (first["before"], *whole.values()) for order in orders]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(orders[3:])) == 8  # two in each of four epochs
    assert len(set(orders[:3])) == 3
    assert rest == {name: whole[name] for name in ("epoch 2", "epoch 3")}
    assert first["epoch 1"] == whole["epoch 1"]


def orders_of_steps(path):
    """The orders of job.steps and job.evaluate, with passes by hand between them."""
    import paddle

    import ppfleet
    from ppfleet.data.sampler import Plan

    job = ppfleet.Job(path, device=DEVICE, seed=3)
    net = paddle.nn.Linear(1, 1)
    net, sgd = job.prepare(net, paddle.optimizer.SGD(0.0, parameters=net.parameters()))
    train, seen = job.loader(Numbers(12), 4, shuffle=True), {"steps": [], "evaluate": [], "by hand": []}

    def ids(batch):
        (numbers,) = batch if isinstance(batch, list) else [batch]
        return numbers.numpy().tolist()

    def note(output, numbers):
        seen["evaluate"] += numbers.numpy().tolist()
        return numbers

    both = job.loader([(np.float32([n]), np.int64(n)) for n in range(12)], 4, shuffle=True)
    for _ in job.epochs(2):
        seen["by hand"] += [n for batch in train for n in ids(batch)]
        for batch in job.steps(train):
            seen["steps"] += ids(batch)
            job.backward(net(paddle.ones([1, 1])).mean())
        list(both)
        job.evaluate(net, both, value=note)
        seen["by hand"] += [n for batch in train for n in ids(batch)]
    plan = Plan(length=12, batch_size=4, seed=3, shuffle=True)
    return seen, [plan.order(epoch).tolist() for epoch in range(2)]


def test_orders_of_steps_and_evaluate_stay_those_of_old_checkpoints(tmp_path):
    ((seen, (zero, one)),) = run(orders_of_steps, 1, tmp_path / "out", str(tmp_path / "run"))
    assert seen["steps"] == zero + one
    assert seen["evaluate"] == zero + zero
    assert seen["by hand"][:12] == zero and seen["by hand"][24:36] == one
