"""`python -m ppfleet launch`: checks, waits for the other machines, runs Paddle's launcher, restarts a failed job.

Paddle's own launcher starts the trainers. A guard process (cluster/process_tree.py) runs around it, so that killing
this process, the launcher or the guard, even with SIGKILL, leaves no trainer behind.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppfleet import limits
from ppfleet._version import __version__
from ppfleet.cli import Stopped, stoppable
from ppfleet.cluster import hosts, process_tree
from ppfleet.cluster.ports import port_holder
from ppfleet.cluster.rendezvous import UNKNOWN, Meeting
from ppfleet.commands.launch import env_secrets
from ppfleet.commands.launch.flags import Launch, Machine, translate
from ppfleet.commands.launch.ps_roles import Roles
from ppfleet.commands.why import cause
from ppfleet.distributed import devices
from ppfleet.errors import PREEMPTED, CommError, FleetError

_DONE = "workers done"


def main(arguments: list[str]) -> int:
    launch = translate(arguments, this_machine())
    for note in launch.notes:
        say(note)
    if launch.dry_run:
        print(launch.text())
        return 0
    check_here(launch)
    return Supervisor(launch).run()


def say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def this_machine() -> Machine:
    """Which Paddle is installed and how many cards there are, without importing Paddle."""
    row = devices.of_machine()
    return Machine(cards=row.cards(), built=row.has_wheel(), env=dict(os.environ), accelerator=row)


def check_here(launch: Launch) -> None:
    """Check what can be checked before anything is started: script, log directory, ports, parameter server."""
    script = launch.script[0]
    if not Path(script).is_file():
        raise FleetError(f"script {script} not found in {Path.cwd()}: check the path and the working directory")
    try:
        Path(launch.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise FleetError(f"cannot write logs to {launch.log_dir}: {failure.strerror}") from None
    for port in launch.ports:
        if holder := port_holder(launch.host, port):
            raise FleetError(
                f"port {port} of {launch.host} is in use by {holder}: end that process, or choose another port with "
                f"{'--servers' if launch.workers else '--start_port'}"
            )
    if launch.workers and not has_servers():
        raise FleetError(
            "this PaddlePaddle was built without the parameter server, as all 3.x CPU wheels are: "
            "use PaddlePaddle 2.6, or train collectively with --ips"
        )


def has_servers() -> bool:
    code = "import paddle; raise SystemExit(not hasattr(paddle.base.core, 'DistFleetWrapper'))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def by_address(launch: Launch) -> Launch:
    """Replace host names by addresses: Paddle's launcher ignores a --host without a dot. This is done at each start,
    after all hosts have joined, because a pod that replaces another one has a new address."""
    if UNKNOWN in launch.nodes or all("." in node or ":" in node for node in launch.nodes):
        return launch
    addresses = {node: next((ip for ip in hosts.resolve(node) if "." in ip), "") for node in launch.nodes}
    if missing := [node for node, address in addresses.items() if not address]:
        raise FleetError(f"{', '.join(missing)} has no IPv4 address here: correct its DNS entry, or /etc/hosts")
    changed = {f"--ips={','.join(launch.nodes)}": f"--ips={','.join(addresses.values())}"}
    changed[f"--host={launch.host}"] = f"--host={addresses[launch.host]}"
    return replace(launch, arguments=tuple(changed.get(argument, argument) for argument in launch.arguments))


class Supervisor:
    """One job as this host sees it: starts it until it succeeds or no restarts are left."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.meeting: Meeting | None = None
        self.roles: Roles | None = None
        self.started = False
        self.began = time.time()

    def run(self) -> int:
        process_tree.adopt()
        with stoppable(), tempfile.TemporaryDirectory(prefix="ppfleet-") as private:
            for attempt in range(self.launch.restarts + 1):
                try:
                    code, reason = self._attempt(attempt, Path(private))
                except Stopped as stop:
                    code = PREEMPTED if self._answer("preempted") else 128 + stop.number
                    self._tell(ended=code, final=True)
                    return code
                finally:
                    if self.meeting:
                        self.meeting.close()
                left = self.launch.restarts - attempt
                if code in (0, PREEMPTED) or not left or (self.meeting and self.meeting.final):
                    break
                say(f"{reason}; restarting, {left} restart{'s' if left > 1 else ''} left")
        if code:
            say(f"{reason}; the trainers' logs are in {self.launch.log_dir}" if self.started else reason)
            if sentence := self._answer():
                say(f"{sentence} (run `ppfleet why {self.launch.log_dir}` for details)")
        return code

    def _answer(self, kind: str = "") -> str:
        """How the flight records of this host explain the end of the job; empty if it is not of that kind."""
        try:
            answer = cause.answer([Path(self.launch.log_dir)]) if self.started else None
        except Exception as failure:  # noqa: BLE001 - the explanation is optional, the job's exit code is not
            say(f"cannot read the flight records ({type(failure).__name__}: {failure})")
            return ""
        if answer is None or answer.attempt.started < self.began or kind not in ("", answer.kind):
            return ""
        return answer.sentence

    def _attempt(self, attempt: int, private: Path) -> tuple[int, str]:
        """Start the job once: its exit code, and the reason if that is not 0."""
        launch = self.launch
        if len(launch.nodes) > 1:
            self.meeting = self._new_meeting()
            try:
                self.meeting.start(lambda token: None)
            except CommError as failure:
                return 1, str(failure)
        command, env = env_secrets.keep(by_address(launch), dict(os.environ), private, attempt)
        if launch.workers:
            self.roles = Roles(private / f"roles{attempt}", launch.workers.count(launch.host))
            command = self.roles.wrap(command, len(launch.command()) - len(launch.script))
        watched = [sys.executable, process_tree.__file__, str(os.getpid()), str(limits.LAUNCH_GRACE), *command]
        process = subprocess.Popen(watched, env=env, start_new_session=True)
        self.started = True
        reason = ""
        try:
            reason = self._watch(process)
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):  # a trainer that is stopped or stuck ignores SIGTERM
                    process.wait(limits.LAUNCH_GRACE + 5 if not reason else limits.LAUNCH_GRACE_LOST)
            process_tree.end_below(0, process)
            process.wait()
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if self.roles and not reason:
            # On a host without workers only this command stops the servers, so their exit code means nothing.
            code = 0 if self.roles.over and not self.roles.workers else code
            reason = self.roles.failed() or ("" if code or self.roles.over else "not all workers finished")
        if reason:
            code = 1  # stopped here because of another host, or failed although the launcher returned 0
        elif code == PREEMPTED:
            reason = "SIGTERM: the job was saved; run the same command to resume"
        elif code:
            reason = f"the trainers on this host exited with code {code}"
        return self._agree(code, reason)

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the job ends here, or fails on another host: then the reason to stop it."""
        while process.poll() is None:
            if self.meeting:
                self.meeting.hear(0.5)
                for number, name in enumerate(self.meeting.nodes):
                    if number == self.meeting.node or (self.meeting.node and number):
                        continue
                    if number not in self.meeting.links and number not in self.meeting.ended:
                        return f"lost the connection to {name}"
                    if self.meeting.ended.get(number, 0) not in (0, PREEMPTED):  # after SIGTERM all end together
                        return f"the job on {name} exited with code {self.meeting.ended[number]}"
            else:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            if self.roles and (reason := self.roles.failed()):
                return reason
            if self.roles and not self.roles.over and self._all_done(self.roles):
                self.roles.release()
                if not self.roles.workers:
                    process.terminate()
        return ""

    def _all_done(self, roles: Roles) -> bool:
        """Whether the workers of all hosts are done: each host reports to the first, which then informs all."""
        meeting = self.meeting
        if meeting is None or not roles.done():
            return roles.done()
        others = [0] if meeting.node else range(1, len(meeting.nodes))
        heard = all(meeting.at.get(number) == _DONE for number in others)
        if meeting.node or heard:
            meeting.tell(_DONE)
        return heard

    def _agree(self, code: int, reason: str) -> tuple[int, str]:
        """A job succeeds only if it does on every host: each reports to the first, which then informs all."""
        meeting = self.meeting
        if meeting is None:
            return code, reason
        if meeting.node:
            self._tell(ended=code)
        deadline = time.monotonic() + limits.LAST_WORDS
        others = [0] if meeting.node else list(range(1, len(meeting.nodes)))
        while code == 0 and time.monotonic() < deadline:
            if not [n for n in others if n in meeting.links and n not in meeting.ended]:
                break
            meeting.hear(0.5)
        for number in others:
            other = meeting.ended.get(number)
            if code == 0 and other != 0:
                name = meeting.nodes[number]
                lost = f"lost the connection to {name} at the end of the job"
                code, reason = 1, f"the job on {name} exited with code {other}" if other else lost
        if not meeting.node:
            self._tell(ended=code)
        return code, reason

    def _tell(self, **message: Any) -> None:
        for link in self.meeting.links.values() if self.meeting else ():
            link.send(**message)

    def _new_meeting(self) -> Meeting:
        launch = self.launch
        # Without the script's arguments: paths may differ between hosts, and the script itself compares the rest.
        text = "\0".join((*launch.nodes, Path(launch.script[0]).name, __version__))
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        node = launch.nodes.index(launch.host) if launch.host else -1
        same = "list of hosts, script or version of ppfleet"
        return Meeting(list(launch.nodes), node, launch.meeting_port, digest, launch.wait, say, same)
