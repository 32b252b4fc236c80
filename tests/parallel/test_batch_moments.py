"""Mean and variance of a batch by channels, in two passes."""

import pytest
import torch

from tutti.parallel.data.batchnorm import _moments

SHAPES = [(7, 5), (3, 1, 9), (4, 6, 5, 3), (2, 3, 4, 5, 2), (1, 4, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch_has_them(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=torch.float64) * 3 + 2
    dims = [dim for dim in range(len(shape)) if dim != 1]
    before = values.clone()
    for found, wanted in zip(_moments(values), torch.var_mean(values, dims, correction=0), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert torch.equal(values, before)


@pytest.mark.parametrize("far", [1e2, 1e4, 1e6])
def test_a_mean_far_from_zero_costs_no_precision(far: float) -> None:
    """In float32, beside the variance of the same values in float64: a mean that is rounded moves it by its square."""
    values = torch.randn(16, 3, 33, generator=torch.Generator().manual_seed(0)) + far
    variance, mean = _moments(values)
    exact, middle = torch.var_mean(values.double(), (0, 2), correction=0)
    torch.testing.assert_close(variance.double(), exact, rtol=3e-6, atol=0)
    torch.testing.assert_close(mean.double(), middle, rtol=1e-6, atol=0)


def test_channels_last_gives_the_same() -> None:
    values = torch.randn(4, 6, 5, 3, dtype=torch.float64)
    for found, wanted in zip(
        _moments(values.contiguous(memory_format=torch.channels_last)), _moments(values), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
