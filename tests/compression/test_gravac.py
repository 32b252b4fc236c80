"""GraVAC's density beside the rule in plain numpy, and what it makes of gradients that change."""

import numpy as np
import pytest
import torch

from tutti.compression.gravac import GravacReducer
from tutti.compression.top_k import TopK

N, LEAST, GAIN = 4000, 0.004, 0.6


def sharp(step: int) -> torch.Tensor:
    """Nearly all of it in four of a thousand values, always the same."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(N, dtype=torch.float64, generator=draw) * torch.where(torch.arange(N) < 16, 100.0, 0.01)


def flat(step: int) -> torch.Tensor:
    return torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def by_hand(gradients: list[torch.Tensor], window: int) -> list[float]:
    """The density of every step: sums over a window of squares of what is to be sent, and of its largest."""
    density, error, sums, found = 0.25, np.zeros(N), np.zeros(3), []
    for step, gradient in enumerate(gradients, 1):
        found.append(density)
        x = error + gradient.numpy()
        order = np.argsort(-np.abs(x), kind="stable")
        half = max(LEAST, density / 2)
        sent, fewer = order[: int(np.ceil(density * N))], order[: int(np.ceil(half * N))]
        sums += [(x**2).sum(), (x[sent] ** 2).sum(), (x[fewer] ** 2).sum()]
        error = x.copy()
        error[sent] -= x[sent].astype(np.float32)
        if step % window == 0:
            if sums[2] >= GAIN * sums[0]:
                density = half
            elif sums[1] < GAIN * sums[0]:
                density = min(0.25, 2 * density)
            sums = np.zeros(3)
    return found


@pytest.mark.parametrize("window", [1, 3])
def test_the_density_follows_the_gain(window: int) -> None:
    """Down to its least while a few values are all, up again when they are not."""
    gradients = [sharp(step) for step in range(10 * window)] + [flat(step) for step in range(10 * window)]
    exchange = GravacReducer(TopK(LEAST), [(N,)], gain=GAIN, window=window, dtype=torch.float64)
    densities = []
    for gradient in gradients:
        densities.append(exchange.density)
        exchange.run(gradient.clone())
        exchange.finish_step(True)
    assert densities == by_hand(gradients, window)
    assert min(densities) == LEAST
    assert densities[-1] > 2 * LEAST


def test_steps_that_do_not_count_and_zeros_move_nothing() -> None:
    exchange = GravacReducer(TopK(LEAST), [(N,)], gain=GAIN, window=2, dtype=torch.float64)
    for gradient, finite in ((sharp(0), False), (sharp(0) * float("nan"), False), (torch.zeros(N).double(), True)):
        exchange.run(gradient.clone())
        exchange.finish_step(finite)
    assert exchange.shared["ladder"].tolist() == [0.25, 1, 0, 0, 0]
    for _ in range(3):
        exchange.run(torch.zeros(N).double())
        exchange.finish_step(True)
    assert exchange.density == 0.25
