"""Communication: shared memory within a host, hierarchical and point-to-point collectives, traffic accounting."""
