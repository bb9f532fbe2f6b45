"""The numbered lines of a TIPC text file, each with the place where an editor shows it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ppfleet.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """One line: `number` decides its meaning, `source` is where an editor shows it."""

    number: int
    source: int
    text: str

    @property
    def key(self) -> str:
        return self.text.partition(":")[0].strip()

    @property
    def value(self) -> str:
        return self.text.partition(":")[2].strip()

    @property
    def banner(self) -> str | None:
        """The name in `=====name=====`."""
        text = self.text.strip()
        return text.strip("=").strip() if text[0] == text[-1] == "=" else None

    @property
    def separator(self) -> bool:
        return self.text.lstrip().startswith("#") or self.banner is not None

    def values(self) -> list[str]:
        """The alternatives between `|`."""
        return [part.strip() for part in self.value.split("|")]

    def fail(self, message: str) -> NoReturn:
        stands = repr(self.text.strip())
        raise ConfigError(f"line {self.source} ({stands}): {message}", line=self.source, stands=stands, problem=message)


def present(text: str) -> str:
    """The text, or nothing where it says `null`."""
    return "" if text.strip() == "null" else text.strip()


def words(text: str, line: Line) -> list[str]:
    """Arguments as a shell would split them; nothing else of a shell's happens to them."""
    if not any(mark in text for mark in "\"'\\"):
        return text.split()  # nearly always, and forty times as fast
    try:
        return shlex.split(text)
    except ValueError as failure:
        line.fail(f"{failure}: a quotation mark is missing")


def read(path: str | Path) -> list[Line]:
    """The numbered lines of a file."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; give one of its .txt files") from None
    except OSError as failure:
        raise ConfigError(f"cannot read {path}: {failure.strerror}") from None
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{path} is no UTF-8 text (byte {failure.start}): save it as UTF-8") from None
    kept = [(source, line) for source, line in enumerate(re.split(r"\r\n|\n|\r", text), 1) if line.strip()]
    lines = [Line(number, source, line) for number, (source, line) in enumerate(kept, 1)]
    for line in lines:
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", line.text):
            raise ConfigError(f"{path}: line {line.source} holds a control character: {line.text!r}")
    return lines
