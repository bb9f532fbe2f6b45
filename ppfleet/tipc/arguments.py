"""The arguments of a command: flags named by the file's keys, Paddle's launcher, the device map."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from ppfleet.tipc.command import LocalMachine
from ppfleet.tipc.config import Config, Fleet, trainer_name
from ppfleet.tipc.reader import ConfigLine, present, split_arguments

YES, NO = ("true", "gpu", "1"), ("false", "cpu", "0")


@dataclass(frozen=True)
class Arguments:
    config: Config
    mode: str
    machine: LocalMachine

    def emit(self, name: str, value: str) -> list[str]:
        """`key=value`, with the key from the file; [] without key or value."""
        line = self.config.line(name)
        if line is None or not present(line.key) or not value:
            return []
        bare = re.fullmatch(r"use[-_]gpu", line.key) and self.config.lines["epochs"].key.startswith("--")
        key = f"--{line.key}" if bare else line.key
        *before, flag = split_arguments(key, line)
        return [*before, f"{flag}={unquoted(value)}"]

    def unless_given(self, command: ConfigLine, name: str, value: str) -> list[str]:
        emitted = self.emit(name, value)
        return [] if emitted and f"{emitted[-1].partition('=')[0]}=" in command.value else emitted

    def use_gpu(self, number: int) -> str:
        """ConfigLine 5 has a value for each entry of gpu_list, or one for all."""
        values = self.config.values("use_gpu", self.mode)
        if len(values) not in (1, len(self.config.fleets())):
            entries = len(self.config.fleets())
            self.config.lines["use_gpu"].fail(
                f"{len(values)} values for {entries} entries of gpu_list: give one for all, or one for each"
            )
        return values[number if len(values) > 1 else 0]

    def trainer(self, trainer: str) -> list[str]:
        """The command of that trainer, from the line with its name as key."""
        names = ("norm_train", "pact_train", "fpgm_train", "distill_train", "trainer1", "trainer2")
        lines = [line for line in map(self.config.line, names) if line]
        line = next((line for line in lines if trainer_name(line.key) == trainer), None)
        if line is None:
            given = ", ".join(f"{line.key} (line {line.source})" for line in lines if present(line.key))
            self.config.lines["trainer"].fail(f"there is no command for {trainer}, only for {given}")
        if not present(line.value):
            line.fail(f"`trainer:` names {trainer}, but its command is null")
        command = split_arguments(line.value, line)
        if trainer == "to_static_train" and not command[0].endswith(".py"):  # flags on top of norm_train's command
            return [*self.trainer("norm_train"), *command]
        return command

    def launch(self, fleet: Fleet, logs: str) -> tuple[list[str], dict[str, str], str]:
        """What starts the script on those devices: nothing, or Paddle's launcher; its environment, and a note."""
        env: dict[str, str] = {}
        note = "" if self.machine.cards or not fleet.devices else self._mapped(fleet)
        if not fleet.nodes and len(fleet.devices) < 2:
            if self.machine.cards and fleet.devices:
                env["CUDA_VISIBLE_DEVICES"] = fleet.devices[0]
            return [], env, note
        launch = ["-m", "paddle.distributed.launch"]
        if fleet.nodes:
            launch.append(f"--ips={','.join(fleet.nodes)}")
            if self.machine.address:
                env["POD_IP"] = self.machine.address  # otherwise the launcher resolves the host's name
            if self.machine.interface:
                env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = self.machine.interface
            if self.machine.start_port:
                env["PADDLE_START_PORT"] = str(self.machine.start_port)
        launch.append(f"--gpus={fleet.text}" if fleet.devices else "--nproc_per_node=1")
        if not self.machine.cards:
            env["PADDLE_DISTRI_BACKEND"] = "gloo"
            if fleet.devices:
                env["CUDA_VISIBLE_DEVICES"] = fleet.text  # a CPU build counts its processes by it
        name = f"launch_node_{self.node(fleet)}" if fleet.nodes else "launch"
        return [*launch, f"--log_dir={logs}.{name}"], dict(sorted(env.items())), note

    def node(self, fleet: Fleet) -> int:
        """This machine's index in that list of nodes."""
        return fleet.nodes.index(self.machine.address) if self.machine.address in fleet.nodes else 0

    def elsewhere(self, fleet: Fleet) -> str:
        """Why this node does not take part: a run on one machine is done by the file's first node only."""
        first = next((other.nodes[0] for other in self.config.fleets() if other.nodes), self.machine.address)
        if not self.machine.address or self.machine.address in (fleet.nodes or (first,)):
            return ""
        return f"this run is done on {', '.join(fleet.nodes or (first,))}"

    def _mapped(self, fleet: Fleet) -> str:
        count, per_node = len(fleet.devices), " per node" if fleet.nodes else ""
        text = f"gpus {fleet.text} are {count} CPU processes" if count > 1 else f"gpu {fleet.text} is a CPU process"
        return f"{self.machine.why}: {text}{per_node}"


def unquoted(value: str) -> str:
    """A value without the quotation marks that a shell would need: it is one argument, spaces or not."""
    quoted = re.fullmatch(r"""(["'])(.*)\1""", value)
    return quoted[2] if quoted else value


def interpreter(line: ConfigLine) -> tuple[list[str], str]:
    """The command that starts a script, and a note about it.

    `python`, and any version up to this one (nearly all published files say python3.7), means the interpreter that
    runs this runner; a path or another name is used unchanged.
    """
    command = split_arguments(line.value, line)
    if not present(line.value) or not command:
        line.fail("must name an interpreter, such as python")
    version = re.fullmatch(r"python(?:(\d+)(?:\.(\d+))?)?", command[0])
    own = sys.version_info[:2]
    if version is None or (int(version[1] or 3), int(version[2] or 0)) > own:
        return command, ""
    other = command[0] not in ("python", "python3", f"python{own[0]}.{own[1]}")
    note = f"{command[0]}: using Python {own[0]}.{own[1]} instead, which runs this runner" if other else ""
    return [sys.executable, *command[1:]], note


def on_cpu(script: list[str]) -> list[str]:
    """The device map: arguments for a card, as `key=value` or as two words, changed to the CPU."""
    mapped: list[str] = []
    for before, word in zip(["", *script], script):
        key, equals, value = word.partition("=")
        if equals:
            mapped.append(f"{key}={_cpu_value(key, value)}")
        else:
            mapped.append(_cpu_value(before, word) if before in ("--device", "--use-gpu", "--use_gpu") else word)
    return mapped


def _cpu_value(key: str, value: str) -> str:
    plain = key.lstrip("-").rpartition(".")[2].replace("-", "_").lower()
    if plain == "device" and value.lower().startswith("gpu") or plain == "use_gpu" and value.lower() == "gpu":
        return "cpu"
    return "False" if plain == "use_gpu" and value.lower() in YES else value
