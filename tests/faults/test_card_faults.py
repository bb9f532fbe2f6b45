"""Faults that only asynchronous devices have, on simulated cards: who is named, and that every process ends."""

import re
import signal

import pytest

from ppfleet.errors import STALLED
from tests.harness import DEVICE, on_cards, start

pytestmark = on_cards


def stand_still():
    import time

    time.sleep(300)


def trains(path, what, culprit, reads):
    """Steps in which some ranks read their loss with `item()`, during which Paddle holds the GIL; at step 5 something
    happens to one rank."""
    import os
    import time

    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(path, device=DEVICE, seed=3, stall=4.0, stall_long=30.0, log_every=10**9)
    net = blocks.with_batch_norm()  # synchronised: the forward pass waits for the others, too
    model, _ = job.prepare(net, paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    for points, labels in job.steps(job.loader(blocks.Points(8 * job.world.size * 20), 8)):
        time.sleep(0.3)  # so that a beat comes between the first step and the fault
        if job.world.rank == culprit and job.step == 5:
            if what == "stall":
                stand_still()
            if what == "exit":
                os._exit(0)
            if what == "raise":
                raise ValueError("something is wrong")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        loss = F.cross_entropy(model(points), labels)
        if job.world.rank in reads:
            loss.item()
        job.backward(loss)
    return job.step


def stalled(end):
    """As a script it would exit with 76; the harness catches what is raised."""
    return end.code == STALLED or bool(end.error and end.error[0] == "Stalled")


@pytest.mark.parametrize(
    ("ranks", "culprit", "reads"), [(2, 1, [0]), (2, 0, [1]), (3, 1, [0]), (3, 1, [0, 2]), (3, 2, [])]
)
def test_a_rank_whose_python_is_blocked_by_its_device_is_not_blamed(tmp_path, ranks, culprit, reads):
    ends = start(trains, ranks, tmp_path, str(tmp_path / "run"), "stall", culprit, reads).wait(60)
    for rank, end in enumerate(ends):
        # One that cannot hear is killed by the judge.
        assert end.code == -signal.SIGKILL if rank in reads else stalled(end), (rank, end.code, end.output[-2000:])
    told = rf"rank {culprit} on 127.0.0.1 has been in `stand_still` \(tests/faults/test_card_faults.py:\d+\) for \d+ s"
    for rank, end in enumerate(ends):
        if rank not in reads or rank == 0:  # the judge speaks through rank 0's output
            assert re.search(told, end.output), (rank, end.output[-2000:])


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("exit", "rank 1 on 127.0.0.1 exited before it (it finished)"),
        ("raise", "rank 1 on 127.0.0.1 exited before it (ValueError: something is wrong)"),
        ("kill", "rank 1 on 127.0.0.1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_goes_is_noticed_during_a_device_wait(tmp_path, what, shown):
    ends = start(trains, 3, tmp_path, str(tmp_path / "run"), what, 1, []).wait(60)
    for rank in (0, 2):
        assert ends[rank].error and ends[rank].error[0] == "CommError", ends[rank].output[-2000:]
        assert shown in ends[rank].error[1]


@pytest.mark.parametrize("collective", [60])
def test_a_collective_that_never_comes_is_a_stall_of_all(tmp_path, collective):
    """The cards, not the programs, stand still: every rank waits in the same operation."""
    env = {"SIM_STALL": f"rank=1,collective={collective}"}
    ends = start(trains, 2, tmp_path, str(tmp_path / "run"), "", -1, [], env=env).wait(90)
    for end in ends:
        assert stalled(end), end.output[-2000:]
        assert re.search(r"all ranks have waited in all-reduce of gradients #\d+ .* for \d s", end.output)


@pytest.mark.parametrize("fails", ["kernel=relu,count=6", "collective=40", "kernel=concat,count=20"])
def test_a_device_error_is_not_called_a_lost_rank(tmp_path, fails):
    """A failed card surfaces at a later call of the rank that has it: both ranks get that error."""
    env = {"SIM_FAIL": f"rank=1,{fails}"}
    ends = start(trains, 2, tmp_path, str(tmp_path / "run"), "", -1, [], env=env).wait(60)
    kind, text = ends[1].error
    assert "another rank died" not in text and kind != "CommError", ends[1].error
    assert ends[0].error[0] == "CommError" and f"rank 1 on 127.0.0.1 exited before it ({kind}: " in ends[0].error[1]


def sums_on_a_failed_card():
    """The error of the card comes out of the very call of the collective."""
    import time

    import paddle

    from tests.ranks.test_comm import make

    comm = make()
    values = paddle.ones([4])
    if comm.world.rank == 1:
        paddle.nn.functional.relu(values)  # fails, some time later
        time.sleep(1)
    return comm.all_reduce(values, "a sum").tolist()


def test_a_collective_on_a_failed_card_raises_the_cards_error(tmp_path):
    ends = start(sums_on_a_failed_card, 2, tmp_path, env={"SIM_FAIL": "rank=1,kernel=relu,count=1"}).wait(60)
    assert ends[1].error and ends[1].error[0] != "CommError", ends[1].error
    assert "rank 1 on 127.0.0.1 exited before it" in ends[0].error[1], ends[0].error
