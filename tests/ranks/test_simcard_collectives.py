"""Collectives between simulated cards, one a rank: through Paddle's own ProcessGroupCustom and DataParallel."""

import contextlib
from pathlib import Path

import pytest

from tests.harness import on_cards, run, start, wait_for
from tests.simcard import enter_rank, environment, read_trace
from tests.simcard.build import _paddle

pytestmark = on_cards

PADDLE26 = _paddle()[1].startswith("2.")


def begin():
    rank = enter_rank()
    import paddle
    import paddle.distributed as dist

    paddle.set_device(f"sim:{rank}")
    dist.init_parallel_env()
    return rank, dist.get_world_size(), paddle, dist


def collectives(dtype):
    """What each collective left on this rank, as float32."""
    rank, size, paddle, dist = begin()

    def tensor(*values):
        return paddle.to_tensor(list(values), dtype="float32").astype(dtype)

    def values(tensor):
        return tensor.astype("float32").tolist()

    big = paddle.full([300_000], rank + 1, dtype="float32").astype(dtype)  # does not fit into one slot
    dist.all_reduce(big)
    seen = {"big": values(paddle.unique(big.astype("float32")))}
    for name in ("SUM", "MAX", "MIN", "PROD"):
        x = tensor(rank + 1, 2)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        seen[name] = values(x)
    x = tensor(rank + 1)
    dist.broadcast(x, src=size - 1)
    seen["broadcast"] = values(x)
    x = tensor(rank + 1)
    dist.reduce(x, dst=1)
    seen["reduce"] = values(x) if rank == 1 else None
    parts = []
    dist.all_gather(parts, tensor(rank, rank + 0.5 if "float" in dtype else rank))
    seen["all_gather"] = [values(part) for part in parts]
    x = tensor(0)
    dist.reduce_scatter(x, [tensor(rank + other) for other in range(size)])
    seen["reduce_scatter"] = values(x)
    x = tensor(0)
    dist.scatter(x, [tensor(10 + other) for other in range(size)] if rank == 0 else None, src=0)
    seen["scatter"] = values(x)
    got = [tensor(0) for _ in range(size)]
    parts = [tensor(10 * rank + other) for other in range(size)]
    dist.alltoall(*((parts, got) if PADDLE26 else (got, parts)))  # the order of the arguments has changed
    seen["alltoall"] = [values(one) for one in got]
    if rank == 0:
        dist.send(tensor(5, 6), dst=size - 1)
    if rank == size - 1:
        x = tensor(0, 0)
        dist.recv(x, src=0)
        seen["recv"] = values(x)
    dist.barrier()
    return seen


CASES = [(2, "float32"), (2, "float16"), (2, "bfloat16"), (3, "float32"), (3, "int64")]


@pytest.mark.parametrize("size, dtype", CASES[:2] + CASES[3:] if PADDLE26 else CASES)
def test_collectives(tmp_path, size, dtype):
    before = {path.name for path in Path("/dev/shm").glob("simcard-*")}
    ranks = run(collectives, size, tmp_path, dtype, env=environment(size))
    total, product = size * (size + 1) / 2, 2 if size == 2 else 6
    half = 0.5 if "float" in dtype else 0
    for rank, seen in enumerate(ranks):
        assert seen["big"] == [total]
        assert seen["SUM"] == [total, 2 * size] and seen["PROD"] == [product, 2**size]
        assert seen["MAX"] == [size, 2] and seen["MIN"] == [1, 2]
        assert seen["broadcast"] == [size]
        assert seen["reduce"] == ([total] if rank == 1 else None)
        assert seen["all_gather"] == [[other, other + half] for other in range(size)]
        assert seen["reduce_scatter"] == [sum(other + rank for other in range(size))]
        assert seen["scatter"] == [10 + rank]
        assert seen["alltoall"] == [[10 * other + rank] for other in range(size)]
    assert ranks[-1]["recv"] == [5, 6]
    assert {path.name for path in Path("/dev/shm").glob("simcard-*")} <= before  # nothing is left


