"""`ppfleet <command>`, also as `python -m ppfleet <command>`: what a person runs."""

from __future__ import annotations

import sys
from importlib import import_module

# Name -> what it is for.
COMMANDS = {
    "doctor": "what would go wrong, before a launch; on one machine or on all of them",
    "launch": "start a training script on one machine or on several, checked and guarded",
    "report": "a run on one page: curves, faults, mistakes, checkpoints, settings",
    "scale": "the same training on 1 to N ranks: time, metric, efficiency, a projection",
    "tipc": "certify train -> eval -> export -> infer from TIPC text files",
    "why": "what happened to a job: one sentence, then the timeline",
}


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        try:
            return int(import_module(_module(arguments[0])).main(arguments[1:]))
        except ModuleNotFoundError as missing:
            needed = f"{sys.executable} has no {missing.name}, which ppfleet needs"
            print(f"{needed}: take .venv/bin/python, or pip install -e '.[cpu]' into this one", file=sys.stderr)
            return 2
    lines = "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    known = f"usage: python -m ppfleet <command> …\n\n{lines}\n\npython -m ppfleet <command> --help tells more"
    if arguments and arguments[0] in ("-h", "--help"):
        print(known)
        return 0
    said = f"{arguments[0]!r} is no command" if arguments else "which command?"
    print(f"python -m ppfleet: {said}\n{known}", file=sys.stderr)
    return 2


def run() -> int:
    """The entry point of the console command `ppfleet`."""
    return main(sys.argv[1:])


def _module(command: str) -> str:
    """The module whose `main(arguments)` returns the exit code."""
    return "ppfleet.tipc.cli" if command == "tipc" else f"ppfleet.commands.{command}.command"


if __name__ == "__main__":
    sys.exit(run())
