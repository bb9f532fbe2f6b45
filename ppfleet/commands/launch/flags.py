"""Translates every launch flag of Paddle's documents, old and new, for the current launcher. Pure: starts nothing.

    launch = translate(["--ips=192.168.0.1,192.168.0.2", "--gpus=0,1", "train.py", "--epochs=1"], machine)

A flag that cannot work is refused with the reason, instead of being ignored, taken for the script, or hanging the job.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable

from ppfleet import limits
from ppfleet.cli import Parser, number
from ppfleet.cluster import hosts
from ppfleet.cluster.rendezvous import UNKNOWN
from ppfleet.distributed.devices import CPU, GPU, Device
from ppfleet.errors import WorldError

# Environment variables that would silently override the flags.
OVERRIDES = (
    "PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_IPS", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_RANK",
    "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT", "PADDLE_NPROC_PER_NODE", "PADDLE_DEVICES", "PADDLE_LOG_DIR",
    "PADDLE_START_PORT", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_SIZE",
    "POD_IP",
)  # fmt: skip
_ELASTIC = "Paddle's elastic mode with etcd: start it with paddle.distributed.launch, as docs/clusters.md shows"
SERVERS = ("server_num", "worker_num", "servers", "workers", "http_port")
_HETEROGENEOUS = (
    "heterogeneous workers are not supported: PaddlePaddle 2.6 stops at the documented command and asks for "
    "heter_devices, and the 3.x CPU wheels have no parameter server; use --worker_num or --workers"
)
_TRAINERS = "Paddle's launcher never ends a parameter-server job started with it; use --worker_num or --workers"
REFUSED = {
    "heter_worker_num": _HETEROGENEOUS, "heter_workers": _HETEROGENEOUS, "heter_devices": _HETEROGENEOUS,
    "trainer_num": _TRAINERS, "trainers": _TRAINERS,
}  # fmt: skip
_ENDPOINT = {"servers": re.compile(r"[^\s:]+:[1-9][0-9]{0,4}"), "workers": re.compile(r"[^\s:]+(:[1-9][0-9]{0,4})?")}


@dataclass(frozen=True)
class Machine:
    """What the translation must know about this machine and its Paddle."""

    cards: int = 0  # as the driver reports them
    built: bool = False  # whether this Paddle can use them
    env: Mapping[str, str] = field(default_factory=dict)
    own: Callable[[Sequence[str], Mapping[str, str]], str] = hosts.own
    interface_of: Callable[[str], str] = hosts.interface_of
    toward: Callable[[str], str] = hosts.toward
    accelerator: Device = GPU


@dataclass(frozen=True)
class Launch:
    """What to start: Paddle's launcher with these arguments and these changes to the environment."""

    arguments: tuple[str, ...]
    script: tuple[str, ...]
    env: dict[str, str]
    without: tuple[str, ...]  # variables to remove from the environment
    nodes: tuple[str, ...]  # all hosts, rank 0's first; UNKNOWN where --nnodes only counts them; empty: this host alone
    host: str  # this host's name in `nodes`; empty: not the first one, with --nnodes
    ports: tuple[int, ...]  # on which this host's trainers will listen
    meeting_port: int
    log_dir: str
    notes: tuple[str, ...]
    restarts: int
    wait: float
    dry_run: bool
    workers: tuple[str, ...] = ()  # parameter servers: the host of each worker; empty: collective training

    def command(self) -> list[str]:
        return [sys.executable, "-m", "paddle.distributed.launch", *self.arguments, *self.script]

    def text(self) -> str:
        """The command, ready to paste into a shell."""
        without = [f"-u {name}" for name in self.without]
        changes = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        prefix = ["env", *without, *changes] if without else changes
        return " ".join([*prefix, *map(shlex.quote, self.command())])


def add_machine_flags(parser: Parser, wait: float, lowest_port: int = 1025) -> None:
    """The flags that launch, doctor and scale share: which machines, and how long to wait for them."""
    add = parser.add_argument
    add("--ips", "--cluster_node_ips", metavar="A,B", help="all machines, rank 0's first")
    add("--host", "--node_ip", metavar="A",
        help="this machine's address in --ips (default: the one that a network interface has)")  # fmt: skip
    add("--start_port", "--started_port", type=number(int, lowest_port, 64999), metavar="P",
        help="the first of the trainers' ports (default: FLAGS_START_PORT, else 6070)")  # fmt: skip
    add("--wait", type=number(float, 1), default=wait, metavar="SECONDS", help="how long to wait for other machines")


