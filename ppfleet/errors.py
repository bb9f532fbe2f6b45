"""The family of exceptions. Each message says what happened, on which rank, and what to do next.

Programs decide by `code`, never by the message: `except ppfleet.FleetError as failure: failure.code == "port_taken"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleet import foreign

STALLED = 76  # exit code of a rank that the watchdog ended
PREEMPTED = 75  # exit code after SIGTERM with everything saved: run the same command again to resume


class FleetError(Exception):
    """Anything that ppfleet refuses or cannot do; `except ppfleet.FleetError` catches the whole family."""

    code: Any = "fleet"  # stable; `raise` may pass a more specific one

    def __init__(self, text: str = "", *, code: str = "", **fields: Any) -> None:
        """`fields`: plain data about it, such as `ranks=[1]`, for the flight record and for other ranks."""
        super().__init__(text)
        self.fields = fields
        if code:
            self.code = code


class PaddleMissing(FleetError, ImportError):
    """PaddlePaddle is not installed."""

    code = "paddle_missing"


class WorldError(FleetError):
    """The environment does not describe a valid job: a missing rank, an endpoint listed twice."""

    code = "world"


class CommError(FleetError):
    """A peer died or did not answer, or the backend does not support the operation.

    More specific codes: `port_taken`, `not_joined`, `peer_lost`.
    """

    code = "comm"


class Stalled(CommError, SystemExit):
    """The watchdog ends the job: a rank stalled, or the ranks diverged. Uncaught, it is an exit code.

    The class's `code` is "stalled"; an instance's is the exit code, as Python reads it from there.
    """

    code: Any = "stalled"

    def __init__(self, text: str, **fields: Any) -> None:
        super().__init__(text, **fields)
        self.code = STALLED


class Preempted(SystemExit):
    """SIGTERM ends the job. Uncaught, it is an exit code: PREEMPTED if everything is saved, otherwise 143.

    The class's `code` is "preempted"; an instance's is the exit code, as Python reads it from there.
    """

    code: Any = "preempted"

    def __init__(self, text: str, code: int = PREEMPTED) -> None:
        super().__init__(text)
        self.code = code


class MismatchError(FleetError):
    """The ranks do not agree on something that must be the same everywhere."""

    code = "mismatch"


class DataError(FleetError):
    """A data set or a loader setting that cannot work. More specific code: `worker_died`."""

    code = "data"


class NonFiniteError(FleetError):
    """A loss or gradient is NaN or infinite."""

    code = "non_finite"


class CheckpointError(FleetError):
    """A checkpoint cannot be written, or does not verify, or does not fit the model."""

    code = "checkpoint"


class OutputError(FleetError):
    """A file cannot be written."""

    code = "output"


class ExportError(FleetError):
    """A model cannot be exported, or its static form gives different outputs."""

    code = "export"


class ConfigError(FleetError):
    """A TIPC text file, or a mode of it, that cannot be run."""

    code = "config"


def code_of(failure: BaseException) -> str:
    """The stable code of any exception: one of ours, `interrupted`, `exit`, `connection`, or empty for others."""
    if isinstance(failure, (FleetError, Preempted)):
        return str(type(failure).code if isinstance(failure, SystemExit) else failure.code)
    if isinstance(failure, (KeyboardInterrupt, SystemExit)):
        return "interrupted" if isinstance(failure, KeyboardInterrupt) else "exit"
    return "connection" if foreign.is_connection_loss(failure) else ""


def pack(failure: BaseException) -> dict[str, Any]:
    """An exception as plain data, for another rank or the flight record."""
    fields = failure.fields if isinstance(failure, FleetError) else {}
    return {"type": type(failure).__name__, "error": code_of(failure), "text": str(failure), "fields": fields}


def unpack(packed: Mapping[str, Any], before: str = "", **fields: Any) -> FleetError:
    """The exception that was packed, with its class and code; a FleetError if its class is not one of ours."""
    found = globals().get(str(packed["type"]))
    family = found if isinstance(found, type) and issubclass(found, FleetError) else None
    text = str(packed["text"]) if family else f"{packed['type']}: {packed['text']}"
    code = "" if family is not None and issubclass(family, SystemExit) else str(packed["error"])
    return (family or FleetError)(f"{before}{text}", code=code, **{**packed["fields"], **fields})
