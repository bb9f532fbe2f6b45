"""How a process uses its processor: threads, memory, matrix products. What the user has set in the environment stays.

Only for jobs on a CPU. The number of threads may change the order in which a library adds up, and so the last bits.
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
    """Set this process up as one of `ranks` on its host; returns what was set, for a person to read."""
    env = _environment()
    threads = _threads(env, ranks)
    paddle.base.core.set_num_threads(threads)  # Paddle's OpenMP and MKL, also after they were loaded
    return {"threads": threads, "idle": _wait_idly(env), "malloc": _keep_memory(env), "mkl": _fast_mkl(env)}


def _environment() -> dict[str, str]:
    """As this process was started with it: `import paddle` sets OMP_NUM_THREADS where nobody did."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:  # of a process that has given up its rights, say
        return dict(os.environ)
    return {name: value for name, _, value in (word.partition("=") for word in text.split("\0")) if value}


def _threads(env: dict[str, str], ranks: int) -> int:
    said = env.get("PPFLEET_THREADS", "")
    if said:
        if not said.isdecimal() or not 0 < int(said) < 1000:
            raise WorldError(f"PPFLEET_THREADS={said} is no number of threads")
        return int(said)
    said = env.get("OMP_NUM_THREADS", "").partition(",")[0]
    # Paddle's launcher hands its own 1 on, which nobody asked for; whoever wants 1 there has PPFLEET_THREADS.
    if said.isdecimal() and int(said) and not (said == "1" and was_launched()):
        return int(said)
    mine = others = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        others = os.sched_getaffinity(os.getppid())
    # A rank that was bound to cores of its own does not share them with the others that its parent started.
    return max(1, int(min(len(mine), cgroup_cores())) // (ranks if mine == others else 1))


def cgroup_cores(root: str = "/") -> float:
    """How many cores this process's control group may use: containers are limited so."""
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
    """Let OpenMP's threads spin for a millisecond between loops, not for 200: others have use for the cores."""
    if own := [name for name in ("KMP_BLOCKTIME", "OMP_WAIT_POLICY", "KMP_LIBRARY") if name in env]:
        return f"as {', '.join(own)} says"
    try:
        ctypes.CDLL(str(Path(paddle.__file__).parent / "libs" / "libiomp5.so")).kmp_set_blocktime(_SPIN)
    except (OSError, AttributeError):  # Paddle was built with another OpenMP
        return "as it was"
    return f"after {_SPIN} ms"


def _keep_memory(env: dict[str, str]) -> str:
    """Let malloc keep what a step frees: else Linux takes it back and hands it out, page by page, at every step."""
    if own := [name for name in env if name.startswith(_OWN_MALLOC)]:
        return f"as {', '.join(own)} says"
    if platform.libc_ver()[0] != "glibc":
        return "as it was"
    libc = ctypes.CDLL(None)
    # No mapping of its own for a large tensor: it would be given back. Everything comes from the heap, which stays.
    taken = [libc.mallopt(name, value) for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, (1 << 31) - 1))]
    if not all(taken):
        return "keeps some memory"
    return "keeps memory" + (", in large pages" if _large_pages(libc) else "")


def _large_pages(libc: ctypes.CDLL) -> bool:
    """Ask Linux to back the heap with pages of 2 MB, which spares the processor most look-ups of addresses.

    The heap is made to grow once, its new part marked, and handed back to malloc. Nothing of it is in use until it is
    written to.
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
    """Paddle's MKL is of 2019 and takes AVX2 on Intel's processors only, unless told; before its first product."""
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
