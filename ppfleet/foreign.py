"""What others print: the one place that looks for words in a text.

Paddle, gloo, compilers and crashed interpreters say what happened in words alone. Our own failures have codes
(`errors.py`, `watchdog/events.py`); `tests/unit/test_codes.py` lets no other file look for words in a message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FAILURE = re.compile(r"\w*error\b|\w*exception\b|\b(lost|closed|fault|fatal|aborted|killed|terminate called)\b", re.I)
_CONNECTION = re.compile(r"connection (reset|closed|refused|aborted)|broken pipe|by peer|\bgloo\b", re.I)


def is_connection_loss(failure: BaseException) -> bool:
    """Whether an exception is what a library raises when the process at the other end is gone."""
    return isinstance(failure, ConnectionError) or tells_of_connection(str(failure))


def tells_of_connection(text: str) -> bool:
    return bool(_CONNECTION.search(text))


def tells_of_unused_parameters(text: str) -> bool:
    """Whether Paddle's reducer says that a parameter was used that it had found unused, or the other way round."""
    return "find_unused_parameters" in text or "has been ready before" in text


def telling_lines(lines: Sequence[str]) -> list[str]:
    """Those of them that tell of a failure."""
    return [line.strip() for line in lines if _FAILURE.search(line)]


def telling_line(text: str, last: bool = False) -> str:
    """The first line, or the last one, that tells of a failure; the last line of all where none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = telling_lines(lines)
    return (telling[-1 if last else 0] if telling else lines[-1] if lines else "").strip()
