"""Before the ranks talk through Paddle: a rank that is missing or there twice, another version, other code."""

import os
import socket

import pytest

from tests.harness import DEVICE, environment, free_ports, run_raising, start


def joined(version, code):
    """A rank of a job, with this version of Paddle and this content of a module of its own."""
    import sys
    import tempfile
    from pathlib import Path
    from types import ModuleType

    import paddle

    from ppfleet.distributed.collectives import Comm
    from ppfleet.distributed.devices import CPU
    from ppfleet.distributed.world import World

    if code:
        path = Path(tempfile.mkdtemp()) / "mine.py"
        path.write_text(code)
        module = ModuleType("mine")
        module.__file__ = str(path)
        sys.modules["mine"] = module
    paddle.__version__ = version
    world = World.from_env()
    comm = Comm(world, CPU)
    return comm.gather(world.rank)


def ranks(tmp_path, arguments, changes=None, wait="30"):
    """Start one rank for each entry of `arguments`, with changes of its environment."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(len(arguments))]
    running = []
    for rank, each in enumerate(arguments):
        if each is not None:
            env = {**environment(rank, endpoints), "PPFLEET_WAIT": wait, **(changes or {}).get(rank, {})}
            running.append(start(joined, 1, tmp_path / str(rank), *each, env=env))
    return [each.wait(90)[0] for each in running]


def test_all_are_there_and_the_same(tmp_path):
    ends = ranks(tmp_path, [("9.9", "a = 1"), ("9.9", "a = 1"), ("9.9", "")])  # one rank alone may lack a module
    assert [end.value for end in ends] == [[0, 1, 2]] * 3, ends[0].output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [("9.9", ""), ("8.8", ""), ("9.9", "")],
            "the same PaddlePaddle: rank 0 on 127.0.0.1: 9.9; rank 1 on 127.0.0.1: 8.8",
        ),
        ([("9.9", "a = 1"), ("9.9", "a = 1"), ("9.9", "a = 2")], "the same code of mine: rank 0 on 127.0.0.1"),
    ],
)
def test_ranks_that_differ(tmp_path, arguments, words):
    ends = ranks(tmp_path, arguments)
    assert [end.error[0] for end in ends] == ["MismatchError"] * 3
    assert all(words in end.error[1] for end in ends), ends[0].error


def test_a_rank_that_does_not_come_is_named_on_every_other(tmp_path):
    ends = ranks(tmp_path, [("9.9", ""), ("9.9", ""), None], wait="3")
    assert all(end.error[1].startswith("rank 2 on 127.0.0.1 did not join within 3 s") for end in ends), ends
    (end,) = ranks(tmp_path / "other", [None, ("9.9", "")], wait="3")
    assert end.error[1].startswith("rank 0 did not answer rank 1 on 127.0.0.1 at 127.0.0.1:")


def test_two_of_the_same_rank(tmp_path):
    endpoints = environment(1, [f"127.0.0.1:{port}" for port in free_ports(3)])
    same = {
        name: endpoints[name] for name in ("PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS")
    }
    first = {
        **same,
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_CURRENT_ENDPOINT": same["PADDLE_TRAINER_ENDPOINTS"].split(",")[0],
    }
    ends = ranks(tmp_path, [("9.9", "")] * 3, {0: first, 1: same, 2: same})
    assert "two processes claim to be rank 1: process" in ends[0].error[1]
    assert all(end.error is not None for end in ends)


def test_a_rank_of_a_larger_job(tmp_path):
    """One host counts more ranks than the first one."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(3)]
    names = ("PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINERS_NUM")
    larger = {name: environment(2, endpoints)[name] for name in names}
    smaller = {name: environment(0, endpoints[:2])[name] for name in names}
    for end in ranks(tmp_path, [("9.9", "")] * 2, {0: smaller, 1: larger}):
        assert end.error[0] == "MismatchError" and "claims to be rank 2 of a job of 2" in end.error[1], end.output


def test_other_descriptions_of_the_world(tmp_path):
    """The same ranks, in another order on one host: as when two machines have different lists."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(3)]
    normal = environment(2, endpoints)
    swapped = [endpoints[0], endpoints[2], endpoints[1]]
    names = ("PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS")
    changes = {rank: {n: environment(rank, endpoints)[n] for n in names} for rank in range(2)}
    changes[2] = {
        "PADDLE_TRAINER_ID": "2",
        "PADDLE_CURRENT_ENDPOINT": swapped[2],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(swapped),
    }
    assert normal["PADDLE_TRAINERS_NUM"] == "3"
    ends = ranks(tmp_path, [("9.9", "")] * 3, changes)
    assert all("the same list of ranks" in end.error[1] for end in ends), ends


def test_a_host_that_takes_itself_for_rank_0(tmp_path):
    """Paddle's launcher makes every host rank 0 that it does not find in the list."""
    ports = free_ports(2)
    env = environment(0, [f"198.51.100.7:{ports[0]}", f"198.51.100.8:{ports[1]}"])
    (end,) = start(joined, 1, tmp_path, "9.9", "", env=env).wait(60)
    assert end.error[0] == "WorldError" and "198.51.100.7 is not an address of this machine" in end.error[1]
    assert "python -m ppfleet launch" in end.error[1]


def test_strangers_do_not_disturb(tmp_path):
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    first = start(joined, 1, tmp_path / "0", "9.9", "", env=environment(0, endpoints))
    port, noise = int(endpoints[0].rpartition(":")[2]), [b"GET / HTTP/1.1\r\n\r\n", b"[" * 5000 + b"\n", b"{}\n", b""]
    while noise:
        try:
            with socket.create_connection(("127.0.0.1", port), 2) as stranger:
                stranger.sendall(noise[0])
            noise.pop(0)
        except ConnectionRefusedError:
            assert first.processes[0].poll() is None
    second = start(joined, 1, tmp_path / "1", "9.9", "", env=environment(1, endpoints))
    assert first.wait()[0].value == second.wait()[0].value == [0, 1]


def impatient():
    import os

    os.environ["PPFLEET_WAIT"] = "soon"
    return joined("9.9", "")


def test_a_wrong_join_timeout(tmp_path):
    for kind, message in run_raising(impatient, 2, tmp_path):
        assert kind == "WorldError" and "PPFLEET_WAIT must be a positive number of seconds, got 'soon'" in message


def orphaned_while_waiting(path):
    import time

    import ppfleet
    from ppfleet.distributed import handshake

    if os.environ["PADDLE_TRAINER_ID"] == "1":
        raise RuntimeError("saw that its launcher is gone, and does not begin")
    until = time.monotonic() + 2
    handshake.is_orphan = lambda: time.monotonic() > until
    ppfleet.Job(path, device=DEVICE)


def test_a_launcher_that_dies_during_the_roll_call_is_noticed(tmp_path):
    first, _ = start(orphaned_while_waiting, 2, tmp_path / "out", str(tmp_path / "run")).wait(25)  # before the 30 s
    assert first.error[0] == "CommError" and "the launcher of rank 0" in first.error[1], first.output
