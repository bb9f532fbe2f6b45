"""`ppfleet report`: what a run's files tell, in every state that a run can be in, and the page that is made of it."""

import base64
import html.parser
import json
import os
import re
import shutil
import time
from types import SimpleNamespace

import pytest

from ppfleet.__main__ import main
from ppfleet.checkpoint import manifest
from ppfleet.checkpoint.history import NAME, RANKS, History
from ppfleet.commands.report import run
from ppfleet.errors import CheckpointError, DataError
from ppfleet.evaluation.confusion import Mistake, Seen
from ppfleet.watchdog.process import this_host
from ppfleet.watchdog.recorder import KEPT
from tests.story import A, B

HOSTILE = "</td></table></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b\u202e"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a PNG


class Page(html.parser.HTMLParser):
    """A page as its elements and its words. Fails on tags that do not close, and on all that could run or load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        assert not self.open and text.startswith("<!DOCTYPE html>")
        assert not re.search(r"https?://|@import|url\(", text) and "\x1b" not in text and text.encode()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert tag not in ("script", "link", "iframe", "object", "base", "form"), tag
        assert not [name for name in attrs if name.startswith("on")], attrs
        assert attrs.get("src", "data:image/").startswith("data:image/")
        assert attrs.get("href", "#").startswith(("#", "logs/"))
        self.elements.append((tag, attrs))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def count(self, tag, **wanted):
        return sum(
            name == tag and all(attrs.get(key.rstrip("_")) == value for key, value in wanted.items())
            for name, attrs in self.elements
        )


def report(directory, *more):
    assert main(["report", str(directory), *map(str, more)]) == 0
    return Page((directory / "report.html").read_text(encoding="utf-8"))


def write_history(story, ranks=2, first=0, steps=(), **figures):
    """Lines of a start that trained from `first`; each step a second after the other."""
    history = History(story.directory / NAME)
    if ranks:
        history.add(first, {RANKS: ranks})
    for step in steps:
        story.now += 1
        history.add(step, {"train/loss": 3 / (step + 1), **figures})
    history.close()


def evaluation(directory, seen, show=None):
    directory.mkdir(parents=True, exist_ok=True)
    job = SimpleNamespace(directory=directory, comm=SimpleNamespace(on_first=lambda work, what: work()))
    seen.write(job, "step 12", show)


def write_checkpoints(directory, count=2):
    state = json.dumps({"step": 12, "epoch": 1, "metrics": {"top1": 0.5}})
    parts = dict.fromkeys(manifest.PARTS, state.encode())
    return [manifest.write(directory / "checkpoints", 12 * n, parts, best=n == 1) for n in range(1, count + 1)]


def killed_and_resumed(story):
    """12 steps, rank 1 is killed; the next start fails at once; the third goes on from step 10 and comes to the end."""
    first, second = ranks = story.ranks()
    story.now = story.began + 0.01
    write_history(story, steps=[4, 8, 12])
    end = story.train(ranks, 12)
    first.step(end), second.step(end)
    first.say(end + 1, "killed", 1, signal=9)
    story.began += 100
    for rank in story.ranks(run=""):
        rank.fail(1, DataError("no data"))
    story.began += 100
    ranks = story.ranks(run="third")
    for rank in ranks:
        rank.flight.step = 10
    story.now = story.began + 1
    write_history(story, first=10, steps=[11, 14, 18])
    History(story.directory / NAME).add(18, {"eval/top1": 0.75, "eval/samples": 8})
    end = story.train(ranks, 8)
    for rank in ranks:
        rank.say(end + 20, "ended")
    story.now = story.began + end + 30


def test_a_run_that_was_killed_and_went_on(story, capsys):
    killed_and_resumed(story)
    page = report(story.directory)
    said = capsys.readouterr().out
    assert said.startswith(f"report: {story.directory}/report.html: finished, step 18, eval/top1 0.75, 3 starts, 3 min")
    starts = [(s.first, s.last, s.ranks, s.well, s.back) for s in run.collect([story.directory]).starts]
    assert starts == [(0, 12, 2, False, 2), (None, 12, 2, False, 1), (10, 18, 2, True, 0)]
    assert f"rank 1 on {A} was killed by SIGKILL at step 12" in page.text and "ranks 0, 1 raised DataError" in page.text
    assert f"python -m ppfleet why {story.directory} --back 2" in page.text
    # Three charts (loss, accuracy, steps over time), each with a mark for both ends that were not the last.
    charts = [attrs["aria-label"] for _, attrs in page.elements if "aria-label" in attrs]
    assert [each.partition(",")[0] for each in charts] == ["loss", "accuracy", "steps over time"]
    assert page.count("g", class_="mark") == 6
    assert f"Mark 1 at step 12: end of start 1: rank 1 on {A} was killed by SIGKILL at step 12 (" in charts[0]
    assert "Mark 2 at step 12: end of start 2: ranks 0, 1 raised DataError: no data (t.py:1)." in charts[0]
    assert "from 0.6 at step 4 to 0.1579 at 18" in charts[0]  # step 12 of the first start was undone
    assert "samples" not in charts[1]
    assert page.count("svg") == 3 and "finished" in page.text


def test_marks_keep_their_numbers_where_the_first_start_never_trained(story):
    story.rank(0, 1, run="").fail(1, DataError("no data"))
    story.began += 100
    story.now = story.began + 1
    write_history(story, ranks=1, steps=[2, 4])
    only = story.rank(0, 1)
    only.fail(story.train([only], 4) + 5, ValueError("no"))
    page = report(story.directory)
    told = [attrs["aria-label"] for _, attrs in page.elements if "aria-label" in attrs]
    assert "Mark 1 at step 0: end of start 1" in told[0] and "Mark 2 at step 4: end of start 2" in told[0]
    assert "Mark 1 at seconds 0: end of start 1. Mark 2 at seconds 4" in told[1]


def test_a_run_that_goes_on(story):
    ranks = [story.rank(n, boot=this_host(), pid=os.getpid()) for n in range(2)]
    story.now = story.began + 0.01
    write_history(story, steps=[2])
    story.now = story.began + story.train(ranks, 3) + 0.5
    page = report(story.directory)
    assert page.count("span", class_="pill running") == 1 and page.count("g", class_="mark") == 0
    assert "running · 2 ranks · from step 0 to step 3" in page.text and "still run, at step 3" in page.text


def test_a_run_that_failed_is_marked_too(story):
    story.now = story.began + 0.01
    write_history(story, ranks=1, steps=[2])
    only = story.rank(0, 1)
    only.fail(story.train([only], 3) + 1, ValueError("no"))
    page = report(story.directory)
    assert page.count("span", class_="pill failed") == 1 and page.count("g", class_="mark") == 2
    assert page.count("p", class_="failed") == 1 and f"rank 0 on {A} raised ValueError: no" in page.text


def test_a_start_that_was_refused_leaves_the_run_finished(story, capsys):
    killed_and_resumed(story)
    story.began += 1000
    for rank in story.ranks(run="fourth"):
        rank.fail(1, CheckpointError("other preprocess than now"))
    page = report(story.directory)
    assert page.count("span", class_="pill ok") == 1 and page.count("p", class_="failed") == 0
    assert "finished, step 18, eval/top1 0.75, 4 starts" in capsys.readouterr().out
    assert "raised CheckpointError: other preprocess than now" in page.text  # among the starts


def test_the_best_is_told_where_it_is_not_the_last(story, capsys):
    killed_and_resumed(story)
    History(story.directory / NAME).add(20, {"eval/top1": 0.5, "eval/loss": 0.25})
    report(story.directory)
    assert "eval/top1 0.5 (best 0.75), eval/loss 0.25," in capsys.readouterr().out


def test_a_run_that_was_preempted_is_stopped(story):
    for rank in story.ranks():
        rank.say(1, "preempted", text="saved at step 3")
    page = report(story.directory)
    assert page.count("span", class_="pill stopped") == 1 and "got SIGTERM and ended" in page.text
    assert "no history.jsonl: rank 0 writes it" in page.text  # it never came to a line


def test_figures_that_are_not_finite_are_said(story):
    nan = float("nan")
    story.directory.mkdir()
    history = History(story.directory / NAME)
    for step in range(1, 21):
        history.add(step, {"train/loss": nan if step > 3 else 1.0, "eval/loss": float("inf")})
    page = report(story.directory)
    assert "train/loss was NaN or infinite at step 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 7 more" in page.text
    assert "eval/loss was NaN or infinite" in page.text and page.count("g", class_="line") == 2
    assert "no flight record, step 20, eval/loss not finite" in page.text


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda d: History(d / NAME).add(3, {"train/loss": 1.0}), "train/loss 1"),
        (
            lambda d: (d / "settings.json").write_text('{"seed": 3, "options": {"epochs": 8}}'),
            "options name value epochs 8",
        ),
        (write_checkpoints, "all 2 verify"),
        (lambda d: evaluation(d, Seen(["a"], {(0, 0): 4})), "4 of 4 samples correct (100.00 %)"),
        (lambda d: evaluation(d / "eval", Seen(["a"], {})), "0 of 0 samples correct (none)"),
    ],
)
def test_any_part_of_a_run_alone_is_a_page(tmp_path, make, shown):
    make(tmp_path)
    assert shown in report(tmp_path).text


def test_no_run_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty", "nothing"):
        assert main(["report", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("report: no run found: looked for history.jsonl, settings.json,") and not said.out
        assert said.err.count("\n") == 1 and str(tmp_path / name) in said.err
    assert not list(tmp_path.rglob("report.html"))
    with pytest.raises(SystemExit) as ended:
        main(["report"])
    assert ended.value.code == 2


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    History(tmp_path / NAME).add(3, {"train/loss": 1.0})
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "no/page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and not (tmp_path / "report.html").exists()


def test_damaged_files_are_notes(story):
    killed_and_resumed(story)
    (story.directory / "settings.json").write_text("{")
    (story.directory / "evaluation.json").write_text("[]")
    (story.directory / "flight" / "0000000000009-rank1.ring").write_bytes(b"nothing of the kind")
    page = report(story.directory)
    assert "settings.json is damaged: not JSON" in page.text and "evaluation.json: it is damaged" in page.text
    assert "0000000000009-rank1.ring is not a flight record" in page.text
    (story.directory / NAME).unlink()
    (story.directory / NAME).mkdir()
    (story.directory / "settings.json").write_text("3")
    page = report(story.directory)
    assert "cannot read history.jsonl: Is a directory" in page.text and "not a JSON object" in page.text


def test_only_damaged_files_are_named(tmp_path, capsys):
    (tmp_path / "settings.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert "settings.json is damaged" in capsys.readouterr().err


def test_hosts_with_directories_of_their_own(story, tmp_path):
    story.now = story.began + 0.01
    write_history(story, steps=[2])
    first, second = ranks = [story.rank(0), story.rank(1, boot="other", address=B)]
    end = story.train(ranks, 3)
    first.say(end, "ended"), second.say(end, "ended")
    other = tmp_path / "from-b"
    (other / "flight").mkdir(parents=True)
    shutil.move(second.path, other / "flight")
    assert "no record of rank 1: if it ran on another host" in report(story.directory).text
    whole = report(story.directory, other)
    assert "no record" not in whole.text and "all 2 ranks finished" in whole.text and B in whole.text
    alone = report(other)
    assert (
        "no record of rank 0: if it ran on another host" in alone.text
        and "no history.jsonl: rank 0 writes it" in alone.text
    )


def test_starts_whose_records_are_gone(story):
    for start in range(KEPT + 2):
        story.began += 100
        story.now = story.began + 1
        write_history(story, ranks=1, first=10 * start, steps=[10 * start + 5])
        rank = story.rank(0, 1, run=f"token{start}")
        rank.flight.remove_old()
        rank.flight.step = 10 * start
        rank.say(story.train([rank], 5) + 10, "terminated")
    found = run.collect([story.directory]).starts
    assert [(each.first, each.last) for each in found] == [(10 * n, 10 * n + 5) for n in range(KEPT + 2)]
    assert [each.back for each in found] == [None, None, *range(KEPT - 1, -1, -1)]
    assert "its flight record was deleted" in found[1].sentence and found[0].ended < found[1].time
    assert report(story.directory).count("g", class_="mark") == 2 * (KEPT + 2)


def test_a_clock_that_was_set_back_and_ranks_that_are_no_number(tmp_path):
    lines = [(50, 0, {RANKS: 2}), (60, 5, {"a": 1}), (20, 5, {RANKS: 4}), (10, 9, {"a": 2}), (30, 9, {RANKS: None})]
    text = [json.dumps({"time": when, "step": step, **values}) for when, step, values in lines]
    (tmp_path / NAME).write_text("\n".join(text))
    found = run.collect([tmp_path]).starts
    assert [(each.ranks, each.first, each.last) for each in found] == [(2, 0, 5), (4, 5, 9)]
    assert "2 starts" in report(tmp_path).text


def test_checkpoints_that_do_not_verify_are_named(tmp_path):
    _, second = write_checkpoints(tmp_path, 2)
    page = report(tmp_path)
    assert "000002-step-24 (latest) 12 1 yes" in page.text and "000001-step-12 (best) 12 1 yes" in page.text
    assert json.loads((second / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"] in page.text
    (second / "model.safetensors").write_text("x" * (second / "model.safetensors").stat().st_size)
    page = report(tmp_path)
    assert "1 of 2 do not verify" in page.text
    assert "no: model.safetensors is altered: its SHA-256 is not the manifest's" in page.text


def test_a_checkpoint_that_is_removed_meanwhile_is_none(tmp_path, monkeypatch):
    _, second = write_checkpoints(tmp_path, 2)
    verify = manifest.verify

    def remove_first(path):
        if path == second:
            shutil.rmtree(path)
        return verify(path)

    monkeypatch.setattr(manifest, "verify", remove_first)
    assert "all 1 verify" in report(tmp_path).text


def test_hostile_names_stay_text(story):
    """Class names, paths, settings, figures, a fault's words, the script's arguments, the directory are anybody's."""
    story.directory = story.directory / HOSTILE.replace("/", "_")
    story.directory.mkdir(parents=True)
    story.now = story.began + 0.01
    write_history(story, steps=[2, 4], **{HOSTILE: 0.5, f"eval/{HOSTILE}": float("nan")})
    rank = story.rank(0, 1)
    rank.flight.describe(script=HOSTILE, host=HOSTILE)
    rank.fail(1, ValueError(HOSTILE), HOSTILE)
    (story.directory / "settings.json").write_text(
        json.dumps({HOSTILE: HOSTILE, "defaults": HOSTILE, f"x{HOSTILE}": {HOSTILE: [HOSTILE]}})
    )
    mistakes = [Mistake(1, 0, 1, 0.9), Mistake(2, 1, 0, 0.8)]
    evaluation(
        story.directory,
        Seen([HOSTILE, "\udcff"], {(0, 1): 1, (1, 0): 1}, mistakes),
        lambda sample: (HOSTILE, b"<script>" if sample == 1 else base64.b64decode(PIXEL)),
    )
    page = report(story.directory)  # which parses it, and refuses whatever could run
    shown = HOSTILE.replace("\x1b", "\ufffd")
    assert page.text.count(" ".join(shown.split())) >= 10
    assert page.count("img") == 1 and page.text.count("no picture") == 1
    assert f"{shown}: \\udcff, predicted {shown} (80.0 %)" in [attrs.get("alt") for _, attrs in page.elements]


