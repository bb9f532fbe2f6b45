"""Two hosts on one machine: network namespaces joined by a veth pair, each with a host name and hosts file of its own.

Needs root and iproute2 (`make debian-packages`); `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("192.168.0.1", "192.168.0.2")


def missing() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "needs iproute2: make debian-packages"
    probe = subprocess.run(["ip", "netns", "add", f"pf{os.getpid()}probe"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", f"pf{os.getpid()}probe"], capture_output=True, check=False)
    return f"this machine makes no network namespaces: {probe.stderr.strip()}" if probe.returncode else ""


@contextlib.contextmanager
def two_hosts(own_name: str = "127.0.1.1") -> Iterator[list[list[str]]]:
    """The words to put before a command so that it runs on the first and on the second host.

    `own_name` is what a host's own name stands for: as Debian has it (which misleads Paddle's launcher), "" for nothing
    at all, or "right" for its address.
    """
    names = [f"pf{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            hosts = Path(f"/etc/netns/{name}/hosts")
            hosts.parent.mkdir(parents=True)
            stands_for = address if own_name == "right" else own_name
            hosts.write_text("127.0.0.1 localhost\n" + (f"{stands_for} {name}\n" if stands_for else ""))
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                _ip("-n", name, "link", "set", device, "up")
        named = 'hostname {} && exec "$@"'
        yield [["ip", "netns", "exec", n, "unshare", "-u", "sh", "-c", named.format(n), "sh"] for n in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


@contextlib.contextmanager
def cut(before: list[list[str]]) -> Iterator[None]:
    """The link between the two hosts is down."""
    name = before[1][3]
    _ip("-n", name, "link", "set", name, "down")
    try:
        yield
    finally:
        _ip("-n", name, "link", "set", name, "up")


@contextlib.contextmanager
def capped(before: list[list[str]], mbit: float) -> Iterator[None]:
    """The link between the two hosts carries so much in each direction."""
    limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
    for words in before:
        command = [*words[:4], "tc", "qdisc", "add", "dev", words[3], *limit]
        subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        for words in before:
            subprocess.run([*words[:4], "tc", "qdisc", "del", "dev", words[3], "root"], check=True, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
