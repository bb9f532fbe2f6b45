"""`ppfleet scale` without its processes: which runs, where the time went, parity, projection, table and page."""

import json
import re
from dataclasses import replace

import pytest

from ppfleet.__main__ import main
from ppfleet.checkpoint.history import NAME, History
from ppfleet.commands.scale import command, parity, projection, series_page, table, time_breakdown, trial
from ppfleet.commands.scale.projection import Network, Step
from ppfleet.commands.scale.series import GLOBAL, RANK, Point, Series, Trial, doubled, take_out
from ppfleet.commands.scale.summary import summary
from ppfleet.errors import FleetError
from ppfleet.watchdog.recorder import Flight, read

SERIES = Series("train.py", ("--epochs=1",), 16, (GLOBAL, RANK), (1, 2), (1, 2), (0, 1))


# Which runs


def test_points_from_the_smallest_on():
    assert SERIES.points(GLOBAL) == [Point(1, 1, 16), Point(1, 2, 8), Point(2, 1, 8), Point(2, 2, 4)]
    assert SERIES.points(RANK) == [Point(1, 1, 16), Point(1, 2, 16), Point(2, 1, 16), Point(2, 2, 16)]
    # Where the smallest has more than one rank, the batch given is that of each of them.
    assert replace(SERIES, ranks=(2, 4)).points(GLOBAL)[0] == Point(1, 2, 16)


def test_runs_are_made_once_and_seed_by_seed():
    runs = SERIES.runs()
    assert len(runs) == len(set(runs)) == 2 * 7  # 1 × 1 belongs to both tables
    assert [run.seed for run in runs] == [0] * 7 + [1] * 7


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(FleetError, match="a global batch of 16 cannot be divided by 3 ranks.*--batch=rank"):
        replace(SERIES, ranks=(1, 3)).points(GLOBAL)


def test_a_run_is_known_by_its_command():
    run = Trial(Point(1, 2, 8), 0)
    assert SERIES.command(run) == ["train.py", "--epochs=1", "--batch-size=8", "--seed=0"]
    name = SERIES.name(run)
    assert re.fullmatch("1x2-batch8-seed0-[0-9a-f]{8}", name) and name == replace(SERIES, seeds=(0, 7)).name(run)
    others = [replace(SERIES, arguments=("--epochs=2",)), replace(SERIES, threads="2"), replace(SERIES, script="b.py")]
    assert len({name, *(other.name(run) for other in others)}) == 4
    # A machine alone computes the same, whatever others there are; two machines do so in their order.
    away = replace(SERIES, hosts=("a", "b"))
    assert away.name(run) == name and away.name(Trial(Point(2, 2, 8), 0)) != SERIES.name(Trial(Point(2, 2, 8), 0))


@pytest.mark.parametrize(
    ("words", "left", "value"),
    [
        (["--a", "--batch-size=4"], ["--a"], "4"),
        (["--batch-size", "4", "b"], ["b"], "4"),
        (["--batch-size=4", "--batch-size=8"], [], "8"),
        (["--batch-size-x=4"], ["--batch-size-x=4"], None),
    ],
)
def test_an_option_is_taken_out_of_the_script_s(words, left, value):
    assert take_out(words, "--batch-size") == (left, value)


