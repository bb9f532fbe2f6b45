"""Collectives and rank-0 sections on real ranks."""

import time

import pytest

from tests.harness import DEVICE, free_ports, on_cpus, run, run_raising, start


def make():
    from ppfleet.distributed import devices
    from ppfleet.distributed.collectives import Comm
    from ppfleet.distributed.world import World

    world = World.from_env()
    return Comm(world, devices.select(DEVICE))


def collectives():
    import os

    import paddle

    from ppfleet.distributed.store import _send_at_once

    comm = make()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if not comm.world.alone:
        _send_at_once(comm.world)
    leaked = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
    rank, size = comm.world.rank, comm.world.size
    sums = {
        dtype: comm.all_reduce(paddle.full([3], rank + 1).astype(dtype)).astype("float32").tolist()
        for dtype in ("float32", "float64", "bfloat16", "int32", "int64", "uint8")
    }
    with comm.first("a block"):
        order = comm._store.add("order", 1) if size > 1 else rank + 1
        time.sleep(0.3 if rank == 0 else 0)
    return {
        "sums": sums,
        "mean": comm.mean(float(rank), 1.0 + rank),
        "gathered": comm.gather({"rank": rank, "text": "x" * 1000 * rank}),
        "first": comm.on_first(lambda: {"from": rank}, "test"),
        "order": order,
        "leaked": leaked,
        "bytes": len(comm.broadcast_bytes(bytes(range(256)) * 5 if rank == 0 else None)),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives(tmp_path, size):
    for rank, seen in enumerate(run(collectives, size, tmp_path)):
        expected = [size * (size + 1) / 2] * 3
        assert all(values == expected for values in seen["sums"].values()), seen["sums"]
        assert seen["mean"] == sum(range(size)) / sum(range(1, size + 1))
        assert [part["rank"] for part in seen["gathered"]] == list(range(size))
        assert [len(part["text"]) for part in seen["gathered"]] == [1000 * r for r in range(size)]
        assert seen["first"] == {"from": 0}
        assert seen["bytes"] == 1280
        assert seen["leaked"] == 0  # looking for the store's sockets leaves no descriptor behind
        assert (seen["order"] == 1) == (rank == 0)


def refused(dtype):
    import paddle

    make().all_reduce(paddle.ones([2]).astype(dtype), "a test")


@on_cpus
@pytest.mark.parametrize("dtype", ["float16", "int16", "complex64"])
def test_what_gloo_gets_wrong_is_refused(tmp_path, dtype):
    for kind, message in run_raising(refused, 2, tmp_path, dtype):
        assert kind == "CommError" and f"gloo cannot sum {dtype}" in message and "float32" in message


def failing_section(error):
    comm = make()

    def work():
        if error == "FleetError":
            from ppfleet.errors import CheckpointError

            raise CheckpointError("the disk is full")
        raise ZeroDivisionError("oh")

    if error == "not plain":
        import numpy as np

        comm.on_first(lambda: np.float32(1), "a sum")
    if error == "block":
        with comm.first("unpack"):
            raise ValueError("bad archive")
    comm.on_first(work, "saving")


def test_an_exception_in_a_rank_0_section_raises_on_all(tmp_path):
    first, *others = run_raising(failing_section, 3, tmp_path, "FleetError")
    assert first == ("CheckpointError", "the disk is full")
    assert others == [("CheckpointError", "saving failed on rank 0 on 127.0.0.1: the disk is full")] * 2
    first, *others = run_raising(failing_section, 2, tmp_path, "other")
    assert first[0] == "ZeroDivisionError"
    assert others == [("FleetError", "saving failed on rank 0 on 127.0.0.1: ZeroDivisionError: oh")]
    first, *others = run_raising(failing_section, 2, tmp_path, "block")
    assert first == ("ValueError", "bad archive")
    assert others[0][0] == "FleetError" and "unpack failed on rank 0" in others[0][1]


def test_a_result_that_cannot_travel_is_an_error_on_all(tmp_path):
    first, other = run_raising(failing_section, 2, tmp_path, "not plain")
    assert first[0] == other[0] == "CommError" and "a sum failed on rank 0" in other[1]
    assert "a float32 at value: pass .item()" in first[1] and "a float32 at value: pass .item()" in other[1]


class Gloo:
    """Counts the calls of Paddle's collectives, all of which fail after 30 s; `SAY_WAITING` becomes 1 s."""

    def __init__(self):
        import paddle.distributed as dist

        from ppfleet.distributed import collectives

        self.calls = []
        collectives.SAY_WAITING = 1.0
        for name in ("all_reduce", "all_gather", "broadcast", "barrier", "gather", "reduce", "scatter", "send", "recv"):
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name, function):
        def call(*arguments, **options):
            self.calls.append(name)
            return function(*arguments, **options)

        return call