def add_process_flags(parser: Parser) -> None:
    """The flags that launch and doctor share: how many processes on each machine."""
    add = parser.add_argument
    add(
        "--gpus",
        "--devices",
        "--xpus",
        "--npus",
        "--selected_gpus",
        metavar="0,1",
        help="the cards to use, one process for each",
    )
    add("--nproc_per_node", type=number(int, 1, 1024), metavar="N", help="processes on each machine, without cards")


def host_list(ips: str | None) -> tuple[str, ...]:
    """The hosts of --ips, checked."""
    nodes = tuple(ips.split(",")) if ips is not None else ()
    for node in nodes:
        if not hosts.is_host(node):
            raise WorldError(f"--ips must list addresses or host names as A,B without spaces, got {node!r} in {ips!r}")
    if len(set(nodes)) < len(nodes):
        raise WorldError(f"--ips={ips} lists a machine twice")
    return nodes


def card_list(gpus: str | None) -> list[str]:
    """The cards of --gpus, checked."""
    cards = gpus.split(",") if gpus is not None else []
    if not all(re.fullmatch("0|[1-9][0-9]{0,3}", card) for card in cards) or len(set(cards)) < len(cards):
        raise WorldError(f"--gpus must list different cards such as 0,1, got {gpus!r}")
    return cards


def parser() -> Parser:
    made = Parser(
        "Start a training script on this machine, or on several, with Paddle's launcher.\n\n"
        "python -m ppfleet launch --nproc_per_node 2 tools/train.py --device=cpu\n"
        "python -m ppfleet launch --ips=192.168.0.1,192.168.0.2 --gpus=0,1 tools/train.py   (on each machine)\n",
        "python -m ppfleet launch",
    )
    add = made.add_argument
    add_machine_flags(made, wait=limits.MACHINES)
    add_process_flags(made)
    add("--master", metavar="A:P", help="where the machines meet, when --nnodes counts them; instead of --ips")
    add("--nnodes", metavar="N", help="number of machines, for --master")
    add("--log_dir", default="log", metavar="DIR", help="directory for each trainer's workerlog.N")
    add("--job_id", help="a name for the job")
    add("--use_paddlecloud", action="store_true", help="accepted, but has no effect in current Paddle")
    for name in (*SERVERS, *REFUSED):
        add(f"--{name}", help=argparse.SUPPRESS)
    add("--restarts", type=number(int, 0, 1000), default=0, metavar="N",
        help="restart a failed job on all machines at most N times; the script resumes")  # fmt: skip
    add("--dry-run", action="store_true", help="print the final command and start nothing")
    add("script", help="the training script, followed by its own arguments")
    add("arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's arguments")
    return made


def translate(arguments: Sequence[str], machine: Machine) -> Launch:
    """The launch that those arguments describe; a wrong one ends the process with exit code 2 and one line."""
    made = parser()
    o = made.parse_args(list(arguments))
    given = {name: getattr(o, name) for name in SERVERS if getattr(o, name) is not None}
    for name, why in REFUSED.items():
        if getattr(o, name) is not None:
            made.error(f"--{name}: {why}")
    try:
        return _Translation(o, machine).servers(given) if given else _Translation(o, machine).collective()
    except WorldError as failure:
        made.error(str(failure))


