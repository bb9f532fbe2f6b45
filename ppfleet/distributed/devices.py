"""The devices that a job can run on: one row each. Nobody else asks "is it CUDA?".

A device of Paddle's plugin interface (npu, mlu, gcu, …) needs no row: `custom` makes one from its name. Add one where
more is known about it. Paddle is imported only where it is needed, so that the launcher can read the table without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TypeVar

from ppfleet import log
from ppfleet.errors import WorldError

T = TypeVar("T")
AUTO = "auto"
_ANY = 1 << 10  # cards of a machine that cannot be counted


@dataclass(frozen=True)
class Device:
    """What must be known of a kind of device to train on it."""

    name: str  # as in Job(device="gpu") and paddle.set_device("gpu:0")
    title: str  # in messages
    backend: str  # of Paddle's process group
    interface_variable: str  # where that backend reads the network interface from
    wheel: str  # the PaddlePaddle that can use it
    interface_prefix: str = ""  # of that value: NCCL takes eth1 for eth10, too, but not =eth1
    is_accelerator: bool = True
    launch_flag: str = ""  # of Paddle's launcher, for the cards to use
    visible_variable: str = ""  # which cards a process sees
    selected_variable: str = ""  # which one Paddle's launcher gave to this rank
    device_files: str = ""  # in /dev, one a card: counts them without loading anything
    has_autocast: bool = True
    has_streams: bool = True  # to copy batches while it computes
    pins_memory: bool = False  # whether Paddle can lock memory of the host for it, from which it copies by itself
    is_custom: bool = False  # by a plugin for Paddle's CustomDevice interface
    # Whether Paddle's own reducer exchanges gradients during backward(). Where a failure of the backend in there ends
    # the process (gloo), ppfleet exchanges them itself, afterwards.
    overlaps_exchange: bool = True
    # Paddle's flags that make its operators give the same bits each time; None: not known for this device.
    deterministic: tuple[str, ...] | None = None
    cannot_sum: tuple[str, ...] = ()  # dtypes that its backend returns wrong, or dies of

    def count(self) -> int:
        """How many of them this Paddle can use here."""
        import paddle

        if self.name == CPU.name:
            return 1
        if self.name == GPU.name:
            return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0
        if self.name == XPU.name:
            return int(paddle.framework.core.get_xpu_device_count()) if paddle.is_compiled_with_xpu() else 0
        return sum(card.partition(":")[0] == self.name for card in paddle.device.get_available_custom_device() or ())

    def files(self) -> int:
        """How many of them Linux shows."""
        found = len(list(Path("/dev").glob(self.device_files))) if self.device_files else 0
        if not found and self.name == GPU.name and Path("/dev/dxg").exists():  # WSL2 has one file for all of them
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
                return listed.stdout.count("GPU ")
        return found

    def cards(self) -> int:
        """How many of them Linux shows; where it is not known how, as many as anybody asks for if it is installed."""
        return self.files() if self.device_files else _ANY * self.has_wheel()

    def has_wheel(self) -> bool:
        """Whether the installed PaddlePaddle, or its plugin, is the one for it, without loading it."""
        try:
            distribution(self.wheel)
        except PackageNotFoundError:
            return False
        return True

    def own(self, env: Mapping[str, str]) -> str:
        """Paddle's name of the one that is this rank's: the launcher says which; without it, the first."""
        if not self.is_accelerator:
            return self.name
        return f"{self.name}:{env.get(self.selected_variable, '0').split(',')[0]}"

    def environment(self) -> dict[str, str]:
        """What Paddle's process group reads, as its own launcher sets it."""
        custom = {"PADDLE_XCCL_BACKEND": self.name} if self.is_custom else {}
        return {"PADDLE_DISTRI_BACKEND": self.backend, **custom}

    def versions(self) -> dict[str, str]:
        """What computes: must be the same on all ranks, or they hang (NCCL) or diverge."""
        import paddle

        found = {"kind of device": self.name}
        if self.name == GPU.name:
            known = {"CUDA": "cuda", "cuDNN": "cudnn", "NCCL": "nccl"}
            found.update({name: str(getattr(paddle.version, ask, str)()) for name, ask in known.items()})
        return found

    def hardware(self) -> dict[str, str]:
        """The card and its driver. Different ones may work together, and round differently."""
        import paddle

        if self.name != GPU.name:
            return {}
        with contextlib.suppress(OSError):
            driver = Path("/proc/driver/nvidia/version").read_text().partition("Kernel Module")[2].split()[:1]
            return {"card": str(paddle.device.cuda.get_device_name()), "driver": " ".join(driver)}
        return {"card": str(paddle.device.cuda.get_device_name())}

    def generators(self) -> list[Any]:
        """Paddle's random generators of a process that runs on it."""
        import paddle

        core = paddle.framework.core
        found = [core.default_cpu_generator()]
        if self.is_accelerator:
            number = int(paddle.get_device().partition(":")[2])
            if self.is_custom:
                found.append(core.default_custom_device_generator(paddle.CustomPlace(self.name, number)))
            elif self.name == XPU.name:
                found.append(core.default_xpu_generator(number))
            else:
                found.append(core.default_cuda_generator(number))
        return found


