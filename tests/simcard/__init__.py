"""A simulated card for tests: a CustomDevice plugin of type `sim`. README.md says what it does and does not.

run(function, 2, tmp_path, env=environment(2, delay_us=1000))     # tests/harness.py

def function():
    enter_rank()                 # before Paddle is imported
    import paddle
    paddle.set_device("sim")
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def environment(cards: int = 1, **knobs: object) -> dict[str, str]:
    """The variables of a process with this many cards. A knob is named as its variable: `delay_us` is SIM_DELAY_US."""
    known = {
        "memory",
        "delay_us",
        "collective_delay_us",
        "copy_delay_us",
        "stall",
        "fail",
        "without",
        "pinned",
        "trace",
        "sync_bn",
    }
    if unknown := sorted(set(knobs) - known):
        raise TypeError(f"unknown knobs {unknown}, known are {sorted(known)}")
    from tests.simcard import build  # not above: `python -m tests.simcard.build` imports this module first

    return {
        "CUSTOM_DEVICE_ROOT": str(build.plugin()),
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": "sim",
        "SIM_CARDS": str(cards),
        **{f"SIM_{name.upper()}": str(value) for name, value in knobs.items()},
    }


def rank_environment(local_rank: int) -> dict[str, str]:
    """What Paddle's launcher sets for a rank on custom devices."""
    return {
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": "sim",
        "FLAGS_selected_sims": str(local_rank),
    }


def enter_rank() -> int:
    """Make this process the rank that PADDLE_TRAINER_ID says, before Paddle is imported; returns the rank."""
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    os.environ.update(rank_environment(rank))
    return rank


def read_trace(path: Path | str) -> list[dict[str, Any]]:
    """The events that SIM_TRACE=<path> wrote, in the order of time."""
    events = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return sorted(events, key=lambda event: float(event["time"]))
