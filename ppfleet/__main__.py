"""`ppfleet <command>`, also as `python -m ppfleet <command>`."""

from __future__ import annotations

import sys
from importlib import import_module

from ppfleet.cli import exit_code

COMMANDS = {
    "check-cards": "check on this machine's cards what ppfleet promises, and write a report to send",
    "doctor": "find problems before a launch, on one machine or between all of them",
    "launch": "start a training script on one or several machines, checked and supervised",
    "report": "write one page about a run: curves, failures, mistakes, checkpoints, settings",
    "scale": "train on 1 to N ranks: time, metric, efficiency, projection to more machines",
    "tipc": "certify train -> eval -> export -> infer from TIPC text files",
    "why": "explain what happened to a job: one sentence, then the timeline",
}


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        try:
            command = import_module(_module(arguments[0]))
            return exit_code(lambda: command.main(arguments[1:]))
        except ModuleNotFoundError as missing:
            print(
                f"{sys.executable} cannot import {missing.name}, which ppfleet needs: use .venv/bin/python, or run "
                f"pip install -e '.[cpu]' with this Python",
                file=sys.stderr,
            )
            return 2
    commands = "\n".join(f"  {name:13}{text}" for name, text in COMMANDS.items())
    usage = f"usage: python -m ppfleet <command> …\n\n{commands}\n\nrun python -m ppfleet <command> --help for details"
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage)
        return 0
    problem = f"unknown command {arguments[0]!r}" if arguments else "a command is required"
    print(f"python -m ppfleet: {problem}\n{usage}", file=sys.stderr)
    return 2


def run() -> int:
    """The entry point of the console command `ppfleet`."""
    return main(sys.argv[1:])


def _module(command: str) -> str:
    """The module whose `main(arguments)` returns the exit code."""
    return "ppfleet.tipc.cli" if command == "tipc" else f"ppfleet.commands.{command.replace('-', '_')}.command"


if __name__ == "__main__":
    sys.exit(run())
