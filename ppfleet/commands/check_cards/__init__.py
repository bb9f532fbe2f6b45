"""`check-cards`: what ppfleet promises, checked on this machine's cards."""
