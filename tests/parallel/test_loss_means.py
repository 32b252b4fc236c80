"""Means of torch's losses over rows: those of unequal parts add up to the whole's."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutti.parallel.loss_means import CountedLoss
from tutti.parallel.losses import Weighted


def signs(target: Tensor) -> Tensor:
    return (target > 0.5).double() * 2 - 1


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl_div, batchmean": lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="batchmean"),
    "kl_div, mean": lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="mean"),
    "gaussian_nll": lambda x, t: F.gaussian_nll_loss(x, t, t + 1),
    "poisson_nll": lambda x, t: F.poisson_nll_loss(x, t),
    "hinge_embedding": lambda x, t: F.hinge_embedding_loss(x, signs(t)),
    "cosine_embedding": lambda x, t: F.cosine_embedding_loss(x, t, signs(t[:, 0])),
    "margin_ranking": lambda x, t: F.margin_ranking_loss(x, t, signs(t)),
    "multi_margin": lambda x, t: F.multi_margin_loss(x, t.argmax(1), weight=torch.tensor([1.0, 2.0, 3.0]).double()),
    "multilabel_margin": lambda x, t: F.multilabel_margin_loss(
        x, torch.stack([t.argmax(1), *[t.argmax(1) * 0 - 1] * 2], 1)
    ),
    "multilabel_soft_margin": lambda x, t: F.multilabel_soft_margin_loss(x, t.round(), torch.tensor([1.0, 2.0, 3.0])),
    "triplet_margin": lambda x, t: F.triplet_margin_loss(x, t, -t),
    "triplet_margin_with_distance": lambda x, t: nn.TripletMarginWithDistanceLoss()(x, t, -t),
    "mse": lambda x, t: F.mse_loss(x, t),
}


@pytest.mark.parametrize("name", LOSSES)
def test_means_of_unequal_rows_add_up(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.rand(7, 3, generator=generator, dtype=torch.float64)
    counted = CountedLoss(lambda model, batch: 2 * LOSSES[name](*batch))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reduction: 'mean' divides")
        parts = [counted(nn.Identity(), (x[rows], target[rows])) for rows in (slice(2), slice(2, 7))]
        assert all(isinstance(part, Weighted) for part in parts)
        mean = sum(part.total for part in parts) / sum(part.count for part in parts)
        torch.testing.assert_close(mean, 2 * LOSSES[name](x, target), rtol=1e-12, atol=1e-12)