def test_doubled():
    assert [doubled(most) for most in (1, 2, 3, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.py"], "must set the batch per rank: add --batch-size=N"),
        (["train.py", "--", "--batch-size=x"], "must set the batch per rank"),
        (
            ["train.py", "--", "--batch-size=4", "--seed=3"],
            "remove --seed=3 from the script's arguments: scale sets it for each run (see --seeds)",
        ),
        (
            ["train.py", "--", "--batch-size=4", "--output-dir", "x"],
            "remove --output-dir=x from the script's arguments",
        ),
        (["no.py", "--", "--batch-size=4"], "script no.py not found in"),
        (["--ranks=1,1", "train.py"], "'1,1' lists a number twice"),
        (["--ranks=0", "train.py"], "must be an integer >= 1, got '0'"),
        (["--batch=world", "train.py"], "must be global or rank, or both, got 'world'"),
        (["--latency=1", "train.py", "--", "--batch-size=4"], "--latency also needs --bandwidth"),
        (["--ranks=1,3", "train.py", "--", "--batch-size=4"], "a global batch of 4 cannot be divided by 3 ranks"),
        (["--ips=a,,b", "train.py", "--", "--batch-size=4"], "without spaces, got ''"),
    ],
)
def test_what_makes_no_series_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as end:
        command.main(words)
    error = capsys.readouterr().err
    assert end.value.code == 2 and told in error and error.count("\n") == 1


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["scale", "--ranks=1", "--output=train.py/x", "train.py", "--", "--batch-size=4"]) == 1
    assert "batch 4 per rank, seed 0: cannot write train.py" in capsys.readouterr().err


# Where the time went


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.time", lambda: 1.7e9 + self.now)

    def during(self, flight, kind, seconds, inside=None, **more):
        with flight.during(kind, kind, **more) as entry:
            if inside:
                inside()
            self.now += seconds
        return entry


def recorded(path, rank, clock, exchanges):
    """A rank that starts up for 7 s, takes 1 s for data and 3 s for a step besides its exchange, and ends with an
    evaluation of 5 s in which it waits for 2 s more."""
    flight = Flight(path / f"1-rank{rank}.ring", {"rank": rank, "size": 2, "pid": 1, "started": 1.7e9})
    clock.during(flight, "work", 7)
    clock.during(flight, "evaluate", 3)  # before training: not part of its time
    for number, seconds in enumerate(exchanges):
        clock.during(flight, "data", 1)

        def exchange(seconds=seconds):
            entry = flight.enter("collective", "all-reduce of gradients", "[250] float32", waits=True, numbered=True)
            clock.now += seconds
            flight.leave(entry)

        clock.during(flight, "step", 3, exchange)
        clock.now += 0.5
        flight.step = number + 1
    clock.during(flight, "evaluate", 5, lambda: clock.during(flight, "meeting", 2, waits=True))
    clock.during(flight, "save", 4)
    clock.during(flight, "export", 100)
    return read(flight.path)


def test_the_record_adds_up_where_the_time_went(tmp_path, monkeypatch):
    made = recorded(tmp_path, 0, Clock(monkeypatch), [1, 3])
    assert vars(made.spent) == {
        "steps": 2, "span": 2 * 4.5 + 4 + 7 + 4, "data": 2, "step": 6 + 4, "waited": 4, "evaluate": 7, "save": 4
    }  # fmt: skip


def test_a_ring_that_is_full_still_knows_the_whole_time(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    flight = Flight(tmp_path / "1-rank0.ring", {"rank": 0, "size": 1, "pid": 1}, slots=8)
    for _ in range(100):
        clock.during(flight, "data", 1)
        clock.during(flight, "step", 2)
    assert len(read(flight.path).entries) == 8 and vars(read(flight.path).spent)["span"] == 300


def test_exchange_and_waiting_are_told_apart_also_on_several_hosts(tmp_path, monkeypatch):
    """Rank 1 is late at the first exchange, rank 0 at the second: each takes 1 s, the rest is waiting."""
    clock = Clock(monkeypatch)
    first, second = recorded(tmp_path, 0, clock, [3, 1]), recorded(tmp_path, 1, clock, [1, 5])
    apart = time_breakdown.combine(
        [json.loads(json.dumps(time_breakdown.host_times([each]))) for each in (first, second)]
    )
    assert apart == time_breakdown.combine([time_breakdown.host_times([first, second])])
    assert apart.communication == pytest.approx(2) and apart.stragglers == pytest.approx(3)
    assert (apart.compute, apart.data, apart.evaluation, apart.saving, apart.other) == (6, 2, 7, 4, 1)
    assert sum(getattr(apart, name) for name in ("compute", "communication", "stragglers", "data", "evaluation",
                                                 "saving", "other")) == pytest.approx(apart.span)  # fmt: skip
    assert (apart.steps, apart.looked_at, apart.bytes, apart.overlapped) == (2, 2, 1000, False)


def test_a_rank_that_trained_nothing_has_no_parts(tmp_path):
    Flight(tmp_path / "1-rank0.ring", {"rank": 0, "size": 1, "pid": 1})
    assert (
        time_breakdown.combine([time_breakdown.host_times([read(tmp_path / "1-rank0.ring")])]) is None
        and time_breakdown.combine([]) is None
    )


# Parity


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (100, 1.984)]
)
def test_students_quantiles(freedom, value):
    assert parity.t_quantile(freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ([0.900, 0.911, 0.919], parity.PARITY),
        ([0.850, 0.861, 0.869], parity.LOWER),
        ([0.950, 0.961, 0.969], parity.HIGHER),
        ([0.850, 0.930, 0.940], parity.UNKNOWN),
        ([0.950], parity.UNKNOWN),
    ],
)
def test_verdicts(other, word):
    found = parity.compare(dict(enumerate([0.90, 0.91, 0.92])), dict(enumerate(other)), 0.009)
    assert found.word == word and found.sentence.startswith(word) and found.seeds == len(other)


