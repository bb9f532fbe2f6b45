"""Checks that a machine can make on its own before a launch, and what it contributes to the comparison."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from ppfleet._version import __version__
from ppfleet.cluster import hosts
from ppfleet.cluster.ports import port_holder
from ppfleet.distributed import devices

OK, WARNING, ERROR = "ok", "warning", "error"
_MIN_SHM, _MIN_FILES, _MIN_DISK = 512 << 20, 4096, 2 << 30


@dataclass(frozen=True)
class Finding:
    level: str
    check: str
    host: str
    text: str
    fix: str = ""


def local(host: str, o: Namespace) -> list[Finding]:
    """All checks that need no other machine."""
    findings = []
    for check in (_address, _name, _ports, _shared_memory, _file_limit, _disk, _proxies, _paddle, _inputs):
        findings += [Finding(level, name, host, text, fix) for level, name, text, fix in check(host, o)]
    return findings


Row = tuple[str, str, str, str]


def _address(host: str, o: Namespace) -> Iterator[Row]:
    if host:
        interface = hosts.interface_of(host)
        stats = psutil.net_if_stats().get(interface)
        yield OK, "own address", f"{host} on {interface}, MTU {stats.mtu if stats else 'unknown'}", ""


def _name(host: str, o: Namespace) -> Iterator[Row]:
    """Paddle's launcher and gloo use the address that the host's name resolves to; ppfleet launch does not."""
    addresses = hosts.resolve(platform.node())
    if not host or len(o.ips.split(",")) < 2 or set(addresses) & set(hosts.resolve(host)):
        return
    resolved = ", ".join(addresses) or "nothing"
    text = f"{platform.node()} resolves to {resolved}, not to {host}: paddle.distributed.launch would hang"
    fix = f"add the line `{host} {platform.node()}` to /etc/hosts, or start with `python -m ppfleet launch`"
    yield WARNING, "host name", text, fix


def _ports(host: str, o: Namespace) -> Iterator[Row]:
    wanted = range(o.start_port - 1, o.start_port + o.processes)
    taken = {port: holder for port in wanted if (holder := port_holder(host or "127.0.0.1", port))}
    for port, holder in taken.items():
        fix = "end that process, or choose another --start_port on all machines"
        yield ERROR, "ports", f"port {port} is in use by {holder}", fix
    if not taken:
        yield OK, "ports", f"{wanted[0]} to {wanted[-1]} are free", ""


def _shared_memory(host: str, o: Namespace) -> Iterator[Row]:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    level = OK if free >= _MIN_SHM else WARNING
    fix = "in a container: --shm-size=8g; otherwise mount -o remount,size=8g /dev/shm; or train with --workers=0"
    yield level, "/dev/shm", f"{free >> 20} MB free" + ("" if level == OK else ": loader workers need more"), fix


def _file_limit(host: str, o: Namespace) -> Iterator[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = OK if soft >= _MIN_FILES or soft == resource.RLIM_INFINITY else WARNING
    yield level, "open files", f"limit of {soft}", f"ulimit -n {min(hard, 65536)}"


def _disk(host: str, o: Namespace) -> Iterator[Row]:
    free = shutil.disk_usage(".").free
    level = OK if free >= _MIN_DISK else WARNING
    yield level, "disk", f"{free / (1 << 30):.1f} GB free in {Path.cwd()}", "free some space for checkpoints and logs"


def _proxies(host: str, o: Namespace) -> Iterator[Row]:
    proxies = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if os.environ.get(name)]
    direct = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).split(",")
    proxied = [node for node in (o.ips or "").split(",") if node and node not in direct and "*" not in direct]
    if proxies and proxied:
        text = f"{', '.join(proxies)} set, but {', '.join(proxied)} not in no_proxy: Paddle's rendezvous may fail"
        yield WARNING, "proxy", text, f"export no_proxy={','.join(filter(None, [*direct, *proxied]))}"


def _paddle(host: str, o: Namespace) -> Iterator[Row]:
    v = versions()
    if v["PaddlePaddle"] == "none":
        yield ERROR, "PaddlePaddle", "not installed for this Python", "pip install 'ppfleet[cpu]' or 'ppfleet[gpu]'"
    else:
        text = f"{v['PaddlePaddle']}, Python {v['Python']}, ppfleet {v['ppfleet']}, {v['cards']} card(s)"
        yield OK, "versions", text, ""


def _inputs(host: str, o: Namespace) -> Iterator[Row]:
    for name, path in (("--data-path", o.data_path), ("--config", o.config)):
        if path and not Path(path).exists():
            yield ERROR, "inputs", f"{name}={path} does not exist", "copy it to this machine, or correct the path"


def versions() -> dict[str, str]:
    return {
        "PaddlePaddle": _paddle_version(),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "ppfleet": __version__,
        "cards": str(devices.of_machine().files()),
    }


def facts(o: Namespace) -> dict[str, str]:
    """What must be the same on all machines, each as a short string."""
    return {
        **versions(),
        "processes": str(o.processes),
        "code": _code(Path.cwd()),
        "data": _listing(Path(o.data_path)) if o.data_path else "",
        "config": _digest(Path(o.config).read_bytes()) if o.config and Path(o.config).is_file() else "",
    }


def _paddle_version() -> str:
    for name in ("paddlepaddle-gpu", "paddlepaddle"):
        try:
            return f"{version(name)} ({'for cards' if name.endswith('gpu') else 'for CPU'})"
        except PackageNotFoundError:
            pass
    return "none"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _code(root: Path) -> str:
    """A digest of all Python files below the working directory, without environments and outputs."""
    sha = hashlib.sha256()
    for path in _files(root, {"output", "log", "build", "site-packages"}):
        if path.suffix == ".py":
            name = str(path.relative_to(root)).encode(errors="surrogateescape")
            sha.update(name + b"\0" + path.read_bytes())
    return sha.hexdigest()[:12]


def _listing(root: Path) -> str:
    """A digest of all names and sizes in a data set: quick, but blind to a changed file of the same size."""
    if not root.exists():
        return "missing"
    sha, count = hashlib.sha256(), 0
    for path in _files(root):
        sha.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode(errors="surrogateescape"))
        count += 1
    return f"{count} files, {sha.hexdigest()[:12]}"


def _files(root: Path, without: set[str] | None = None) -> Iterator[Path]:
    """All files below `root`, in order, without hidden directories and those named in `without`."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in (without or ()))
        yield from (Path(directory) / name for name in sorted(files))
