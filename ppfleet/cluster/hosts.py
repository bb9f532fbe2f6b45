"""Which of a list of hosts is this machine, and by which network interface. Pure: no Paddle."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence

from ppfleet.errors import WorldError


def addresses() -> dict[str, str]:
    """This machine's own addresses, each with its interface."""
    import psutil  # here: a list of hosts can be looked at without it

    found = {}
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found[entry.address.partition("%")[0]] = interface
    return found


def resolve(host: str) -> list[str]:
    """The addresses behind a name; an address is itself, in its usual spelling."""
    plain = host.strip("[]").partition("%")[0]
    try:
        return [str(ipaddress.ip_address(plain))]
    except ValueError:
        pass
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError):
        return []


def interface_of(host: str) -> str:
    """The interface that has that host's address; nothing where it is another machine's."""
    own = addresses()
    loopback = next((name for address, name in own.items() if ipaddress.ip_address(address).is_loopback), "lo")
    for address in resolve(host):
        if address in own:
            return own[address]
        if ipaddress.ip_address(address) in ipaddress.ip_network("127.0.0.0/8"):
            return loopback  # all of them are this machine, listed or not
    return ""


def toward(host: str) -> str:
    """This machine's address on the way to that host, as its routes say; nothing is sent."""
    for address in resolve(host):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def own(hosts: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """The one of `hosts` that is this machine: what POD_IP says, or what the interfaces show."""
    said = (os.environ if env is None else env).get("POD_IP", "")
    if said:
        same = [host for host in hosts if host == said or set(resolve(host)) & set(resolve(said))]
        if same:
            return same[0]
        raise WorldError(f"POD_IP={said} is not one of {', '.join(hosts)}")
    mine = [host for host in hosts if interface_of(host)]
    if len(mine) == 1:
        _check_reachable(mine[0], hosts)
        return mine[0]
    if mine:
        raise WorldError(
            f"{' and '.join(mine)} are both this machine: set POD_IP to the one to use, such as POD_IP={mine[0]}"
        )
    shown = ", ".join(address for address in addresses() if not ipaddress.ip_address(address).is_loopback)
    raise WorldError(
        f"none of {', '.join(hosts)} is an address of this machine, which has {shown or 'loopback alone'}: "
        f"correct the list, or set POD_IP=<its address in the list>"
    )


def _check_reachable(host: str, all_hosts: Sequence[str]) -> None:
    """Refuse a name that resolves to loopback, as Debian's installer sets it up: other machines cannot use it."""
    found = resolve(host)
    if len(all_hosts) > 1 and found != [host.strip("[]")] and all(ipaddress.ip_address(a).is_loopback for a in found):
        shown = ", ".join(address for address in addresses() if not ipaddress.ip_address(address).is_loopback)
        raise WorldError(
            f"{host} is {found[0]} on this machine, where no other can reach it: list its address ({shown}), "
            f"or correct /etc/hosts"
        )


def is_host(text: str) -> bool:
    """An address of either kind, or a name; a number with dots that is no address is neither."""
    try:
        ipaddress.ip_address(text.strip("[]").partition("%")[0])
        return True
    except ValueError:
        return re.fullmatch(r"[A-Za-z_](?:[\w.-]*\w)?", text, re.ASCII) is not None


DEFAULT_PORT = 6070  # where Paddle's launcher begins; hosts meet one below the first port of the trainers


def start_port(env: Mapping[str, str]) -> int:
    """The first of the trainers' ports: as the environment says, else 0."""
    for name in ("PADDLE_START_PORT", "FLAGS_START_PORT"):
        if text := env.get(name, ""):
            if not re.fullmatch("[0-9]{1,5}", text) or not 1024 < int(text) < 65000:
                raise WorldError(f"{name} must be a port from 1025 to 64999, got {text!r}")
            return int(text)
    return 0
