"""Which process uses a port."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

from ppfleet.cluster import hosts


def port_holder(host: str, port: int) -> str:
    """The process that listens there; "" if none does."""
    address = next(iter(hosts.resolve(host)), host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind((address, port))
            return ""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"
