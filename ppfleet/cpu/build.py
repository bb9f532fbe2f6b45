"""Compile the operators on first use, once per machine and Paddle version, and load them."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import inspect
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paddle
from paddle.base import core

from ppfleet import foreign, log
from ppfleet.errors import FleetError

SOURCES = ("kernels_avx2.cc", "kernels_portable.cc", "operators.cc")
_HERE = Path(__file__).parent
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wno-psabi", "-fno-tree-loop-distribute-patterns"]
_SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer"]


@functools.lru_cache(None)
def load() -> str | None:
    """Register the operators with Paddle; None, or the reason why that is not possible."""
    try:
        library = built()
        core.load_op_meta_info_and_register_op(str(library))
        ctypes.CDLL(str(library)).ppfleet_ask(_question)
    except (OSError, FleetError, RuntimeError) as failure:
        return str(failure)
    return None


_GRAD = inspect.unwrap(paddle.grad).__code__


def _has_create_graph() -> bool:
    """Whether the gradient that runs now was started by `paddle.grad(..., create_graph=True)`, the only one to say so.

    Paddle does not tell operators, but it runs them in the thread, and so below the frame, that asked for gradients.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _GRAD:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["create_graph"])


_question = ctypes.CFUNCTYPE(ctypes.c_bool)(_has_create_graph)  # lives as long as the operators that ask


def is_loaded() -> bool:
    """Whether the operators have been loaded."""
    return load.cache_info().currsize > 0 and load() is None


def _flags() -> list[str]:
    """Compiler flags; PPFLEET_SANITIZE=address adds AddressSanitizer, whose library must be preloaded."""
    sanitizer = os.environ.get("PPFLEET_SANITIZE")
    return [*_FLAGS, *_SANITIZED, f"-fsanitize={sanitizer}"] if sanitizer else _FLAGS


def built() -> Path:
    """The compiled library; compiles it if it is not cached."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise FleetError(f"not available for {platform.machine()}")
    libraries = _libraries()
    facts = [paddle.__version__, paddle.version.commit, *_flags(), *map(str, libraries), *platform.libc_ver()]
    contents = [path.read_bytes() for path in sorted(_HERE.iterdir()) if path.suffix in (".cc", ".h", ".inc")]
    key = hashlib.sha256(b"\0".join([*contents, *(fact.encode() for fact in facts)])).hexdigest()[:16]
    cache = Path(os.environ.get("PPFLEET_CACHE") or Path.home() / ".cache" / "ppfleet")
    target = cache / f"operators-{key}.so"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FleetError("no C++ compiler was found (Debian: apt-get install g++)")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"operators-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a host arrive at the same time, and one compiles
        if not target.exists():
            log.say(f"compiling ppfleet's CPU operators for Paddle {paddle.__version__}: once, about 20 s")
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _compile(compiler, libraries, Path(scratch)).replace(target)
    return target


def _libraries() -> list[Path]:
    """Libraries to link with. OpenMP is Paddle's own: threads of a second one would compete for the cores."""
    root = Path(paddle.__file__).parent
    needed = [root / "libs" / "libiomp5.so", root / "libs" / "libmklml_intel.so"]
    missing = [path.name for path in needed if not path.exists()]
    if missing:
        raise FleetError(f"this build of Paddle lacks {' and '.join(missing)}")
    paddles = [root / "base" / "libpaddle.so", *(root / "libs" / f"lib{n}.so" for n in ("phi", "phi_core", "common"))]
    return [*needed, *(path for path in paddles if path.exists())]


def _compile(compiler: str, libraries: list[Path], scratch: Path) -> Path:
    include = Path(paddle.sysconfig.get_include())
    objects = [scratch / f"{source}.o" for source in SOURCES]

    def run(*command: str | Path) -> None:
        done = subprocess.run([compiler, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise FleetError(f"{compiler} failed: {foreign.telling_line(done.stderr) or 'no reason given'}")

    def compile_one(source: str, into: Path) -> None:
        run(*_flags(), f"-I{include}", f"-I{include / 'third_party'}", "-c", _HERE / source, "-o", into)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, SOURCES, objects))
    sanitizers = [flag for flag in _flags() if flag.startswith("-fsanitize=")]
    run(
        "-shared",
        *sanitizers,
        "-o",
        scratch / "operators.so",
        *objects,
        *libraries,
        f"-Wl,-rpath,{libraries[0].parent}",
    )
    return scratch / "operators.so"
