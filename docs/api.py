"""Write docs/api.md, the reference, from signatures and docstrings. Reads the source: nothing is imported.

python docs/api.py             write it
python docs/api.py --check     exit code 1 if it is not what it would write
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "api.md"
# What a training script uses, in the order of reading: module -> name -> members; none: all public ones (of errors:
# the classes).
CONTENTS: dict[str, dict[str, list[str]]] = {
    "job": {"Job": []},
    "data.loader": {"Loader": []},
    "data.threads": {"ThreadedDataset": ["draw_into"]},
    "evaluation.metrics": {"top1": [], "top5": [], "topk": [], "cross_entropy": []},
    "distributed.collectives": {"Comm": ["on_first", "first", "gather"]},
    "checkpoint.board": {"Board": []},
    "errors": {},
}
HEAD = """# Reference

What a training script calls, from the docstrings (`make docs` writes this page). [Pages](README.md) tell how to use it.
"""


def page() -> str:
    parts = [HEAD]
    for module, names in CONTENTS.items():
        source = (HERE.parent / "ppfleet" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        tree = ast.parse(source)
        found = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        parts.append(f"## ppfleet.{module}\n\n{_said(tree)}\n")
        constants = re.findall(r"^([A-Z]+ = \d+)  # (.+)$", source, re.MULTILINE)
        if constants:
            parts.append("".join(f"- `{what}`: {why}\n" for what, why in constants))
        for name, members in (names or {name: [] for name in found if name[0].isupper()}).items():
            node = found[name]
            parts.append(_class(node, members) if isinstance(node, ast.ClassDef) else _function(node))
    return "\n".join(parts).rstrip() + "\n"


def _class(node: ast.ClassDef, members: list[str]) -> str:
    """Its docstring, then each public method and property that has one."""
    inside = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    made = inside.get("__init__")
    bases = ", ".join(map(ast.unparse, node.bases))
    text = f"### {node.name}{f' ({bases})' if bases else ''}\n\n"
    if node.name == "Job" and made is not None:  # a script makes no other of them itself
        text += f"```python\n{_signature(made, node.name)}\n```\n\n"
    text += f"{_said(node)}\n"
    for name, part in inside.items():
        if (name in members if members else not name.startswith("_")) and ast.get_docstring(part):
            text += f"\n{_function(part, f'{node.name}.')}"
    return text


def _function(node: ast.FunctionDef, owner: str = "") -> str:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if "property" in marks:
        return f"#### {owner}{node.name}: {ast.unparse(node.returns) if node.returns else ''}\n\n{_said(node)}\n"
    head = f"{'####' if owner else '###'} {owner}{node.name}\n\n"
    return f"{head}```python\n{_signature(node, owner + node.name)}\n```\n\n{_said(node)}\n"


def _signature(node: ast.FunctionDef, name: str) -> str:
    """As one writes the call, over several lines where it is long."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    parts = [_argument(one, value) for one, value in zip(positional, [*defaults, *arguments.defaults])]
    parts = [part for part in parts if part not in ("self", "cls")]
    if arguments.vararg:
        parts.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_argument(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg:
        parts.append(f"**{_argument(arguments.kwarg, None)}")
    back = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({', '.join(parts)}){back}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){back}"


def _argument(node: ast.arg, value: ast.expr | None) -> str:
    text = f"{node.arg}: {ast.unparse(node.annotation)}" if node.annotation else node.arg
    if value is None:
        return text
    return f"{text}{' = ' if node.annotation else '='}{ast.unparse(value)}"


def _said(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: aligned definitions become a list, paragraphs of code a block."""
    parts = []
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        defined = [re.match(r"(\w+) {2,}(.+)", line) for line in paragraph.splitlines()]
        if all(defined):
            parts.append("\n".join(f"- `{one[1]}`: {one[2]}" for one in defined if one))
        else:
            parts.append(f"```python\n{paragraph}\n```" if _is_code(paragraph) else paragraph)
    return "\n\n".join(parts)


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE.name} is not what the docstrings say: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
