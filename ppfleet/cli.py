"""What command-line programs share: options that say what they expect, one-line errors, exit codes. Pure."""

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
        # An option whose default is None explains in its own text what happens without it.
        plain = action.default is None or action.default is False
        return action.help if plain else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Shows defaults in --help, accepts no abbreviations, and reports a wrong command line in one line.

    >>> parser = Parser("Train a model.")
    >>> parser.add_argument("--epochs", type=number(int, 1), default=90, help="passes over the data")
    >>> parser.switch("--amp", "train in mixed precision")
    """

    def __init__(self, description: str | None = None, prog: str | None = None) -> None:
        super().__init__(prog, description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")

    def switch(self, name: str, text: str, default: bool | None = False) -> None:
        """Add an option that is true when given, and also accepts True or False: `--name`, `--name=False`."""
        self.add_argument(name, type=yes_or_no, nargs="?", const=True, default=default, metavar="True|False", help=text)


def yes_or_no(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"must be True or False, got {text!r}")


def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], Any]:
    """A type for argparse: a number of that kind within those limits.

    >>> number(int, 1, 64)("8")
    8
    """

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most or math.isinf(value):
            name = "an integer" if kind is int else "a number"
            limits = f">= {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {name} {limits}, got {text!r}")
        return value

    return parse


def exit_code(main: Callable[[], int | None]) -> int:
    """Call `main` and return the process's exit code: what `main` returned (None: 0), 1 after an error of ppfleet's
    (75 and 76: see errors.py), 130 after Ctrl-C, 141 when the reader of the output has gone."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        with contextlib.suppress(AttributeError):  # show what the terminal cannot display as escapes
            getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except FleetError as failure:
        sys.last_value = failure  # the other ranks, which wait for this one, are sent it as the reason
        print(f"error: {failure}", file=sys.stderr, flush=True)
        return failure.code if isinstance(failure, SystemExit) else 1
    except BrokenPipeError:
        discard_output()
        return 141
    except KeyboardInterrupt as interrupt:
        sys.last_value = interrupt
        print("interrupted", file=sys.stderr, flush=True)
        return 130


def discard_output() -> None:
    """After a BrokenPipeError: send what is still buffered nowhere, so that Python can exit without another error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and end the process with its `exit_code`.

    >>> if __name__ == "__main__":
    ...     run(main)
    """
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(exit_code(main))


class Stopped(BaseException):
    """SIGINT (Ctrl-C), SIGTERM or SIGHUP was received."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Stopped, once, so that child processes are ended in order. An ignored signal, as
    under nohup, stays ignored."""

    def stop(number: int, frame: Any) -> None:
        for caught in handlers:
            signal.signal(caught, signal.SIG_IGN)
        raise Stopped(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {caught: handler for caught in signals if (handler := signal.getsignal(caught)) != signal.SIG_IGN}
    for caught in handlers:
        signal.signal(caught, stop)
    try:
        yield
    finally:
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
