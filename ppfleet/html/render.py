"""Renders a page from a template: a single file without scripts, fonts or external links."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

_PACKAGE = Path(__file__).resolve().parent.parent
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # not allowed in HTML, but possible in file names


def render(template: str, **values: object) -> str:
    """Render the template with that path in ppfleet/. Values are escaped unless the template marks them `safe`.

    >>> render("commands/report/run_page.html.j2", title="Run 1", ...)
    """
    return printable(environment().get_template(template).render(values))


def environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, so that training does not import it

    env = Environment(
        loader=FileSystemLoader(_PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(number=number, when=when)
    return env


def printable(text: str) -> str:
    """File names may hold any bytes: show those that are not text as escapes."""
    return _CONTROL.sub("\ufffd", text).encode(errors="backslashreplace").decode()


def number(value: float) -> str:
    """A number for a reader, rounded to four digits."""
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def when(seconds: float) -> str:
    """Date and time in this host's time zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged file may contain any number
        return "at an unknown time"
