"""Every launch flag of Paddle's documents, old and new, translated for today's launcher. Pure: nothing is started.

    plan = translate(["--ips=192.168.0.1,192.168.0.2", "--gpus=0,1", "train.py", "--epochs=1"], here)

A flag that cannot work says why at once, instead of being ignored, mistaken for the script, or waited on for ever.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable

from ppfleet.cli import Parser, number
from ppfleet.cluster import hosts
from ppfleet.cluster.rendezvous import UNKNOWN
from ppfleet.distributed.devices import CPU, DEVICES, GPU, Device
from ppfleet.errors import WorldError

# The environment's word for the same things, which would override the flags in silence.
OVERRIDES = (
    "PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_IPS", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_RANK",
    "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT", "PADDLE_NPROC_PER_NODE", "PADDLE_DEVICES", "PADDLE_LOG_DIR",
    "PADDLE_START_PORT", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_SIZE",
    "POD_IP",
)  # fmt: skip
_ELASTIC = "Paddle's elastic mode with etcd: start it as docs/clusters.md shows, with paddle.distributed.launch"
SERVERS = ("server_num", "worker_num", "servers", "workers", "http_port")
_HETEROGENEOUS = (
    "heterogeneous workers are not supported: PaddlePaddle 2.6 stops at the documents' command, asking for "
    "heter_devices, and the 3.x wheels for CPU have no parameter server; take --worker_num, or --workers"
)
_TRAINERS = "Paddle's launcher never ends a parameter-server job that is counted so: take --worker_num, or --workers"
REFUSED = {
    "heter_worker_num": _HETEROGENEOUS, "heter_workers": _HETEROGENEOUS, "heter_devices": _HETEROGENEOUS,
    "trainer_num": _TRAINERS, "trainers": _TRAINERS,
}  # fmt: skip
_ENDPOINT = {"servers": re.compile(r"[^\s:]+:[1-9][0-9]{0,4}"), "workers": re.compile(r"[^\s:]+(:[1-9][0-9]{0,4})?")}


@dataclass(frozen=True)
class Machine:
    """What the translation must know of this machine and its Paddle."""

    cards: int = 0  # as the driver shows them
    built: bool = False  # whether this Paddle can use them
    env: Mapping[str, str] = field(default_factory=dict)
    own: Callable[[Sequence[str], Mapping[str, str]], str] = hosts.own
    interface_of: Callable[[str], str] = hosts.interface_of
    accelerator: Device = GPU


@dataclass(frozen=True)
class Launch:
    """What is to be done: Paddle's launcher with these arguments, and these changes of the environment."""

    arguments: tuple[str, ...]
    script: tuple[str, ...]
    env: dict[str, str]
    without: tuple[str, ...]  # variables to leave out of the environment
    nodes: tuple[str, ...]  # all hosts, the first one's first; UNKNOWN where --master only counts them; empty: this one
    host: str  # this one's name among them; empty: another than the first of a counted number
    ports: tuple[int, ...]  # that this host's trainers will listen at
    meeting_port: int
    log_dir: str
    notes: tuple[str, ...]
    restarts: int
    wait: float
    dry_run: bool
    workers: tuple[str, ...] = ()  # parameter-server mode: the host of each worker; empty: collective training

    def command(self) -> list[str]:
        return [sys.executable, "-m", "paddle.distributed.launch", *self.arguments, *self.script]

    def text(self) -> str:
        """As a reader can paste it into a shell."""
        without = [f"-u {name}" for name in self.without]
        changes = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        prefix = ["env", *without, *changes] if without else changes
        return " ".join([*prefix, *map(shlex.quote, self.command())])


