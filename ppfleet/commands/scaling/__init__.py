"""The parts of `python -m ppfleet scale`."""
