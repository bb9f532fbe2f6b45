"""`python -m ppfleet scale`: train on 1 to N ranks and compare time, metric, speed-up and efficiency.

python -m ppfleet scale tools/train.py -- --device=cpu --data-path=lite_data --epochs=8 --batch-size=16
python -m ppfleet scale --ips=192.168.0.1,192.168.0.2 --ranks=1,2 tools/train.py -- …     (on each machine)

Each run is a `ppfleet launch` in its own directory below --output. Run the same command again to continue an
interrupted series: finished runs are not repeated. With several machines the first one writes the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppfleet import limits
from ppfleet._version import __version__
from ppfleet.checkpoint.files import json_bytes, replace_file
from ppfleet.cli import Parser, Stopped, number, stoppable
from ppfleet.cluster.rendezvous import Meeting
from ppfleet.commands.launch import flags
from ppfleet.commands.launch.command import this_machine
from ppfleet.commands.scale import network, series_page, table, trial
from ppfleet.commands.scale.projection import Network
from ppfleet.commands.scale.series import MODES, Flags, Point, Series, Trial, doubled, take_out
from ppfleet.commands.scale.summary import summary
from ppfleet.distributed.devices import GPU
from ppfleet.errors import FleetError

_THREADS = "PPFLEET_THREADS"


def main(arguments: list[str]) -> int:
    made = parser()
    try:
        runner = _runner(made, made.parse_args(arguments))
        with stoppable():
            return runner.run()
    except Stopped as stop:
        say("stopped: run the same command again to continue")
        return 128 + stop.number


def say(text: str) -> None:
    print(f"scale: {text}", file=sys.stderr, flush=True)


def parser() -> Parser:
    made = Parser(__doc__, "python -m ppfleet scale")
    add = made.add_argument
    add("--ranks", type=numbers(1), metavar="1,2,4",
        help="ranks per machine (default: 1, and one for each core or card)")  # fmt: skip
    add("--seeds", type=numbers(0), default="0,1,2", metavar="0,1,2", help="seeds to train with at each size")
    add("--batch", type=modes, default="global,rank", metavar="global,rank",
        help="what stays constant: the global batch, the batch per rank, or both in turn")  # fmt: skip
    add("--metric", metavar="NAME", help="metric of the script's evaluation (default: its first)")
    add("--tolerance", type=number(float, 0, 100), default=1.0, metavar="PERCENT",
        help="difference of the metric that counts as equal")  # fmt: skip
    add("--output", type=Path, default=Path("output/scale"), metavar="DIR",
        help="directory for the runs and scale.json, .html and .png")  # fmt: skip
    add("--bandwidth", type=number(float, 1e-3), metavar="MBIT/S",
        help="bandwidth of the network to project for (default: measured)")  # fmt: skip
    add("--latency", type=number(float, 0), metavar="MS", help="one-way latency of the network to project for")
    flags.add_machine_flags(made, wait=limits.MACHINES, lowest_port=1027)
    add("--batch-flag", default=Flags.batch, metavar="FLAG", help="the script's option for the batch per rank")
    add("--seed-flag", default=Flags.seed, metavar="FLAG", help="the script's option for the seed")
    add("--output-flag", default=Flags.output, metavar="FLAG", help="the script's option for its directory")
    add("script", help="the training script, with its own arguments after --")
    add("arguments", nargs=argparse.REMAINDER, metavar="-- …", help="the script's arguments")
    return made


def numbers(least: int) -> Any:
    """A type for argparse: a list such as 1,2,4."""
    one = number(int, least)

    def parse(text: str) -> tuple[int, ...]:
        values = [one(part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} lists a number twice")
        return tuple(values)

    return parse


def modes(text: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(text.split(",")))
    if not set(chosen) <= set(MODES):
        raise argparse.ArgumentTypeError(f"must be {' or '.join(MODES)}, or both, got {text!r}")
    return chosen


def _runner(made: Parser, o: argparse.Namespace) -> SeriesRunner:
    """Check everything that can be checked before anything is started."""
    machine = this_machine()
    on_cards = machine.built and machine.cards > 0
    cores = len(os.sched_getaffinity(0))
    ranks = o.ranks or tuple(dict.fromkeys((1, machine.cards if on_cards else cores)))
    machines = [f"--ips={o.ips}"] if o.ips else []
    machines += [f"--host={o.host}"] if o.host else []
    machines += [f"--start_port={o.start_port}"] if o.start_port else []
    launch = flags.translate([*machines, *_devices(max(ranks), on_cards), o.script], machine)
    named = Flags(o.batch_flag, o.seed_flag, o.output_flag)
    arguments, batch = take_out(o.arguments[1:] if o.arguments[:1] == ["--"] else o.arguments, named.batch)
    for flag in (named.seed, named.output):
        arguments, value = take_out(arguments, flag)
        if value is not None:
            ours = "--seeds" if flag == named.seed else "--output"
            made.error(f"remove {flag}={value} from the script's arguments: scale sets it for each run (see {ours})")
    if not batch or not batch.isdecimal() or not int(batch):
        made.error(f"the script's arguments must set the batch per rank: add {named.batch}=N after --")
    if not Path(o.script).is_file():
        made.error(f"script {o.script} not found in {Path.cwd()}: check the path and the working directory")
    env = {}
    if not on_cards and not any(os.environ.get(name) for name in (_THREADS, "OMP_NUM_THREADS")):
        # Otherwise one rank alone would use all cores, and two ranks no more than that.
        env[_THREADS] = str(max(1, cores // max(ranks)))
    threads = env.get(_THREADS) or os.environ.get(_THREADS, "")
    series = Series(
        o.script, tuple(arguments), int(batch), o.batch, doubled(max(1, len(launch.nodes))), ranks, o.seeds, named,
        launch.nodes, threads,
    )  # fmt: skip
    try:
        series.runs()
    except FleetError as failure:
        made.error(str(failure))
    given = Network.of_link(o.bandwidth, o.latency or 0.0) if o.bandwidth else None
    if o.latency is not None and given is None:
        made.error("--latency also needs --bandwidth")
    notes = [f"every rank computes with {env[_THREADS]} of {cores} cores, whatever the number of ranks"] if env else []
    return SeriesRunner(o, series, launch, given, on_cards, env, notes)


def _devices(ranks: int, on_cards: bool) -> list[str]:
    return [f"{GPU.launch_flag}={','.join(map(str, range(ranks)))}" if on_cards else f"--nproc_per_node={ranks}"]


@dataclass
class SeriesRunner:
    """The series on this host: the first host decides what to run, the others follow."""

    o: argparse.Namespace
    series: Series
    launch: flags.Launch
    given: Network | None  # to project for
    on_cards: bool
    env: dict[str, str]
    notes: list[str]
    meeting: Meeting | None = field(default=None, init=False)

    def run(self) -> int:
        runs = self.series.runs()
        if len(self.launch.nodes) < 2:
            return self._lead(runs, None)
        self.meeting = self._new_meeting()
        try:
            self.meeting.start(lambda token: None)
            measured = network.measure(self.meeting)
            return self._follow() if self.meeting.node else self._lead(runs, measured)
        finally:
            self.meeting.close()

    def _lead(self, runs: list[Trial], measured: Network | None) -> int:
        results = []
        for count, run in enumerate(runs, 1):
            label = f"[{count}/{len(runs)}] {run}"
            directory = self._directory(run)
            result = trial.finished(directory)
            if result is not None:
                say(f"{label}: already done")
            else:
                resumed = directory.has_checkpoint()
                say(f"{label}{' (resumed; its time will not count)' if resumed else ''}; log: {directory.output}")
                result = self._train(run, directory, resumed)
            results.append(result)
        self._exchange(json.dumps({"end": True}), "the next run")
        metric, tolerance = self.o.metric or "", self.o.tolerance / 100
        compared = summary(self.series, results, metric, tolerance, measured, self.given)
        compared["notes"] = [*self.notes, *compared["notes"]]
        self._write(compared)
        return 0

    def _train(self, run: Trial, directory: trial.TrialDirectory, resumed: bool) -> dict[str, Any]:
        order = {"run": [run.point.machines, run.point.ranks, run.point.batch, run.seed]}
        self._exchange(json.dumps(order), "the next run")
        if self.meeting:
            self.meeting.tell(str(run))
        wall = self._execute(run, directory)
        gathered = self._exchange(json.dumps(trial.host_times(directory)), "the records of the run")
        hosts = [json.loads(text) for text in gathered[: run.point.machines]]
        result = trial.result(directory, self.series.command(run), run, wall, resumed, hosts)
        trial.write(directory, result)
        return result

    def _follow(self) -> int:
        """On any host but the first: run what the first one orders."""
        while True:
            order = json.loads(self._exchange("", "the next run")[0])
            if "run" not in order:
                say(f"done; the result is on {self.launch.nodes[0]}")
                return 0
            *point, seed = map(int, order["run"])
            run, times = Trial(Point(*point), seed), {}
            if self.meeting and self.meeting.node < run.point.machines:
                directory = self._directory(run)
                say(f"{run}; log: {directory.output}")
                self._execute(run, directory)
                times = trial.host_times(directory)
            self._exchange(json.dumps(times), "the records of the run")

    def _execute(self, run: Trial, directory: trial.TrialDirectory) -> float:
        arguments = _devices(run.point.ranks, self.on_cards)
        if run.point.machines > 1:
            arguments += [f"--ips={','.join(self.launch.nodes[: run.point.machines])}", f"--host={self.launch.host}"]
            arguments += [f"--start_port={self.launch.meeting_port + 1}", f"--wait={self.o.wait:g}"]
        arguments += [*self.series.command(run), f"{self.series.flags.output}={directory.run}"]
        try:
            return trial.execute(arguments, directory, self.env)
        except FleetError as failure:
            raise FleetError(f"{run}: {failure}") from None

    def _directory(self, run: Trial) -> trial.TrialDirectory:
        return trial.TrialDirectory(self.o.output / self.series.name(run), self.meeting.node if self.meeting else 0)

    def _exchange(self, text: str, purpose: str) -> list[str]:
        return self.meeting.exchange(text, purpose, all_hear=False) if self.meeting else [text]

    def _new_meeting(self) -> Meeting:
        series = self.series
        text = json.dumps([self.launch.nodes, Path(series.script).name, series.batch, series.modes, series.ranks,
                           series.seeds, __version__])  # fmt: skip
        node = self.launch.nodes.index(self.launch.host)
        same = "list of hosts, script, series or version of ppfleet"
        # launch uses the port below the trainers' first one, scale the port below that.
        port = self.launch.meeting_port - 1
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        return Meeting(list(self.launch.nodes), node, port, digest, self.o.wait, say, same)

    def _write(self, results: dict[str, Any]) -> None:
        print(table.text(results), flush=True)
        output = self.o.output
        output.mkdir(parents=True, exist_ok=True)
        replace_file(output / "scale.json", json_bytes(results))
        replace_file(output / "scale.html", series_page.html(results).encode())
        table.picture(results, output / "scale.png")
        say(f"wrote {output}/scale.json, scale.html and scale.png")
