"""`ppfleet why`: what happened to a job."""
