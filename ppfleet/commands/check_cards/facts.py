"""Facts about this machine, without Paddle: driver, topology, host, commit. Each is a short text."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from pathlib import Path
from typing import Any

from ppfleet._version import __version__
from ppfleet.distributed.devices import GPU

# tests/simcard is not hardware: the report says so, and its speed is measured but not judged.
SIMULATED = "sim"
SIMULATED_NOTE = "simulated card: proves the code path, not the hardware"
ROOT = Path(__file__).resolve().parents[3]  # of the clone, or where ppfleet is installed
_TOOL = "nvidia-smi"


def of_machine() -> dict[str, str]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "ppfleet": __version__,
        "commit": _commit(),
    }


def of_cards(found: dict[str, Any]) -> dict[str, str]:
    """What the probe found of the cards, as text, and what the driver's own tool says."""
    told = {
        "cards": f"{found['count']} × {found['title']}: {', '.join(dict.fromkeys(found['names']))}",
        **found["versions"],
        **found["hardware"],
        "TensorRT": found["tensorrt"] or "none",
        "paddle": f"{found['paddle']} ({found['paddle_commit'][:12]})",
    }
    if found["device"] == GPU.name:
        told["topology"] = _output([_TOOL, "topo", "-m"]) or f"unknown: {_TOOL} topo -m gave nothing"
    return told


def card_memory(device: str) -> list[int] | None:
    """MB in use on each card; None where nobody can be asked."""
    if device != GPU.name:
        return None
    text = _output([_TOOL, "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    numbers = text.split()
    return [int(number) for number in numbers] if numbers and all(map(str.isdigit, numbers)) else None


def _commit() -> str:
    if not (ROOT / ".git").exists():
        return "unknown: not a clone"
    changed = " with changes" if _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]) else ""
    return (_output(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]) or "unknown") + changed


def _output(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, errors="replace")
        return done.stdout.rstrip()
    return ""
