"""Every command of the pages, run as a reader would: in a copy of the repository, page by page (`make docs-test`).

A page's commands share a shell, or two on two hosts: network namespaces where this is root, else 127.0.0.2 and
127.0.0.3. What a page shows below its commands must have been printed by them, apart from numbers and from `…`.
"""

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import pages
from tests.harness import ROOT
from tests.hosts import namespaces

LIMIT = 900  # seconds a command, on a machine that has other things to do as well
SENTINEL = "that was all of it:"
counted: collections.Counter[str] = collections.Counter()


class Shell:
    """A bash that reads one command after the other, as from a person."""

    def __init__(self, before: list[str], directory: Path, **variables: str) -> None:
        self.directory, self.on_loopback = directory, "POD_IP" in variables
        self._said = (directory.parent / f"{directory.name}.said").open("w+b")
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("PADDLE", "PYTHON", "FLAGS"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._bash = subprocess.Popen(
            [*before, "bash", "--noprofile", "--norc"],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env={**clean, "PATH": path, "HOME": os.environ.get("HOME", "/"), **variables},
            start_new_session=True,
        )

    def tell(self, command: str) -> None:
        self._said.truncate(0)
        self._said.seek(0)
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{{ {command}\n}} < /dev/null\nprintf '\\n{SENTINEL} %s\\n' $?\n".encode())
        self._bash.stdin.flush()

    def answer(self, where: str) -> tuple[int, str]:
        """Exit code of the last command, and what it printed."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            said = Path(self._said.name).read_bytes().decode(errors="replace").replace("\0", "")
            if ended := re.search(rf"^{SENTINEL} (\d+)$", said, re.MULTILINE):
                return int(ended[1]), said[: ended.start()]
            assert self._bash.poll() is None, f"{where}: the shell itself ended\n{said[-3000:]}"
            time.sleep(0.1)
        raise AssertionError(f"{where}: not over after {LIMIT} s\n{said[-3000:]}")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        self._said.close()


def clone(directory: Path) -> Path:
    """What a reader has after `git clone` and the first make: the files under version control, and .venv."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    (directory / ".venv").symlink_to(Path(sys.executable).parent.parent)
    return directory


@contextlib.contextmanager
def shells(hosts: int):
    """One shell here, or one on each of two hosts, in copies of their own."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppfleet-docs-")))
        before, variables = [[]], [{}]
        if hosts == 2 and not namespaces.missing():
            before, variables = stack.enter_context(namespaces.two_hosts()), [{}, {}]
        elif hosts == 2:
            before, variables = [[], []], [{"POD_IP": address} for address in LOOPBACK.values()]
        made = []
        for name, words, more in zip(("ppfleet", "ppfleet-b"), before, variables):
            made.append(Shell(words, clone(scratch / name), **more))
            stack.callback(made[-1].end)
            if more:
                for config in (scratch / name / "test_tipc/configs").rglob("*.txt"):
                    config.write_text(on_loopback(config.read_text()))
        yield made


LOOPBACK = dict(zip(namespaces.ADDRESSES, ("127.0.0.2", "127.0.0.3")))


def on_loopback(text: str) -> str:
    for address, instead in LOOPBACK.items():
        text = text.replace(address, instead)
    return text


def shown(line: str) -> "re.Pattern[str]":
    """A line of a page as a pattern: any number stands for any number, … for anything, blanks for any width."""
    words = (re.sub(r"\d+", r"\\d+", re.escape(word)) for word in line.split())
    return re.compile(r"\s+".join(words).replace("…", ".*"))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page_runs(page):
    steps = pages.steps(page)
    run = [step for step in steps if isinstance(step, pages.Command) and not step.not_run]
    for step in steps:
        if isinstance(step, pages.Command) and step.not_run:
            counted[step.not_run] += 1
            print(f"{step.where}: {step.not_run}: {step.text}", flush=True)
    two = any("each" in step.special for step in run)
    said: dict[int, str] = collections.defaultdict(str)  # by each block
    with shells(2 if two else 1) if run else contextlib.nullcontext() as here:
        for step in steps:
            if isinstance(step, pages.File):
                for shell in here:
                    (shell.directory / step.name).write_text(step.text, encoding="utf-8")
            elif not step.not_run:
                said[step.block] += do(step, here if "each" in step.special else here[:1])
                compare(step, said[step.block])
                counted["run"] += 1
                counted["run on two hosts"] += "each" in step.special
                counted["lines of output compared"] += len(step.printed)


def do(step, there) -> str:
    """Type it, on one host or on both; what was printed."""
    began = time.monotonic()
    for shell in there:
        shell.tell(on_loopback(step.text) if shell.on_loopback else step.text)
    answers = [shell.answer(step.where) for shell in there]
    for code, said in answers:
        assert code == step.code, f"{step.where}: exit code {code}, not {step.code}: {step.text}\n{said[-5000:]}"
    print(f"{step.where}: {time.monotonic() - began:.1f} s: {step.text}", flush=True)
    return "".join(said for _, said in answers)


def compare(step, said: str) -> None:
    for line in filter(str.strip, step.printed):
        assert shown(line).search(said), f"{step.where}: the page shows {line!r}, which nobody printed\n{said[-5000:]}"


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "here").mkdir()
    made = Shell([], tmp_path / "here")
    yield made
    made.end()


def typed(text, printed=(), **special):
    return pages.Command(ROOT / "README.md", 7, 7, text, special, list(printed))


def test_commands_share_their_shell(shell):
    for text in ("export A=3", "cd /", "sleep 60 &", "kill -9 $!"):
        do(typed(text), [shell])
    assert "3 at /\n" in do(typed("echo $A at $PWD"), [shell])
    do(typed("wait $!", code="137"), [shell])


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (typed("false"), "README.md:7: exit code 1, not 0: false"),
        (typed("true", code="75"), "README.md:7: exit code 0, not 75"),
        (typed("echo 12 of 30", ["13 of …"]), ""),
        (typed("echo 12 of 30", ["12 off"]), "README.md:7: the page shows '12 off', which nobody printed"),
        (typed("sleep 60"), "README.md:7: not over after 1 s"),
        (typed("exit 3"), "README.md:7: the shell itself ended"),
    ],
    ids=lambda value: value.text if isinstance(value, pages.Command) else "",
)
def test_a_page_that_is_wrong_is_told(shell, command, complaint, monkeypatch):
    monkeypatch.setitem(globals(), "LIMIT", 1 if "sleep" in command.text else 60)
    with pytest.raises(AssertionError, match=re.escape(complaint)) if complaint else contextlib.nullcontext():
        compare(command, do(command, [shell]))


@pytest.fixture(scope="module", autouse=True)
def sum_of_it():
    yield
    if counted:
        print("docs: " + ", ".join(f"{what}: {count}" for what, count in counted.items() if count))
