"""The benchmarks run: real contenders, which must compute the same. Figures are for `make bench`."""

import json
import subprocess
import sys

import pytest

from tests.harness import ROOT

PEERS = ROOT / ".venv-peers/bin/python"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "scale", "input", "infer", "memory"])
def test_a_quick_run(name, tmp_path):
    if name != "memory" and not PEERS.exists():
        pytest.skip("the peers are not installed: make .venv-peers/.ready")
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / f"{name}.json").read_text())
    assert told["rows"] and told["cases"] and told["machine"]["cores"] > 0
    assert "| work | ours |" in done.stdout and (tmp_path / f"{name}.svg").exists()
