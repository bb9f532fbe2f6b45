"""What `make site` adds to MkDocs: the reference where docs/api.md asks for it, and docstrings as Markdown."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """GitHub shows docs/api.md as a list of links; the comments in it become the reference here."""
    markdown = re.sub(r"<!-- GitHub only -->.*?<!-- end -->", "", markdown, flags=re.DOTALL)
    return re.sub(r"^<!-- (::: .*?) -->$", r"\1", markdown, flags=re.MULTILINE | re.DOTALL)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Browsers and screen readers are told which language a page is in."""
    path = page.file.src_uri
    chinese = path.endswith("_cn.md") or (path.startswith("test_tipc/") and not path.endswith("_en.md"))
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if chinese else output


class Markdown(griffe.Extension):
    """In a docstring, aligned definitions are a list and a paragraph of code is a block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_paragraph, obj.docstring.value.split("\n\n")))


def _paragraph(text: str) -> str:
    defined = [re.match(r"(\w+) {2,}(.+)", line) for line in text.splitlines()]
    if all(defined):
        return "\n".join(f"- `{one[1]}`: {one[2]}" for one in defined if one)
    return f"```python\n{text}\n```" if _is_code(text) else text


def _is_code(text: str) -> bool:
    """One word is code to Python, and prose to a reader."""
    try:
        return bool(ast.parse(text).body) and not text.isidentifier()
    except SyntaxError:
        return False