def parser() -> Parser:
    made = Parser(
        "Start a training script on this machine, or as one of several: Paddle's launcher, with what it needs.\n\n"
        "python -m ppfleet launch --nproc_per_node 2 tools/train.py --device=cpu\n"
        "python -m ppfleet launch --ips=192.168.0.1,192.168.0.2 --gpus=0,1 tools/train.py   (on each machine)\n"
    )
    made.prog = "python -m ppfleet launch"
    add = made.add_argument
    add("--ips", "--cluster_node_ips", metavar="A,B", help="all machines, rank 0's first")
    add("--gpus", "--devices", "--selected_gpus", metavar="0,1", help="the cards to use, a process each")
    add("--nproc_per_node", type=number(int, 1, 1024), metavar="N", help="processes on this machine, without cards")
    add("--host", "--node_ip", metavar="A", help="this machine's address in the list (default: by the interfaces)")
    add("--start_port", "--started_port", type=number(int, 1025, 64999), metavar="P",
        help="the first of the trainers' ports (default: FLAGS_START_PORT, else 6070)")  # fmt: skip
    add("--master", metavar="A:P", help="where hosts meet that are counted and not listed; needs --nnodes")
    add("--nnodes", metavar="N", help="number of machines, for --master")
    add("--log_dir", default="log", metavar="DIR", help="workerlog.N of each trainer")
    add("--job_id", help="a name for the job")
    add("--use_paddlecloud", action="store_true", help="accepted; it has no effect in today's Paddle")
    for name in (*SERVERS, *REFUSED):
        add(f"--{name}", help=argparse.SUPPRESS)
    add("--restarts", type=number(int, 0, 1000), default=0, metavar="N",
        help="start a job that died again, on all machines, at most so often; the script resumes")  # fmt: skip
    add("--wait", type=number(float, 1), default=120.0, metavar="SECONDS", help="for the other machines to come")
    add("--dry-run", action="store_true", help="print the final command and start nothing")
    add("script", help="the training script, with its own arguments after it")
    add("arguments", nargs=argparse.REMAINDER, metavar="…", help="of the script")
    return made


