"""How the arguments of a command are written: keys from the file, Paddle's launcher, the device map."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from ppfleet.tipc.command import Here
from ppfleet.tipc.config import Config, Fleet, trainer_name
from ppfleet.tipc.lines import Line, present, words

YES, NO = ("true", "gpu", "1"), ("false", "cpu", "0")


@dataclass(frozen=True)
class Arguments:
    config: Config
    mode: str
    here: Here

    def emit(self, name: str, value: str) -> list[str]:
        """`key=value`, the key being what the file says."""
        line = self.config.line(name)
        if line is None or not present(line.key) or not value:
            return []
        bare = re.fullmatch(r"use[-_]gpu", line.key) and self.config.lines["epochs"].key.startswith("--")
        key = f"--{line.key}" if bare else line.key
        *before, flag = words(key, line)
        return [*before, f"{flag}={unquoted(value)}"]

    def unless_given(self, command: Line, name: str, value: str) -> list[str]:
        emitted = self.emit(name, value)
        return [] if emitted and f"{emitted[-1].partition('=')[0]}=" in command.value else emitted

    def use_gpu(self, number: int) -> str:
        """Line 5 is aligned with gpu_list; a single value serves every entry."""
        values = self.config.values("use_gpu", self.mode)
        if len(values) not in (1, len(self.config.fleets())):
            self.config.lines["use_gpu"].fail(
                f"{len(values)} values for {len(self.config.fleets())} entries of gpu_list: one for all, or one each"
            )
        return values[number if len(values) > 1 else 0]

    def trainer(self, trainer: str) -> list[str]:
        """The command of that trainer; lines are told by their keys."""
        names = ("norm_train", "pact_train", "fpgm_train", "distill_train", "trainer1", "trainer2")
        lines = [line for line in map(self.config.line, names) if line]
        line = next((line for line in lines if trainer_name(line.key) == trainer), None)
        if line is None:
            given = ", ".join(f"{line.key} (line {line.source})" for line in lines if present(line.key))
            self.config.lines["trainer"].fail(f"names {trainer}, but there are commands only for {given}")
        if not present(line.value):
            line.fail(f"`trainer:` names {trainer}, but its command is null")
        command = words(line.value, line)
        if trainer == "to_static_train" and not command[0].endswith(".py"):  # flags on top of norm_train's command
            return [*self.trainer("norm_train"), *command]
        return command

    def launch(self, fleet: Fleet, logs: str) -> tuple[list[str], dict[str, str], str]:
        """What starts the script on those devices: nothing, or Paddle's launcher with what it needs here."""
        env: dict[str, str] = {}
        note = "" if self.here.cards or not fleet.devices else self._mapped(fleet)
        if not fleet.nodes and len(fleet.devices) < 2:
            if self.here.cards and fleet.devices:
                env["CUDA_VISIBLE_DEVICES"] = fleet.devices[0]
            return [], env, note
        launch = ["-m", "paddle.distributed.launch"]
        if fleet.nodes:
            launch.append(f"--ips={','.join(fleet.nodes)}")
            if self.here.address:
                env["POD_IP"] = self.here.address  # or the launcher guesses by the host's name
            if self.here.interface:
                env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = self.here.interface
            if self.here.start_port:
                env["PADDLE_START_PORT"] = str(self.here.start_port)
        launch.append(f"--gpus={fleet.text}" if fleet.devices else "--nproc_per_node=1")
        if not self.here.cards:
            env["PADDLE_DISTRI_BACKEND"] = "gloo"
            if fleet.devices:
                env["CUDA_VISIBLE_DEVICES"] = fleet.text  # by which a CPU build counts its processes
        name = f"launch_node_{self.node(fleet)}" if fleet.nodes else "launch"
        return [*launch, f"--log_dir={logs}.{name}"], dict(sorted(env.items())), note

    def node(self, fleet: Fleet) -> int:
        """This machine's place in that list of nodes."""
        return fleet.nodes.index(self.here.address) if self.here.address in fleet.nodes else 0

    def elsewhere(self, fleet: Fleet) -> str:
        """Why this node has no part in a run: one machine's run is made once, on the first node of the file."""
        first = next((other.nodes[0] for other in self.config.fleets() if other.nodes), self.here.address)
        if not self.here.address or self.here.address in (fleet.nodes or (first,)):
            return ""
        return f"this run is made on {', '.join(fleet.nodes or (first,))}"

    def _mapped(self, fleet: Fleet) -> str:
        count, each = len(fleet.devices), " a node" if fleet.nodes else ""
        what = f"gpus {fleet.text} are {count} CPU processes" if count > 1 else f"gpu {fleet.text} is a CPU process"
        return f"{self.here.why}: {what}{each}"


def unquoted(value: str) -> str:
    """A value is one argument, blanks or not; quotation marks around it are the shell's."""
    quoted = re.fullmatch(r"""(["'])(.*)\1""", value)
    return quoted[2] if quoted else value


def interpreter(line: Line) -> tuple[list[str], str]:
    """What starts a script, and what is to be said about it.

    `python`, and any version up to this one (nearly all published files say python3.7), is the interpreter that runs
    the runner; a path, or another name, is taken as it stands.
    """
    command = words(line.value, line)
    if not present(line.value) or not command:
        line.fail("names no interpreter")
    version = re.fullmatch(r"python(?:(\d+)(?:\.(\d+))?)?", command[0])
    own = sys.version_info[:2]
    if version is None or (int(version[1] or 3), int(version[2] or 0)) > own:
        return command, ""
    other = command[0] not in ("python", "python3", f"python{own[0]}.{own[1]}")
    note = f"{command[0]}: Python {own[0]}.{own[1]}, which runs this runner, stands in for it" if other else ""
    return [sys.executable, *command[1:]], note


def on_cpu(script: list[str]) -> list[str]:
    """The device map: arguments that ask for a card ask for the CPU instead, as `key=value` or as two words."""
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
