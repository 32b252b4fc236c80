"""The gradient noise scale, estimated from gradients of parts of a batch, and AdaScale's gain. Does not import torch.

The gradient of one unit (a sample, or a token) has the mean G and a covariance whose trace is S. A batch of n units is
computed in K parts (one microbatch of one rank each) of n_j units, with mean gradients g_j. With g the mean gradient of
the whole batch,

    S   = (sum_j n_j |g_j|^2 - n |g|^2) / (K - 1)
    G^2 = |g|^2 - S / n

are unbiased whatever the sizes of the parts. With equal parts they are the estimators of McCandlish et al. 2018 (arXiv
1812.06162, appendix A.1) with B_small = n / K and B_big = n. Their ratio S / G^2 is the simple noise scale, which
approximates the critical batch size (section 2.2 there: equal where the Hessian is a multiple of the identity,
otherwise of the same order). Both estimates are noisy, and a single G^2 may be negative. So each is averaged first and
they are divided last, because a mean of ratios is biased.
"""

import math
from dataclasses import dataclass

DECAY = 0.95
"""Decay of the moving averages per measurement: they look back over about 20. Chosen, not fitted. A single estimate is
off by more than its value where the batch is far below the noise scale, and both averages change during training.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """The estimates of one step.

    Attributes:
        square: |G|^2, the squared norm of the mean gradient.
        variance: S, the variance of one unit's gradient.
    """

    square: float
    variance: float


def estimate_noise(within: float, whole: float, units: float, parts: int) -> NoiseEstimate | None:
    """Estimate the mean and the variance of the gradient from one batch.

    Args:
        within: the sum over parts of n_j |g_j|^2.
        whole: |g|^2, the squared norm of the whole batch's mean gradient.
        units: number of units in the batch.
        parts: number of parts.

    Returns:
        The estimates; None with fewer than two parts, or where an input is not finite (an overflow of float16).
    """
    if parts < 2 or not math.isfinite(within) or not math.isfinite(whole):
        return None
    variance = (within - units * whole) / (parts - 1)
    return NoiseEstimate(square=whole - variance / units, variance=variance)


@dataclass(slots=True, kw_only=True)
class NoiseAverages:
    """Moving averages of the estimates, corrected for their start at 0 (as Adam's are).

    Attributes:
        square_sum: moving average of `square` before the correction.
        variance_sum: moving average of `variance` before the correction.
        count: number of measurements.
    """

    square_sum: float = 0.0
    variance_sum: float = 0.0
    count: int = 0

    def add(self, estimate: NoiseEstimate) -> None:
        """Add one step's estimates."""
        self.square_sum = DECAY * self.square_sum + (1 - DECAY) * estimate.square
        self.variance_sum = DECAY * self.variance_sum + (1 - DECAY) * estimate.variance
        self.count += 1

    @property
    def square(self) -> float:
        """The squared norm |G|^2 of the mean gradient; 0 before the first measurement."""
        return self.square_sum / self._weight

    @property
    def variance(self) -> float:
        """The variance S of one unit's gradient; 0 before the first measurement."""
        return self.variance_sum / self._weight

    @property
    def scale(self) -> float | None:
        """The noise scale S / |G|^2 in units; None as long as |G|^2 is not distinguishable from noise."""
        return self.variance / self.square if self.square > 0 and self.variance >= 0 else None

    @property
    def _weight(self) -> float:
        return 1 - DECAY**self.count if self.count else 1.0


def adascale_gain(averages: NoiseAverages, batch: float, base_batch: float) -> float:
    """Return how many steps with `base_batch` one step with `batch` is worth.

    This is AdaScale's gain (Johnson et al. 2020, arXiv 2007.05105): (s + m) / (s / k + m), between 1 and k = batch /
    base_batch. s is the variance of a gradient of the base batch, and m is the squared norm of the mean gradient.

    Args:
        averages: the measured moments; without a measurement the gain is 1.
        batch: units per step.
        base_batch: units per step for which the base rate holds.
    """
    if not averages.count:
        return 1.0
    ratio = batch / base_batch
    spread, mean = max(averages.variance, 0.0) / base_batch, max(averages.square, 0.0)
    below = spread / ratio + mean
    gain = (spread + mean) / below if below > 0 else 1.0
    return min(max(gain, min(1.0, ratio)), max(1.0, ratio))