def test_many_classes_are_shown_as_pairs(tmp_path):
    pairs = {(n, n): 50 - n % 7 for n in range(1000)} | {(n, (n + 1) % 1000): n % 7 for n in range(1000)}
    evaluation(tmp_path, Seen([f"class {n}" for n in range(1000)], pairs))
    page = report(tmp_path)
    assert page.count("table", class_="matrix") == 0 and page.count("tr") == 31
    assert "1000 classes; the 30 most confused pairs of 857" in page.text
    assert "class 6 class 7 6 12.0 %" in page.text
    evaluation(tmp_path, Seen([f"class {n}" for n in range(30)], {(3, 4): 2}))
    page = report(tmp_path)
    assert page.count("table", class_="matrix") == 1 and page.count("tr") == 31


def test_the_newest_evaluation_is_shown(tmp_path, monkeypatch):
    evaluation(tmp_path, Seen(["a", "b"], {(0, 0): 3}))
    monkeypatch.setattr(time, "time", lambda: 4e9)
    evaluation(tmp_path / "eval", Seen(["a", "b"], {(0, 0): 3, (0, 1): 1}))
    assert "3 of 4 samples correct" in report(tmp_path).text


def test_a_long_history_makes_no_long_page(tmp_path):
    lines = [f'{{"time": {n}, "step": {n}, "train/loss": {1 / (n + 1)}, "train/lr": 0.1}}' for n in range(20_000)]
    (tmp_path / NAME).write_text("\n".join(lines))
    report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 300_000
