"""Paddle's launcher writes its whole environment into the log directory. Secrets go another way: through a file that
only this user can read, which is gone when the job ends.

As a script (`python secret.py train.py …`, which the launcher starts instead of train.py) it puts them back and runs
the training script as if nothing had been between.
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
    """The launcher's command and environment for that attempt, with the secrets in a file under `private`."""
    env = {name: value for name, value in environ.items() if name not in launch.without} | launch.env
    secrets = {name: value for name, value in env.items() if is_secret(name, value)}
    command = launch.command()
    if attempt:  # the launcher appends to logs: each attempt has its own
        command = [f"{word}/restart_{attempt}" if word == f"--log_dir={launch.log_dir}" else word for word in command]
    if not secrets:
        return command, env
    path = private / "environment.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(secrets), encoding="utf-8")
    env = {name: value for name, value in env.items() if name not in secrets} | {_FILE: str(path)}
    place = len(command) - len(launch.script)
    return [*command[:place], str(Path(__file__).resolve()), *launch.script], env


def main() -> None:
    import runpy

    path = os.environ.pop(_FILE, "")
    os.environ.update(json.loads(Path(path).read_text(encoding="utf-8")) if path else {})
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
