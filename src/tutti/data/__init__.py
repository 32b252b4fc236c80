"""Data: one order for any number of ranks, shares of it, seeded samples, fingerprints."""
