"""Which sample goes where, and batches of them: sampler, loader, worker processes, threads."""
