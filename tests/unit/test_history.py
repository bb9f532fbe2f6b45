"""history.jsonl: what is written, what a reader makes of torn lines, and of steps that a resume did again."""

import json
import math
import resource
import signal
import subprocess
import sys

import pytest

from ppfleet.checkpoint.board import Board
from ppfleet.checkpoint.history import NAME, RANKS, History, Line, curves, read
from ppfleet.errors import FleetError
from tests.harness import ROOT


def test_a_line_is_plain_json_with_null_for_what_is_not_finite(tmp_path):
    history = History(tmp_path / "new" / NAME)
    nan, inf = float("nan"), float("inf")
    assert history.add(3, {"train/loss": 0.5, "train/lr": 1e-9, "größe": 2, "a": nan, "b": inf, "c": -inf}) == ""
    (first,) = (tmp_path / "new" / NAME).read_text(encoding="utf-8").splitlines()
    told = json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert '"größe": 2,' in first  # as the whole number that it was
    assert list(told) == ["time", "step", "train/loss", "train/lr", "größe", "a", "b", "c"]
    assert (told["step"], told["train/loss"], told["größe"], told["a"], told["b"]) == (3, 0.5, 2, None, None)
    (line,) = read(tmp_path / "new" / NAME)
    assert line.values["train/lr"] == 1e-9 and math.isnan(line.values["c"])


def test_names_of_the_line_itself_are_taken(tmp_path):
    for name in ("time", "step"):
        with pytest.raises(FleetError, match=f"cannot be named '{name}'"):
            History(tmp_path / NAME).add(1, {name: 1.0})


def test_a_torn_line_is_left_out_and_the_next_one_begins_anew(tmp_path):
    path = tmp_path / NAME
    History(path).add(1, {"a": 1})
    with path.open("ab") as stream:
        stream.write(b'{"time": 5, "step": 2, "a": 0.')
    assert [line.step for line in read(path)] == [1]
    History(path).add(3, {"a": 3})
    assert [line.step for line in read(path)] == [1, 3]


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe\x00", b"[]", b"null", b'{"step": 1}', b'{"time": "x", "step": 1}', b'{"time": 1, "step": []}',
     b'{"time": NaN, "step": 1}', b'{"time": 1, "step": Infinity}',
     b'{"time": 1, "step": 1' + b"0" * 400 + b"}", b'{"time": 1, "step": 1, "a": 1' + b"0" * 400 + b"}",
     b"[" * 10000],
)  # fmt: skip
def test_what_is_no_line_is_left_out(tmp_path, text):
    (tmp_path / NAME).write_bytes(b'{"time": 1, "step": 1, "a": 2, "b": "text", "c": true}\n' + text + b"\n")
    assert read(tmp_path / NAME) == [Line(1.0, 1, {"a": 2.0})]


def test_no_file_has_no_lines(tmp_path):
    (tmp_path / "file").touch()
    assert read(tmp_path / NAME) == read(tmp_path / "file" / NAME) == []


def test_a_resume_replaces_what_it_does_again():
    def line(step, **values):
        return Line(0.0, step, values)

    before = [line(10, loss=5), line(20, loss=4), line(20, top1=0.2), line(30, loss=3), line(3, epoch_figure=1)]
    again = [line(25, loss=3.5), line(35, loss=2.5), line(40, top1=0.4), line(40, top1=0.5)]
    assert curves([*before, *again]) == {
        "loss": [(10, 5), (20, 4), (25, 3.5), (35, 2.5)],
        "top1": [(20, 0.2), (40, 0.5)],
        "epoch_figure": [(3, 1)],  # counted otherwise: the others keep their points
    }
    resumed = line(20, **{RANKS: 2})
    assert curves([*before, resumed, line(40, loss=2)]) == {
        "loss": [(10, 5), (20, 4), (40, 2)],  # without that of step 30, which was lost
        "top1": [(20, 0.2)],
        "epoch_figure": [(3, 1)],
        RANKS: [(20, 2)],
    }
    assert curves([*before, line(0, **{RANKS: 2})]) == {RANKS: [(0, 2)]}  # training began anew


def test_a_kill_loses_at_most_a_line(tmp_path):
    """Killed while it writes as fast as it can: every line but the last is whole, and none is missing between."""
    code = f"""
from pathlib import Path
from ppfleet.checkpoint.history import History
history, step = History(Path({str(tmp_path / NAME)!r})), 0
while True:
    step += 1
    history.add(step, {{"a": step, "b": 1 / step}})
    if step == 1000: print("going", flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "going\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    steps = [line.step for line in read(tmp_path / NAME)]
    assert len(steps) >= 1000 and steps == list(range(1, len(steps) + 1))
    assert (tmp_path / NAME).read_bytes().count(b"\n") - len(steps) in (0, 1)


def test_a_full_disk_costs_lines_not_the_training(tmp_path, capsys):
    """By a limit on the size of a file: the line that does not fit is torn, said once, and the next ones are whole."""
    board = Board(tmp_path)
    board._writer = None  # VisualDL's own file would hit the limit too
    board.add(1, {"a": 1})
    size = (tmp_path / NAME).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[0][1]))
    try:
        for step in (2, 3, 4):
            board.add(step, {"a": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    board.add(5, {"a": 1})
    assert [line.step for line in read(tmp_path / NAME)] == [1, 5]
    said = capsys.readouterr().err
    assert said.count("cannot write") == 1 and "training continues" in said


def test_a_place_that_takes_no_file_is_said(tmp_path):
    (tmp_path / NAME).mkdir()
    assert History(tmp_path / NAME).add(1, {}) == f"cannot write {tmp_path / NAME}: Is a directory"
