"""The results of a benchmark in the format that TIPC's parsers read, and as plain data."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from backends import Backend

_DASHES = {"Env": (22, 22), "Paddle": (22, 22), "Conf": (23, 23), "Model": (23, 22), "Data": (23, 23), "Perf": (23, 23)}


class Benchmark:
    """Collects the times of each batch (after warm-up), then reports their means over batches.

    The times of a batch's preprocessing and inference count in full, even if they overlapped with other batches;
    images/s is measured by wall-clock time.
    """

    def __init__(self, options: argparse.Namespace, backend: Backend, stamp: dict[str, Any], shape: list[int]) -> None:
        self.options, self.backend, self.stamp, self.shape = options, backend, stamp, shape
        self.images = 0
        self.wall = 0.0
        self.times: list[tuple[float, float, float]] = []
        self.card: dict[str, str] = {}

    def add(self, images: int, preprocess: float, infer: float, postprocess: float) -> None:
        self.images += images
        self.times.append((preprocess, infer, postprocess))
        if self.options.use_gpu and len(self.times) == 1:
            self.card = nvidia_smi("driver_version", "memory.used", "utilization.gpu")

    def report(self) -> dict[str, dict[str, Any]]:
        """Print the block and return the same values as data."""
        facts = self.facts()
        _line("\n")
        for section, (left, right) in _DASHES.items():
            _line(f"{'-' * left} {section} info {'-' * right}")
            if section != "Perf":
                for name, value in facts[section].items():
                    _line(f" {name}: {value}")
        perf, more = facts["Perf"], facts["More"]
        _line(" cpu_rss(MB): {cpu_rss_mb}, gpu_rss(MB): {gpu_rss_mb}, gpu_util: {gpu_util}%".format(**perf))
        _line(f" total time spent(s): {perf['total_time_s']}")
        _line(
            " preprocess_time(ms): {preprocess_time_ms}, inference_time(ms): {inference_time_ms}, "
            "postprocess_time(ms): {postprocess_time_ms}".format(**perf)
        )
        _line(" inference_time(ms) p50: {p50}, p90: {p90}, p99: {p99}".format(**more["inference_ms"]))
        _line(" whole_batch_time(ms) p50: {p50}, p90: {p90}, p99: {p99}".format(**more["batch_ms"]))
        _line(f" images/s: {more['images_per_s']} (inference alone: {more['inference_images_per_s']})")
        _line(" backend: {name} {version}, threads: {threads}, workers: {workers}".format(**more["backend"]))
        return facts

    def facts(self) -> dict[str, dict[str, Any]]:
        times = np.array(self.times)
        whole = times.sum(1)
        paddle = sys.modules.get("paddle")  # not imported by other backends: then the version that exported the model
        cuda = paddle is not None and paddle.is_compiled_with_cuda()
        o = self.options
        return {
            "Env": {
                "OS_version": os_version(),
                "CUDA_version": paddle.version.cuda() if paddle and cuda else None,
                "CUDNN_version": paddle.version.cudnn() if paddle and cuda else None,
                "drivier_version": self.card.get("driver_version"),
            },
            "Paddle": {
                "paddle_version": paddle.__version__ if paddle else self.stamp.get("paddle"),
                "paddle_commit": paddle.version.commit if paddle else self.stamp.get("paddle_commit"),
                "log_api_version": "1.0",
            },
            "Conf": self.backend.conf(o),
            "Model": {"model_name": self.stamp.get("model", "unknown"), "precision": o.precision},
            "Data": {"batch_size": o.batch_size, "input_shape": self.shape, "data_num": self.images},
            "Perf": {
                "cpu_rss_mb": round(peak_memory_mb(), 3),
                "gpu_rss_mb": self.card.get("memory.used"),
                "gpu_util": self.card.get("utilization.gpu"),
                "total_time_s": round(float(times.sum()), 4),
                **{
                    f"{name}_time_ms": round(float(seconds) * 1000, 4)
                    for name, seconds in zip(("preprocess", "inference", "postprocess"), times.mean(0))
                },
            },
            "More": {
                "inference_ms": percentiles(times[:, 1]),
                "batch_ms": percentiles(whole),
                "images_per_s": round(self.images / self.wall, 2),
                "inference_images_per_s": round(self.images / float(times[:, 1].sum()), 2),
                "wall_s": round(self.wall, 4),
                "backend": self.backend.facts(o),
                "batches": len(times),
                "warmup": o.warmup,
            },
        }


def _line(text: str) -> None:
    print(f"[{time.strftime('%Y/%m/%d %H:%M:%S')}] infer INFO: {text}", flush=True)


def percentiles(seconds: np.ndarray[Any, Any]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(seconds, p)) * 1000, 4) for p in (50, 90, 99)}


def os_version() -> str:
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.platform()
    facts = dict(line.split("=", 1) for line in lines if "=" in line)
    return facts.get("PRETTY_NAME", platform.platform()).strip('"')


def peak_memory_mb() -> float:
    """The peak memory of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def nvidia_smi(*questions: str) -> dict[str, str]:
    """Values from nvidia-smi for the first visible card, including other processes on it; {} without a card, or if the
    tool hangs."""
    if not shutil.which("nvidia-smi"):
        return {}
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", "-i", card, f"--query-gpu={','.join(questions)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(questions, (value.strip() for value in answer.strip().split(","))))
