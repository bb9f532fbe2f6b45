"""Keeps secrets out of the logs: Paddle's launcher writes its whole environment into the log directory.

Secrets are passed to the trainers in a file that only this user can read and that is deleted when the job ends. The
launcher starts this file instead of train.py (`python env_secrets.py train.py …`): it restores the variables and runs
the training script.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppfleet.commands.launch.flags import Launch

_FILE = "PPFLEET_SECRETS"
_NAMES = re.compile(r"(_|^)(TOKEN|KEY|SECRET|CREDENTIALS?)$|PASSWORD|PASSWD|SECRET_", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"^\w+://[^/@\s]+@")  # http://user:password@proxy


def is_secret(name: str, value: str) -> bool:
    return bool(value) and (_NAMES.search(name) is not None or _IN_ADDRESS.search(value) is not None)


def keep(launch: Launch, environ: Mapping[str, str], private: Path, attempt: int) -> tuple[list[str], dict[str, str]]:
    """The launcher's command and environment for that attempt, with the secrets moved to a file in `private`."""
    env = {name: value for name, value in environ.items() if name not in launch.without} | launch.env
    secrets = {name: value for name, value in env.items() if is_secret(name, value)}
    command = launch.command()
    if attempt:  # the launcher appends to existing logs, so each attempt gets a directory of its own
        log_dir = f"--log_dir={launch.log_dir}"
        command = [f"{word}/restart_{attempt}" if word == log_dir else word for word in command]
    if not secrets:
        return command, env
    path = private / "environment.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(secrets), encoding="utf-8")
    env = {name: value for name, value in env.items() if name not in secrets} | {_FILE: str(path)}
    script = len(command) - len(launch.script)
    return [*command[:script], str(Path(__file__).resolve()), *launch.script], env


def main() -> None:
    import runpy

    path = os.environ.pop(_FILE, "")
    os.environ.update(json.loads(Path(path).read_text(encoding="utf-8")) if path else {})
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
