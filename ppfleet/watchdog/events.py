"""What can happen to a job: events with codes, which the recorder stores, the watchdog sends and `render` words.

Programs decide by `Event.code` and by its fields, never by a message. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from ppfleet import errors


class _Name(str, Enum):
    __str__ = str.__str__


class Kind(_Name):
    """What an entry is about. A collective waits in gloo or NCCL, a meeting on the store; rank 0's work meanwhile."""

    MARK = "mark"
    COLLECTIVE = "collective"
    MEETING = "meeting"
    WORK = "work"
    DATA = "data"
    STEP = "step"
    SAVE = "save"
    EXPORT = "export"
    EVALUATE = "evaluate"
    START = "start"


class Mark(_Name):
    """What a mark is about: something that happened, without duration."""

    SIGTERM = "SIGTERM"
    RESUMED = "resumed"


class Code(_Name):
    """What happened. The values are the `kind` of `why --json`: they stay as they are."""

    # a rank died
    KILLED = "killed"  # by a signal, or without anything known of it
    OOM = "oom"  # by the OOM killer
    EXIT = "exit"  # with an exit code
    HOST = "host"  # with its host, or the network to it
    GONE = "gone"  # all at once
    # nothing goes on
    STALL = "stall"  # of a rank; of nobody alone: the network
    STOPPED = "stopped"
    MISMATCH = "mismatch"  # the ranks diverged, or have different settings
    UNEVEN = "uneven"  # … because one had fewer batches
    STRAGGLER = "straggler"
    # the rank's own account
    EXCEPTION = "exception"
    NAN = "nan"
    INTERRUPTED = "interrupted"
    PORT = "port"
    MISSING = "missing"
    WORKER = "worker"
    # ended by others
    ORPHAN = "orphan"
    PREEMPTED = "preempted"
    TERMINATED = "terminated"
    # nothing failed
    ENDED = "ended"
    FINISHED = "finished"
    RUNNING = "running"


LOST = (Code.KILLED, Code.OOM, Code.EXIT, Code.HOST)  # a peer is gone: the others may catch that
VERDICTS = (*LOST, Code.STALL, Code.STOPPED, Code.MISMATCH, Code.UNEVEN)  # what a watchdog announces


@dataclass(frozen=True)
class Operation:
    """What a rank is in: `number` counts what all ranks do together, and is 0 for what it does alone."""

    number: int = 0
    kind: str = ""  # a Kind; "" between two entries
    name: str = ""
    detail: str = ""  # shape and dtype
    where: str = ""  # file:line of the user's code
    step: int = 0
    at: str = ""  # where the user's code is by now: `evaluate` (tools/train.py:71)


@dataclass(frozen=True)
class Waiting:
    """Ranks that wait in the same operation; `after` is where they went another way than the others."""

    ranks: tuple[int, ...]
    operation: Operation
    host: str = ""
    after: Operation | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened to a rank, or that it did."""

    code: Code
    rank: int = -1  # that caused it; -1: no single rank
    host: str = ""  # its address in the job's list
    operation: Operation = Operation()  # what it was in
    seconds: float = 0.0  # for how long
    waiting: tuple[Waiting, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)  # signal, pid, type, text …: what `render` needs
    time: float = 0.0  # seconds since 1970, when it was recorded

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """A ValueError if that is not an event. Events of version 0.1.0 are accepted, too."""
        try:
            data = data if "code" in data and "fields" in data else _of_0_1(data)
            waiting = tuple(
                Waiting(
                    tuple(map(int, each["ranks"])),
                    Operation(**each["operation"]),
                    str(each["host"]),
                    Operation(**each["after"]) if each["after"] else None,
                )
                for each in data["waiting"]
            )
            return cls(
                Code(data["code"]), int(data["rank"]), str(data["host"]), Operation(**data["operation"]),
                float(data["seconds"]), waiting, dict(data["fields"]), float(data["time"]),
            )  # fmt: skip
        except (TypeError, KeyError, AttributeError) as failure:
            raise ValueError(f"no event: {failure}") from None


def exception(failure: BaseException, rank: int, host: str, where: str) -> Event:
    """What a rank raised, with the code that its class or the raising site gave it."""
    return Event(Code.EXCEPTION, rank, host, fields={**errors.pack(failure), "where": where})


def _of_0_1(words: Mapping[str, Any]) -> dict[str, Any]:
    """Version 0.1.0 wrote a kind, a finished sentence and loose facts; of exceptions the class and the message."""
    kind, how = str(words["kind"]), words.get("how")
    fields = {name: value for name, value in words.items() if name not in ("kind", "time", "culprit")}
    if kind == "lost":
        kind = {"exit": "exit", "unreachable": "host"}.get(str(how), "oom" if words.get("oom") else "killed")
    elif how == "stopped":
        kind = "stopped"
    elif kind == "exception":
        known = getattr(errors, str(words.get("type")), None)
        if not isinstance(known, type):  # none of ours
            known = KeyboardInterrupt if words.get("type") == "KeyboardInterrupt" else Exception
        fields.update(error=errors.code_of(known(str(words.get("text")))), fields={})
    empty = Event(Code(kind), words.get("culprit", -1), fields=fields, time=words.get("time", 0.0))
    return empty.to_json()
