"""The runner: real processes, real logs, and every way in which a chain can break."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from tests.harness import wait_for
from tests.tipc_files import LONG, SHORT, edited, repository, surroundings, tipc

LITE = "lite_train_lite_infer"
ROOT = Path("test_tipc/output/toy") / LITE
ONE = ("gpu_list:0|0,1", "gpu_list:-1")  # one process, no launcher: what is tested here does not depend on it
LAUNCHED = ("gpu_list:0|0,1", "gpu_list:0,1")


@pytest.fixture
def repo(tmp_path):
    return repository(tmp_path)


def certify(repo, *changes, mode=LITE, options=(), text=SHORT):
    (repo / "file.txt").write_text(edited(text, *changes))
    done = tipc(repo, "run", "file.txt", mode, *options)
    path = repo / "test_tipc/output/toy" / mode / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    return done, {entry["id"].rpartition("nodes_1.")[2]: entry for entry in results.get("commands", [])}


def statuses(entries):
    return {name: entry["status"] for name, entry in entries.items()}


def test_a_whole_chain(repo):
    done, entries = certify(repo, ONE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(entries) == ["train", "eval", "export", *(f"infer_{d}_batchsize_{b}" for d in ("gpu_on_cpu", "cpu")
                                                        for b in (1, 4))]  # fmt: skip
    assert set(statuses(entries).values()) == {"ok"}
    status = (repo / ROOT / "results_python.log").read_text()
    assert len(re.findall(r"^Run successfully with command - toy - .*!", status, re.MULTILINE)) == 7
    assert "train.py runs" in done.stdout and "\x1b" not in status + done.stdout
    assert status.count("python3.7") == 1  # the substitution is said once
    figures = entries["infer_cpu_batchsize_4"]["figures"]
    assert (figures["inference_ms"], figures["images_per_s"], figures["cpu_rss_mb"]) == (79.5877, 12.5, 288.957)
    for entry in entries.values():
        assert "runs" in (repo / ROOT / entry["log"]).read_text()


def test_results_are_fresh_and_the_last_ones_are_kept(repo):
    assert certify(repo, ONE)[0].returncode == 0
    done, entries = certify(repo, ONE, ("norm_train:train.py", "norm_train:train.py --break=nothing"))
    assert done.returncode == 1 and entries["train"]["status"] == "failed"  # the first run's weights do not count
    assert "successfully" not in (repo / ROOT / "results_python.log").read_text()
    assert (repo / f"{ROOT}.previous.file/results_python.log").read_text().count("Run successfully") == 7
    (repo / "other.txt").write_text((repo / "file.txt").read_text())
    tipc(repo, "run", "other.txt", LITE)
    tipc(repo, "run", "other.txt", LITE)  # each text file's last results are kept
    kept = [path.name.partition(".previous.")[2] for path in (repo / ROOT).parent.glob("*.previous.*")]
    assert sorted(kept) == ["file", "other"]


@pytest.mark.parametrize(
    ("script", "how", "reason", "failed", "skipped"),
    [
        ("train", "fail", "exit code 3", "train", 6),
        ("train", "kill", "killed by SIGKILL", "train", 6),
        ("train", "255", "exit code 255", "train", 6),
        ("train", "nothing", "wrote no latest.pdparams in", "train", 6),
        ("eval", "fail", "exit code 3", "eval", 0),
        ("export", "fail", "exit code 3", "export", 4),
        ("export", "nothing", r"wrote no \*\*/\*.pdiparams in", "export", 4),
        ("infer", "nothing", "no benchmark block", "infer_cpu_batchsize_1", 0),
        ("infer", "fail", "exit code 3", "infer_cpu_batchsize_1", 0),
    ],
)
def test_breaks(repo, script, how, reason, failed, skipped):
    line = {"train": "norm_train", "eval": "eval", "export": "norm_export", "infer": "inference"}[script]
    done, entries = certify(repo, ONE, (f"{line}:{script}.py", f"{line}:{script}.py --break={how}"))
    assert done.returncode == 1
    assert entries[failed]["status"] == "failed" and re.search(reason, entries[failed]["reason"]), entries[failed]
    assert list(statuses(entries).values()).count("skipped") == skipped
    status = (repo / ROOT / "results_python.log").read_text()
    assert re.search(rf"^Run failed with command - toy - .*{script}.py .*!", status, re.MULTILINE)
    assert f"failed: norm_train_gpus_-1_nodes_1.{failed}" in done.stdout


def test_the_time_limit(repo):
    change = ("norm_train:train.py", "norm_train:train.py --break=hang")
    done, entries = certify(repo, ONE, change, options=("--timeout", "2"))
    assert done.returncode == 1 and entries["train"]["reason"] == "stopped at its time limit of 2 s"
    assert "now I hang" in entries["train"]["tail"] and entries["export"]["status"] == "skipped"
    assert not processes(repo)


def processes(repo):
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if process.info["cwd"] == str(repo) and process.info["cmdline"]:
            found.append(process)
    return found


def test_one_run_fails_the_next_goes_on(repo):
    fail = "import sys; sys.exit('gpus_0_' in ' '.join(sys.argv) and 3)"
    (repo / "train.py").write_text((repo / "train.py").read_text() + f"\n{fail}\n")
    done, entries = certify(repo, ("gpu_list:0|0,1", "gpu_list:0|-1"))
    results = json.loads((repo / ROOT / "results.json").read_text())["commands"]
    by_run = {run: {e["status"] for e in results if e["run"] == run} for run in {e["run"] for e in results}}
    assert by_run == {"norm_train_gpus_0_nodes_1": {"failed", "skipped"}, "norm_train_gpus_-1_nodes_1": {"ok"}}
    assert done.returncode == 1


def test_a_missing_interpreter(repo):
    done, entries = certify(repo, ONE, ("python:python3.7", "python:/nowhere/python"))
    assert done.returncode == 1
    assert entries["train"]["reason"] == "cannot start /nowhere/python: No such file or directory"
    assert "Run failed with command - toy - /nowhere/python" in done.stdout


def test_what_cannot_be_run_at_all(repo):
    (repo / "file.txt").write_text(edited(SHORT, ONE))
    for arguments, words in [
        (("file.txt", "nonsense"), "unknown mode 'nonsense'"),
        (("file.txt", "lite_train_whole_infer"), "no value for lite_train_whole_infer"),
        (("nothing.txt", LITE), "nothing.txt: no such file"),
        (("file.txt",), "a mode is required"),
    ]:
        done = tipc(repo, "run", *arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (repo / "test_tipc").exists()


def test_trainers_that_the_repository_lacks_are_refused(repo):
    changes = (("trainer:norm_train", "trainer:pact_train"), ("norm_train:train.py", "pact_train:train.py"))
    done, entries = certify(repo, ONE, *changes)
    assert done.returncode == 1 and "successfully" not in done.stdout
    assert entries["train"]["reason"].startswith("refused: pact_train is not one of this repository's trainers")
    assert not (repo / ROOT / "pact_train_gpus_-1_nodes_1").exists()
    done, entries = certify(repo, ONE, *changes, options=("--trainers", "pact_train"))
    assert done.returncode == 0


def test_other_modes(repo):
    done, entries = certify(repo, ONE, mode="whole_infer")
    assert done.returncode == 0 and [e["stage"] for e in entries.values()] == ["export", *["infer"] * 4]
    assert (repo / "exported/inference.pdiparams").exists()
    tail = "=====train_benchmark_params=====\nbatch_size:16\nfp_items:fp32\nepoch:1\n"
    done, entries = certify(repo, ONE, mode="benchmark_train", text=SHORT + tail)
    assert done.returncode == 0, done.stdout
    (entry,) = entries.values()
    assert entry["figures"]["images_per_s"] == 20.5
    (repo / "train.py").write_text((repo / "train.py").read_text().replace("ips:", "speed:"))
    done, entries = certify(repo, ONE, mode="benchmark_train", text=SHORT + tail)
    assert done.returncode == 1 and "no `ips:`" in next(iter(entries.values()))["reason"]


def test_the_launcher_and_its_trainers(repo):
    """Two processes of Paddle's launcher without a card; when one of them fails, its words are in the report."""
    done, entries = certify(repo, LAUNCHED)
    assert done.returncode == 0, done.stdout
    assert "[device map: no card here: gpus 0,1 are 2 CPU processes]" in done.stdout
    body = "import os, sys\nif os.environ['PADDLE_TRAINER_ID'] == '1': sys.exit('this is the reason')\n"
    (repo / "train.py").write_text((repo / "train.py").read_text() + body)
    done, entries = certify(repo, LAUNCHED)
    assert done.returncode == 1 and "this is the reason" in entries["train"]["tail"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_runner(repo, number):
    """Paddle's launcher puts its trainers into sessions of their own; they end all the same, also after SIGKILL."""
    change = ("norm_train:train.py", "norm_train:train.py --break=hang")
    (repo / "file.txt").write_text(edited(SHORT, LAUNCHED, change))
    command = [sys.executable, "-m", "ppfleet", "tipc", "run", "file.txt", LITE]
    process = subprocess.Popen(command, cwd=repo, env=surroundings(), stdout=subprocess.PIPE, text=True)
    log = repo / ROOT / "logs/norm_train_gpus_0,1_nodes_1.train.log"
    wait_for(lambda: log.exists() and "now I hang" in log.read_text(), 60, "the command hangs")
    assert len(processes(repo)) >= 4  # runner, guard, launcher, trainers
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    wait_for(lambda: not processes(repo), 60, "every process of the run ends")
    if number == signal.SIGKILL:
        return
    assert process.returncode == 128 + number
    results = json.loads((repo / ROOT / "results.json").read_text())
    assert [e["status"] for e in results["commands"]] == ["failed", *["skipped"] * 6] and not results["finished"]
    assert results["commands"][0]["reason"] == f"interrupted by {number.name}"


def test_what_an_earlier_launch_left_in_the_environment_does_not_count(repo):
    check = "assert not any(n.startswith('PADDLE_') for n in os.environ) and os.environ['KEPT'] == '1'\n"
    (repo / "train.py").write_text((repo / "train.py").read_text() + check)
    (repo / "file.txt").write_text(edited(SHORT, ONE))
    done = tipc(
        repo, "run", "file.txt", LITE, env={"PADDLE_TRAINER_ID": "3", "PADDLE_NPROC_PER_NODE": "1", "KEPT": "1"}
    )
    assert done.returncode == 0, done.stdout


def test_reports(repo):
    """JUnit that a reader of XML takes, and a page that needs nothing else; also with control characters and markup."""
    body = "print('\\x00\\x1b[31mred\\x1b[0m </script> & <b>'); sys.exit(4)\n"
    (repo / "eval.py").write_text("import sys\n" + body)
    done, entries = certify(repo, ONE)
    tree = ElementTree.parse(repo / ROOT / "results.xml").getroot()
    (suite,) = tree
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("7", "1", "0")
    (failure,) = tree.iter("failure")
    assert failure.get("message") == "exit code 4" and len(list(tree.iter("testcase"))) == 7
    page = (repo / ROOT / "report.html").read_text()
    assert not re.search(r"(?:src|href)=.(?:https?:|//)|<script|@import|url\(", page)
    assert "&lt;/script&gt; &amp; &lt;b&gt;" in page and 'name="viewport"' in page
    for words in (
        "eval failed</b>",
        "train passed</b>",
        "79.59",
        '<figure class="plot">',
        "exit code 4",
        "no card here: runs on the CPU",
    ):
        assert words in page, words
    for reference in re.findall(r'href="([^"]+)"', page):
        target = reference[1:]
        assert f'id="{target}"' in page if reference[0] == "#" else (repo / ROOT / reference).exists(), reference


def test_a_toy_file_of_windows_runs(repo):
    (repo / "file.txt").write_bytes(edited(SHORT, ONE).replace("\n", "\r\n").encode())
    assert tipc(repo, "run", "file.txt", LITE).returncode == 0


def test_output_elsewhere(repo):
    done, _ = certify(repo, ONE, options=("--output", "elsewhere"))
    assert (repo / "elsewhere/toy" / LITE / "report.html").exists() and not (repo / "test_tipc").exists()
    assert sorted(path.name for path in (repo / "elsewhere/toy").iterdir()) == [f".{LITE}.lock", LITE]


def background(repo, *arguments, **more):
    command = [sys.executable, "-m", "ppfleet", "tipc", "run", "file.txt", *(arguments or (LITE,))]
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **more}
    return subprocess.Popen(command, cwd=repo, env=surroundings(), **more)


