"""The gradient noise scale from gradients of parts of a batch, and what follows from it. No torch here.

The gradient of one unit (a sample, or a token) has the mean G and a covariance whose trace is S. A batch is computed in
K parts (a microbatch of a rank each) of n_j units, n in all, with mean gradients g_j; g is the whole batch's. Then

    S   = (sum_j n_j |g_j|^2 - n |g|^2) / (K - 1)
    G^2 = |g|^2 - S / n

are unbiased whatever the parts' sizes; with equal parts they are the estimators of McCandlish et al. 2018 (arXiv
1812.06162, appendix A.1) with B_small = n / K and B_big = n. Their ratio S / G^2 is the simple noise scale, which is
taken for the critical batch (section 2.2 there: equal where the Hessian is a multiple of the identity, else of the same
order). Both are noisy, and G^2 may come out negative once: they are averaged apart and divided last, for the mean of
ratios is biased.
"""

import math
from dataclasses import dataclass

DECAY = 0.95
"""Of the moving averages, a measurement: they look back over about 20. Chosen, not fitted: a single estimate is off by
more than its value where the batch is far below the noise scale, and both averages change while training goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """One step's estimates. `square`: of |G|^2; `variance`: of S, the variance of one unit's gradient."""

    square: float
    variance: float


def estimate_noise(within: float, whole: float, units: float, parts: int) -> NoiseEstimate | None:
    """Estimates from `within`, the sum of n_j |g_j|^2, and `whole`, |g|^2, of a batch of `units`.

    None with fewer than two parts, or where something is not finite (an overflow of float16).
    """
    if parts < 2 or not math.isfinite(within) or not math.isfinite(whole):
        return None
    variance = (within - units * whole) / (parts - 1)
    return NoiseEstimate(square=whole - variance / units, variance=variance)


@dataclass(slots=True, kw_only=True)
class NoiseAverages:
    """Moving averages of the estimates, corrected for their start at 0 (as Adam's are). `count`: of measurements."""

    square_sum: float = 0.0
    variance_sum: float = 0.0
    count: int = 0

    def add(self, estimate: NoiseEstimate) -> None:
        """Take one step's estimates in."""
        self.square_sum = DECAY * self.square_sum + (1 - DECAY) * estimate.square
        self.variance_sum = DECAY * self.variance_sum + (1 - DECAY) * estimate.variance
        self.count += 1

    @property
    def square(self) -> float:
        """|G|^2; 0 before anything was measured."""
        return self.square_sum / self._weight

    @property
    def variance(self) -> float:
        """S; 0 before anything was measured."""
        return self.variance_sum / self._weight

    @property
    def scale(self) -> float | None:
        """The noise scale S / |G|^2 in units; None where |G|^2 does not stand out of the noise yet."""
        return self.variance / self.square if self.square > 0 and self.variance >= 0 else None

    @property
    def _weight(self) -> float:
        return 1 - DECAY**self.count if self.count else 1.0


def adascale_gain(averages: NoiseAverages, batch: float, base_batch: float) -> float:
    """How many steps with `base_batch` one step with `batch` is worth: AdaScale (Johnson et al. 2020, 2007.05105).

    (s + m) / (s / k + m) with k = batch / base_batch, s the variance of a gradient of the base batch and m the squared
    mean; between 1 and k. 1 before anything was measured.
    """
    if not averages.count:
        return 1.0
    ratio = batch / base_batch
    spread, mean = max(averages.variance, 0.0) / base_batch, max(averages.square, 0.0)
    below = spread / ratio + mean
    gain = (spread + mean) / below if below > 0 else 1.0
    return min(max(gain, min(1.0, ratio)), max(1.0, ratio))
