"""The wheel that users install holds everything the package reads at run time, and its command `ppfleet` starts."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from ppfleet._version import __version__
from tests.harness import ROOT

pytestmark = pytest.mark.essential

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ppfleet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a stale build/ in the working directory would put deleted files back in."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (copy / "dist").iterdir()
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel):
    listed = subprocess.run(["git", "ls-files", "ppfleet"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = {name for name in listed.stdout.split() if (ROOT / name).exists()}
    if not tracked:
        pytest.skip("not a git checkout: no list of the package's files")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ppfleet/")}
    assert tracked - inside == set()
    for suffix in (".j2", ".cc", ".h", ".inc", ".typed"):
        assert any(name.endswith(suffix) for name in inside), suffix


def test_its_metadata(wheel):
    assert wheel.name == f"ppfleet-{__version__}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(path).decode().split("\n\n")[0].splitlines()
    for line in (
        f"Version: {__version__}",
        "Requires-Python: >=3.9",
        "License-Expression: Apache-2.0",
        "Requires-Dist: jinja2>=3.0",
        "Requires-Dist: matplotlib>=3.6",
    ):
        assert line in metadata
    extras = {line.split(": ")[1] for line in metadata if line.startswith("Provides-Extra")}
    assert extras == {"cpu", "gpu", "gpu26", "deploy", "examples", "dev"}


def test_the_installed_command_starts(wheel, tmp_path):
    """In an environment that holds only the wheel; what it depends on is read from the tests' own."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    fresh = tmp_path / "venv/bin/python"
    install = ["-m", "pip", "--python", str(fresh), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *install], check=True)
    (site,) = [path for path in sys.path if path.endswith("site-packages") and path.startswith(sys.prefix)]
    # The wheel's own directory comes first on the path, so that ppfleet is the wheel's.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PADDLE_"))}
    (own,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    (own / "dependencies.pth").write_text(f"{site}\n")
    for words in (["--help"], *([command, "--help"] for command in ("launch", "doctor", "report", "why", "scale"))):
        done = subprocess.run(
            [tmp_path / "venv/bin/ppfleet", *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and done.stdout.startswith("usage: "), f"{words}: {done.stderr}"
    where = subprocess.run(
        [fresh, "-c", "import ppfleet; print(ppfleet.__file__)"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(tmp_path / "venv"))
