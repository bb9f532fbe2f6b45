"""The family of exceptions. Each message says what happened, on which rank, and what to do next."""

from __future__ import annotations

STALLED = 76  # exit code of a rank that the watch ended
PREEMPTED = 75  # exit code after SIGTERM, with everything saved: start again to go on


class FleetError(Exception):
    """Anything that ppfleet refuses or cannot do; `except ppfleet.FleetError` catches the whole family."""


class PaddleMissing(FleetError, ImportError):
    """PaddlePaddle is not installed."""


class WorldError(FleetError):
    """The environment describes no possible job: a missing rank, an endpoint listed twice."""


class CommError(FleetError):
    """A peer died or did not answer, or the backend cannot do what was asked of it."""


class Stalled(CommError, SystemExit):
    """The watch ends the job: somebody stood still, or the ranks went different ways. Uncaught it is an exit code."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = STALLED


class Preempted(SystemExit):
    """SIGTERM came: the end. Uncaught it is an exit code: PREEMPTED where all is saved, 143 where it could not be."""

    def __init__(self, text: str, code: int = PREEMPTED) -> None:
        super().__init__(text)
        self.code = code


class MismatchError(FleetError):
    """The ranks do not agree on something that must be the same everywhere."""


class DataError(FleetError):
    """A data set or a loader setting that cannot work."""


class NonFiniteError(FleetError):
    """A loss or gradient is NaN or infinite."""


class CheckpointError(FleetError):
    """A checkpoint cannot be written, or does not verify, or does not fit the model."""


class OutputError(FleetError):
    """A file cannot be written."""


class ExportError(FleetError):
    """A model cannot be exported, or its static form answers differently."""


class ConfigError(FleetError):
    """A TIPC text file, or a mode asked of it, that cannot be run as it stands."""


def named(class_name: str) -> type[FleetError]:
    """The class of this family with that name, for an error that travelled from another rank as text."""
    found = globals().get(class_name)
    return found if isinstance(found, type) and issubclass(found, FleetError) else FleetError
