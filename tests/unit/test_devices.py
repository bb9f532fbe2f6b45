"""The device table: what it says of each device, and what is chosen where."""

import sys
import types

import pytest

from ppfleet.distributed import devices
from ppfleet.distributed.devices import CPU, GPU
from ppfleet.errors import WorldError


@pytest.fixture
def paddle(monkeypatch):
    """A Paddle with that many cards, and these plugins' devices: the table asks it nothing else."""
    found = types.SimpleNamespace(cards=0, cuda=True, set=None, kunlun=0, plugins=[])
    found.is_compiled_with_cuda = lambda: found.cuda
    found.is_compiled_with_xpu = lambda: found.kunlun > 0
    found.framework = types.SimpleNamespace(core=types.SimpleNamespace(get_xpu_device_count=lambda: found.kunlun))
    found.device = types.SimpleNamespace(
        cuda=types.SimpleNamespace(device_count=lambda: found.cards),
        get_all_custom_device_type=lambda: sorted({name.partition(":")[0] for name in found.plugins}),
        get_available_custom_device=lambda: found.plugins,
    )
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
    with pytest.raises(WorldError, match="device='npu', but paddle-custom-npu is not installed"):
        devices.choose("npu")
    with pytest.raises(WorldError, match="device must be one of auto, cpu, gpu, xpu, .*, got 'tpu'"):
        devices.choose("tpu")


def test_auto_says_when_it_leaves_an_accelerator_unused(paddle, monkeypatch, capfd):
    monkeypatch.setattr(devices.Device, "files", lambda self: 8 * (self.name == "npu"))
    assert devices.choose("auto") is CPU
    assert "this machine has 8 Ascend NPU(s), for which paddle-custom-npu is not installed" in capfd.readouterr().err
    devices.choose("cpu")
    assert capfd.readouterr().err == ""


def test_a_rank_takes_the_card_that_the_launcher_gave_it(paddle):
    paddle.cards = 4
    devices.select("gpu", {"FLAGS_selected_gpus": "3"})
    assert paddle.set == "gpu:3"
    devices.select("gpu", {})
    assert paddle.set == "gpu:0"
    devices.select("cpu", {"FLAGS_selected_gpus": "3"})
    assert paddle.set == "cpu"


def test_devices_of_plugins_need_no_row(paddle):
    paddle.plugins = ["new_kind:0", "new_kind:1", "other:0"]
    row = devices.choose("new_kind")
    assert row.count() == 2 and row.is_accelerator and devices.choose("auto").name == "new_kind"
    devices.select("new_kind", {"FLAGS_selected_new_kinds": "1"})
    assert paddle.set == "new_kind:1"
    # What Paddle's own launcher sets for such a device.
    assert row.environment() == {"PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": "new_kind"}
    assert row.visible_variable == "NEW_KIND_VISIBLE_DEVICES" and row.launch_flag == "--devices"


def test_cards_that_linux_does_not_show_are_not_taken_for_none(monkeypatch):
    installed = []
    monkeypatch.setattr(devices.Device, "has_wheel", lambda self: self.name in installed)
    monkeypatch.setattr(devices.Device, "files", lambda self: 0)
    gcu, npu = devices.DEVICES["gcu"], devices.DEVICES["npu"]
    assert gcu.cards() == npu.cards() == 0 and devices.of_machine() is GPU
    installed += ["gcu"]
    assert gcu.cards() > 100 and devices.of_machine() is gcu
    installed += ["npu"]
    assert npu.cards() == 0  # Linux would show them


def test_a_row_may_know_more(paddle):
    paddle.kunlun, paddle.plugins = 4, ["npu:0"]
    assert (
        devices.choose("auto").name == "xpu" and devices.choose("xpu").environment()["PADDLE_DISTRI_BACKEND"] == "bkcl"
    )
    assert devices.choose("npu").title == "Ascend NPU"


def test_names_of_rows_are_their_keys():
    assert all(name == device.name for name, device in devices.DEVICES.items())
    assert not CPU.is_accelerator and all(d.launch_flag and d.visible_variable for d in devices.ACCELERATORS)
