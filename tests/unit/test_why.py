"""`ppfleet why`: which rings are read, what belongs to which start, and what is printed, as text, JSON and a page."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest

from ppfleet.__main__ import main
from ppfleet.commands.why import cause
from ppfleet.errors import CommError
from ppfleet.watchdog.process import this_host
from tests.harness import ROOT
from tests.story import GRADIENTS, A, B

# The records themselves


def test_clocks_that_are_minutes_apart(story):
    first, second = story.rank(0), story.rank(1, boot="other", address=B, skew=-300.0)
    end = story.train([first, second], 5)
    second.step(end)
    first.pulse(end + 3)
    first.fail(end + 3, ValueError("no"))  # three seconds after the other had died
    second.pulse(end + 0.1)
    found = story.look(60)
    assert found.ranks == (1,) and found.attempt.ranks[1].record.facts["skew"] == pytest.approx(300, abs=0.01)
    assert found.attempt.ranks[1].seen == pytest.approx(story.began + end + 0.1, abs=0.01)


def test_clocks_that_cannot_be_compared_are_a_note(story):
    story.rank(0), story.rank(1, boot="other", address=B)
    assert f"cannot compare the clock of {B} with that of rank 0" in story.look(60).notes


def test_earlier_attempts(story, capsys):
    for number, run in enumerate(("a", "b", "", "")):
        story.began += 100
        for rank in story.ranks(run=run):
            rank.fail(1, ValueError(f"failure {number}"))
    found = story.look(60)
    assert "failure 3" in found.sentence and found.earlier == 3 and len(found.attempt.ranks) == 2
    assert any("3 earlier starts of this job: --back 1" in note for note in found.notes)
    for back, shown in enumerate(("failure 3", "failure 2", "failure 1", "failure 0")):
        assert main(["why", str(story.directory), "--back", str(back)]) == 0
        assert shown in capsys.readouterr().out.splitlines()[0]
    assert main(["why", str(story.directory), "--back", "4"]) == 2
    assert "only 4 starts" in capsys.readouterr().err


def test_failed_start_is_newer_although_the_other_hosts_clock_is_ahead(story):
    ranks = [story.rank(0), story.rank(1, boot="other", address=B, skew=600.0)]
    story.train(ranks, 3)
    story.began += 100
    story.rank(0, run="").fail(60, CommError("nothing heard of rank 1", code="not_joined"))
    assert story.look(90).kind == "missing"


def test_failed_start_has_no_ranks_of_an_older_one(story):
    for run, size in (("", 2), ("a", 2), ("", 1)):
        story.began += 100
        for number in range(size):
            story.rank(number, 2, run=run).fail(1, ValueError("no"))
    found = story.look(60)
    assert [rank.number for rank in found.attempt.ranks] == [0] and found.earlier == 2


def test_clock_of_a_failed_start_is_known_from_an_earlier_one(story):
    story.train([story.rank(0), story.rank(1, boot="other", address=B, skew=600.0)], 3)
    story.began += 100
    story.rank(0, run=""), story.rank(1, run="", boot="other", address=B, skew=600.0)
    first, second = story.look(60).attempt.ranks
    assert first.seen == pytest.approx(second.seen, abs=0.01)


def test_this_host_is_not_rank_0s(story):
    ranks = [story.rank(0, skew=-3600.0), story.rank(1, boot=this_host(), address=B, pid=os.getpid())]
    end = story.train(ranks, 3)
    found = story.look(end + 1)
    assert [rank.state for rank in found.attempt.ranks] == ["running", "running"]
    assert found.now == pytest.approx(story.began + end + 1 - 3600, abs=0.01)


def test_older_copy_does_not_count(story, tmp_path):
    first = story.rank(0, 1)
    first.pulse(1)
    shutil.copytree(story.directory, tmp_path / "copy")
    first.pulse(50)
    (rank,) = cause.answer([tmp_path / "copy", story.directory]).attempt.ranks
    assert rank.seen == story.began + 50


def test_damaged_ring_and_dangling_link_are_notes(story, tmp_path):
    story.rank(0, 2).fail(1, ValueError("no"))
    (story.directory / "flight" / "0000000000009-rank1.ring").write_bytes(b"nothing of the kind")
    (story.directory / "rank1.ring").symlink_to("/somewhere/else/0000000000123-rank1.ring")
    (story.directory / "rank0.ring").symlink_to("/somewhere/else/0000000000001-rank0.ring")
    found = story.look(60)
    assert found.kind == "exception"
    damaged, dangling, *_ = found.notes
    assert "0000000000009-rank1.ring is not a flight record" in damaged
    assert "rank1.ring points to /somewhere/else/0000000000123-rank1.ring, which does not exist here" in dangling
    assert not any("0000000000001-rank0.ring" in note for note in found.notes)  # that one is here


def test_a_ring_counts_once(story, tmp_path):
    first = story.rank(0, 1)
    first.say(1, "ended")
    log = tmp_path / "log"
    (log / "restart_1").mkdir(parents=True)
    (log / "rank0.ring").symlink_to(first.path)
    (log / "restart_1" / "rank0.ring").symlink_to(first.path)
    shutil.copytree(story.directory, tmp_path / "copy")
    found = cause.answer([log, story.directory, tmp_path / "copy"])
    assert found.earlier == 0 and len(found.attempt.ranks) == 1


def test_ring_of_a_restart_alone(story, tmp_path):
    first = story.rank(0, 1)
    first.say(1, "ended")
    (tmp_path / "log" / "restart_2").mkdir(parents=True)
    (tmp_path / "log" / "restart_2" / "rank0.ring").symlink_to(first.path)
    assert cause.answer([tmp_path / "log"]).kind == "finished"


def test_directories_of_two_hosts(story, tmp_path):
    _, second = story.rank(0), story.rank(1, boot="other", address=B)
    other = tmp_path / "from-b" / "flight"
    other.mkdir(parents=True)
    shutil.move(second.path, other)
    assert cause.answer([story.directory]).attempt.missing == [1]
    assert cause.answer([story.directory, tmp_path / "from-b"]).attempt.missing == []


# What is printed


def failed_job(story):
    first, second = ranks = story.ranks()
    end = story.train(ranks, 12)
    first.step(end), second.enter(end, "step", "step 13"), second.reduce(end, "a sum <&>")
    first.say(end + 0.1, "killed", 1, signal=9)
    story.now = story.began + 60


def test_text(story, capsys):
    failed_job(story)
    assert main(["why", str(story.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"why: rank 1 on {A} was killed by SIGKILL at step 12 (in a sum <&> #13, tests/story.py:31)"
    assert any(line.startswith("the last ") for line in lines)
    assert sum("… not finished" in line for line in lines) == 4  # a step and a collective of each
    assert len(lines) < 30


def test_text_shows_what_a_rank_is_in_even_if_it_began_long_ago(story, capsys):
    only = story.rank(0, 1)
    only.enter(0, "evaluate", "evaluation")
    for when in range(1, 20):
        only.leave(when + 0.5, only.enter(when, "data", "next batch of the evaluation"))
    assert main(["why", str(story.directory)]) == 0
    assert any("evaluation " in line and "not finished" in line for line in capsys.readouterr().out.splitlines()[2:])


def test_json(story, capsys):
    failed_job(story)
    assert main(["why", str(story.directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "killed" and found["culprits"] == [1] and "SIGKILL" in found["sentence"]
    assert [rank["state"] for rank in found["ranks"]] == ["said", "gone"]
    assert found["event"]["code"] == "killed" and found["ranks"][0]["event"]["fields"]["signal"] == 9
    assert found["timeline"][-1]["left"] is None and found["timeline"][-1]["what"] == GRADIENTS


class Tags(html.parser.HTMLParser):
    """Fails on a tag that is closed without having been opened, or never."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page(story, capsys, tmp_path):
    failed_job(story)
    page = tmp_path / "why.html"
    assert main(["why", str(story.directory), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert (
        f"<h1>rank 1 on {A} was killed by SIGKILL at step 12 (in a sum &lt;&amp;&gt; #13, tests/story.py:31)</h1>"
        in text
    )
    drawing = xml.fromstring(text[text.index('<div class="timeline') : text.index("</div></div>") + 6])
    rows = [row.get("title") for row in drawing.findall("div") if row.get("class").startswith("row")]
    assert rows[0].startswith(f"rank 0 on {A}: ended by the watchdog") and rows[1].startswith(f"rank 1 on {A}: gone")
    assert all("not finished" in row for row in rows)
    bars = [bar.get("class") for bar in drawing.iter("i")]
    assert sorted(bar for bar in bars if bar.endswith(" open")) == ["collective inside open"] * 2 + ["step open"] * 2
    assert bars.count("outline") == 1 and bars.count("died") == 2  # the outline is around what rank 1 was in
    assert text.count('<th scope="row">') == 2
    assert "<script" not in text and "http" not in text


def test_reader_that_has_enough(story):
    failed_job(story)
    command = [sys.executable, "-m", "ppfleet", "why", str(story.directory), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_page_that_cannot_be_written(story, capsys, tmp_path):
    failed_job(story)
    assert main(["why", str(story.directory), "--html", str(tmp_path / "no" / "why.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_long_record_makes_no_long_page(story, tmp_path):
    ranks = story.ranks()
    end = story.train(ranks, 160)
    ranks[0].step(end)
    ranks[1].enter(end, "data", "next batch")
    for rank in ranks:
        rank.pulse(end + 300)
    story.now = story.began + end + 300
    assert main(["why", str(story.directory), "--html", str(tmp_path / "why.html")]) == 0
    text = (tmp_path / "why.html").read_text(encoding="utf-8")
    assert text.count('<i class="') < 25 and "× step" in text and "× next batch" not in text


def test_nothing_to_read(tmp_path, capsys):
    assert main(["why", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err == f"why: no flight record found in {tmp_path}/flight/*.ring and {tmp_path}/*.ring\n"
    assert not said.out


def test_only_a_damaged_ring(tmp_path, capsys):
    (tmp_path / "rank0.ring").write_bytes(b"")
    assert main(["why", str(tmp_path)]) == 2
    assert "is not a flight record" in capsys.readouterr().err


def test_a_rank_without_an_entry(story, tmp_path):
    story.rank(0, 1, address="").fail(1, ValueError("no"), "")
    story.now = story.began + 60
    assert main(["why", str(story.directory), "--html", str(tmp_path / "why.html")]) == 0
    assert cause.answer([story.directory]).sentence == "rank 0 raised ValueError: no"


def test_imports_nothing_of_training():
    code = "import sys, ppfleet.commands.why.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & {"paddle", "numpy", "safetensors"}


def test_every_kind_of_entry_has_a_name_and_a_colour():
    from ppfleet.commands.why import timeline
    from ppfleet.watchdog.recorder import KINDS

    assert set(timeline._KINDS) == set(KINDS) - {"mark"}
    assert all(
        re.fullmatch("#[0-9a-f]{6}", each) for kind in timeline._KINDS.values() for each in (kind.light, kind.dark)
    )
