"""The version, in one place: packaging reads it, checkpoints and pages show it."""

__version__ = "0.1.0"