def test_the_interval_is_that_of_the_paired_differences():
    found = parity.compare({0: 1.0, 1: 2.0, 2: 3.0, 9: 9.0}, {2: 3.3, 1: 2.2, 0: 1.1}, 0.1)
    assert found.difference == pytest.approx(0.2) and found.seeds == 3
    assert (
        found.high - 0.2 == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4) == pytest.approx(0.2 - found.low, rel=1e-4)
    )


def test_equal_figures_of_few_samples_are_no_proof():
    same = {0: 0.9, 1: 0.95}
    assert parity.compare(same, same, 0.01).word == parity.PARITY
    assert parity.compare(same, same, 0.01, resolution=1 / 20).word == parity.UNKNOWN
    assert parity.compare(same, {0: float("nan"), 1: 0.95}, 0.01).word == parity.UNKNOWN


# Projection


def test_a_ring_on_two_and_many_ranks():
    network = Network(bandwidth=1e6, latency=0.001)
    assert projection.wire_time(2e6, 2, network) == pytest.approx(2 + 0.002)
    assert projection.wire_time(2e6, 4, network) == pytest.approx(3 + 0.006)
    assert projection.wire_time(2e6, 1, network) == 0


def test_handling_is_what_the_network_does_not_explain():
    step = Step(own=0.1, exchange=2.5, ranks=2, bytes=2_000_000)
    network = Network(1e6, 0.0)
    assert projection.handling(step, network) == pytest.approx(0.5 / 2e6)
    assert projection.handling(step, None) == pytest.approx(2.5 / 2e6)
    assert projection.handling(step, Network(1e3, 0.0)) == 0  # it cannot be less than nothing
    a_byte = projection.handling(step, network)
    assert projection.step_time(step, a_byte, 2, network) == pytest.approx(0.1 + 2.5)  # as measured
    assert projection.step_time(step, a_byte, 2, Network(1e5, 0.0)) == pytest.approx(0.1 + 20 + 0.5)
    assert projection.step_time(step, a_byte, 4, network) == pytest.approx(0.1 + 3 + 0.75)


# The table


def made(point, seed, seconds, top1, resumed=False, steps=10, exchange=1.0):
    own = {"compute": seconds - exchange - 1, "communication": exchange, "stragglers": 0.0, "data": 0.5,
           "evaluation": 0.3, "saving": 0.1, "other": 0.1}  # fmt: skip
    more = {"span": seconds, "steps": steps, "looked_at": steps, "bytes": 1_000_000 if point.total > 1 else 0}
    return {"command": [], "machines": point.machines, "ranks": point.ranks, "batch": point.batch, "seed": seed,
            "wall": seconds + 4, "resumed": resumed, "metrics": {"top1": top1, "top5": 1.0}, "samples": 360,
            "parts": None if resumed else {**own, **more, "overlapped": False}, "finished": 0.0}  # fmt: skip