def hanging(repo, script="train", body="print('now I hang', flush=True); time.sleep(60); sys.exit(5)"):
    """The toy repository with a script that hangs; its log."""
    (repo / f"{script}.py").write_text((repo / f"{script}.py").read_text() + f"\n{body}\n")
    (repo / "file.txt").write_text(edited(SHORT, ONE))
    return repo / ROOT / f"logs/norm_train_gpus_-1_nodes_1.{script}.log"


def guard_of(runner):
    return next(
        child for child in psutil.Process(runner.pid).children() if "process_tree.py" in " ".join(child.cmdline())
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_whose_guard_is_killed_has_failed(repo, number):
    """Whatever the command says then: one that ignores SIGTERM, one that exits 0 on it, one whose children live on."""
    body = (
        "import subprocess; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); "
        "subprocess.Popen(['sleep', '61'], start_new_session=True); print('now I hang', flush=True); time.sleep(60)"
    )
    log = hanging(repo, "eval", body)
    runner = background(repo)
    wait_for(lambda: log.exists() and "now I hang" in log.read_text(), 60, "the command hangs")
    guard_of(runner).send_signal(number)
    output, _ = runner.communicate(timeout=60)
    results = {e["stage"]: e for e in json.loads((repo / ROOT / "results.json").read_text())["commands"]}
    assert runner.returncode == 1 and results["eval"]["reason"] == f"killed by {number.name}", output
    wait_for(lambda: not processes(repo), 60, "every process of the run ends")


def test_two_runners_keep_out_of_each_others_way(repo):
    log = hanging(repo)
    first = background(repo)
    wait_for(lambda: log.exists() and "now I hang" in log.read_text(), 60, "the command hangs")
    second = tipc(repo, "run", "file.txt", LITE)
    assert second.returncode == 2 and "another runner is using" in second.stderr
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    assert json.loads((repo / ROOT / "results.json").read_text())["commands"][0]["status"] == "failed"


def test_a_run_outlives_whoever_looked_at_it(repo):
    """A closed pipe, a full device, no output at all, a terminal that hangs up under nohup: the report is there."""
    (repo / "file.txt").write_text(edited(SHORT, ONE))
    for redirection in ("| head -1", "> /dev/full", ">&- 2>&-"):
        shell = f"{sys.executable} -m ppfleet tipc run file.txt {LITE} {redirection}"
        subprocess.run(
            ["bash", "-c", shell], cwd=repo, env=surroundings(), capture_output=True, timeout=60, check=False
        )
        wait_for(lambda: not processes(repo), 60, "every process of the run ends")
        results = json.loads((repo / ROOT / "results.json").read_text())
        assert results["finished"] and {e["status"] for e in results["commands"]} == {"ok"}, redirection
        (repo / ROOT / "results.json").unlink()
    log = hanging(repo, body="print('now I hang', flush=True); time.sleep(3)")
    runner = background(repo, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(lambda: log.exists() and "now I hang" in log.read_text(), 60, "the command hangs")
    runner.send_signal(signal.SIGHUP)
    output, _ = runner.communicate(timeout=60)
    assert runner.returncode == 0, output


def test_old_and_empty_files_do_not_count(repo):
    assert certify(repo, ONE, mode="whole_infer")[0].returncode == 0
    nothing = ("infer_export:export.py", "infer_export:export.py --break=nothing")
    done, entries = certify(repo, ONE, nothing, mode="whole_infer")  # at once: no clock is asked
    assert done.returncode == 1 and "wrote no **/*.pdiparams in ./exported" in done.stdout
    (repo / "export.py").write_text((repo / "export.py").read_text().replace('write_text("p")', 'write_text("")'))
    done, entries = certify(repo, ONE)
    assert done.returncode == 1 and "wrote only empty **/*.pdiparams" in entries["export"]["reason"]


def test_where_nothing_was_run_nothing_is_certified(repo):
    text = (
        LONG.replace("--use_gpu:True|False", "--use_gpu:True").replace("False|True", "True").replace("rec\n", "toy\n")
    )
    done, entries = certify(repo, text=text, mode="whole_infer")
    assert done.returncode == 1 and "all were skipped: this certifies nothing" in done.stdout
    page = (repo / "test_tipc/output/toy/whole_infer/report.html").read_text()
    assert "certifies nothing" in page and '<span class="pill failed">failed</span></h1>' in page


def test_what_the_disk_refuses_is_a_sentence(repo):
    (repo / "file.txt").write_text(edited(SHORT, ONE))
    (repo / "taken").write_text("a file")
    for output in ("taken", "/proc/nothing", "taken/below"):
        done = tipc(repo, "run", "file.txt", LITE, "--output", output)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr, output
    (repo / "real").mkdir()
    (repo / "test_tipc/output/toy").mkdir(parents=True)
    (repo / ROOT).symlink_to(repo / "real")
    for _ in range(3):
        assert tipc(repo, "run", "file.txt", LITE).returncode == 0


def test_odd_output_of_commands(repo):
    """Megabytes, binary, figures that are none, a command that removes its own log: a verdict all the same."""
    body = (
        "import shutil; sys.stdout.buffer.write(os.urandom(3_000_000)); print('ips: 1e999'); print('images/s: 1e999')"
    )
    (repo / "infer.py").write_text(f"{(repo / 'infer.py').read_text()}\n{body}\n")
    (repo / "eval.py").write_text("import shutil; shutil.rmtree('test_tipc')")
    done, entries = certify(repo, ONE)
    assert "Traceback" not in done.stderr and entries["eval"]["status"] == "ok"
    ElementTree.parse(repo / ROOT / "results.xml")
