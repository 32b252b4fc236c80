"""Data: one order of samples for any number of ranks, each rank's share of it, seeded samples, and fingerprints."""
