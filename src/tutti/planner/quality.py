"""How many samples a target quality takes at a global batch: the statistical half of time to quality."""

from tutti.planner.choice import NoiseScale

MOST_DOUBLINGS = 16
"""Sizes of the global batch above the script's own that are tried at most."""


def samples_to_quality(batch: float, noise: NoiseScale) -> float:
    """Samples needed with a global batch: E = E_min (1 + B / B_crit), B in the unit of the noise scale.

    McCandlish, Kaplan, Amodei and others 2018, arXiv 1812.06162, equations 2.11 and 2.12: steps S and samples E = S B
    obey (S / S_min - 1) (E / E_min - 1) = 1. As good as the noise scale's evidence, which goes with every use.
    """
    return noise.least_samples * (1.0 + batch / noise.critical_batch)


def steps_to_quality(batch: float, noise: NoiseScale) -> float:
    """Steps needed: S = S_min (1 + B_crit / B)."""
    return samples_to_quality(batch, noise) / batch


def batches_to_try(own: int, noise: NoiseScale, ranks: int) -> tuple[int, ...]:
    """Global batches worth a search: the script's own, times and by powers of two, up to 4 times the critical one,
    and no batch of more samples than the quality takes at least.

    Beyond that the steps fall by less than a fifth with any batch, while samples grow in proportion.
    """
    most = max(float(own), min(4 * noise.critical_batch, noise.least_samples))
    least = max(1.0, min(own, noise.critical_batch) / 4, min(float(own), float(ranks)) / 4)
    found = {own}
    batch = own
    while batch * 2 <= most and len(found) <= MOST_DOUBLINGS:
        batch *= 2
        found.add(batch)
    batch = own
    while batch // 2 >= least and batch % 2 == 0:
        batch //= 2
        found.add(batch)
    return tuple(sorted(found))
