"""`ppfleet report`: a run on one page."""
