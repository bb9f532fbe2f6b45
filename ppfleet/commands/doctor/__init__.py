"""`ppfleet doctor`: find what would go wrong before a launch."""
