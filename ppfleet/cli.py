"""What a command-line script needs around its work: options that say what they expect, errors of one line. Pure."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Callable, NoReturn

from ppfleet.errors import FleetError


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        # Where the default is None, what happens without the option is in its text.
        plain = action.default is None or action.default is False
        return action.help if plain else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Shows the defaults in --help, takes no abbreviations, and refuses in one line."""

    def __init__(self, description: str | None = None) -> None:
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")

    def switch(self, name: str, text: str, default: bool | None = False) -> None:
        """An option that is true when given, and also takes True or False: `--name`, `--name=False`."""
        self.add_argument(name, type=yes_or_no, nargs="?", const=True, default=default, metavar="True|False", help=text)


def yes_or_no(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")


def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], Any]:
    """A type for argparse: a number of that kind within those limits."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most or math.isinf(value):
            limits = f"from {least:g} up" if most == float("inf") else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' if kind is int else ''}number {limits}")
        return value

    return parse


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and end the process: 0 when it returns, 1 after an error of ppfleet's (75 and 76: see errors.py), 130
    after Ctrl-C."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a file name that is no text is shown with escapes
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        main()
        sys.stdout.flush()
    except FleetError as failure:
        sys.last_value = failure  # what the other ranks are told when they wait for this one
        print(f"error: {failure}", file=sys.stderr, flush=True)
        sys.exit(failure.code if isinstance(failure, SystemExit) else 1)
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt as interrupt:
        sys.last_value = interrupt
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(0)


class Stopped(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP came."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped, once, so that what is running is ended in order. One that is ignored,
    as under nohup, stays ignored."""

    def stop(number: int, frame: Any) -> None:
        for each in kept:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {each: handler for each in watched if (handler := signal.getsignal(each)) != signal.SIG_IGN}
    for each in kept:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