TYPES = ["float16", "float32", "float64", "int32", "int64", "uint8", "int8"]
if not PADDLE26:  # which sends no bfloat16 to custom devices
    TYPES.append("bfloat16")


def sums():
    rank, size, paddle, dist = begin()
    seen = {}
    for dtype in TYPES:
        x = paddle.to_tensor([rank + 1.0, 3.0]).astype(dtype)
        try:
            dist.all_reduce(x)
            seen[dtype] = x.astype("float32").tolist()
        except Exception as error:  # noqa: BLE001 - the test shows it
            seen[dtype] = str(error)
    return seen


def test_sums_in_all_types(tmp_path):
    for seen in run(sums, 2, tmp_path, env=environment(2)):
        assert seen == dict.fromkeys(TYPES, [3.0, 6.0])


def network(paddle):
    from paddle import nn

    class Net(nn.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x, branch):
            hidden = nn.functional.relu(self.first(x))
            return {"a": self.a, "b": self.b, "both": lambda x: self.a(x) + self.b(x)}[branch](hidden)

    paddle.seed(1)
    return Net()


def data_parallel(mode):
    """Weights after six steps: with one rank of all data, or with several ranks of a share each."""
    import os

    if "PADDLE_TRAINER_ID" in os.environ:
        rank, size, paddle, dist = begin()
    else:
        import paddle

        paddle.set_device("sim:0")
        rank, size = 0, 1
    import numpy as np

    from tests.simcard import counters

    net = network(paddle)
    whole = paddle.DataParallel(net, find_unused_parameters=mode == "unused") if size > 1 else net
    opt = paddle.optimizer.Momentum(0.1, 0.9, parameters=net.parameters())
    random = np.random.RandomState(0)
    for step in range(6):
        x, y = random.randn(12, 8).astype("float32"), random.randint(0, 4, 12)
        share = slice(rank * 12 // size, (rank + 1) * 12 // size)
        x, y = paddle.to_tensor(x[share]), paddle.to_tensor(y[share])
        branch = "both" if mode == "no_sync" else "ab"[step % 2]

        def backward(branch=branch, x=x, y=y):
            paddle.nn.functional.cross_entropy(whole(x, branch), y).backward()

        counters.reset()
        if mode == "no_sync":  # gradients of two passes are added up; the second exchanges their sum
            with whole.no_sync() if size > 1 else contextlib.nullcontext():
                backward()
            assert counters.counters()["collectives"] == 0
        backward()
        assert (counters.counters()["collectives"] > 0) == (size > 1)
        opt.step()
        opt.clear_grad()
    return {key: value.numpy().tolist() for key, value in net.state_dict().items()}


@pytest.mark.parametrize("mode", ["no_sync", "unused"])
def test_data_parallel_gives_what_one_process_gives(tmp_path, mode):
    import numpy as np

    [alone] = run(data_parallel, 1, tmp_path / "alone", mode, env=environment(1))
    together = run(data_parallel, 2, tmp_path / "together", mode, env=environment(2))
    assert together[0] == together[1]
    for key, value in alone.items():
        np.testing.assert_allclose(together[0][key], value, rtol=0, atol=2e-7)


def deep():
    rank, size, paddle, dist = begin()
    net = paddle.nn.Sequential(*[paddle.nn.Linear(64, 64) for _ in range(6)])
    net = paddle.DataParallel(net, comm_buffer_size=1e-2, last_comm_buffer_size=1e-2)  # many small buckets
    net(paddle.ones([4, 64])).mean().backward()
    paddle.device.synchronize()
    return rank


def test_the_exchange_overlaps_the_backward_pass(tmp_path):
    env = environment(2, delay_us=3000, collective_delay_us=2000, trace=tmp_path / "trace%r")
    run(deep, 2, tmp_path, env=env)
    events = [event for event in read_trace(tmp_path / "trace0") if event["event"] in ("begin", "end", "collective")]
    reductions = [i for i, e in enumerate(events) if e["event"] == "begin" and e["name"] == "all_reduce"]
    assert len(reductions) >= 6
    gradients = [i for i, e in enumerate(events) if e["event"] == "begin" and e["name"] == "matmul_grad"]
    assert sum(1 for i in reductions if i < gradients[-1]) >= 3  # while the backward pass still computes
    assert {e["compute_stream"] for e in events if e.get("name") == "all_reduce" and e["event"] == "collective"} == {
        False
    }


def synchronised(convert):
    """The running mean of a BatchNorm that sees another batch on each rank."""
    rank, size, paddle, dist = begin()
    layer = paddle.nn.BatchNorm2D(1)
    if convert:
        layer = paddle.nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    net = paddle.DataParallel(layer)
    net(paddle.full([2, 1, 2, 2], float(rank))).sum().backward()
    return float(layer._mean.numpy()[0])


@pytest.mark.parametrize(
    "convert, knobs, expected", [(True, {}, [0.05, 0.05]), (True, {"sync_bn": "local"}, [0.0, 0.1])]
)
def test_sync_batch_norm(tmp_path, convert, knobs, expected):
    assert run(synchronised, 2, tmp_path, convert, env=environment(2, **knobs)) == pytest.approx(expected)


def reductions(count):
    rank, size, paddle, dist = begin()
    x = paddle.ones([4])
    for _ in range(count):
        dist.all_reduce(x)
        print("sum", float(x.numpy()[0]), flush=True)
    return float(x.numpy()[0])


@pytest.mark.parametrize("rule", ["rank=1,collective=3", "rank=1,stream=communication,count=3"])
def test_a_stalled_rank_hangs_all(tmp_path, rule):
    trace = tmp_path / "trace%r"
    job = start(reductions, 2, tmp_path, 6, env=environment(2, stall=rule, trace=trace))
    wait_for(lambda: "stall" in traced(tmp_path / "trace1"), 60, "rank 1 stalls", lambda: job.output(1))
    wait_for(lambda: begun(tmp_path / "trace0") == 3, 60, "rank 0 is in its third collective", lambda: job.output(0))
    assert all(process.poll() is None for process in job.processes)
    job.kill()
    assert begun(tmp_path / "trace0") == 3 and "all_reduce" not in ended(tmp_path / "trace0")[2:]


def test_a_late_rank_is_waited_for(tmp_path):
    env = environment(2, stall="rank=1,collective=3,seconds=1.5", trace=tmp_path / "trace%r")
    assert run(reductions, 2, tmp_path, 4, env=env) == [16.0, 16.0]
    times = [e["time"] for e in read_trace(tmp_path / "trace0") if e["event"] == "end" and e["name"] == "all_reduce"]
    assert times[2] - times[1] >= 1.4


def traced(path):
    return [event["event"] for event in read_trace(path)] if path.exists() else []


def begun(path):
    events = read_trace(path) if path.exists() else []
    return sum(1 for event in events if event["event"] == "begin" and event["name"] == "all_reduce")


def ended(path):
    return [event["name"] for event in read_trace(path) if event["event"] == "end" and event["name"] == "all_reduce"]


def test_a_rank_fails_in_a_collective_and_the_other_hangs(tmp_path):
    job = start(reductions, 2, tmp_path, 6, env=environment(2, fail="rank=1,collective=4", trace=tmp_path / "trace%r"))
    wait_for(lambda: job.processes[1].poll() is not None, 60, "rank 1 ends", lambda: job.output(1))
    wait_for(lambda: begun(tmp_path / "trace0") == 4, 60, "rank 0 is in its fourth collective", lambda: job.output(0))
    assert job.processes[0].poll() is None
    job.kill()
    failed = job._end(1)
    assert failed.error is not None and "error code is : 3" in failed.error[1]
    assert "card 1 failed: all_reduce: failed as SIM_FAIL says" in failed.output
    assert failed.output.count("sum ") == 3
