"""Mixtures of experts in stages, and losses that read what modules of other stages left in attributes."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, Trained, assert_agree
from parallel.test_expert import mixtral, other_names, stacked, top1, top2
from trainer.several import Case, on_ranks, once
from tutti.config.plan import LayoutRule, PipelinePlan
from tutti.nn.mixture import MixtureOfExperts, auxiliary_loss

STEPS = 3


class Penalised(nn.Module):
    """A layer that leaves a penalty for the loss, and something that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        self.penalty, self.seen = y.square().mean(), y.detach()
        return x + y


def penalised() -> Subject:
    """The penalties count in evaluation too; the model is a plain Sequential."""
    generator = torch.Generator().manual_seed(6)
    data = torch.randn(26, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 6, (26,), generator=generator)
    made: list[nn.Sequential] = []

    def model() -> nn.Module:
        made.append(nn.Sequential(*(Penalised() for _ in range(4)), nn.Linear(6, 6)))
        return made[0]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        penalties = [layer.penalty for layer in made[0] if isinstance(layer, Penalised)]
        return F.cross_entropy(output, target) + torch.stack(penalties).sum()

    return Subject(model=model, data=TensorDataset(data, target), loss_fn=loss, batch=8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(8), MixtureOfExperts(8, 6, 4, top_k=2, capacity_factor=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


class Mixed(nn.Module):
    """A mixture in every block; the embedding is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


def mixed() -> Subject:
    tokens = torch.randint(0, 17, (26, 7), generator=torch.Generator().manual_seed(7))
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(Mixed())
        return made[0]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten()) + 0.1 * auxiliary_loss(made[0])

    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return Subject(model=model, data=data, loss_fn=loss, batch=8, job={"clip_norm": 0.5})


def staged(make: Any, schedule: str, microbatches: int, outside: dict[str, int], **more: Any) -> Case:
    chunks = 2 if schedule == "interleaved" else 1
    pipeline = PipelinePlan(schedule=schedule, stages_per_rank=chunks)  # type: ignore[arg-type]
    mesh = {**outside, "stage": 2}
    return make, {"mesh": mesh, "pipeline": pipeline, "batch": {"num_microbatches": microbatches}, **more}


TWO: dict[str, Case] = {
    "top-1, tokens are dropped": staged(top1, "1f1b", 2, {}),
    "top-2": staged(top2, "zero-bubble", 3, {}),
    "stacked experts by other names": staged(other_names, "1f1b", 2, {}),
    "penalties": staged(penalised, "interleaved", 3, {}),
    "penalties, tuned": staged(penalised, "1f1b", 4, {}),
    "a mixture a block, recomputed": staged(
        mixed, "1f1b", 2, {}, layout=(LayoutRule(), LayoutRule(modules="blocks.*", recompute=True))
    ),
}
FOUR: dict[str, Case] = {
    "top-2, experts divided": staged(top2, "1f1b", 2, {"expert": 2}),
    "a mixture a block, experts divided": staged(mixed, "gpipe", 2, {"expert": 2}),
    "top-1, beside replicas": staged(top1, "1f1b", 3, {"replicate": 2}),
    "stacked experts": staged(stacked, "1f1b", 2, {"expert": 2}),
    "mixtral": staged(mixtral, "1f1b", 2, {"expert": 2}),
    "penalties, beside replicas": staged(penalised, "zero-bubble", 2, {"replicate": 2}),
}


@functools.cache
def results(ranks: int) -> list[dict[str, Trained]]:
    return on_ranks({2: TWO, 4: FOUR}[ranks], ranks, steps=STEPS)


def agrees(ranks: int, name: str) -> None:
    make, plan = {2: TWO, 4: FOUR}[ranks][name]
    one = once(make, plan["batch"]["num_microbatches"], STEPS)
    tolerance = 1e-5 if make is mixtral else 1e-12  # its router computes in float32
    assert_agree(one, [got[name] for got in results(ranks)], tolerance)


@pytest.mark.parametrize("name", TWO)
def test_losses_see_what_other_stages_left(name: str) -> None:
    agrees(2, name)


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_experts_are_divided_within_stages(name: str) -> None:
    agrees(4, name)
