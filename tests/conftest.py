"""Fixtures that several test files share. Helpers that are plain functions are in `tests/harness.py`."""

import subprocess
import sys

import pytest

from tests.harness import ROOT, run
from tests.hosts import namespaces
from tests.story import Story
from tests.tipc_files import surroundings


def pytest_collection_modifyitems(items):
    if lacking := namespaces.missing():
        for item in items:
            if item.get_closest_marker("two_hosts"):
                item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.fixture
def story(tmp_path, monkeypatch):
    """Flight records of a run that the test makes up."""
    return Story(tmp_path / "run", monkeypatch)


@pytest.fixture(scope="session")
def lite_data(tmp_path_factory):
    """What `tools/lite_data.py` writes. Read it, or copy it; do not change it."""
    path = tmp_path_factory.mktemp("data") / "lite_data"
    command = [sys.executable, "tools/lite_data.py", str(path)]
    subprocess.run(command, cwd=ROOT, env=surroundings(), check=True, capture_output=True)
    return path


def compile_operators():
    from ppfleet.cpu import build

    build.load()


@pytest.fixture(scope="session")
def operators(tmp_path_factory):
    """The operators are compiled: a job with small time limits does not wait for that."""
    run(compile_operators, 1, tmp_path_factory.mktemp("operators"), timeout=300)
