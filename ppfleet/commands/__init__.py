"""What a person runs: `python -m ppfleet <command>`. Never imported by training."""