def results(series=SERIES, **more):
    found = []
    for run in series.runs():
        found.append(made(run.point, run.seed, 12.0 / run.point.total + 2 * run.seed, 0.9 + 0.01 * run.seed, **more))
    return found


def test_speed_up_and_efficiency():
    facts = summary(SERIES, results())
    base, two, apart, four = facts["tables"][GLOBAL]
    assert facts["metric"] == "top1" and base["time"] == {"mean": 13, "spread": pytest.approx(2**0.5), "count": 2}
    assert base["speed_up"] is base["efficiency"] is base["parity"] is None
    assert two["speed_up"] == pytest.approx(13 / 7) and two["efficiency"] == pytest.approx(13 / 14)
    assert four["speed_up"] == pytest.approx(13 / 4) and four["efficiency"] == pytest.approx(13 / 16)
    assert (apart["machines"], apart["global_batch"]) == (2, 16) and four["parity"]["difference"] == 0
    assert four["metric"]["mean"] == pytest.approx(0.905) and base["start_up"]["mean"] == pytest.approx(4)


def test_the_time_of_a_resumed_run_does_not_count_and_its_metric_does():
    found = results()
    found[1] = made(Point(1, 2, 8), 0, 1.0, 0.5, resumed=True)
    facts = summary(SERIES, found)
    row = facts["tables"][GLOBAL][1]
    assert row["time"]["count"] == 1 and row["speed_up"] == pytest.approx(13 / 8) and row["runs"] == 2
    assert row["metric"]["mean"] == pytest.approx((0.5 + 0.91) / 2)
    assert facts["notes"][1].endswith("the time does not: 1 machine × 2 ranks, seed 0")
    found[8] = made(Point(1, 2, 8), 1, 1.0, 0.5, resumed=True)
    row = summary(SERIES, found)["tables"][GLOBAL][1]
    assert row["time"] is row["speed_up"] is row["parts"] is None and table.cells(row)[3] == table.NONE


def test_the_projection_is_made_of_the_largest_point_and_its_own_machine():
    network = Network(1e6, 0.0)
    made_of = summary(SERIES, results(), measured=network)["projection"]
    step = made_of["step"]
    # 2 × 2: spans of 3 and 5 s in 10 steps, of which 0.1 s a step is exchange and 0.4 s of each are not steps
    assert step == {"own": pytest.approx(0.26), "exchange": pytest.approx(0.1), "ranks": 4, "bytes": 1_000_000}
    assert made_of["handling"] == 0 and made_of["one_machine_step"] == pytest.approx(0.66)  # (6 + 8) / 2 - 0.4
    assert [point["machines"] for point in made_of["points"]] == [2, 4, 8, 16, 32, 64]
    assert made_of["points"][0]["step"] == pytest.approx(0.26 + 1.5)
    given = summary(SERIES, results(), measured=network, given=Network(1e7, 0.0))["projection"]
    assert given["points"][0]["step"] == pytest.approx(0.26 + 0.15) and given["network_is"] == "given"


@pytest.mark.parametrize(
    ("series", "network", "told"),
    [
        (SERIES, None, "the network must be measured"),
        (replace(SERIES, modes=(GLOBAL,)), Network(1, 1), "it needs an equal batch per rank"),
        (replace(SERIES, machines=(1,), ranks=(1,)), Network(1, 1), "a single rank exchanges nothing"),
    ],
)
def test_why_there_is_no_projection(series, network, told):
    facts = summary(series, results(series), measured=network)
    assert facts["projection"] is None and told in facts["notes"][-1]


def test_times_that_cannot_be_relied_on_are_called_so():
    assert summary(SERIES, results())["notes"][0].startswith("the times of one point vary by up to 35%")
    steady = replace(SERIES, seeds=(0,))
    assert not [note for note in summary(steady, results(steady))["notes"] if "vary" in note]


def test_what_the_figures_cover_is_said():
    found = results()[:7]
    found[1]["parts"]["looked_at"] = 4
    assert "separated using the newest 4 of up to 10 steps" in summary(SERIES, found)["notes"][0]
    found[2]["parts"]["overlapped"] = True
    assert "communication includes both" in summary(SERIES, found)["notes"][1]


