"""Experts divided over ranks, and mixtures whose slice several ranks share, against one device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, assert_same_as_one
from tutti.nn.mixture import MixtureOfExperts, auxiliary_loss, mixtures


class Tokens(nn.Module):
    """(batch, seq, 6) -> (batch, seq, 3) through two mixtures with residual connections."""

    def __init__(self, experts: int, top_k: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.moe = MixtureOfExperts(8, 10, experts, top_k=top_k, capacity_factor=capacity_factor)
        self.norm = nn.LayerNorm(8)
        self.second = MixtureOfExperts(8, 7, experts, top_k=top_k, capacity_factor=capacity_factor, activation="gelu")
        self.leave = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = x + self.moe(self.norm(x))
        return self.leave(x + self.second(x))


def subject(experts: int = 5, top_k: int = 1, capacity_factor: float | None = 0.8, **fields: Any) -> Subject:
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(26, 4, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 3, (26, 4), generator=generator)
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(Tokens(experts, top_k, capacity_factor))
        return made[0]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten()) + 0.1 * auxiliary_loss(made[0])

    return Subject(model=model, data=TensorDataset(data, target), loss_fn=loss, batch=7, **fields)


def top1() -> Subject:
    return subject()


def top2() -> Subject:
    return subject(top_k=2, capacity_factor=0.7, job={"clip_norm": 0.5})


def roomy() -> Subject:
    return subject(experts=4, top_k=2, capacity_factor=None)


def drops(run: Any) -> dict[str, Any]:
    """What this rank's mixtures saw last, and what it holds."""
    run.model.train()
    run.scope.counts = True
    run.model(torch.linspace(-1, 1, 96).reshape(4, 4, 6))
    held = run.layout.of_name("moe.input_weight")
    return {
        "counts": [(moe.assigned, moe.dropped) for moe in mixtures(run.model)],
        "experts": held.local_shape[0],
        "shape": tuple(run.model.moe.input_weight.shape),
        "sums": held.sums,
    }


@pytest.mark.parametrize(
    ("mesh", "make"),
    [
        ({"replicate": 2}, top2),
        ({"replicate": 3}, top1),
        ({"expert": 2}, top1),
        ({"expert": 3}, top2),
        ({"expert": 2, "replicate": 2}, top2),
        ({"replicate": 2, "expert": 2}, top1),
        ({"expert": 4}, roomy),
    ],
    ids=str,
)
def test_ranks_route_drop_and_learn_as_one_device(mesh: dict[str, int], make: Any) -> None:
    many = assert_same_as_one(make, mesh=mesh, batch={"num_microbatches": 2}, steps=4, look=drops)
    facts = [trained.facts for trained in many]
    degree = mesh.get("expert", 1)
    experts = 4 if make is roomy else 5
    assert sum(fact["experts"] for fact in facts) == experts * len(facts) // degree
    assert all(fact["shape"][0] == fact["experts"] for fact in facts)
    assert all("expert" not in fact["sums"] for fact in facts) or degree == 1
    assert all(fact["counts"] == facts[0]["counts"] for fact in facts)  # of the slice, so equal on all ranks
    assert (facts[0]["counts"][0][1] > 0) == (make is not roomy)
