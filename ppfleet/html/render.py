"""From a template to a page: one file without scripts, fonts or links to elsewhere."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

_PACKAGE = Path(__file__).resolve().parent.parent
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # in no page: a name that somebody chose may have them


def render(template: str, **values: object) -> str:
    """The page of a template, which is named by its path in ppfleet/. Values are text unless a template says `safe`.

    >>> render("commands/report/run_page.html.j2", title="Run 1", ...)
    """
    return printable(environment().get_template(template).render(values))


def environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: training does not wait for it

    made = Environment(
        loader=FileSystemLoader(_PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(number=number, when=when)
    return made


def printable(text: str) -> str:
    """File names need not be text: what is none is shown with escapes."""
    return _CONTROL.sub("\ufffd", text).encode(errors="backslashreplace").decode()


def number(value: float) -> str:
    """As short as it is readable."""
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def when(seconds: float) -> str:
    """Date and time of this host."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged file may say any time
        return "at an unknown time"
