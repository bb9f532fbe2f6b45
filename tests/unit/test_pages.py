"""The pages agree with each other: the same commands in both languages, links that lead somewhere, tests that exist."""

import ast
import re

import pytest

from tests import pages
from tests.harness import ROOT

EVERY = sorted(
    [page for pair in pages.PAGES.items() for page in pair]
    + [ROOT / "docs/api.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
)


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages.PAGES, ids=name)
def test_the_same_commands_in_both_languages(page):
    english, chinese = (
        [step.essence if isinstance(step, pages.Command) else step for step in pages.steps(one)]
        for one in (page, pages.PAGES[page])
    )
    assert chinese == english


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_links_lead_somewhere(page):
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        assert not anchor or target.suffix != ".md" or anchor in pages.headings(target), f"{name(page)}: {link}"


def promises(page):
    return [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| **")]


@pytest.mark.parametrize("page", [ROOT / "docs/promises.md", ROOT / "docs/promises_cn.md"], ids=name)
def test_each_promise_names_tests_that_are_there(page):
    rows = promises(page)
    assert len(rows) > 10
    for row in rows:
        tests = re.findall(r"`([\w/.]+)`", row.split(" | ")[-1])
        assert tests and all((ROOT / "tests" / test).exists() for test in tests), row


@pytest.mark.parametrize("suffix", ["", "_cn"])
def test_the_readme_promises_what_the_page_explains(suffix):
    short, full = (
        [row.split("**")[1] for row in promises(ROOT / page)]
        for page in (f"README{suffix}.md", f"docs/promises{suffix}.md")
    )
    assert short and short == [promise for promise in full if promise in short]


def test_make_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [one for page in pages.PAGES for one in pages.commands(page) if one.not_run == "a make target"]
    assert named
    for one in named:
        assert one.text.split()[1] in targets, one.where


def test_the_reference_names_what_is_there():
    """Each row of docs/api.md, and each comment that `make site` turns into a full entry."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        module = section.split()[0]
        path = ROOT / f"{module.replace('.', '/')}.py"
        defined = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                inside = [part.name for part in getattr(node, "body", ()) if isinstance(part, ast.FunctionDef)]
                defined |= {node.name, *(f"{node.name}.{name}" for name in inside)}
        rows = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
        entries = {name.rpartition(".")[2] for name in re.findall(rf"^<!-- ::: ({module}\.\w+)", section, re.MULTILINE)}
        assert rows and rows <= defined, f"{module}: {rows - defined}"
        assert entries == {row for row in rows if "." not in row}, module
    assert {"Job.steps", "Job.backward", "Job.evaluate", "Job.resume"} <= set(re.findall(r"`(Job\.\w+)`", page))


def blocks(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return pages.steps(page)


def test_what_a_block_says(tmp_path):
    first, second, third, file = blocks(
        tmp_path,
        "```bash\n# on each machine\npython a.py \\\n  --flag   # exit code 75\n\n"
        "b   # needs cards: four\nc <file>\n```\n\n"
        "```text\nshown\n```\n\n```python\n# own.py\nprint(1)\n```\n",
    )
    assert (first.text, first.line, first.special) == ("python a.py --flag", 4, {"each": "yes", "code": "75"})
    assert (second.not_run, third.not_run, third.special) == ("needs cards", "a placeholder", {})
    assert third.printed == ["shown"] and file == pages.File("own.py", "# own.py\nprint(1)\n")


def test_words_between_commands_and_text_part_them(tmp_path):
    assert blocks(tmp_path, "```bash\na\n```\n\nMeanwhile:\n\n```text\nb\n```\n")[0].printed == []


@pytest.mark.parametrize("text", ["```bash\na   # needs a miracle\n```\n", "```sh\na\n```\n", "```bash\na\n"])
def test_what_nobody_knows_is_refused(tmp_path, text):
    with pytest.raises(pages.PageError):
        blocks(tmp_path, text)
