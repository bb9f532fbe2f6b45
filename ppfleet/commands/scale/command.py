"""`python -m ppfleet scale`: the same training on 1 to N ranks, as a table of time, metric, speed-up and efficiency.

python -m ppfleet scale tools/train.py -- --device=cpu --data-path=lite_data --epochs=8 --batch-size=16
python -m ppfleet scale --ips=192.168.0.1,192.168.0.2 --ranks=1,2 tools/train.py -- …     (on each machine)

Each run is a `ppfleet launch` in a directory of its own below --output. A series that was interrupted goes on with the
same command: finished runs are not made again. Of several machines the first one writes the result.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppfleet._version import __version__
from ppfleet.checkpoint.files import json_bytes, replace_file
from ppfleet.cli import Parser, Stopped, number, stoppable
from ppfleet.cluster.rendezvous import Meeting
from ppfleet.commands.launch import flags
from ppfleet.commands.launch.command import this_machine
from ppfleet.commands.scale import network, series_page, table, trial
from ppfleet.commands.scale.projection import Network
from ppfleet.commands.scale.series import MODES, Flags, Point, Run, Series, doubled, take_out
from ppfleet.commands.scale.summary import summary
from ppfleet.distributed.devices import GPU
from ppfleet.errors import FleetError

_THREADS = "PPFLEET_THREADS"


def main(words: list[str]) -> int:
    made = parser()
    o = made.parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a terminal that knows no × is shown escapes
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        conductor = _conductor(made, o)
        with stoppable():
            return conductor.run()
    except Stopped as stop:
        say("stopped: the same command goes on from here")
        return 128 + stop.number
    except FleetError as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        return 1


def say(text: str) -> None:
    print(f"scale: {text}", file=sys.stderr, flush=True)


def parser() -> Parser:
    made = Parser(__doc__)
    made.prog = "python -m ppfleet scale"
    add = made.add_argument
    add("--ranks", type=numbers(1), metavar="1,2,4", help="ranks a machine (default: 1, and one for each core or card)")
    add("--seeds", type=numbers(0), default="0,1,2", metavar="0,1,2", help="each of which trains everywhere")
    add("--batch", type=modes, default="global,rank", metavar="global,rank",
        help="what stays equal: the global batch, the batch of a rank, or first one and then the other")  # fmt: skip
    add("--metric", metavar="NAME", help="of the script's evaluation (default: its first)")
    add("--tolerance", type=number(float, 0, 100), default=1.0, metavar="PERCENT",
        help="difference of the metric that does not matter")  # fmt: skip
    add("--output", type=Path, default=Path("output/scale"), metavar="DIR", help="the runs, scale.json, .html and .png")
    add(
        "--bandwidth",
        type=number(float, 1e-3),
        metavar="MBIT/S",
        help="rate of the link to project for (default: measured)",
    )
    add("--latency", type=number(float, 0), metavar="MS", help="of the link to project for, one way")
    add("--ips", metavar="A,B", help="all machines, the first one's first; on each the same command is started")
    add("--host", metavar="A", help="this machine's address in --ips (default: by the interfaces)")
    add("--start_port", type=number(int, 1027, 64999), metavar="P", help="the first of the trainers' ports")
    add("--wait", type=number(float, 1), default=120.0, metavar="SECONDS", help="for the other machines to come")
    add("--batch-flag", default=Flags.batch, metavar="FLAG", help="the script's option for the batch of a rank")
    add("--seed-flag", default=Flags.seed, metavar="FLAG", help="the script's option for the seed")
    add("--output-flag", default=Flags.output, metavar="FLAG", help="the script's option for its directory")
    add("script", help="the training script, with its own arguments after --")
    add("arguments", nargs=argparse.REMAINDER, metavar="-- …", help="of the script")
    return made


def numbers(least: int) -> Any:
    """A type for argparse: a list such as 1,2,4."""
    one = number(int, least)

    def parse(text: str) -> tuple[int, ...]:
        found = [one(part) for part in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} lists a number twice")
        return tuple(found)

    return parse


def modes(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text.split(",")))
    if not set(found) <= set(MODES):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(MODES)}")
    return found


def _conductor(made: Parser, o: argparse.Namespace) -> Conductor:
    """Everything that can be refused before anything is started."""
    machine = this_machine()
    on_cards = machine.built and machine.cards > 0
    cores = len(os.sched_getaffinity(0))
    ranks = o.ranks or tuple(dict.fromkeys((1, machine.cards if on_cards else cores)))
    places = [f"--ips={o.ips}"] if o.ips else []
    places += [f"--host={o.host}"] if o.host else []
    places += [f"--start_port={o.start_port}"] if o.start_port else []
    launch = flags.translate([*places, *_devices(max(ranks), on_cards), o.script], machine)
    named = Flags(o.batch_flag, o.seed_flag, o.output_flag)
    arguments, batch = take_out(o.arguments[1:] if o.arguments[:1] == ["--"] else o.arguments, named.batch)
    for flag in (named.seed, named.output):
        arguments, value = take_out(arguments, flag)
        if value is not None:
            made.error(f"{flag}={value}: each run gets its own ({'--seeds' if flag == named.seed else '--output'})")
    if not batch or not batch.isdecimal() or not int(batch):
        made.error(f"how large is the batch of one rank? say {named.batch}=N among the script's arguments")
    if not Path(o.script).is_file():
        made.error(f"there is no script {o.script} here: is the working directory right?")
    env = {}
    if not on_cards and not any(os.environ.get(name) for name in (_THREADS, "OMP_NUM_THREADS")):
        # Else one rank alone would have all cores, and two not more than it.
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
        made.error("--latency alone is half a network: give --bandwidth too")
    notes = [f"every rank computes with {env[_THREADS]} of {cores} cores, on however many ranks"] if env else []
    return Conductor(o, series, launch, given, on_cards, env, notes)


def _devices(ranks: int, on_cards: bool) -> list[str]:
    return [f"{GPU.launch_flag}={','.join(map(str, range(ranks)))}" if on_cards else f"--nproc_per_node={ranks}"]


@dataclass
class Conductor:
    """The series on this host: the first one decides what is run, the others follow."""

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

    def _lead(self, runs: list[Run], measured: Network | None) -> int:
        results = []
        for count, run in enumerate(runs, 1):
            label = f"[{count}/{len(runs)}] {run}"
            place = self._place(run)
            done = trial.finished(place)
            if done is not None:
                say(f"{label}: done before")
            else:
                resumed = place.begun()
                say(f"{label}{' (goes on; its time will not count)' if resumed else ''}; log: {place.output}")
                done = self._make(run, place, resumed)
            results.append(done)
        self._together(json.dumps({"end": True}), "the next run")
        metric, tolerance = self.o.metric or "", self.o.tolerance / 100
        facts = summary(self.series, results, metric, tolerance, measured, self.given)
        facts["notes"] = [*self.notes, *facts["notes"]]
        self._write(facts)
        return 0

    def _make(self, run: Run, place: trial.Place, resumed: bool) -> dict[str, Any]:
        order = {"run": [run.point.machines, run.point.ranks, run.point.batch, run.seed]}
        self._together(json.dumps(order), "the next run")
        if self.meeting:
            self.meeting.tell(str(run))
        wall = self._execute(run, place)
        told = self._together(json.dumps(trial.records(place)), "the records of the run")
        hosts = [json.loads(each) for each in told[: run.point.machines]]
        made = trial.result(place, self.series.words(run), run.point, run.seed, wall, resumed, hosts)
        trial.write(place, made)
        return made

    def _follow(self) -> int:
        """On another host than the first: what that one says."""
        while True:
            order = json.loads(self._together("", "the next run")[0])
            if "run" not in order:
                say(f"done; the result is on {self.launch.nodes[0]}")
                return 0
            *point, seed = map(int, order["run"])
            run, told = Run(Point(*point), seed), {}
            if self.meeting and self.meeting.node < run.point.machines:
                place = self._place(run)
                say(f"{run}; log: {place.output}")
                self._execute(run, place)
                told = trial.records(place)
            self._together(json.dumps(told), "the records of the run")

    def _execute(self, run: Run, place: trial.Place) -> float:
        words = _devices(run.point.ranks, self.on_cards)
        if run.point.machines > 1:
            words += [f"--ips={','.join(self.launch.nodes[: run.point.machines])}", f"--host={self.launch.host}"]
            words += [f"--start_port={self.launch.meeting_port + 1}", f"--wait={self.o.wait:g}"]
        words += [*self.series.words(run), f"{self.series.flags.output}={place.run}"]
        try:
            return trial.execute(words, place, self.env)
        except FleetError as failure:
            raise FleetError(f"{run}: {failure}") from None

    def _place(self, run: Run) -> trial.Place:
        return trial.Place(self.o.output / self.series.name(run), self.meeting.node if self.meeting else 0)

    def _together(self, text: str, what: str) -> list[str]:
        return self.meeting.exchange(text, what, all_hear=False) if self.meeting else [text]

    def _new_meeting(self) -> Meeting:
        series = self.series
        text = json.dumps([self.launch.nodes, Path(series.script).name, series.batch, series.modes, series.ranks,
                           series.seeds, __version__])  # fmt: skip
        node = self.launch.nodes.index(self.launch.host)
        same = "list of hosts, script, series or version of ppfleet"
        # launch meets one below the trainers' first port, this one below that.
        port = self.launch.meeting_port - 1
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        return Meeting(list(self.launch.nodes), node, port, digest, self.o.wait, say, same)

    def _write(self, facts: dict[str, Any]) -> None:
        print(table.text(facts), flush=True)
        output = self.o.output
        output.mkdir(parents=True, exist_ok=True)
        replace_file(output / "scale.json", json_bytes(facts))
        shown = series_page.html(facts).encode()
        replace_file(output / "scale.html", shown)
        table.picture(facts, output / "scale.png")
        say(f"{output}/scale.json, scale.html, scale.png")
