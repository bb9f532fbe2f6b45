"""What is checked, and how a result looks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASS, FAIL, NOT_RUN = "pass", "fail", "not run"
AMP = (("O0", ""), ("O1", "float16"), ("O1", "bfloat16"), ("O2", "float16"), ("O2", "bfloat16"))
FAULTS = {
    "stall": "a rank that stalls",
    "exit": "a rank that exits",
    "raise": "a rank that raises an exception",
    "kill": "a rank that is killed (SIGKILL)",
}


@dataclass(frozen=True)
class Item:
    key: str  # stable, for programs
    title: str
    checks: str  # what is run and compared


@dataclass(frozen=True)
class Result:
    """What was found, in a sentence, and what to do about it."""

    status: str
    sentence: str
    fix: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    log: str = ""


def passed(sentence: str, **figures: Any) -> Result:
    return Result(PASS, sentence, figures=figures)


def failed(sentence: str, fix: str, log: Path | str = "", **figures: Any) -> Result:
    return Result(FAIL, sentence, fix, figures, str(log))


def not_run(sentence: str, fix: str = "", **figures: Any) -> Result:
    return Result(NOT_RUN, sentence, fix, figures)


def amp_key(level: str, dtype: str) -> str:
    return f"resume_{level}_{dtype}" if dtype else f"resume_{level}"


ITEMS = (
    Item("facts", "Facts", "device, driver, CUDA, cuDNN and NCCL versions, topology, Paddle, ppfleet, host"),
    Item("two_machines", "Two machines", "gradients of one card against all cards of all machines (--ips)"),
    Item("batch_norm", "SyncBatchNorm", "BatchNorm uses the global batch: 1 card and N cards agree"),
    Item("gradients", "Gradients", "1 card and N cards agree within 1e-4, TF32 off, under Paddle's launcher"),
    Item("accumulation", "Accumulation", "2 batches per optimizer step: 1 card and N cards agree"),
    Item("unused", "Unused parameter", "a parameter that is never used: trains, and stays as it was"),
    Item("branch", "Branch", "every second card uses more layers (find_unused=True): as one card that does both"),
    *(
        Item(amp_key(level, dtype), f"{level} {dtype}".strip() + ", resume",
             "trains; kill -9 and resume ends with the SHA-256 of an undisturbed run")  # fmt: skip
        for level, dtype in AMP
    ),
    *(
        Item(f"fault_{kind}", f"Fault: {kind}",
             f"{title}: all ranks end in time, the sentence names it, no card memory is left")  # fmt: skip
        for kind, title in FAULTS.items()
    ),
    Item("export", "Export", "N cards train and export; the static model answers as the dynamic one"),
    Item("inference", "Inference", "deploy/inference_python/infer.py on the card answers as on the CPU"),
    Item("tensorrt", "TensorRT", "the same with TensorRT"),
    Item("speed", "Speed", "images/s of Job against a plain DataParallel loop, side by side"),
)  # fmt: skip
