"""Plans the commands of the chain for a Config and a mode, as argument lists with their needs and logs. Starts nothing.

For each entry of gpu_list, for each trainer: train -> eval, train -> export -> infer (each device x batch size x ...).
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ppfleet import limits
from ppfleet.errors import ConfigError
from ppfleet.tipc.arguments import NO, YES, Arguments, interpreter, on_cpu, unquoted
from ppfleet.tipc.command import Command, LocalMachine
from ppfleet.tipc.config import MODES, OTHER_MODES, TRAIN_BENCHMARK, Config, Fleet
from ppfleet.tipc.line_table import LONG
from ppfleet.tipc.reader import present, split_arguments


@dataclass
class CommandPlan:
    config: Config
    mode: str
    machine: LocalMachine
    root: str  # the directory of this model and mode
    notes: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)


def make(config: Config, mode: str, machine: LocalMachine) -> CommandPlan:
    """The commands of that mode on that machine; a ConfigError names the line that makes them impossible.

    >>> plan = make(parse("train_infer_python.txt"), "lite_train_lite_infer", LocalMachine(cards=False))
    >>> [command.text for command in plan.commands]
    """
    if mode not in MODES:
        other = f"{mode} is a mode of another script" if mode in OTHER_MODES else f"unknown mode {mode!r}"
        raise ConfigError(f"{other}; the modes are {', '.join(MODES)}")
    planner = _Planner(config, mode, machine)
    try:
        planner.fill()
    except ConfigError as failure:
        raise ConfigError(f"{config.path}: {failure}", **failure.fields) from None
    if not planner.plan.commands:
        raise ConfigError(f"{config.path}: nothing to do in {mode}: every command is null")
    return planner.plan


def missing(plan: CommandPlan) -> list[str]:
    """Data, weights and scripts that the commands need and that do not exist."""
    problems: dict[str, None] = {}
    for command in plan.commands:
        if command.skip or command.refused:
            continue
        script = next((word for word in command.argv if word.endswith(".py")), "")
        for name in filter(None, (*command.reads, script)):
            if "://" in name or Path(name).exists() or Path(f"{name}.pdparams").exists():
                continue
            mentions = (line for line in plan.config.lines.values() if name in re.split(r"[|=\s]", line.value))
            source = next((f" (line {line.source})" for line in mentions), "")
            problems[f"{name} does not exist; {command.stage} needs it{source}"] = None
    return list(problems)


class _Planner:
    def __init__(self, config: Config, mode: str, machine: LocalMachine) -> None:
        self.config, self.mode, self.machine = config, mode, machine
        self.write = Arguments(config, mode, machine)
        self.plan = CommandPlan(config, mode, machine, f"{machine.output}/{config.model}/{mode}")
        self.python, note = interpreter(config.lines["python"])
        self._note(note)
        self._names: set[str] = set()
        self.limit = machine.limit or (limits.TIPC_WHOLE if mode.startswith("whole_train") else limits.TIPC_LITE)

    def fill(self) -> None:
        if self.mode == "whole_infer":
            self._whole_infer()
            return
        for number, fleet in enumerate(self.config.fleets()):
            for trainer in self.config.trainers():
                if self.mode == "benchmark_train":
                    self._benchmark(number, fleet, trainer)
                    continue
                for autocast in self._autocasts():
                    self._chain(number, fleet, trainer, autocast)

    def _note(self, text: str) -> None:
        if text and text not in self.plan.notes:
            self.plan.notes.append(text)

    def _autocasts(self) -> list[str]:
        line = self.config.line("autocast")
        return [value or "null" for value in line.values()] if line else [""]

    # The stages

    def _chain(self, number: int, fleet: Fleet, trainer: str, autocast: str) -> None:
        run = self._run_name(fleet, trainer, autocast)
        directory = f"{self.plan.root}/{run}"
        weights = f"{directory}/{self._required('train_model_name')}"
        epochs, batch_size = self.config.value("epochs", self.mode), self.config.value("batch_size", self.mode)
        train = self._train(number, fleet, trainer, autocast, run, epochs, batch_size)
        self._add(replace(train, makes=_weight_files(weights)))
        away = train.skip or (f"the model is on {fleet.nodes[0]}" if self.write.node(fleet) else "")
        first = replace(fleet, nodes=(), devices=fleet.devices[:1])
        self._eval(number, first, run, weights, train.id, away)
        exported = self._export(first, trainer, run, weights, directory, train.id, away)
        model = f"{directory}/{self._inference_dir()}".rstrip("/")
        images = self.config.value("train_infer_img_dir", self.mode) or self.config.value("image_dir", self.mode)
        quantised = trainer in ("pact_train", "quant_train")
        for command in self._infers(run, model, images, quantised):
            self._add(replace(command, needs=(exported or train.id,), skip=command.skip or away))

    def _run_name(self, fleet: Fleet, trainer: str, autocast: str, more: str = "") -> str:
        cast = f"_autocast_{autocast}" if autocast else ""
        name = _short(f"{trainer}_gpus_{fleet.text}{cast}_nodes_{max(1, len(fleet.nodes))}{more}")
        if name in self._names:  # the same devices on other nodes
            name = next(f"{name}_{n}" for n in itertools.count(2) if f"{name}_{n}" not in self._names)
        self._names.add(name)
        return name

    def _train(
        self, number: int, fleet: Fleet, trainer: str, autocast: str, run: str, epochs: str, batch_size: str
    ) -> Command:
        config, directory = self.config, f"{self.plan.root}/{run}"
        data, weights = config.value("data_path", self.mode), config.value("pretrained", self.mode)
        script = [
            *self.write.trainer(trainer),
            *self.write.emit("output_dir", directory),
            *self.write.emit("epochs", epochs),
            *self.write.emit("pretrained", weights),
            *self.write.emit("batch_size", batch_size),
            *self.write.emit("data_path", data),
            *self.write.emit("autocast", present(autocast)),
            *self.write.emit("train_spare", config.value("train_spare", self.mode)),
            *self.write.emit("use_gpu", self.write.use_gpu(number)),
        ]
        launch, env, note = self.write.launch(fleet, f"{self.plan.root}/logs/{run}")
        if not self.machine.cards and ("amp" in (trainer.partition("_")[0], autocast) or autocast == "fp16"):
            note = "; ".join(filter(None, (note, "mixed precision needs a card: on a CPU, Paddle computes in float32")))
        return self._command(
            "train", run, [*launch, *script], card=bool(fleet.devices), batch_size=batch_size, note=note, env=env,
            nodes=fleet.nodes,
            reads=tuple(map(unquoted, filter(None, (data, weights)))), device=self._device_name(fleet),
            skip=self.write.elsewhere(fleet),
            refused="" if trainer in self.machine.trainers else
            f"{trainer} is not one of this repository's trainers ({', '.join(self.machine.trainers)}); "
            f"if it is, list it in --trainers",
        )  # fmt: skip

    def _eval(self, number: int, fleet: Fleet, run: str, weights: str, needs: str, away: str) -> None:
        line = self.config.lines.get("eval")
        if line is None or not present(line.value):
            return
        key = "pretrained" if present(self.config.lines["pretrained"].key) else "export_weight"
        script = [
            *split_arguments(line.value, line),
            *self.write.emit(key, weights),
            *self.write.unless_given(line, "data_path", self.config.value("data_path", self.mode)),
            *self.write.unless_given(line, "use_gpu", self.write.use_gpu(number)),
            *self.write.emit("eval_spare", self.config.value("eval_spare", self.mode)),
        ]
        self._add(self._command("eval", run, script, card=bool(fleet.devices), needs=(needs,), skip=away,
                                env=self._visible(fleet), device=self._device_name(fleet)))  # fmt: skip

    def _export(self, fleet: Fleet, trainer: str, run: str, weights: str, directory: str, needs: str, away: str) -> str:
        """Add the export of that trainer's model; its id, or "" if the file has none."""
        of = {"pact_train": "pact", "fpgm_train": "fpgm", "distill_train": "distill"}
        name = f"{of.get(trainer, 'norm')}_export" if self.config.form == LONG else "norm_export"
        for spare in "12":
            line = self.config.line(f"trainer{spare}")
            if line and line.key == trainer and trainer != "to_static_train":
                name = f"export{spare}"
        line = self.config.line(name)
        if line is None or not present(line.value):
            return ""
        script = [
            *split_arguments(line.value, line),
            *self.write.emit("export_weight", weights),
            *self.write.emit("save_inference_dir", directory),
        ]
        command = self._command("export", run, script, needs=(needs,), skip=away, env=self._visible(fleet),
                                makes=_model_files(directory), device=self._device_name(fleet))  # fmt: skip
        self._add(command)
        return command.id

    def _whole_infer(self) -> None:
        if self.config.line("infer_model") is None:
            raise ConfigError("whole_infer needs a model in line 37, which is a separator in this file")
        models = self.config.values("infer_model", self.mode)
        exports = self.config.values("infer_export", self.mode)
        quants = self.config.values("infer_quant", self.mode)
        if models == [""]:
            self.config.lines["infer_model"].fail("whole_infer needs a model here")
        for number, model in enumerate(models):
            run = "whole_infer" if len(models) == 1 else f"whole_infer_{number + 1}"
            quantised = quants[min(number, len(quants) - 1)].lower() == "true"
            needs: tuple[str, ...] = ()
            directory = model
            export = exports[min(number, len(exports) - 1)]
            if export.lower() not in ("", "false"):
                line = self.config.lines["norm_export" if export.lower() == "true" else "infer_export"]
                if not present(line.value):
                    line.fail("whole_infer needs this export command, which is null")
                given = self.config.value("save_inference_dir", self.mode) if self.config.form != LONG else ""
                target = given or f"{self.plan.root}/{run}"
                script = [
                    *split_arguments(line.value if export.lower() == "true" else export, line),
                    *self.write.emit("export_weight", model),
                    *self.write.emit("save_inference_dir", target),
                ]
                command = self._command("export", run, script, makes=_model_files(target), reads=(unquoted(model),))
                self._add(command)
                needs, directory = (command.id,), f"{target}/{self._inference_dir()}".rstrip("/")
            images = self.config.value("image_dir", self.mode)
            for command in self._infers(run, directory, images, quantised):
                self._add(replace(command, needs=needs, reads=command.reads if needs else (*command.reads, directory)))

    def _infers(self, run: str, model: str, images: str, quantised: bool) -> Iterator[Command]:
        line = self.config.lines.get("inference")
        if line is None or not present(line.value):
            return
        devices = dict.fromkeys(self.config.values("infer_use_gpu", self.mode))
        benchmark = self.config.value("benchmark", self.mode)
        for name, value in (*(("infer_use_gpu", device) for device in devices), ("benchmark", benchmark)):
            if value and value.lower() not in (*YES, *NO):
                self.config.lines[name].fail(f"must be True or False, got {value!r}")
        for device in devices:
            name = "gpu" if device.lower() in YES else "cpu"
            for label, batch_size, special, arguments in self._cells(name == "gpu", quantised):
                script = [
                    *split_arguments(line.value, line),
                    *self.write.emit("infer_use_gpu", device),
                    *self.write.emit("model_dir", model),
                    *self.write.emit("infer_batch_size", batch_size),
                    *arguments,
                    *self.write.emit("image_dir", images),
                    *self.write.emit("save_log_path", self.config.value("save_log_path", self.mode)),
                    *self.write.emit("benchmark", benchmark),
                    *self.write.emit("infer_spare", self.config.value("infer_spare", self.mode)),
                ]
                shows = "benchmark" if benchmark.lower() in YES else ""
                mapped = name == "gpu" and not self.machine.cards
                shown = (
                    f"{name}_on_cpu" if mapped and not special else name
                )  # a CPU's result must not look like a card's
                yield self._command(
                    "infer", run, script, part=f"_{shown}{label}", device=name if self.machine.cards else "cpu",
                    batch_size=batch_size, shows=shows, reads=(unquoted(images),) if images else (),
                    skip=f"{self.machine.why}, and {special} needs one" if mapped and special else "",
                )  # fmt: skip

    def _cells(self, card: bool, quantised: bool) -> Iterator[tuple[str, str, str, list[str]]]:
        """(name, batch size, what only a card supports, more arguments) of each valid combination."""
        names = ("tensorrt",) if card else ("mkldnn", "cpu_threads")
        loops = [self.config.values(name, self.mode) for name in (*names, "infer_batch_size", "precision")]
        shown = {"tensorrt": "usetrt", "mkldnn": "usemkldnn", "cpu_threads": "threads"}
        for combination in dict.fromkeys(itertools.product(*loops)):
            *options, batch_size, precision = combination
            half = precision.lower() in ("fp16", "true")
            plain = options[0].lower() == "false"  # without TensorRT on a card, without mkldnn on a CPU
            if quantised and not card and "int8" not in precision and any("int8" in other for other in loops[-1]):
                continue
            if plain and (half or (card and "int8" in precision)) or (card and not quantised and "int8" in precision):
                continue
            chosen = [(name, value) for name, value in zip(names, options) if value]
            label = "".join(f"_{shown[name]}_{value}" for name, value in chosen)
            label += f"_precision_{precision}" if precision else ""
            arguments = [word for name, value in chosen for word in self.write.emit(name, value)]
            arguments += self.write.emit("precision", precision)
            special = "TensorRT" if card and options[0].lower() == "true" else "fp16" if half else ""
            yield f"{label}_batchsize_{batch_size}" if batch_size else label, batch_size, special, arguments

    def _benchmark(self, number: int, fleet: Fleet, trainer: str) -> None:
        tail = self.config.tails.get(TRAIN_BENCHMARK)
        wanted = ("batch_size", "fp_items", "epoch")
        if tail is None or any(name not in tail for name in wanted):
            raise ConfigError(f"benchmark_train needs a section ====={TRAIN_BENCHMARK}===== with {', '.join(wanted)}")
        for name, allowed in (("batch_size", "[1-9][0-9]*"), ("fp_items", "fp32|fp16"), ("epoch", "[1-9][0-9]*")):
            if not all(re.fullmatch(allowed, value) for value in tail[name].values()):
                tail[name].fail("expected fp32 or fp16" if name == "fp_items" else "expected a number")
        for precision, batch_size in itertools.product(tail["fp_items"].values(), tail["batch_size"].values()):
            autocast = ""
            if self.config.line("autocast") is not None and present(self.config.lines["autocast"].key):
                autocast = "amp" if precision == "fp16" else "fp32"
            elif (precision == "fp16") != (trainer == "amp_train"):
                tail["fp_items"].fail(
                    f"{precision} with {trainer}: without an autocast line, only amp_train trains in fp16"
                )
            run = self._run_name(fleet, trainer, autocast, f"_{precision}_bs{batch_size}")
            command = self._train(number, fleet, trainer, autocast, run, tail["epoch"].value, batch_size)
            # The launcher's log shows its node's first rank, and only trainer 0 logs the speed.
            self._add(replace(command, shows="" if self.write.node(fleet) else "ips"))

    def _required(self, name: str) -> str:
        line = self.config.lines[name]
        return present(line.value) or line.fail("a value is needed to find the weights that training wrote")

    def _inference_dir(self) -> str:
        line = self.config.line("inference_dir")
        return present(line.value) if line and line.key == "inference_dir" else ""

    def _visible(self, fleet: Fleet) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": fleet.devices[0]} if fleet.devices and self.machine.cards else {}

    def _device_name(self, fleet: Fleet) -> str:
        return "gpu" if fleet.devices and self.machine.cards else "cpu"

    # Commands

    def _command(
        self,
        stage: str,
        run: str,
        script: list[str],
        part: str = "",
        env: dict[str, str] | None = None,
        card: bool = True,
        **more: Any,
    ) -> Command:
        if not self.machine.cards or not card:
            mapped = on_cpu(script)
            why = self.machine.why if not self.machine.cards else "gpu_list is -1"
            more["note"] = more.get("note") or (f"{why}: runs on the CPU" if mapped != script else "")
            script = mapped
        name = _short(re.sub(r"[^0-9A-Za-z_.,=+-]", "_", f"{run}.{stage}{part}"))
        log = f"{self.plan.root}/logs/{name}.log"
        values: dict[str, Any] = {"env": tuple((env or {}).items()), "limit": self.limit, **more}
        return Command(name, stage, run, (*self.python, *script), log, **values)

    def _add(self, command: Command) -> None:
        """Add a command with a unique name and log, even if the file repeats itself."""
        taken = {other.id for other in self.plan.commands}
        if command.id in taken:
            name = next(f"{command.id}_{n}" for n in itertools.count(2) if f"{command.id}_{n}" not in taken)
            command = replace(command, id=name, log=f"{self.plan.root}/logs/{name}.log")
        self._note(command.note)
        self.plan.commands.append(command)


def _short(name: str) -> str:
    """A file name of limited length: the beginning, and a digest of the whole if it is too long."""
    return name if len(name) <= 150 else f"{name[:130]}~{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _weight_files(path: str) -> tuple[tuple[str, str], ...]:
    """The extension is optional: `latest` means latest.pdparams."""
    directory, _, name = path.rpartition("/")
    name = glob.escape(name)
    return ((directory, name if name.endswith(".pdparams") else f"{name}|{name}.pdparams"),)


def _model_files(directory: str) -> tuple[tuple[str, str], ...]:
    """The files of an exported model in any subdirectory: weights, and the graph of any Paddle version."""
    return ((directory, "**/*.pdiparams"), (directory, "**/*.pdmodel|**/*.json"))
