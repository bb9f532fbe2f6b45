"""`python -m ppfleet launch`: checks, waits for the other machines, runs Paddle's launcher, starts a dead job again.

No launcher of our own: Paddle's starts the trainers. Around it stands a guard, so that killing this process, the
launcher or the guard, also with SIGKILL, leaves no trainer behind.
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
from ppfleet.distributed.devices import GPU
from ppfleet.errors import PREEMPTED, CommError, FleetError

_DONE = "workers done"


def main(words: list[str]) -> int:
    launch = translate(words, this_machine())
    for note in launch.notes:
        say(note)
    if launch.dry_run:
        print(launch.text())
        return 0
    try:
        check_here(launch)
        return Supervisor(launch).run()
    except FleetError as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        return 1


def say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def this_machine() -> Machine:
    """Which Paddle is installed and which cards there are, without loading it."""
    return Machine(cards=GPU.files(), built=GPU.has_wheel(), env=dict(os.environ))


def check_here(launch: Launch) -> None:
    """What can be known before anything is started: the script, the log directory, the ports, the parameter server."""
    script = launch.script[0]
    if not Path(script).is_file():
        raise FleetError(f"there is no script {script} here: is the working directory right?")
    try:
        Path(launch.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise FleetError(f"cannot write logs to {launch.log_dir}: {failure.strerror}") from None
    for port in launch.ports:
        if holder := port_holder(launch.host, port):
            raise FleetError(
                f"port {port} of {launch.host} is taken by {holder}: end that, or take another"
                f"{' in --servers' if launch.workers else ' --start_port'}"
            )
    if launch.workers and not has_servers():
        raise FleetError(
            "this PaddlePaddle was built without the parameter server (the 3.x wheels for CPU are): "
            "take PaddlePaddle 2.6, or train collectively with --ips"
        )


def has_servers() -> bool:
    code = "import paddle; raise SystemExit(not hasattr(paddle.base.core, 'DistFleetWrapper'))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def by_address(launch: Launch) -> Launch:
    """Paddle's launcher believes a --host only if there is a dot in it: plain names become the addresses behind them.
    Only when all hosts have come, and anew at each start: a pod that replaces another one has another address."""
    if UNKNOWN in launch.nodes or all("." in node or ":" in node for node in launch.nodes):
        return launch
    found = {node: next((each for each in hosts.resolve(node) if "." in each), "") for node in launch.nodes}
    if missing := [node for node, address in found.items() if not address]:
        raise FleetError(f"{', '.join(missing)} has no IPv4 address here: correct its DNS entry, or /etc/hosts")
    changed = {f"--ips={','.join(launch.nodes)}": f"--ips={','.join(found.values())}"}
    changed[f"--host={launch.host}"] = f"--host={found[launch.host]}"
    return replace(launch, arguments=tuple(changed.get(word, word) for word in launch.arguments))


class Supervisor:
    """One job as this host sees it: attempts until one ends well, or there are no restarts left."""

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
                    code, why = self._attempt(attempt, Path(private))
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
                say(f"{why}; starting again, {left} restart{'s' if left > 1 else ''} left")
        if code:
            say(f"{why}; the trainers' own logs are in {self.launch.log_dir}" if self.started else why)
            if sentence := self._answer():
                say(f"{sentence} (run `ppfleet why {self.launch.log_dir}` for details)")
        return code

    def _answer(self, kind: str = "") -> str:
        """What the flight records of this host say of the job; only if it is of that kind."""
        try:
            found = cause.answer([Path(self.launch.log_dir)]) if self.started else None
        except Exception as failure:  # noqa: BLE001 - what it says is a help; how the job ended is told without it
            say(f"the flight records cannot be read ({type(failure).__name__}: {failure})")
            return ""
        if found is None or found.attempt.started < self.began or kind not in ("", found.kind):
            return ""
        return found.sentence

    def _attempt(self, attempt: int, private: Path) -> tuple[int, str]:
        """Start the job once: exit code, and why it is not 0."""
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
        why = ""
        try:
            why = self._watch(process)
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):  # a trainer that is stopped, or stuck, does not end by itself
                    process.wait(limits.LAUNCH_GRACE + 5 if not why else limits.LAUNCH_GRACE_LOST)
            process_tree.end_below(0, process)
            process.wait()
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if self.roles and not why:
            # Nobody but the launch command ends the servers of a host without workers.
            code = 0 if self.roles.over and not self.roles.workers else code
            why = self.roles.failed() or ("" if code or self.roles.over else "not all workers came to their end")
        if why:
            code = 1  # it was stopped here because of another host, or ended badly though the launcher says 0
        elif code == PREEMPTED:
            why = "SIGTERM: the job was saved; the same command goes on from there"
        elif code:
            why = f"the trainers of this host ended with code {code}"
        return self._agree(code, why)

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Until it ends here, or badly elsewhere: why it must be stopped, or nothing."""
        while process.poll() is None:
            if self.meeting:
                self.meeting.hear(0.5)
                for number, name in enumerate(self.meeting.nodes):
                    if number == self.meeting.node or (self.meeting.node and number):
                        continue
                    if number not in self.meeting.links and number not in self.meeting.ended:
                        return f"{name} was lost"
                    if self.meeting.ended.get(number, 0) not in (0, PREEMPTED):  # after SIGTERM all end together
                        return f"the job ended on {name} with code {self.meeting.ended[number]}"
            else:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            if self.roles and (why := self.roles.failed()):
                return why
            if self.roles and not self.roles.over and self._all_done(self.roles):
                self.roles.release()
                if not self.roles.workers:
                    process.terminate()
        return ""

    def _all_done(self, roles: Roles) -> bool:
        """Whether the workers of all hosts have come to their end: each host tells the first, the first tells all."""
        meeting = self.meeting
        if meeting is None or not roles.done():
            return roles.done()
        others = [0] if meeting.node else range(1, len(meeting.nodes))
        heard = all(meeting.at.get(number) == _DONE for number in others)
        if meeting.node or heard:
            meeting.tell(_DONE)
        return heard

    def _agree(self, code: int, why: str) -> tuple[int, str]:
        """A job has ended well when it has on every host: each tells the first, the first tells all."""
        meeting = self.meeting
        if meeting is None:
            return code, why
        if meeting.node:
            self._tell(ended=code)
        deadline = time.monotonic() + limits.LAST_WORDS
        others = [0] if meeting.node else list(range(1, len(meeting.nodes)))
        while code == 0 and time.monotonic() < deadline:
            if not [n for n in others if n in meeting.links and n not in meeting.ended]:
                break
            meeting.hear(0.5)
        for number in others:
            told = meeting.ended.get(number)
            if code == 0 and told != 0:
                name = meeting.nodes[number]
                code, why = 1, f"the job ended on {name} with code {told}" if told else f"{name} was lost at the end"
        if not meeting.node:
            self._tell(ended=code)
        return code, why

    def _tell(self, **message: Any) -> None:
        for link in self.meeting.links.values() if self.meeting else ():
            link.send(**message)

    def _new_meeting(self) -> Meeting:
        launch = self.launch
        # Not the script's arguments: paths may differ from host to host, and the script compares what must not.
        text = "\0".join((*launch.nodes, Path(launch.script[0]).name, __version__))
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        node = launch.nodes.index(launch.host) if launch.host else -1
        same = "list of hosts, script or version of ppfleet"
        return Meeting(list(launch.nodes), node, launch.meeting_port, digest, launch.wait, say, same)
