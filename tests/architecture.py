"""The shape of the code: what `make size` prints, and what tests/unit/test_architecture.py holds it to.

python -m tests.architecture                     # lines, functions and imports per folder
python -m tests.architecture --compare 7368823   # the same beside another commit
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_PACKAGES = {path.parent.name for path in (Path(__file__).resolve().parent.parent / "ppfleet").glob("*/__init__.py")}
ROOT = Path(__file__).resolve().parent.parent
PARTS = ("ppfleet", "models", "tools", "deploy", "examples")


@dataclass
class Module:
    """One Python file: its lines of code, its functions, and which of our modules it imports.

    Blank lines, comments, docstrings and imports do not count: text that explains and files that are split are no cost.
    """

    name: str
    lines: int
    functions: dict[str, int]  # name -> lines
    imports: set[str] = field(default_factory=set)

    @property
    def folder(self) -> str:
        """Of ppfleet's own level too: the modules there are not one thing."""
        return ".".join(self.name.split(".")[:2])


def read(revision: str | None = None) -> dict[str, Module]:
    """All modules of the working tree, or of a commit."""
    sources = {}
    for path in _git(
        "ls-files --cached --others --exclude-standard" if revision is None else f"ls-tree -r --name-only {revision}"
    ).split():
        if path.endswith(".py") and path.partition("/")[0] in PARTS:
            if revision is None and not (ROOT / path).exists():
                continue
            text = _git(f"show {revision}:{path}") if revision else (ROOT / path).read_text(encoding="utf-8")
            sources[path[:-3].replace("/", ".").removesuffix(".__init__")] = text
    return {name: _module(name, text, sources) for name, text in sources.items()}


def _git(command: str) -> str:
    return subprocess.run(["git", *command.split()], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _module(name: str, text: str, known: dict[str, str]) -> Module:
    tree = ast.parse(text)
    functions = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    return Module(
        name, _code_lines(text, tree), functions, {found for found in _imported(tree, known) if found != name}
    )


def _code_lines(text: str, tree: ast.AST) -> int:
    uncounted = {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for n, line in lines if n not in uncounted and line.strip() and not line.strip().startswith("#"))


def _imported(tree: ast.AST, known: dict[str, str]) -> set[str]:
    """Also inside of functions; not what only a type checker reads."""
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name in known}


def folder_imports(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Folder -> the other folders that its modules import."""
    found: dict[str, set[str]] = {module.folder: set() for module in modules.values()}
    for module in modules.values():
        found[module.folder] |= {modules[name].folder for name in module.imports} - {module.folder}
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def _shown(module: Module) -> str:
    parts = module.name.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 or parts[-1] in _PACKAGES else parts[0]


def table(modules: dict[str, Module]) -> str:
    fan_in = Counter(name for module in modules.values() for name in module.imports)
    rows = [("folder", "modules", "lines", "functions", "longest function", "fan-out", "fan-in")]
    for folder in sorted({_shown(module) for module in modules.values()}):
        inside = [module for module in modules.values() if _shown(module) == folder]
        longest = max(((n, f, m.name) for m in inside for f, n in m.functions.items()), default=(0, "", ""))
        names = {module.name for module in inside}
        out = {name for module in inside for name in module.imports} - names
        users = {module.name for module in modules.values() if module.imports & names} - names
        shown = f"{longest[0]} ({longest[2].rpartition('.')[2]}.{longest[1]})" if longest[0] else ""
        count = sum(len(module.functions) for module in inside)
        rows.append((folder, len(inside), sum(m.lines for m in inside), count, shown, len(out), len(users)))  # type: ignore[arg-type]
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    library = [m for m in modules.values() if m.folder.startswith("ppfleet")]
    core = [m for m in library if m.folder not in ("ppfleet.cpu", "ppfleet.ops", "ppfleet.commands", "ppfleet.tipc")]
    most = ", ".join(f"{name.removeprefix('ppfleet.')} {count}" for name, count in fan_in.most_common(5))
    graph = {name: module.imports for name, module in modules.items()}
    return "\n".join(
        [
            *lines,
            f"ppfleet: {len(library)} modules, {sum(m.lines for m in library)} lines; without cpu, commands and tipc: "
            f"{len(core)} modules, {sum(m.lines for m in core)} lines",
            f"most imported: {most}",
            f"cycles of modules: {len(cycles(graph))}, of folders: {len(cycles(folder_imports(modules)))}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", metavar="COMMIT", help="show the table of this commit first")
    options = parser.parse_args()
    if options.compare:
        print(f"{options.compare}\n{table(read(options.compare))}\n\nnow")
    print(table(read()))
    if options.compare:
        print(_git(f"diff --shortstat {options.compare}").strip())


if __name__ == "__main__":
    main()