def translate(words: Sequence[str], machine: Machine) -> Launch:
    """What those flags mean here; exit code 2 and one line where they mean nothing."""
    made = parser()
    o = made.parse_args(list(words))
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
            self.notes.append("--use_paddlecloud has no effect: the machines are those of --ips")

    def collective(self) -> Launch:
        o = self.o
        nodes = self._nodes()
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
            self._interfaces(nodes, host)
        arguments.append(f"--log_dir={o.log_dir}")
        arguments += [f"--job_id={o.job_id}"] if o.job_id else []
        ports = tuple(range(port, port + max(1, count))) if nodes else ()
        if o.master:
            where, _, text = o.master.rpartition(":")
            nodes, port = (where, *[UNKNOWN] * (int(o.nnodes) - 1)), int(text)
            host = where if self.machine.interface_of(where) else ""
        return self._launch(arguments, nodes, host, ports, port - 1)

    def servers(self, given: dict[str, str]) -> Launch:
        """Parameter-server mode: its flags go to Paddle as they are, once their values make sense."""
        if self.o.ips or self.o.master:
            raise WorldError("--ips and --master are for collective training; a parameter-server job has --servers")
        for name, value in given.items():
            if name.endswith(("_num", "_port")):
                if not re.fullmatch("[1-9][0-9]{0,4}", value):
                    raise WorldError(f"--{name}={value} is no number")
            elif not all(_ENDPOINT[name].fullmatch(part) for part in value.split(",")):
                raise WorldError(f"--{name}={value} is no list of address:port,address:port")
        if set(given) - {"http_port"} not in ({"server_num", "worker_num"}, {"servers", "workers"}):
            raise WorldError(
                "a parameter-server job is --server_num and --worker_num, on this machine alone, or --servers and "
                "--workers, on all that they list"
            )
        arguments = [f"--{name}={value}" for name, value in given.items()] + [f"--log_dir={self.o.log_dir}"]
        if "worker_num" in given:
            return self._launch(arguments, (), "", (), 0, ("",) * int(given["worker_num"]))
        servers = [part.rpartition(":") for part in given["servers"].split(",")]
        workers = tuple(part.partition(":")[0] for part in given["workers"].split(","))
        nodes = tuple(dict.fromkeys([*(address for address, _, _ in servers), *workers]))
        host = self._host(nodes)
        self.env["POD_IP"] = host  # else Paddle takes what the host's name stands for
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
        decided = nodes or o.master or not any(name in self.machine.env for name in ("PADDLE_MASTER", "PADDLE_IPS"))
        without = [name for name in OVERRIDES if name in self.machine.env] if decided else []
        for name in without:
            if name not in ("POD_IP", "PADDLE_START_PORT"):
                self.notes.append(f"{name}={self.machine.env[name]} of the environment is left out: the flags decide")
        visible = self.machine.accelerator.visible_variable
        if self.machine.env.get(visible) == "" and visible not in self.env:
            without.append(visible)  # an empty one makes Paddle's launcher fail
        return Launch(
            tuple(arguments), (o.script, *o.arguments), self.env, tuple(without), nodes, host, ports, meeting_port,
            o.log_dir, tuple(self.notes), o.restarts, o.wait, o.dry_run, workers,
        )  # fmt: skip

    def _nodes(self) -> tuple[str, ...]:
        if self.o.ips is None:
            return ()
        if self.o.master:
            raise WorldError("--ips and --master: either all machines, or where they meet")
        nodes = tuple(self.o.ips.split(","))
        for node in nodes:
            if not hosts.is_host(node):
                raise WorldError(
                    f"--ips={self.o.ips}: {node!r} is no address or host name; expected is A,B without blanks"
                )
        if len(set(nodes)) < len(nodes):
            raise WorldError(f"--ips={self.o.ips} lists a machine twice")
        return nodes

    def _host(self, nodes: tuple[str, ...]) -> str:
        if not nodes:
            return self.o.host or ""
        if self.o.host:
            if self.o.host not in nodes:
                raise WorldError(f"--host={self.o.host} is none of {','.join(nodes)}")
            if not self.machine.interface_of(self.o.host):
                raise WorldError(f"--host={self.o.host} is no address of this machine")
            return str(self.o.host)
        return self.machine.own(nodes, self.machine.env)

    def _devices(self) -> list[str]:
        if self.o.gpus is None:
            return []
        devices = str(self.o.gpus).split(",")
        if not all(re.fullmatch("0|[1-9][0-9]{0,3}", device) for device in devices) or len(set(devices)) < len(devices):
            raise WorldError(f"--gpus={self.o.gpus} is no list of cards such as 0,1")
        if self.o.nproc_per_node not in (None, len(devices)):
            raise WorldError(
                f"--gpus={self.o.gpus} is {len(devices)} processes, --nproc_per_node={self.o.nproc_per_node}"
            )
        if self.machine.built and self.machine.cards and max(map(int, devices)) >= self.machine.cards:
            raise WorldError(f"--gpus={self.o.gpus}, but this machine has {self.machine.cards} cards, numbered from 0")
        return devices

    def _without_cards(self, devices: list[str]) -> None:
        """A card's command on a machine without: as many CPU processes, and said so."""
        if self.machine.built and self.machine.cards:
            return
        why = (
            "no card here" if self.machine.built or not self.machine.cards else "this is the CPU build of PaddlePaddle"
        )
        many = f"{len(devices)} CPU processes" if len(devices) > 1 else "a CPU process"
        self.notes.append(f"{why}: --gpus={','.join(devices)} starts {many}")
        self.env[self.machine.accelerator.visible_variable] = ",".join(devices)
        self.env["PADDLE_DISTRI_BACKEND"] = CPU.backend

    def _start_port(self) -> int:
        return int(self.o.start_port or hosts.start_port(self.machine.env) or hosts.DEFAULT_PORT)

    def _master(self) -> list[str]:
        o = self.o
        if (o.master is None) != (o.nnodes is None) and not (o.ips or o.nnodes == "1"):
            raise WorldError("--master and --nnodes belong together: where to meet, and how many machines")
        if o.nnodes and not re.fullmatch("[1-9][0-9]{0,4}", o.nnodes):
            if re.fullmatch("[0-9]+:[0-9]+", o.nnodes):
                raise WorldError(f"--nnodes={o.nnodes}: a changing number of machines needs {_ELASTIC}")
            raise WorldError(f"--nnodes={o.nnodes} is no number of machines")
        if o.ips and o.nnodes and int(o.nnodes) != len(o.ips.split(",")):
            raise WorldError(f"--ips={o.ips} lists {len(o.ips.split(','))} machines, --nnodes={o.nnodes}")
        if o.master is None:
            return []
        if o.master.startswith("etcd://"):
            raise WorldError(f"--master={o.master}: that is {_ELASTIC}")
        host, _, port = o.master.rpartition(":")
        if not (hosts.is_host(host) and re.fullmatch("[1-9][0-9]{0,4}", port) and int(port) < 65536):
            raise WorldError(f"--master={o.master} is no address:port")
        return [f"--master={o.master}", f"--nnodes={o.nnodes}", *([f"--host={o.host}"] if o.host else [])]

    def _interfaces(self, nodes: tuple[str, ...], host: str) -> None:
        """gloo, and NCCL, take the host name's address unless they are told the interface."""
        if len(nodes) < 2 or not (interface := self.machine.interface_of(host)):
            return
        for name in (device.interface_variable for device in DEVICES.values()):
            if not self.machine.env.get(name):
                self.env[name] = interface
