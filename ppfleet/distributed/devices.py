"""The devices that a job can run on: one row each. Nobody else asks "is it CUDA?".

To support another device, add a row. Paddle is imported only where it is needed, so that the launcher can read the
table without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from ppfleet.errors import WorldError

AUTO = "auto"


@dataclass(frozen=True)
class Device:
    """What must be known of a kind of device to train on it."""

    name: str  # as in Job(device="gpu") and paddle.set_device("gpu:0")
    title: str  # in messages
    backend: str  # of Paddle's process group
    interface_variable: str  # where that backend reads the network interface from
    wheel: str  # the PaddlePaddle that can use it
    is_accelerator: bool = True
    launch_flag: str = ""  # of Paddle's launcher, for the cards to use
    visible_variable: str = ""  # which cards a process sees
    selected_variable: str = ""  # which one Paddle's launcher gave to this rank
    device_files: str = ""  # in /dev, one a card: counts them without loading anything
    has_autocast: bool = True
    has_sync_batch_norm: bool = True
    # Whether Paddle's own reducer exchanges gradients during backward(). Where a failure of the backend in there ends
    # the process (gloo), ppfleet exchanges them itself, afterwards.
    overlaps_exchange: bool = True
    cannot_sum: tuple[str, ...] = ()  # dtypes that its backend returns wrong, or dies of

    def count(self) -> int:
        """How many of them this Paddle can use here."""
        import paddle

        if self.name == CPU.name:
            return 1
        if self.name == GPU.name:
            return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0
        return sum(card.partition(":")[0] == self.name for card in paddle.device.get_available_custom_device())

    def files(self) -> int:
        """How many of them Linux shows."""
        return len(list(Path("/dev").glob(self.device_files))) if self.device_files else 0

    def has_wheel(self) -> bool:
        """Whether the installed PaddlePaddle is the one for it, without loading it."""
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

    def generators(self) -> list[Any]:
        """Paddle's random generators of a process that runs on it."""
        import paddle

        core = paddle.framework.core
        found = [core.default_cpu_generator()]
        if self.name == GPU.name:
            number = int(paddle.get_device().partition(":")[2])
            found.append(core.default_cuda_generator(number))
        return found


CPU = Device(
    name="cpu",
    title="CPU",
    backend="gloo",
    interface_variable="GLOO_SOCKET_IFNAME",
    wheel="paddlepaddle",
    is_accelerator=False,
    has_autocast=False,
    has_sync_batch_norm=False,
    overlaps_exchange=False,
    cannot_sum=("float16", "int16", "complex64", "complex128"),  # float16 comes back as inf, the others end the process
)
GPU = Device(
    name="gpu",
    title="NVIDIA card",
    backend="nccl",
    interface_variable="NCCL_SOCKET_IFNAME",
    wheel="paddlepaddle-gpu",
    launch_flag="--gpus",
    visible_variable="CUDA_VISIBLE_DEVICES",
    selected_variable="FLAGS_selected_gpus",
    device_files="nvidia[0-9]*",
)
DEVICES = {device.name: device for device in (CPU, GPU)}
ACCELERATORS = tuple(device for device in DEVICES.values() if device.is_accelerator)


def choose(name: str) -> Device:
    """The row of that name; "auto" is the first accelerator that Paddle can use here, else the CPU."""
    if name not in (AUTO, *DEVICES):
        raise WorldError(f"device must be one of {', '.join((AUTO, *DEVICES))}, got {name!r}")
    if name == AUTO:
        return next((device for device in ACCELERATORS if device.count()), CPU)
    device = DEVICES[name]
    if not device.count():
        why = f"no {device.title} is visible" if device.has_wheel() else f"{device.wheel} is not installed"
        raise WorldError(f"device={name!r}, but {why}; use device='cpu', or 'auto' to use a card where there is one")
    return device


def current() -> Device:
    """The row of the device that Paddle computes on now."""
    import paddle

    return DEVICES[paddle.get_device().partition(":")[0]]


def select(name: str, env: Mapping[str, str] | None = None) -> Device:
    """Choose a device and make this rank's own Paddle's current one."""
    import paddle

    device = choose(name)
    paddle.set_device(device.own(os.environ if env is None else env))
    return device
