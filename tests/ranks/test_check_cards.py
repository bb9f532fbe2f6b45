"""`ppfleet check-cards` on simulated cards: every item, and defects that the right item finds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ppfleet.commands.check_cards.facts import SIMULATED_NOTE
from ppfleet.commands.check_cards.items import FAIL, ITEMS, NOT_RUN, PASS
from tests import simcard
from tests.harness import DEVICE, ROOT, on_cards, wait_for

pytestmark = on_cards
NEEDS_MORE = {"two_machines", "inference", "tensorrt"}  # a second machine, an NVIDIA card
LOW = {"resume_O1_float16", "resume_O1_bfloat16", "resume_O2_float16", "resume_O2_bfloat16"}


def variables(**knobs):
    """Those of a user's shell: which processes run on which card is the command's business."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_"))}
    cards = {name: v for name, v in simcard.environment(2, **knobs).items() if not name.startswith("PADDLE_")}
    return {**own, **cards, "OMP_NUM_THREADS": "1"}


def command(output, *only):
    """The whole command, or some of its items."""
    code = (
        "import sys; from ppfleet import __main__; from ppfleet.commands.check_cards import command, items; "
        "keys = set(sys.argv.pop(1).split(',')); "
        "command.ITEMS = [item for item in items.ITEMS if item.key in keys]; sys.exit(__main__.run())"
    )
    start = ["-c", code, ",".join(only)] if only else ["-m", "ppfleet"]
    return [sys.executable, *start, "check-cards", f"--device={DEVICE}", "--cards=2", "--quick", f"--output={output}"]


def checked(output, *only, **knobs):
    """Exit code, what was printed, the JSON and its items by key."""
    done = subprocess.run(
        command(output, *only),
        cwd=ROOT,
        env=variables(**knobs),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    told = json.loads((output / "check-cards.json").read_text())
    return done, told, {item["key"]: item for item in told["items"]}


def test_every_item(tmp_path):
    done, told, items = checked(tmp_path)
    assert done.returncode == 0, done.stdout
    assert list(items) == [item.key for item in ITEMS]
    for key, item in items.items():
        expected = (NOT_RUN,) if key in NEEDS_MORE else (PASS, NOT_RUN) if key in LOW else (PASS,)
        assert item["status"] in expected and item["sentence"], (key, item)
        if key in LOW and item["status"] == NOT_RUN:
            assert item["figures"]["used"] == "O0"  # Paddle has no autocast to that type on this card
    assert told["simulated"] and told["note"] == SIMULATED_NOTE and done.stdout.startswith(SIMULATED_NOTE)
    assert SIMULATED_NOTE.capitalize() in (tmp_path / "check-cards.html").read_text()
    assert items["batch_norm"]["figures"]["operator"] == "synchronised by Paddle's operator"
    assert items["gradients"]["figures"]["difference"] <= 1e-4
    assert items["resume_O0"]["figures"]["resumed"] == [items["resume_O0"]["figures"]["sha256"]]
    assert 0 < items["resume_O0"]["figures"]["steps_after_resume"] < items["resume_O0"]["figures"]["steps"]
    codes = {kind: items[f"fault_{kind}"]["figures"]["exit_codes"] for kind in ("stall", "exit", "raise", "kill")}
    assert codes["stall"] == [76, 76] and codes["exit"][1] == 3 and codes["raise"][1] == 1 and codes["kill"][1] == -9
    assert all(items[f"fault_{kind}"]["figures"]["card_memory_mb"] is None for kind in codes)
    assert items["speed"]["figures"]["ratio"] > 0 and items["speed"]["figures"]["judged"] is False
    assert "Traceback" not in done.stdout + done.stderr


def test_numbers_of_one_card_and_two(tmp_path):
    done, told, items = checked(tmp_path, "facts", "batch_norm", "branch", sync_bn="local")
    assert done.returncode == 0, done.stdout
    assert items["batch_norm"]["figures"]["operator"] == "synchronised by ppfleet's operator"
    assert [items[key]["status"] for key in ("facts", "batch_norm", "branch")] == [PASS, PASS, PASS]


def test_a_kernel_that_fails_fails_its_item_alone(tmp_path):
    done, told, items = checked(tmp_path, "batch_norm", "unused", fail="rank=1,kernel=conv2d,count=1")
    assert done.returncode == 1 and told["failed"] == 1
    item = items["batch_norm"]
    assert item["status"] == FAIL and "rank 1" in item["sentence"] and item["fix"], item
    assert "Traceback" not in done.stdout and "Traceback" in Path(item["log"]).read_text()
    assert items["unused"]["status"] == PASS


def test_gradients_that_are_not_averaged_fail_the_item(tmp_path):
    """A defect in the exchange: the second rank adds something of its own to a gradient after it."""
    defect = tmp_path / "site"
    defect.mkdir()
    (defect / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('PADDLE_TRAINERS_NUM') == '2':\n"
        "    import paddle\n"
        "    step = paddle.optimizer.SGD.step\n"
        "    def wrong(self):\n"
        "        for p in self._parameter_list[:1]:\n"
        "            p.set_value(p * 1.01)\n"
        "        step(self)\n"
        "    paddle.optimizer.SGD.step = wrong\n"
    )
    os.environ["PYTHONPATH"] = str(defect)
    try:
        done, told, items = checked(tmp_path, "accumulation")
    finally:
        del os.environ["PYTHONPATH"]
    item = items["accumulation"]
    assert done.returncode == 1 and item["status"] == FAIL, done.stdout
    assert "1 and 2 cards differ by" in item["sentence"] and "0.weight" in item["sentence"]
    assert item["figures"]["difference"] > 1e-4


def test_ctrl_c_leaves_a_report_and_no_process(tmp_path):
    import psutil

    process = subprocess.Popen(
        command(tmp_path, "facts", "fault_stall"), cwd=ROOT, env=variables(), stdout=subprocess.PIPE, text=True
    )
    fault = wait_for(lambda: list(tmp_path.glob("*/logs/fault_stall/fault.json")), 120, "a rank stalls")
    below = psutil.Process(process.pid).children(recursive=True)
    assert fault and below
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "(interrupted)" in out
    told = json.loads((tmp_path / "check-cards.json").read_text())
    assert told["interrupted"] and told["items"][0]["status"] == PASS and told["failed"] == 0
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below), 30, "all end")
