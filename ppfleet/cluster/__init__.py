"""What the commands share: hosts, ports, rendezvous, process trees."""
