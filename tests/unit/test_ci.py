"""CI calls make targets that exist, and the same ones in .ci/run and in the workflow."""

import re

import pytest
import yaml

from ppfleet._version import __version__
from tests.harness import ROOT

WORKFLOW = ROOT / ".github/workflows/ci.yml"
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def named(command):
    """The targets of every `make …` in a line of shell."""
    words = [re.sub(r"\s#.*", "", part).split() for part in re.split(r"&&|\|\||;|\n", command)]
    found = [part[part.index("make") + 1 :] for part in words if "make" in part]
    return [word for part in found for word in part if "=" not in word and not word.startswith("-")]


def of_ci_run():
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    return {target for line in lines if not line.startswith("#") for target in named(line)}


def of_workflow():
    targets = set()
    for job in yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            command = step.get("run", "").replace("${{ matrix.target }}", "MATRIX")
            for target in named(command):
                targets |= {row["target"] for row in matrix["include"]} if target == "MATRIX" else {target}
    return targets


def of_pre_commit():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    return {target for hook in hooks for target in named(hook["entry"])}


@pytest.mark.parametrize("source", [of_ci_run, of_workflow, of_pre_commit])
def test_every_target_exists(source):
    targets = source()
    assert targets and targets <= TARGETS


def test_the_workflow_runs_what_ci_run_runs():
    assert of_workflow() == of_ci_run()


def test_the_matrix_is_what_the_metadata_supports():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    matrix = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == supported


def test_help_lists_every_phony_target():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)[1].split())
    assert phony == set(re.findall(r"^([a-z0-9-]+):.*## ", text, re.MULTILINE))


def test_linters_are_pinned():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for tool in ("ruff", "mypy"):
        requirements = re.findall(rf'^    "{tool}\b(.+)",', text, re.MULTILINE)
        assert requirements and all(re.match(r"==[0-9.]+(;|$)", one) for one in requirements), tool


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__


def test_the_wheel_for_cards_has_the_neighbours_of_paddle_26():
    """In all three places that install it: the lane of `make test-cuda-wheel`, the extra `gpu26`, the Dockerfile."""

    def listed(name):
        lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    cuda, paddle26 = listed("cuda-wheel.txt"), listed("paddle26.txt")
    assert cuda - paddle26 == {"paddlepaddle-gpu==2.6.2"} and paddle26 - cuda == {"paddlepaddle==2.6.2"}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = set(re.findall(r'"(.+)"', re.search(r"^gpu26 = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]))
    assert extra <= cuda and any(one.startswith("numpy<") for one in extra)
    dockerfile = (ROOT / "deploy/cluster/Dockerfile").read_text(encoding="utf-8")
    named = re.search(r'PADDLE="(paddlepaddle-gpu==2[^"]+)"', dockerfile)[1].split()
    assert set(named) <= extra and "cudnn" in re.search(r"BASE=(nvidia/cuda:11\.8\S+)", dockerfile)[1]
