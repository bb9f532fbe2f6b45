"""`deploy/cluster/Dockerfile`, step by step, without Docker: its commands in an environment of their own."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.harness import ROOT


def steps():
    text = re.sub(r"\\\n", " ", (ROOT / "deploy/cluster/Dockerfile").read_text())
    return [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.slow
def test_its_commands_make_what_a_pod_needs(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    image = tmp_path / "image"
    image.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env["PATH"] = f"{tmp_path}/venv/bin:{env['PATH']}"
    for kind, rest in steps():
        if kind in ("ARG", "ENV"):
            name, _, value = rest.partition("=")
            env[name] = value.strip('"').replace("/opt", str(tmp_path))
        elif kind == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, image / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, image / target)
        elif kind == "RUN" and not rest.startswith("apt-get"):  # which would change this machine
            done = subprocess.run(["sh", "-c", rest], cwd=image, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{rest}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert {kind for kind, _ in steps()} == {"FROM", "ARG", "ENV", "COPY", "RUN", "WORKDIR"}
    assert list((tmp_path / "ppfleet").glob("operators-*.so"))
    subprocess.run(["python", "tools/train.py", "--help"], cwd=image, env=env, check=True)
