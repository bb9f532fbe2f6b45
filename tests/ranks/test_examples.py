"""The README's scripts under Paddle's own launcher."""

import difflib
import json
import re
import subprocess
import sys

import pytest

from ppfleet.__main__ import main
from tests.harness import ROOT, environment, free_ports, watch


def launch(tmp_path, ranks, script, *arguments):
    command = [sys.executable]
    if ranks > 1:
        command += [
            "-m",
            "paddle.distributed.launch",
            "--nproc_per_node",
            str(ranks),
            "--log_dir",
            str(tmp_path / "launch"),
        ]
        command += ["--start_port", str(free_ports(1)[0]), "--ips", "127.0.0.1"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments],
        cwd=tmp_path,
        env=environment(0, ["alone"]),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def changed_lines():
    plain, fleet = (
        (ROOT / "examples" / name).read_text().splitlines()[1:] for name in ("single_card.py", "many_cards.py")
    )
    return [line[2:].strip() for line in difflib.ndiff(plain, fleet) if line.startswith("+ ") and line[2:].strip()]


def test_at_most_six_lines_change_and_the_readme_shows_them():
    lines = changed_lines()
    assert len(lines) == 6, lines
    for page in ("README.md", "README_cn.md"):
        readme = (ROOT / page).read_text(encoding="utf-8")
        for line in lines:
            assert f"`{line}`" in readme, f"{page} does not show: {line}"


def test_single_card_runs(tmp_path):
    assert "epoch 3: the last loss was" in launch(tmp_path, 1, "single_card.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_cards_runs_and_learns(tmp_path, ranks):
    output = launch(tmp_path, ranks, "many_cards.py")
    losses = [float(loss) for loss in re.findall(r"epoch \d: the last loss was ([\d.]+)", output)]
    assert len(losses) == 4 and losses[-1] < 0.5, output[-2000:]
    settings = json.loads((tmp_path / "output/many_cards/settings.json").read_text())
    assert settings["ranks"] == ranks and settings["global_batch"] == 16 * ranks
    assert (tmp_path / f"output/many_cards/logs/rank{ranks - 1}.log").exists()
    assert main(["report", str(tmp_path / "output/many_cards")]) == 0  # which knows nothing of this script
    assert "train/loss: from" in (tmp_path / "output/many_cards/report.html").read_text()


def test_a_bar_is_drawn_where_a_person_watches(tmp_path):
    code, text = watch([sys.executable, str(ROOT / "examples" / "many_cards.py")], tmp_path)
    assert code == 0, text[-2000:]
    assert re.search(r"epoch: \[4/\?\]: 100%\|.*89/89", text), text[-2000:]
    assert "batch_cost" not in text