class _Translation:
    def __init__(self, o: argparse.Namespace, machine: Machine) -> None:
        self.o, self.machine = o, machine
        self.notes: list[str] = []
        self.env: dict[str, str] = {}
        if o.use_paddlecloud:
            self.notes.append("--use_paddlecloud has no effect: --ips lists the machines")

    def collective(self) -> Launch:
        o = self.o
        nodes = host_list(o.ips)
        if nodes and o.master:
            raise WorldError("--ips lists all machines, --master only where they meet: give one of them, not both")
        devices = self._devices()
        port = self._start_port()
        host = self._host(nodes)
        arguments = [f"--ips={','.join(nodes)}", f"--host={host}"] if nodes else []
        arguments += self._master()
        count = len(devices) or o.nproc_per_node or (1 if not self.machine.built else 0)
        if devices:
            arguments.append(f"{self.machine.accelerator.launch_flag}={','.join(devices)}")
            self._without_cards(devices)
        elif count:
            arguments.append(f"--nproc_per_node={count}")
        if nodes:
            arguments.append(f"--start_port={port}")
            if len(nodes) > 1:
                self._interfaces(host)
        arguments.append(f"--log_dir={o.log_dir}")
        arguments += [f"--job_id={o.job_id}"] if o.job_id else []
        ports = tuple(range(port, port + max(1, count))) if nodes else ()
        if o.master:
            first, _, text = o.master.rpartition(":")
            nodes, port = (first, *[UNKNOWN] * (int(o.nnodes) - 1)), int(text)
            host = first if self.machine.interface_of(first) else ""
            if int(o.nnodes) > 1:
                self._interfaces(host or o.host or self.machine.toward(first))
        return self._launch(arguments, nodes, host, ports, port - 1)

    def servers(self, given: dict[str, str]) -> Launch:
        """Parameter servers: after a check, their flags are passed on to Paddle unchanged."""
        if self.o.ips or self.o.master:
            raise WorldError("--ips and --master are for collective training; a parameter-server job uses --servers")
        for name, value in given.items():
            if name.endswith(("_num", "_port")):
                if not re.fullmatch("[1-9][0-9]{0,4}", value):
                    raise WorldError(f"--{name} must be a number, got {value!r}")
            elif not all(_ENDPOINT[name].fullmatch(part) for part in value.split(",")):
                raise WorldError(f"--{name} must be a list address:port,address:port, got {value!r}")
        if set(given) - {"http_port"} not in ({"server_num", "worker_num"}, {"servers", "workers"}):
            raise WorldError(
                "a parameter-server job needs --server_num and --worker_num (this machine alone), or --servers and "
                "--workers (all machines that they list)"
            )
        arguments = [f"--{name}={value}" for name, value in given.items()] + [f"--log_dir={self.o.log_dir}"]
        if "worker_num" in given:
            return self._launch(arguments, (), "", (), 0, ("",) * int(given["worker_num"]))
        servers = [part.rpartition(":") for part in given["servers"].split(",")]
        workers = tuple(part.partition(":")[0] for part in given["workers"].split(","))
        nodes = tuple(dict.fromkeys([*(address for address, _, _ in servers), *workers]))
        host = self._host(nodes)
        self.env["POD_IP"] = host  # otherwise Paddle uses the address that the host's name resolves to
        ports = tuple(int(port) for address, _, port in servers if address == host)
        lowest = min(int(port) for _, _, port in servers)
        return self._launch(arguments, nodes if len(nodes) > 1 else (), host, ports, lowest - 1, workers)

    def _launch(
        self,
        arguments: list[str],
        nodes: tuple[str, ...],
        host: str,
        ports: tuple[int, ...],
        meeting_port: int,
        workers: tuple[str, ...] = (),
    ) -> Launch:
        o = self.o
        by_flags = nodes or o.master or not any(name in self.machine.env for name in ("PADDLE_MASTER", "PADDLE_IPS"))
        without = [name for name in OVERRIDES if name in self.machine.env] if by_flags else []
        for name in without:
            if name not in ("POD_IP", "PADDLE_START_PORT"):
                self.notes.append(f"ignoring {name}={self.machine.env[name]} from the environment: the flags decide")
        visible = self.machine.accelerator.visible_variable
        if self.machine.env.get(visible) == "" and visible not in self.env:
            without.append(visible)  # an empty value makes Paddle's launcher fail
        return Launch(
            tuple(arguments), (o.script, *o.arguments), self.env, tuple(without), nodes, host, ports, meeting_port,
            o.log_dir, tuple(self.notes), o.restarts, o.wait, o.dry_run, workers,
        )  # fmt: skip

    def _host(self, nodes: tuple[str, ...]) -> str:
        if not nodes:
            return self.o.host or ""
        if self.o.host:
            if self.o.host not in nodes:
                raise WorldError(f"--host={self.o.host} is not one of {','.join(nodes)}")
            if not self.machine.interface_of(self.o.host):
                raise WorldError(f"--host={self.o.host} is not an address of this machine")
            return str(self.o.host)
        return self.machine.own(nodes, self.machine.env)

    def _devices(self) -> list[str]:
        devices = card_list(self.o.gpus)
        if not devices:
            return []
        if self.o.nproc_per_node not in (None, len(devices)):
            raise WorldError(
                f"--gpus={self.o.gpus} starts {len(devices)} processes, but --nproc_per_node={self.o.nproc_per_node}"
            )
        if not (self.machine.built and self.machine.cards):
            return devices
        devices = self._visible(devices)
        if max(map(int, devices)) >= self.machine.cards:
            raise WorldError(f"--gpus={self.o.gpus}, but this machine has {self.machine.cards} cards, numbered from 0")
        return devices

    def _visible(self, devices: list[str]) -> list[str]:
        """As numbers of the machine's cards, which Paddle's launcher looks up in the list of visible ones."""
        name = self.machine.accelerator.visible_variable
        visible = [number.strip() for number in self.machine.env.get(name, "").split(",") if number.strip()]
        if not visible or set(devices) <= set(visible) or not all(number.isdigit() for number in visible):
            return devices
        if max(map(int, devices)) >= len(visible):
            raise WorldError(
                f"--gpus={self.o.gpus}, but {name}={','.join(visible)} leaves only these cards visible: choose some of "
                f"them, or unset {name}"
            )
        chosen = [visible[int(number)] for number in devices]
        self.notes.append(f"--gpus={self.o.gpus} under {name}={','.join(visible)} means the cards {','.join(chosen)}")
        return chosen

    def _without_cards(self, devices: list[str]) -> None:
        """A command for cards on a machine without cards: start as many CPU processes, with a note."""
        if self.machine.built and self.machine.cards:
            return
        cpu_build = self.machine.cards and not self.machine.built
        reason = "this is the CPU build of PaddlePaddle" if cpu_build else "no card here"
        processes = f"{len(devices)} CPU processes" if len(devices) > 1 else "a CPU process"
        self.notes.append(f"{reason}: --gpus={','.join(devices)} starts {processes}")
        self.env[self.machine.accelerator.visible_variable] = ",".join(devices)
        self.env["PADDLE_DISTRI_BACKEND"] = CPU.backend

    def _start_port(self) -> int:
        return int(self.o.start_port or hosts.start_port(self.machine.env) or hosts.DEFAULT_PORT)

    def _master(self) -> list[str]:
        o = self.o
        if (o.master is None) != (o.nnodes is None) and not (o.ips or o.nnodes == "1"):
            raise WorldError("--master and --nnodes must be given together: where to meet, and how many machines")
        if o.nnodes and not re.fullmatch("[1-9][0-9]{0,4}", o.nnodes):
            if re.fullmatch("[0-9]+:[0-9]+", o.nnodes):
                raise WorldError(f"--nnodes={o.nnodes}: a variable number of machines needs {_ELASTIC}")
            raise WorldError(f"--nnodes must be a number of machines, got {o.nnodes!r}")
        if o.ips and o.nnodes and int(o.nnodes) != len(o.ips.split(",")):
            raise WorldError(f"--ips={o.ips} lists {len(o.ips.split(','))} machines, but --nnodes={o.nnodes}")
        if o.master is None:
            return []
        if o.master.startswith("etcd://"):
            raise WorldError(f"--master={o.master} is {_ELASTIC}")
        host, _, port = o.master.rpartition(":")
        if not (hosts.is_host(host) and re.fullmatch("[1-9][0-9]{0,4}", port) and int(port) < 65536):
            raise WorldError(f"--master must be address:port, got {o.master!r}")
        return [f"--master={o.master}", f"--nnodes={o.nnodes}", *([f"--host={o.host}"] if o.host else [])]

    def _interfaces(self, host: str) -> None:
        """Without these variables gloo and NCCL use the interface of the address that the host's name resolves to."""
        if not (interface := self.machine.interface_of(host)):
            return
        for device in (CPU, self.machine.accelerator):
            name = device.interface_variable
            if name and not self.machine.env.get(name):
                self.env[name] = device.interface_prefix + interface
