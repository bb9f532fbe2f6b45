"""`ppfleet scale`: the same training on 1 to N ranks."""