def test_metrics_are_found_by_name():
    assert summary(SERIES, results(), metric="top5")["tables"][GLOBAL][0]["metric"]["mean"] == 1
    with pytest.raises(FleetError, match="--metric=f1 is not in any run's history.jsonl, which has: top1, top5"):
        summary(SERIES, results(), metric="f1")
    none = [{**each, "metrics": {}} for each in results()]
    facts = summary(SERIES, none)
    assert "evaluates nothing" in " ".join(facts["notes"]) and facts["tables"][GLOBAL][1]["parity"] is None
    assert "–" in table.text(facts) and "<h1>" in series_page.html(facts)


def test_text_and_page_show_all_of_it(tmp_path):
    facts = summary(SERIES, results(), measured=Network(1e6, 0.0))
    parts = [
        "Equal global batch (16)",
        "Equal batch per rank (16)",
        "ranks per machine",
        "7.0 s ± 1.4 s",
        "0.9050 ± 0.0071",
    ]
    parts += ["1.86", "93%", "stragglers", "1 × 1", "cannot tell", "rojection", "MB in a ring"]
    for shown in (table.text(facts), series_page.html(facts)):
        assert not [part for part in parts if part not in shown]
    assert "not measured" in table.text(facts) and "<b>Not measured.</b>" in series_page.html(facts)
    assert not re.search(r"https?://|<script|@import|url\(", series_page.html(facts))
    assert 'role="img" aria-label="compute ' in series_page.html(facts)
    table.picture(facts, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


# What a run leaves


@pytest.fixture
def place(tmp_path):
    place = trial.TrialDirectory(tmp_path)
    place.run.mkdir()
    return place


def left(place, ranks=2, batch=8, resumed=True, told=()):
    (place.run / "settings.json").write_text(json.dumps({"ranks": ranks, "batch_size": batch}))
    history = History(place.run / NAME)
    for step, top1 in ((1, 0.5), (2, 0.25), (2, 0.75)):  # the last step was made twice
        history.add(step, {"eval/top1": top1, "eval/f1": float("nan"), "eval/samples": 360, "train/loss": 2.0})
    return trial.result(place, ["train.py"], Trial(Point(1, 2, 8), 0), 9.0, resumed, list(told))


def test_a_result_is_read_back_as_it_was(place, tmp_path, monkeypatch):
    assert trial.finished(place) is None
    told = [time_breakdown.host_times([recorded(tmp_path, 0, Clock(monkeypatch), [1, 3])])]
    assert left(place, told=told)["parts"] is None  # it was interrupted
    found = left(place, resumed=False, told=told)
    assert found["metrics"] == {"top1": 0.75, "f1": None} and found["samples"] == 360 and found["parts"]["span"] == 24
    trial.write(place, found)
    assert trial.finished(place) == found
    place.result.write_text("{")
    with pytest.raises(FleetError, match="result.json .*: delete it to repeat the run"):
        trial.finished(place)


def test_what_is_missing_is_named(place):
    with pytest.raises(FleetError, match="history.jsonl is missing or empty: the script must train with ppfleet.Job"):
        trial.result(place, [], Trial(Point(1, 2, 8), 0), 9.0, True, [])
    with pytest.raises(FleetError, match="trained with batch_size=16 instead of 8 .*--batch-flag"):
        left(place, batch=16)
    with pytest.raises(FleetError, match="trained with ranks=1 instead of 2"):
        left(place, ranks=1)
    with pytest.raises(FleetError, match="the flight records in .* contain no step"):
        trial.result(place, [], Trial(Point(1, 2, 8), 0), 9.0, False, [])


def test_a_checkpoint_makes_a_run_resumable(place):
    assert not place.has_checkpoint()
    checkpoint = place.run / "checkpoints" / "step3"
    checkpoint.mkdir(parents=True)
    assert not place.has_checkpoint()
    (checkpoint / "manifest.json").touch()
    assert place.has_checkpoint()
