"""The page of a real run that was killed and went on, and VisualDL's server on the same run."""

import json
import math
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from ppfleet.__main__ import main
from ppfleet.checkpoint.history import RANKS, curves, read
from tests.faults.test_watch import Victims
from tests.harness import ROOT, environment, free_ports, wait_for
from tests.unit.test_report import Page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two ranks; rank 1 is killed after the line of step 21, when the newest checkpoint is of step 16; the same again
    goes on to the end at step 64."""
    place = tmp_path_factory.mktemp("run")
    plan = {"save_every": 16, "options": {"log_every": 7, "stall": 10}}
    first = Victims(place, 2, **plan)
    first.until(lambda: [line for line in read(first.run / "history.jsonl") if line.step >= 21], 180)
    first.processes[1].send_signal(signal.SIGKILL)
    first.processes[0].wait(180)
    codes, outputs = first.end()
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, outputs
    codes, outputs = Victims(place, 2, **plan).end(180)
    assert codes == [0, 0], outputs
    return first.run


def test_the_page_shows_the_kill_and_the_resume(run, capsys):
    assert main(["report", str(run)]) == 0
    assert "finished, step 64" in capsys.readouterr().out
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    lines = read(run / "history.jsonl")
    begins = [line.step for line in lines if RANKS in line.values]
    assert begins in ([0, 16], [0, 32])  # the latter where this machine was slow to kill
    assert "rank 1 on 127.0.0.1 was killed by SIGKILL" in page.text
    assert f"2 ranks · from step {begins[1]} to step 64" in page.text
    assert "nothing failed: all 2 ranks finished, after 64 steps" in page.text
    loss = next(attrs["aria-label"] for _, attrs in page.elements if attrs.get("aria-label", "").startswith("loss"))
    assert "train/loss: from" in loss and "Mark 1 at step 2" in loss and "was killed by SIGKILL" in loss
    assert page.count("g", class_="mark") == page.count("figure", class_="chart card") >= 5
    assert "all 3 verify" in page.text or "all 4 verify" in page.text
    assert "settings" in page.text.lower() and "global_batch 16" in page.text


def test_visualdl_serves_the_same_curves_from_the_first_step_on(run):
    (port,) = free_ports(1)
    logs = run / "visualdl"
    assert len(list(logs.glob("vdlrecords.*.log"))) == 2  # of which VisualDL shows the newest
    command = [str(Path(sys.executable).with_name("visualdl")), "--logdir", str(logs), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--language", "en", "--disable-telemetry"]  # as `make board` has it
    assert " ".join(command[-3:]) in (ROOT / "Makefile").read_text()
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment(0, []), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        tags = ask(server, port, "tags")
        assert tags["runs"] == [str(logs)]
        history = curves(read(run / "history.jsonl"))
        assert history.pop(RANKS)[0] == (0, 2)
        assert set(tags["tags"][0]) == set(history) > {"train/loss", "train/lr", "eval/top1"}
        for tag, points in history.items():
            served = ask(server, port, "list", run=str(logs), tag=tag)
            assert [(step, pytest.approx(value, rel=1e-6)) for step, value in points] == [
                (step, value) for _, step, value in served
            ], tag
            times = [when for when, _, _ in served]
            assert times == sorted(times) and math.isclose(times[0] / 1000, times[-1] / 1000, abs_tol=600)
    finally:
        server.kill()
        server.wait(10)


def ask(server, port, what, **query):
    """VisualDL's answer, once it is up."""
    address = f"http://127.0.0.1:{port}/app/api/scalar/{what}?{urllib.parse.urlencode(query)}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answered():
        try:
            with direct.open(address, timeout=10) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, "VisualDL's server ended"
            return None

    told = wait_for(answered, 60, "VisualDL's server answers")
    assert told["status"] == 0, told
    return told["data"]
