"""Which sample goes where, and batches of them: sampler, loaders, worker processes, threads, seeding."""
