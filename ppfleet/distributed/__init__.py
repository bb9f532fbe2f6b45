"""Who this process is and how it talks to the others: world, collectives, store, shared memory, handshake."""
