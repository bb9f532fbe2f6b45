"""Compiles the simulated card for the Paddle of this interpreter, once.

python -m tests.simcard.build        # prints the directory for CUSTOM_DEVICE_ROOT
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fork_server import paddle_version

SOURCES = Path(__file__).resolve().parent
CACHE = SOURCES.parent.parent / "output" / "simcard"
LIBRARY = "libsimcard.so"
JOBS = 2
_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-pthread", "-w", "-fvisibility-inlines-hidden"]


def plugin(cache: Path = CACHE, sources: Path = SOURCES) -> Path:
    """The directory that `CUSTOM_DEVICE_ROOT` has to name. Compiles if no process has done so before."""
    paddle, release = _paddle()
    flags = _compile_flags(paddle, release, sources)
    target = cache / f"{release}-{_digest(sources, flags)}"
    if (target / LIBRARY).exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a process that waited here finds it done
        if not (target / LIBRARY).exists():
            _build(target, flags, _link_flags(paddle, release), sources)
    return target


def _paddle() -> tuple[Path, str]:
    """Where Paddle is and its version, without the two seconds of importing it."""
    found = importlib.util.find_spec("paddle")
    if found is None or found.origin is None:
        raise RuntimeError("the simulated card needs Paddle: it is not installed in this interpreter")
    return Path(found.origin).parent, paddle_version()


def _compile_flags(paddle: Path, release: str, sources: Path) -> list[str]:
    major = int(release.split(".")[0])
    flags = [*_FLAGS, "-DPADDLE_WITH_CUSTOM_DEVICE", "-DPADDLE_WITH_CUSTOM_KERNEL", f"-DSIM_PADDLE_MAJOR={major}"]
    if major < 3:  # its DenseTensor has a member of oneDNN
        flags += ["-DPADDLE_WITH_DNNL", f"-I{sources / 'stub26'}"]
    return [*flags, f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}"]


def _link_flags(paddle: Path, release: str) -> list[str]:
    if release.startswith("2."):
        return [str(paddle / "base" / "libpaddle.so"), f"-L{paddle / 'libs'}", "-lcommon"]
    return [f"-L{paddle / 'libs'}", "-lphi", "-lphi_core", "-lcommon"]


def _digest(sources: Path, flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted([*sources.glob("*.cc"), *sources.glob("*.h"), *sources.glob("stub26/*")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(target: Path, flags: list[str], links: list[str], sources: Path) -> None:
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix="building-"))
    try:
        units = sorted(sources.glob("*.cc"), key=lambda path: -path.stat().st_size)
        with ThreadPoolExecutor(JOBS) as pool:
            objects = list(pool.map(lambda unit: _compile(unit, work, flags), units))
        made = ["-o", str(work / LIBRARY), *map(str, objects)]
        _run(["g++", "-shared", "-Wl,--no-undefined", *made, *links, "-pthread", "-ldl", "-lrt"])
        for path in objects:
            path.unlink()
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _compile(unit: Path, work: Path, flags: Iterable[str]) -> Path:
    made = work / f"{unit.stem}.o"
    _run(["g++", *flags, "-c", str(unit), "-o", str(made)])
    return made


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            ["nice", "-n", "5", *command], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        )
    except FileNotFoundError as missing:
        raise RuntimeError(f"the simulated card needs {missing.filename} to be compiled") from None
    if done.returncode:
        shown = "\n".join(done.stderr.splitlines()[-30:])
        raise RuntimeError(f"the simulated card does not compile: {' '.join(command[-4:])}\n{shown}")


if __name__ == "__main__":
    print(plugin())
