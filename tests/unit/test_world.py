import pytest

from ppfleet.distributed.world import World
from ppfleet.errors import WorldError

FOUR = {
    "PADDLE_TRAINER_ID": "2",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6070,10.0.0.1:6071,10.0.0.2:6070,10.0.0.2:6071",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6070",
}


def test_alone_without_any_environment():
    world = World.from_env({"PATH": "/bin"})
    assert (world.rank, world.size, world.alone, world.first) == (0, 1, True, True)


def test_a_launched_job_of_one_is_alone():
    assert World.from_env({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"}).alone


def test_four_ranks_on_two_hosts():
    world = World.from_env(FOUR)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 0, 2)
    assert not world.alone and not world.first
    assert world.master == "10.0.0.1:6070"
    assert world.name(3) == "rank 3 on 10.0.0.2"


def test_master_has_paddles_precedence():
    assert World.from_env({**FOUR, "PADDLE_MASTER": "10.0.0.9:1"}).master == "10.0.0.9:1"
    assert (
        World.from_env({**FOUR, "PADDLE_MASTER": "10.0.0.9:1", "MASTER_ADDR": "h", "MASTER_PORT": "2"}).master == "h:2"
    )


def test_frozen():
    with pytest.raises(AttributeError):
        World().rank = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PADDLE_TRAINER_ID": ""}, "not PADDLE_TRAINER_ID"),
        ({"PADDLE_TRAINER_ENDPOINTS": ""}, "not PADDLE_TRAINER_ENDPOINTS"),
        ({"PADDLE_TRAINER_ID": "4"}, "not a rank of a job of PADDLE_TRAINERS_NUM=4"),
        ({"PADDLE_TRAINER_ID": "-1"}, "not a rank"),
        ({"PADDLE_TRAINER_ID": "two"}, "'two' is not a whole number"),
        ({"PADDLE_TRAINERS_NUM": "3"}, "lists 4"),
        ({"PADDLE_TRAINERS_NUM": "x"}, "not a whole number"),
        ({"PADDLE_CURRENT_ENDPOINT": "127.0.1.1:6070"}, "--host"),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,a:1,a:2,a:3", "PADDLE_CURRENT_ENDPOINT": "a:2"}, "more than once"),
        (
            {"PADDLE_TRAINER_ENDPOINTS": "a:1,b,c:2,d:3", "PADDLE_CURRENT_ENDPOINT": "c:2"},
            "'b', which is not `ip:port`",
        ),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(WorldError, match=message.replace("(", r"\(")):
        World.from_env({**FOUR, **change})
