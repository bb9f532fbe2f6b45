"""What the pages tell a reader to type: their commands, files, outputs and links, as data.

A fenced block is `bash` (commands), `python` (a first line `# name.py` makes it a file that the reader writes), or
`text` (what is printed; directly below commands, it is what they print). In a `bash` block a comment says what is
special; behind a command it is for that one, on a line of its own for those below it:

    # on each machine         the same command on two hosts, at the same time
    # exit code 75            how it ends; else with 0
    # needs cards             cannot be run where the tests run: NEEDS lists the reasons that count

`make <target>` and what holds a `<placeholder>` are named, not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import ROOT

# English pages with their Chinese twins. The commands of a twin are the same, so running one page runs both.
PAGES = {
    ROOT / "README.md": ROOT / "README_cn.md",
    **{
        page: page.with_name(f"{page.stem}_cn.md")
        for page in sorted((ROOT / "docs").glob("*.md"))
        if not page.stem.endswith("_cn") and page.stem != "api"  # made of docstrings, which are English
    },
    **{page: page.with_name(page.name.replace("_en", "")) for page in sorted(ROOT.glob("test_tipc/**/*_en.md"))},
}
NEEDS = {
    "cards": "显卡",
    "a cluster": "集群",
    "a network": "网络",
    "a run": "一次运行",
    "PaddlePaddle 2.6": "PaddlePaddle 2.6",
}
LANGUAGES = ("", "bash", "python", "text")
_SPECIAL = {
    "each": re.compile(r"on (?:each|both) machines?|(?:每台|两台)机器上"),
    "code": re.compile(r"(?:exit code|退出码) (\d+)"),
    "need": re.compile(r"needs (PaddlePaddle 2\.6|[a-z ]+)|需要 ?(PaddlePaddle 2\.6|\w+)"),
}


class PageError(Exception):
    """A page that does not say what to do with a block."""


@dataclass
class Command:
    """One line to type (continued lines are joined)."""

    page: Path
    line: int
    block: int  # where its block begins
    text: str
    special: dict[str, str] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)  # of a block's last command: what the page shows below it

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def code(self) -> int:
        return int(self.special.get("code", 0))

    @property
    def not_run(self) -> str:
        """Why it is only named; empty if it is run."""
        if re.match(r"make [a-z]", self.text):
            return "a make target"
        if re.search(r"<[^\s<>|=&]", self.text):
            return "a placeholder"
        return f"needs {self.special['need']}" if "need" in self.special else ""

    @property
    def essence(self) -> tuple[str, dict[str, str]]:
        """What must be the same in both languages."""
        return re.sub(r"<[^<>]+>", "<>", self.text), self.special


@dataclass
class File:
    """A file that the page tells the reader to write."""

    name: str
    text: str


def steps(page: Path) -> list[Command | File]:
    """What a reader does, in the page's order."""
    found: list[Command | File] = []
    below: list[Command] = []  # the commands of the block just above
    for line, language, body in _blocks(page):
        if language not in LANGUAGES:
            raise PageError(f"{page}:{line}: a block of {language!r}; known are {', '.join(LANGUAGES[1:])}")
        if language == "text" and below:
            below[-1].printed = body
        below = _commands(page, line, body) if language == "bash" else []
        found += below
        if language == "python" and (name := re.match(r"# (\w+\.py)$", body[0])):
            found.append(File(name[1], "\n".join(body) + "\n"))
    return found


def commands(page: Path) -> list[Command]:
    return [step for step in steps(page) if isinstance(step, Command)]


def _blocks(page: Path) -> list[tuple[int, str, list[str]]]:
    """Line, language and lines of each fenced block; words between two of them are a block without either."""
    blocks: list[tuple[int, str, list[str]]] = []
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
            if inside:
                blocks.append((number + 1, line[3:].strip(), []))
        elif inside:
            blocks[-1][2].append(line)
        elif line.strip() and blocks:
            blocks.append((number, "", []))
    if inside:
        raise PageError(f"{page}: the last block has no end")
    return blocks


def _commands(page: Path, first: int, body: list[str]) -> list[Command]:
    found: list[Command] = []
    above: dict[str, str] = {}
    words = ""
    for number, line in enumerate(body, first):
        if not line.strip():
            above = {}
        elif line.startswith("#"):
            above = _special(page, number, line)
        else:
            words += line.strip()
            if words.endswith("\\"):
                words = words[:-1]
                continue
            text, *comment = re.split(r"\s+# ", words, maxsplit=1)
            special = {**above, **_special(page, number, "".join(comment))}
            found.append(Command(page, number, first, text, special))
            words = ""
    return found


def _special(page: Path, number: int, comment: str) -> dict[str, str]:
    said: dict[str, str] = {}
    for what, pattern in _SPECIAL.items():
        if match := pattern.search(comment):
            said[what] = next((group for group in match.groups() if group), "yes").strip()
    if "need" in said:
        known = {**{name: name for name in NEEDS}, **{chinese: name for name, chinese in NEEDS.items()}}
        if said["need"] not in known:
            raise PageError(f"{page}:{number}: needs {said['need']!r}; known are {', '.join(NEEDS)}")
        said["need"] = known[said["need"]]
    return said


def _prose(page: Path) -> str:
    """Without blocks and comments."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    lines = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def links(page: Path) -> list[str]:
    """Where the page points to within the repository."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)) if not link.startswith("http")]
