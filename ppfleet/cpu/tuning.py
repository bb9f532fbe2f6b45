"""How a process uses the CPU: threads, memory, matrix products. Environment variables set by the user take precedence.

Only for jobs on a CPU. The number of threads may change the order of sums in a library, and so the last bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

import paddle

from ppfleet.errors import WorldError
from ppfleet.watchdog.process import was_launched

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h
_MADV_HUGEPAGE, _PAGE, _HEAP = 14, 2 << 20, 1536 << 20  # less than the largest threshold of trimming
_SPIN = 1  # milliseconds
_OWN_MALLOC = ("GLIBC_TUNABLES", "MALLOC_", "LD_PRELOAD")


def tune(ranks: int) -> dict[str, int | str]:
    """Configure this process as one of `ranks` on its host; return what was set, for the log."""
    env = _environment()
    threads = _threads(env, ranks)
    paddle.base.core.set_num_threads(threads)  # Paddle's OpenMP and MKL, also after they were loaded
    return {"threads": threads, "idle": _wait_idly(env), "malloc": _keep_memory(env), "mkl": _fast_mkl(env)}


def _environment() -> dict[str, str]:
    """The environment at the start of this process: `import paddle` sets OMP_NUM_THREADS if the user did not."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:  # as for a process that has dropped its privileges
        return dict(os.environ)
    return {name: value for name, _, value in (word.partition("=") for word in text.split("\0")) if value}


def _threads(env: dict[str, str], ranks: int) -> int:
    text = env.get("PPFLEET_THREADS", "")
    if text:
        if not text.isdecimal() or not 0 < int(text) < 1000:
            raise WorldError(f"PPFLEET_THREADS must be a positive number of threads, got {text!r}")
        return int(text)
    text = env.get("OMP_NUM_THREADS", "").partition(",")[0]
    # Paddle's launcher sets 1 by itself; to get 1 under it, set PPFLEET_THREADS.
    if text.isdecimal() and int(text) and not (text == "1" and was_launched()):
        return int(text)
    mine = others = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        others = os.sched_getaffinity(os.getppid())
    # A rank that is bound to its own cores does not share them with its parent's other processes.
    return max(1, int(min(len(mine), cgroup_cores())) // (ranks if mine == others else 1))


def cgroup_cores(root: str = "/") -> float:
    """How many cores this process's cgroup may use, which is how containers are limited."""
    base, limit = Path(root, "sys/fs/cgroup"), float("inf")
    try:
        groups = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return limit
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = base / controllers if controllers else base
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            limit = min(limit, _quota(place))
            if place == top:
                break
    return limit


def _quota(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(quota) / float(period) if quota not in ("max", "-1") else float("inf")
    except (OSError, ValueError):
        return float("inf")


def _wait_idly(env: dict[str, str]) -> str:
    """Make OpenMP's threads spin for 1 ms between loops, not 200: loading threads need the cores."""
    if own := [name for name in ("KMP_BLOCKTIME", "OMP_WAIT_POLICY", "KMP_LIBRARY") if name in env]:
        return f"as {', '.join(own)} says"
    try:
        ctypes.CDLL(str(Path(paddle.__file__).parent / "libs" / "libiomp5.so")).kmp_set_blocktime(_SPIN)
    except (OSError, AttributeError):  # Paddle was built with another OpenMP
        return "as it was"
    return f"after {_SPIN} ms"


def _keep_memory(env: dict[str, str]) -> str:
    """Make malloc keep what a step frees; otherwise Linux reclaims and maps it again, page by page, at every step."""
    if own := [name for name in env if name.startswith(_OWN_MALLOC)]:
        return f"as {', '.join(own)} says"
    if platform.libc_ver()[0] != "glibc":
        return "as it was"
    libc = ctypes.CDLL(None)
    # A large tensor must not get its own mapping, which would be returned; everything comes from the heap, which stays.
    taken = [libc.mallopt(name, value) for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, (1 << 31) - 1))]
    if not all(taken):
        return "keeps some memory"
    return "keeps memory" + (", in large pages" if _large_pages(libc) else "")


def _large_pages(libc: ctypes.CDLL) -> bool:
    """Ask Linux to back the heap with 2 MB pages, which avoids most TLB misses.

    The heap grows once, its new part is marked and returned to malloc. It uses no memory until it is written to.
    """
    libc.malloc.restype = ctypes.c_void_p
    start = libc.malloc(ctypes.c_size_t(_HEAP))
    if not start:
        return False
    first = -(-start // _PAGE) * _PAGE
    length = (start + _HEAP - first) // _PAGE * _PAGE
    marked = bool(libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE) == 0)
    libc.free(ctypes.c_void_p(start))
    return marked


def _fast_mkl(env: dict[str, str]) -> str:
    """Make MKL use AVX2 on AMD: Paddle's version, of 2019, does so on Intel only. Must precede its first product."""
    name = "MKL_DEBUG_CPU_TYPE"
    if name in env:
        return f"as {name} says"
    try:
        words = set(Path("/proc/cpuinfo").read_text().partition("\n\n")[0].split())
    except OSError:
        words = set()
    if not {"AuthenticAMD", "avx2"} <= words:
        return "as it was"
    os.environ[name] = "5"
    return "AVX2 on AMD"
