"""Evaluation computes as many samples at once as a rank does in training, so that it needs no more memory."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.trainer.evaluate import samples_at_once


def asked(batch: BatchPlan, degree: int = 1, tokens: Any = None) -> int:
    """What a run of this batch on `degree` data-parallel ranks would compute at once."""
    plan = Plan(batch=batch, mesh={"replicate": degree})
    loader, mesh = SimpleNamespace(source=SimpleNamespace(tokens=tokens)), SimpleNamespace(data_degree=degree)
    state, parallel = SimpleNamespace(loader=loader), SimpleNamespace(plan=plan, mesh=mesh)
    return samples_at_once(SimpleNamespace(state=state, parallel=parallel))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "degree", "tokens", "expected"),
    [
        (BatchPlan(global_batch_size=64), 1, None, 64),
        (BatchPlan(global_batch_size=64, num_microbatches=4), 2, None, 8),
        (BatchPlan(global_batch_size=65, num_microbatches=4), 2, None, 9),
        (BatchPlan(global_batch_size=2), 4, None, 1),
        (BatchPlan(global_batch_size=100_000), 1, None, 256),
        (BatchPlan(global_batch_size=2048, unit="tokens"), 1, 64, 32),
        (BatchPlan(global_batch_size=2048, unit="tokens", num_microbatches=2), 2, [32, 96], 8),
        (BatchPlan(global_batch_size=8, unit="tokens"), 1, 64, 1),
    ],
)
def test_as_many_as_in_training(batch: BatchPlan, degree: int, tokens: Any, expected: int) -> None:
    assert asked(batch, degree, tokens) == expected


@given(st.integers(1, 5000), st.integers(1, 8), st.integers(1, 8))
def test_never_more_than_the_largest_share_nor_none(size: int, slices: int, degree: int) -> None:
    at_once = asked(BatchPlan(global_batch_size=size, num_microbatches=min(slices, size)), degree)
    largest = -(-size // (min(slices, size) * degree))
    assert 1 <= at_once == min(largest, 256)


class Counting(nn.Module):
    """Remembers how many samples it got at once, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: dict[bool, list[int]] = {True: [], False: []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[self.training].append(len(x))
        return self.layer(x).mean(1)


def evaluated(batch_size: int | None) -> dict[bool, list[int]]:
    plan = Plan(batch=BatchPlan(global_batch_size=96, unit="tokens", num_microbatches=2), mesh={"replicate": 2})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=96, unit="tokens")
    data = TensorDataset(torch.randn(64, 6, 4), torch.randn(64, 2))
    model = Counting()
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data, F.mse_loss, tokens=6)
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
    job.evaluate(data, batch_size=batch_size)
    return model.seen


@pytest.mark.parametrize(("stated", "most"), [(None, 4), (7, 7)])
def test_a_batch_in_tokens_is_evaluated_in_its_samples(stated: int | None, most: int) -> None:
    for seen in run_ranks(evaluated, 2, stated):
        assert max(seen[True]) == 4  # 96 tokens are 16 samples, in 2 slices on 2 ranks
        assert max(seen[False]) == most
        assert sum(seen[False]) == 32


def token_metrics() -> dict[str, float]:
    """Values of torch losses as metrics, whose means are over targets that are not ignored, or over class weights."""
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run")
    job = tutti.Job(global_batch_size=8)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    target = torch.randint(3, (22,))
    target[:9] = -100  # the ranks' shares have different numbers of targets
    data = TensorDataset(torch.randn(22, 4).double(), target)
    weights = torch.tensor([1.0, 3.0, 0.5]).double()
    model, _, _ = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, F.cross_entropy)
    return job.evaluate(
        data,
        {
            "function": F.cross_entropy,
            "module": nn.CrossEntropyLoss(weight=weights),
            "wrapped": lambda output, wanted: F.cross_entropy(output, wanted),
            "sample": lambda output, wanted: (wanted >= 0).double(),
        },
    )


def test_torch_losses_as_metrics_are_means_over_their_targets() -> None:
    (alone,) = run_ranks(token_metrics, 1)
    ranks = run_ranks(token_metrics, 3)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    target = torch.randint(3, (22,))
    target[:9] = -100
    output = model(torch.randn(22, 4).double()).detach()
    whole = float(F.cross_entropy(output, target))
    weighted = float(F.cross_entropy(output, target, weight=torch.tensor([1.0, 3.0, 0.5]).double()))
    expected = {"loss": whole, "function": whole, "module": weighted, "wrapped": whole, "sample": 13 / 22}
    for values in (alone, *ranks):
        assert values == pytest.approx(expected, rel=1e-12)