def long_section(seconds):
    import paddle

    comm, gloo = make(), Gloo()
    comm.on_first(lambda: time.sleep(seconds), "a long section")
    waited = list(gloo.calls)
    return comm.all_reduce(paddle.ones([1])).tolist(), waited, gloo.calls


def test_a_section_may_last_longer_than_gloos_30_s(tmp_path):
    """Nobody waits for it in gloo."""
    ends = start(long_section, 2, tmp_path, 2.5).wait(60)
    assert [end.value for end in ends] == [[[2.0], [], ["all_reduce"]]] * 2, [end.output for end in ends]
    assert "rank 1 on 127.0.0.1 has waited 1 s in a long section for rank 0 on 127.0.0.1" in ends[1].output


def dying_section():
    import os

    comm = make()
    comm.on_first(lambda: os._exit(3), "saving")


def test_rank_0_dying_in_its_section_ends_the_wait(tmp_path):
    ends = start(dying_section, 2, tmp_path).wait(30)
    assert ends[0].code == 3
    assert (
        ends[1].error is not None and ends[1].error[0] == "CommError" and "saving failed on rank 1" in ends[1].error[1]
    )


def leaving(what):
    """Rank 1 does not come to the barrier: it ends, or raises."""
    comm = make()
    comm.barrier("the start")
    if comm.world.rank == 1:
        if what == "raises":
            raise ValueError("no such file: val_list.txt")
        return "ended"
    comm.barrier("saving")
    return "went on"


@pytest.mark.parametrize("what", ["raises", "returns"])
def test_waiting_for_a_rank_that_left_ends(tmp_path, what):
    ends = start(leaving, 3, tmp_path, what).wait(30)
    for end in (ends[0], ends[2]):
        assert end.error is not None and end.error[0] == "CommError"
        assert "saving cannot continue: rank 1 on 127.0.0.1 exited before it" in end.error[1]


def late():
    comm, gloo = make(), Gloo()
    if comm.world.rank == 1:
        time.sleep(4)  # 1 s, and 1 s more in which the others find out who is missing
    comm.barrier("the start")
    return gloo.calls


def test_who_is_late_is_named_and_may_take_longer_than_gloos_30_s(tmp_path):
    ends = start(late, 3, tmp_path).wait(60)
    assert [end.value for end in ends] == [[], [], []], [end.output for end in ends]
    assert "has waited 1 s in the start for rank 1 on 127.0.0.1" in ends[0].output


def init_twice():
    import os

    os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
    import paddle.distributed as dist

    dist.init_parallel_env()
    make()


def test_init_parallel_env_by_hand_is_refused(tmp_path):
    for kind, message in run_raising(init_twice, 2, tmp_path):
        assert kind == "CommError" and "was already called" in message


def test_a_taken_store_port_is_said(tmp_path):
    import socket

    port, other = free_ports(2)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        endpoints = f"127.0.0.1:{port},127.0.0.1:{other}"
        env = {"PADDLE_TRAINER_ENDPOINTS": endpoints, "PADDLE_TRAINERS_NUM": "2"}
        running = start(
            late, 1, tmp_path, env={**env, "PADDLE_TRAINER_ID": "0", "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{port}"}
        )
        (end,) = running.wait(30)
    assert end.error is not None and f"port {port} of 127.0.0.1" in end.error[1] and "in use" in end.error[1]


def meetings_under_signals():
    """200 meetings on the store, while somebody sends signals all the time."""
    import os
    import signal
    import subprocess
    import sys

    comm, came = make(), []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    sends = f"import os, time\nwhile True:\n    os.kill({os.getpid()}, 15)\n    time.sleep(0.001)"
    sender = subprocess.Popen([sys.executable, "-c", sends])
    try:
        for number in range(200):
            assert comm.gather(number) == [number] * comm.world.size
        while not came:
            time.sleep(0.01)
    finally:
        sender.kill()
        sender.wait()
    comm.barrier("the end")
    return len(came)


