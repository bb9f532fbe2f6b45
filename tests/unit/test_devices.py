"""The device table: what it says of each device, and what is chosen where."""

import dataclasses
import sys
import types

import pytest

from ppfleet.distributed import devices
from ppfleet.distributed.devices import CPU, GPU
from ppfleet.errors import WorldError


@pytest.fixture
def paddle(monkeypatch):
    """A Paddle with that many cards: the table asks it nothing else."""
    found = types.SimpleNamespace(cards=0, cuda=True, set=None)
    found.is_compiled_with_cuda = lambda: found.cuda
    found.device = types.SimpleNamespace(cuda=types.SimpleNamespace(device_count=lambda: found.cards))
    found.set_device = lambda name: setattr(found, "set", name)
    monkeypatch.setitem(sys.modules, "paddle", found)
    return found


def test_auto_is_a_card_where_there_is_one(paddle):
    assert devices.choose("auto") is CPU
    paddle.cards = 2
    assert devices.choose("auto") is GPU and devices.choose("cpu") is CPU
    paddle.cuda = False
    assert devices.choose("auto") is CPU


def test_a_device_that_is_not_there_is_refused(paddle):
    with pytest.raises(WorldError, match="device='gpu', but .*; use device='cpu', or 'auto'"):
        devices.choose("gpu")
    with pytest.raises(WorldError, match="device must be one of auto, cpu, gpu, got 'tpu'"):
        devices.choose("tpu")


def test_a_rank_takes_the_card_that_the_launcher_gave_it(paddle):
    paddle.cards = 4
    devices.select("gpu", {"FLAGS_selected_gpus": "3"})
    assert paddle.set == "gpu:3"
    devices.select("gpu", {})
    assert paddle.set == "gpu:0"
    devices.select("cpu", {"FLAGS_selected_gpus": "3"})
    assert paddle.set == "cpu"


def test_another_device_is_one_row(monkeypatch, paddle):
    paddle.device.get_all_custom_device_type = lambda: ["npu"]
    paddle.device.get_available_custom_device = lambda: ["npu:0", "npu:1", "other:0"]
    npu = dataclasses.replace(GPU, name="npu", title="NPU", backend="xccl", selected_variable="FLAGS_selected_npus")
    monkeypatch.setitem(devices.DEVICES, "npu", npu)
    assert devices.choose("npu") is npu and npu.count() == 2
    devices.select("npu", {"FLAGS_selected_npus": "1"})
    assert paddle.set == "npu:1"


def test_names_of_rows_are_their_keys():
    assert all(name == device.name for name, device in devices.DEVICES.items())
    assert not CPU.is_accelerator and all(d.launch_flag and d.visible_variable for d in devices.ACCELERATORS)