def custom(name: str, **known: Any) -> Device:
    """The row of a device with a plugin for Paddle's CustomDevice interface, as Paddle's launcher treats it."""
    row: dict[str, Any] = {
        "name": name,
        "title": f"{name} card",
        "backend": "xccl",
        "interface_variable": "",
        "wheel": f"paddle-custom-{name.replace('_', '-')}",
        "launch_flag": "--devices",
        "visible_variable": f"{name.upper()}_VISIBLE_DEVICES",
        "selected_variable": f"FLAGS_selected_{name}s",
        "is_custom": True,
    }
    return Device(**{**row, **known})


CPU = Device(
    name="cpu",
    title="CPU",
    backend="gloo",
    interface_variable="GLOO_SOCKET_IFNAME",
    wheel="paddlepaddle",
    is_accelerator=False,
    has_autocast=False,
    deterministic=(),
    overlaps_exchange=False,
    cannot_sum=("float16", "int16", "complex64", "complex128"),  # float16 comes back as inf, the others end the process
)
GPU = Device(
    name="gpu",
    title="NVIDIA card",
    backend="nccl",
    interface_variable="NCCL_SOCKET_IFNAME",
    interface_prefix="=",
    wheel="paddlepaddle-gpu",
    launch_flag="--gpus",
    visible_variable="CUDA_VISIBLE_DEVICES",
    selected_variable="FLAGS_selected_gpus",
    device_files="nvidia[0-9]*",
    pins_memory=True,
    deterministic=("FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic"),
)
XPU = Device(
    name="xpu",
    title="Kunlun card",
    backend="bkcl",
    interface_variable="BKCL_SOCKET_IFNAME",
    wheel="paddlepaddle-xpu",
    launch_flag="--xpus",
    visible_variable="XPU_VISIBLE_DEVICES",
    selected_variable="FLAGS_selected_xpus",
    device_files="xpu[0-9]*",
    has_streams=False,
)
# Plugins that Paddle's pages list; `device_files` where they are known to us.
_PLUGINS = (
    custom("npu", title="Ascend NPU", interface_variable="HCCL_SOCKET_IFNAME", device_files="davinci[0-9]*"),
    custom("mlu", title="Cambricon MLU", device_files="cambricon_dev[0-9]*"),
    custom("gcu", title="Enflame GCU"),
    custom("iluvatar_gpu", title="Iluvatar card"),
    custom("metax_gpu", title="MetaX card"),
    custom("intel_hpu", title="Intel Gaudi"),
)
DEVICES = {device.name: device for device in (CPU, GPU, XPU, *_PLUGINS)}
ACCELERATORS = tuple(device for device in DEVICES.values() if device.is_accelerator)


def of_machine() -> Device:
    """The accelerator that this machine has, by its device files and installed wheels: Paddle is not loaded."""
    rows = [row for row in ACCELERATORS if row.files()] or [row for row in ACCELERATORS if row.has_wheel()]
    return next((row for row in rows if row.has_wheel()), rows[0] if rows else GPU)


def choose(name: str) -> Device:
    """The row of that name; "auto" is the first accelerator that Paddle can use here, else the CPU."""
    known = {**DEVICES, **{kind: custom(kind) for kind in _registered() if kind not in DEVICES}}
    if name not in (AUTO, *known):
        raise WorldError(f"device must be one of {', '.join((AUTO, *known))}, got {name!r}")
    if name == AUTO:
        found = next((device for device in known.values() if device.is_accelerator and device.count()), CPU)
        if found is CPU and (unused := [device for device in known.values() if device.files()]):
            shown = ", ".join(f"{device.files()} {device.title}(s), for which {_lacks(device)}" for device in unused)
            log.say(f"device='auto' uses the CPU although this machine has {shown}")
        return found
    device = known[name]
    if not device.count():
        raise WorldError(
            f"device={name!r}, but {_lacks(device)}; use device='cpu', or 'auto' to use a card where there is one"
        )
    return device


def _lacks(device: Device) -> str:
    return f"no {device.title} is visible to Paddle" if device.has_wheel() else f"{device.wheel} is not installed"


def _registered() -> list[str]:
    """The kinds of devices for which this Paddle has loaded a plugin."""
    import paddle

    return list(paddle.device.get_all_custom_device_type() or ())


def current() -> Device:
    """The row of the device that Paddle computes on now."""
    import paddle

    name = paddle.get_device().partition(":")[0]
    return DEVICES.get(name) or custom(name)


def kept(thing: T) -> T:
    """A stream or event of Paddle's that is never released: Paddle may wait for it then, and after an error of the
    device that wait ends the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Within the block Paddle computes on the CPU: samples are the same wherever they are drawn, and a forked process
    cannot use its parent's card."""
    import paddle

    before = paddle.get_device()
    if before == CPU.name:
        yield
        return
    paddle.set_device(CPU.name)
    try:
        yield
    finally:
        paddle.set_device(before)


def select(name: str, env: Mapping[str, str] | None = None) -> Device:
    """Choose a device and make this rank's own Paddle's current one."""
    import paddle

    device = choose(name)
    paddle.set_device(device.own(os.environ if env is None else env))
    return device