def test_a_signal_does_not_fail_what_waits_on_the_store(tmp_path):
    assert all(count > 0 for count in run(meetings_under_signals, 2, tmp_path))


def resident_mb():
    from pathlib import Path

    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def large_values(megabytes):
    comm = make()
    rank = comm.world.rank
    values = comm.gather(f"{rank}" * (megabytes * 1_000_000))
    mixed = comm.gather({"text": "x" * 3_000_000 * rank})  # rank 0's travels another way than the others'
    result = comm.on_first(lambda: "y" * (megabytes * 1_000_000), "a large result")
    return {
        "values": [[value[0], len(value), len(set(value))] for value in values],
        "mixed": [len(part["text"]) for part in mixed],
        "result": [len(result), result[0]],
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_and_on_first_take_values_of_any_size(tmp_path, size):
    megabytes = 40 if size < 3 else 18
    for seen in run(large_values, size, tmp_path, megabytes):
        assert seen["values"] == [[str(rank), megabytes * 1_000_000, 1] for rank in range(size)]
        assert seen["mixed"] == [3_000_000 * rank for rank in range(size)]
        assert seen["result"] == [megabytes * 1_000_000, "y"]


def many_gathers(count, length):
    comm = make()
    comm.gather("x" * length)
    comm.barrier()
    before = resident_mb()
    for _ in range(count):
        assert [len(value) for value in comm.gather("x" * length)] == [length] * comm.world.size
        comm.on_first(lambda: "y" * length, "a result")
    return resident_mb() - before


@pytest.mark.parametrize(("count", "length"), [(200, 1_000_000), (1500, 60_000)])
def test_gathers_do_not_fill_the_memory_of_rank_0(tmp_path, count, length):
    """Together 400 and 180 MB of values go through rank 0."""
    grown = run(many_gathers, 2, tmp_path, count, length)
    assert max(grown) < 60, grown


class Opaque:
    pass


FAULTS = {
    "array": "a ndarray at value: pass .tolist()",
    "scalar": "a float32 at value['loss']: pass .item()",
    "key": "the dict key 3 at value[0]['rows']",
    "set": "a set at value",
    "object": "a Opaque at value[0]",
    "circle": "nested too deeply",
}


def values_that_cannot_travel():
    """What `gather` says to a value that the last rank brings, and `on_first` to such a result."""
    import numpy as np

    comm = make()
    circle = []
    circle.append(circle)
    values = [np.zeros(3, "float32"), {"loss": np.float32(1)}, [{"rows": {3: "three"}}], {1, 2}, [Opaque()], circle]
    last = comm.world.rank == comm.world.size - 1

    def said(call):
        try:
            return [None, str(call())]
        except Exception as failure:  # noqa: BLE001 - which one it is, is the question
            return [type(failure).__name__, str(failure)]

    return [
        [
            said(lambda: comm.gather(value if last else 1, "a gather")),  # noqa: B023
            said(lambda: comm.on_first(lambda: value, "a result")),  # noqa: B023
            comm.gather(1),  # the job can go on
        ]
        for value in values
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_a_value_that_cannot_travel_is_the_same_error_on_any_number_of_ranks(tmp_path, size):
    for seen in run(values_that_cannot_travel, size, tmp_path):
        for part, (gathered, result, after) in zip(FAULTS.values(), seen):
            assert gathered[0] == result[0] == "CommError", (gathered, result)
            assert part in gathered[1] and part in result[1]
            assert f"rank {size - 1}" in gathered[1] and "rank 0" in result[1]
            assert "died" not in gathered[1] + result[1]
            assert after == [1] * size


def shapes_of_values():
    comm = make()
    value = {"nan": float("nan"), "inf": -float("inf"), "pair": (1, 2.5), "text": "\u00e9\ud800", "big": 1 << 200}
    return [repr(comm.gather(value)[-1]), repr(comm.on_first(lambda: value, "a result"))]


def test_values_arrive_alike_on_any_number_of_ranks(tmp_path):
    alone = run(shapes_of_values, 1, tmp_path)[0]
    assert "nan" in alone[0] and "-inf" in alone[0] and "[1, 2.5]" in alone[0] and str(1 << 200) in alone[0]
    assert alone[0] == alone[1]
    assert run(shapes_of_values, 2, tmp_path) == [alone, alone]
