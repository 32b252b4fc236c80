"""A run checks itself: each mistake is named in the first step, and its correct twin raises nothing."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler, TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan
from tutti.report.build_report import build_report

MASK = (torch.arange(24) % 3 > 0).double()


class Net(nn.Module):
    """With dropout, batch statistics, and a counter that forward reads."""

    def __init__(self, always_drops: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.always_drops, self.calls, self.seen = always_drops, 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        hidden = self.norm(self.first(x)).tanh() * (1 + 0.1 * len(self.seen))
        return self.last(F.dropout(hidden, 0.1, training=self.training or self.always_drops))


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def token_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over what a mask selects, taken by hand."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * batch[2]).sum() / batch[2].sum()


def weighted_mean(model: nn.Module, batch: Any) -> tutti.Weighted:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return tutti.Weighted((losses * batch[2]).sum(), batch[2].sum())


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    """Every other sample of the batch is a negative (CLIP)."""
    output = model(batch[0])
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def triplet(model: nn.Module, batch: Any) -> torch.Tensor:
    """Each sample has a negative of its own."""
    output = model(batch[0])
    return F.triplet_margin_loss(output, output.detach() + 0.1, output.roll(1, 1).detach())


def broadcast(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0])[:, :1], batch[1].double())


def not_broadcast(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1].double())


def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    return entropy(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def rank() -> int:
    return int(os.environ["RANK"])


def other_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (rank() + 1)


def other_betas(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, 0.99 if rank() else 0.999)


def same_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.05


def stale_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank() == 1:
        with torch.no_grad():
            model.first.weight[0, 0] += 1


def new_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.first.weight[0, 0] += 1


def sampler(seed: int, data: Any) -> list[int]:
    return list(RandomSampler(data, generator=torch.Generator().manual_seed(seed)))


def data(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(24, 5, generator=generator), torch.arange(24) % 5, MASK)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "mean over tokens by hand": ({"loss": token_mean}, "is not a mean over samples"),
    "negatives in the batch": ({"loss": contrastive}, "is not a mean over samples"),
    "targets broadcast": ({"loss": broadcast}, "F.mse_loss got an output of shape (4, 1) and a target of shape (4,)"),
    "rate by rank": ({"change": other_rate}, "'lr' of group 0 of Adam is 0.1 on rank 0 and 0.2 on rank 1"),
    "betas by rank": ({"change": other_betas}, "'betas' of group 0 of Adam is (0.9, 0.999) on rank 0"),
    "weights of one rank": (
        {"change": stale_weights},
        "the weights of 'first.weight' differ between the replicas on ranks 0 and 1",
    ),
    "order by rank": (
        {"order": lambda: sampler(rank(), data())},
        "samples in the global batch differs between rank 0 and rank 1",
    ),
    "shorter on one rank": (
        {"order": lambda: sampler(0, data())[: 24 - rank()]},
        "the order of samples in the epoch differs",
    ),
    "data by rank": ({"data": lambda: data(rank())}, "of the data set has other values on rank 1"),
    "evaluation mode": ({"start": lambda model: model.eval()}, "Net is in evaluation mode in training steps"),
    "dropout always": ({"model": functools.partial(Net, True)}, "forward calls dropout with dropout on"),
}
TWINS: dict[str, dict[str, Any]] = {
    "mean over samples": {},
    "weighted mean": {"loss": weighted_mean},
    "a negative for each sample": {"loss": triplet},
    "one shape": {"loss": not_broadcast},
    "penalty": {"loss": penalised},
    "noise in the loss": {"loss": noisy},
    "rate on all ranks": {"change": same_rate},
    "weights on all ranks": {"change": new_weights},
    "order of all ranks": {"order": lambda: sampler(3, data())},
    "part in evaluation mode": {"start": lambda model: model.norm.eval()},
}


def outcome(case: dict[str, Any], plan: Plan) -> str:
    """What a run says: its error, or its findings."""
    folder = Path.cwd() / f"run-{outcome.number}"
    outcome.number += 1
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    file = Path.cwd() / f"plan-{os.getpid()}.json"
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, file))
    job = tutti.Job(global_batch_size=8)
    torch.manual_seed(1)
    model = case.get("model", Net)()
    case.get("start", lambda model: None)(model)
    samples = case.get("data", data)()
    order: Callable[[], Any] | None = case.get("order")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(
        model, optimizer, samples, F.cross_entropy, unpack=lambda batch: ((batch[0],), {}, batch[1]),
        **({} if order is None else {"sampler": order()}),
    )  # fmt: skip
    case.get("change", lambda model, optimizer: None)(model, optimizer)
    try:
        for batch in loader:
            job.forward_backward(case.get("loss", entropy), batch)
            job.update()
        job.evaluate(samples)
    except tutti.TuttiError as error:
        return str(error)
    if set(plan.mesh) == {"replicate"} and "model" not in case:
        assert model.seen[:4] == [1, 2, 3, 4], "the checks leave their traces in the model"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if rank() == 0 else []
    return "; ".join(row["sentence"] for row in rows if row["kind"] == "guard")


outcome.number = 0


def outcomes(cases: list[str], plan: Plan) -> dict[str, str]:
    torch.set_default_dtype(torch.float64)
    known = {**{name: case for name, (case, _) in MISTAKES.items()}, **TWINS}
    return {name: outcome(known[name], plan) for name in cases}


def plan(**fields: Any) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=8), **fields)


def test_mistakes_are_named_and_their_twins_raise_nothing() -> None:
    for number, said in enumerate(
        run_ranks(outcomes, 2, [*MISTAKES, *TWINS], plan(mesh={"replicate": 2}), timeout_s=110)
    ):
        for name, (_, expected) in MISTAKES.items():
            warned = name in ("mean over tokens by hand", "negatives in the batch", "evaluation mode", "dropout always")
            if number == 0 or not warned:
                assert expected in said[name], (name, said[name])
        assert {name: said[name] for name in TWINS} == dict.fromkeys(TWINS, "")


DIVIDED = {
    "zero3": plan(mesh={"shard": 3}, sharding=ShardingPlan(level=3)),
    "zero3, replicas": plan(mesh={"replicate": 2, "shard": 2}, sharding=ShardingPlan(level=3)),
    "split": plan(mesh={"split": 2}, layout=(LayoutRule(modules="first", placement="column"),)),
    "stage": plan(mesh={"stage": 2}),
    "three replicas": plan(mesh={"replicate": 3}),
}


@pytest.mark.parametrize(
    "name", [name if name == "split" else pytest.param(name, marks=pytest.mark.long) for name in DIVIDED]
)
def test_divided_models_raise_nothing(name: str) -> None:
    cases = [case for case in TWINS if case not in ("penalty", "weights on all ranks") or name == "three replicas"]
    for said in run_ranks(outcomes, DIVIDED[name].world_size, cases, DIVIDED[name], timeout_s=110):
        assert said == dict.fromkeys(cases, "")


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero3, replicas", "split", "stage"])
def test_what_ranks_disagree_on_is_named_under_divided_models(name: str) -> None:
    cases = ["rate by rank", "order by rank"]
    for said in run_ranks(outcomes, DIVIDED[name].world_size, cases, DIVIDED[name], timeout_s=110):
        for case in cases:
            assert MISTAKES[case][1] in said[case], said


def test_the_report_says_what_the_run_found(tmp_path: Path) -> None:
    run_ranks(reported, 2, str(tmp_path / "run"))
    findings = build_report(tmp_path / "run").findings
    assert any(f.code == "GUARD" and f.sentence.startswith("The loss of Net is not a mean") for f in findings)


def reported(folder: str) -> None:
    os.environ["TUTTI_RUN_FOLDER"] = folder
    job = tutti.Job(global_batch_size=8)
    model = Net()
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data())
    for batch in loader:
        job.forward_backward(token_mean, (batch[0], batch[1], batch[2].float()))
        job.update()
