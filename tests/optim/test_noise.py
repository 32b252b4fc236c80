"""Estimates of the gradient noise scale: by hand, unbiased, and AdaScale's gain."""

import math

import numpy as np
import pytest

from tutti.optim.gradient_noise_scale import DECAY, NoiseAverages, NoiseEstimate, adascale_gain, estimate_noise


def of_parts(gradients: list[np.ndarray]) -> NoiseEstimate:
    """The estimate from gradients of single units, (units, parameters) for each part."""
    whole = np.concatenate(gradients)
    within = sum(len(part) * float((part.mean(0) ** 2).sum()) for part in gradients)
    found = estimate_noise(within, float((whole.mean(0) ** 2).sum()), len(whole), len(gradients))
    assert found is not None
    return found


def test_equal_parts_give_the_two_batch_sizes_of_mccandlish() -> None:
    """Appendix A.1, equations A.2 and A.3, with B_small = 4 and B_big = 12."""
    draw = np.random.default_rng(0).normal(1.0, 2.0, (12, 5))
    found = of_parts([draw[:4], draw[4:8], draw[8:]])
    small = float(np.mean([(draw[i : i + 4].mean(0) ** 2).sum() for i in (0, 4, 8)]))
    big = float((draw.mean(0) ** 2).sum())
    assert found.square == pytest.approx((12 * big - 4 * small) / (12 - 4), rel=1e-12)
    assert found.variance == pytest.approx((small - big) / (1 / 4 - 1 / 12), rel=1e-12)


def test_parts_of_one_unit_give_the_sample_variance() -> None:
    draw = np.random.default_rng(1).normal(0.3, 1.0, (9, 4))
    found = of_parts([row[None] for row in draw])
    assert found.variance == pytest.approx(float(draw.var(0, ddof=1).sum()), rel=1e-12)


def test_unbiased_with_unequal_parts() -> None:
    """|G|^2 = 8 x 0.25 = 2 and S = 8 x 9 = 72 of gradients drawn around 0.5 with deviation 3."""
    draw = np.random.default_rng(2).normal(0.5, 3.0, (4000, 20, 8))
    found = [of_parts([one[:3], one[3:4], one[4:15], one[15:]]) for one in draw]
    squares, variances = np.array([e.square for e in found]), np.array([e.variance for e in found])
    for values, true in ((squares, 2.0), (variances, 72.0)):
        assert abs(values.mean() - true) < 4 * values.std() / math.sqrt(len(values))


def test_averages_are_divided_last() -> None:
    """The ratio of means is 500; single ratios, whose denominators come near 0, would not average to it."""
    draw = np.random.default_rng(3)
    averages = NoiseAverages()
    for _ in range(3000):
        averages.add(NoiseEstimate(square=1.0 + draw.normal(0, 0.8), variance=500.0 + draw.normal(0, 50)))
    assert averages.scale == pytest.approx(500, rel=0.25)
    assert averages.count == 3000


def test_averages_begin_unbiased_and_forget() -> None:
    averages = NoiseAverages()
    averages.add(NoiseEstimate(square=2.0, variance=6.0))
    assert (averages.square, averages.variance, averages.scale) == pytest.approx((2.0, 6.0, 3.0))
    averages.add(NoiseEstimate(square=4.0, variance=6.0))
    assert averages.square == pytest.approx((2.0 * DECAY + 4.0) / (DECAY + 1))
    assert NoiseAverages().scale is None
    lost = NoiseAverages()
    lost.add(NoiseEstimate(square=-1.0, variance=6.0))
    assert lost.scale is None, "the mean gradient does not stand out of the noise"


def test_what_cannot_be_estimated() -> None:
    assert estimate_noise(1.0, 1.0, 8, 1) is None
    assert estimate_noise(math.inf, 1.0, 8, 2) is None
    assert estimate_noise(1.0, math.nan, 8, 2) is None


def test_gain_of_adascale() -> None:
    """(4, 1) at 8 times the batch: 5 / (4 / 8 + 1); between 1 (no noise) and the ratio (nothing but noise)."""
    averages = NoiseAverages()
    averages.add(NoiseEstimate(square=1.0, variance=4.0 * 16))
    assert adascale_gain(averages, 128, 16) == pytest.approx(10 / 3, rel=1e-12)
    assert adascale_gain(averages, 16, 16) == 1.0
    still, loud = NoiseAverages(), NoiseAverages()
    still.add(NoiseEstimate(square=1.0, variance=0.0))
    loud.add(NoiseEstimate(square=-0.5, variance=9.0))
    assert adascale_gain(still, 128, 16) == 1.0
    assert adascale_gain(loud, 128, 16) == 8.0
    assert adascale_gain(NoiseAverages(), 128, 16) == 1.0
