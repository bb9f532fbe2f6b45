"""What one process of a check does. Started by ranks.py, or by a launcher, as a user's script would be:

    python probe.py '{"task": "train", "device": "gpu", "out": "output/check-cards/…", …}'

It uses ppfleet as scripts do, and writes what it found to <out>/rank<N>.json. The command itself never loads Paddle: it
would hold a card, and could not be killed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

TASKS = ("train", "branch", "export", "speed")


def main(task: dict[str, Any]) -> None:
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    out = Path(task["out"])
    out.mkdir(parents=True, exist_ok=True)
    try:
        told = facts(task["device"]) if task["task"] == "facts" else _work(task)
    except Exception as failure:
        _write(out / f"rank{rank}.json", {"error": type(failure).__name__, "text": str(failure)})
        raise  # uncaught, as in a user's script: the watchdog tells the other ranks
    _write(out / f"rank{rank}.json", told)


def _work(task: dict[str, Any]) -> dict[str, Any]:
    workload = importlib.import_module("ppfleet.commands.check_cards.workload")  # loads Paddle
    if task["task"] not in TASKS:
        raise ValueError(f"unknown task {task['task']!r}")
    told: dict[str, Any] = getattr(workload, task["task"])(task)
    return told


def facts(name: str) -> dict[str, Any]:
    """The device that `name` stands for here, and what computes on it."""
    import paddle

    from ppfleet.distributed import devices
    from ppfleet.errors import WorldError

    about = {"paddle": str(paddle.__version__), "paddle_commit": str(getattr(paddle.version, "commit", ""))}
    try:
        row = devices.choose(name)
    except WorldError as failure:
        return {**about, "device": "", "reason": str(failure)}
    if not row.is_accelerator:
        return {**about, "device": "", "reason": f"--device={name} is the {row.title} here, and no card"}
    count = row.count()
    return {
        **about,
        "device": row.name,
        "title": row.title,
        "count": count,
        "names": _names(row.name, count),
        "versions": row.versions(),
        "hardware": row.hardware(),
        "tensorrt": _tensorrt(),
    }


def _names(device: str, count: int) -> list[str]:
    import paddle

    if device == "gpu":
        return [str(paddle.device.cuda.get_device_name(number)) for number in range(count)]
    return [f"{device}:{number}" for number in range(count)]


def _tensorrt() -> str:
    """The version that this Paddle was built with and finds here; "" without one."""
    from paddle import inference

    versions = [
        getattr(inference, name, lambda: (0,))() for name in ("get_trt_compile_version", "get_trt_runtime_version")
    ]
    return ".".join(map(str, versions[1])) if all(any(version) for version in versions) else ""


def _write(path: Path, told: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(told), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])  # not this folder, whose names are ours alone
    main(json.loads(sys.argv[1]))
