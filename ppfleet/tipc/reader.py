"""The numbered lines of a TIPC text file."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ppfleet.errors import ConfigError


@dataclass(frozen=True)
class ConfigLine:
    """One line: `number`, without blank lines, decides its meaning; `source` is the number that an editor shows."""

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
        content = repr(self.text.strip())
        raise ConfigError(
            f"line {self.source} ({content}): {message}", line=self.source, content=content, problem=message
        )


def present(text: str) -> str:
    """The text, or "" for `null`."""
    return "" if text.strip() == "null" else text.strip()


def split_arguments(text: str, line: ConfigLine) -> list[str]:
    """Split arguments as a shell would, without any other processing of a shell."""
    if not any(mark in text for mark in "\"'\\"):
        return text.split()  # the usual case, forty times as fast
    try:
        return shlex.split(text)
    except ValueError as failure:
        line.fail(f"{failure}: add the missing quotation mark")


def read(path: str | Path) -> list[ConfigLine]:
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
        raise ConfigError(f"{path} is not UTF-8 text (byte {failure.start}): save it as UTF-8") from None
    kept = [(source, line) for source, line in enumerate(re.split(r"\r\n|\n|\r", text), 1) if line.strip()]
    lines = [ConfigLine(number, source, line) for number, (source, line) in enumerate(kept, 1)]
    for line in lines:
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", line.text):
            raise ConfigError(f"{path}: line {line.source} contains a control character, remove it: {line.text!r}")
    return lines
