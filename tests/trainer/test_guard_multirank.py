"""The guard of a training run: each mistake is named on every rank, and its correct twin raises nothing."""

import functools
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import tutti
from harness import preload, run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.parallel.loss_means import CountedLoss
from tutti.report.build_report import build_report
from tutti.trainer.guard.findings import code_of

preload("tutti.trainer.guard")

Loss = Callable[[Any, Any], Any]

SAMPLES = 64


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, x.sum(1) + 1)


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 1), nn.Flatten(0))


class Script:
    """A training of a few steps. What is not said is as in a correct program."""

    def __init__(
        self,
        model: Callable[[], nn.Module] = net,
        loss: Loss = F.mse_loss,
        change: Callable[[int, int, nn.Module, torch.optim.Optimizer], None] | None = None,
        dataset: Callable[[int], Dataset[Any]] = lambda rank: data(),
        sampler: Callable[[int], Any] | None = None,
        evaluates: bool = False,
        level: Any = 1,
        **mesh: int,
    ) -> None:
        self.model, self.loss, self.change, self.dataset = model, loss, change, dataset
        self.sampler, self.evaluates, self.level, self.mesh = sampler, evaluates, level, mesh


class Counts(nn.Module):
    """Counts its calls in Python and in a buffer, keeps what it saw, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.count += 1
        return x * (1 + 0.1 * len(self.seen))


class AlwaysDrops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)


class Centred(nn.Module):
    """Statistics of the batch by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def token_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = target > 0.5
    return ((output - target).square() * mask).sum() / mask.sum()


def counted_token_mean(output: torch.Tensor, target: torch.Tensor) -> Any:
    mask = target > 0.5
    return tutti.Weighted(((output - target).square() * mask).sum(), mask.sum())


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, None] * target[None], torch.arange(len(output)))


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target - torch.randn_like(target)).square().mean()


def noisy_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target - 0.1 * torch.randn_like(target)).square().sum()


def column(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[:, None], target)


def column_by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, None] - target).square().mean()


def rate_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        optimizer.param_groups[0]["lr"] *= 1 + rank


def decay_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.01 * rank


def rate_of_all(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9


def weights_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1 and rank == 1:
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)


def betas_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, 0.99 if rank else 0.999)


def weights_of_all(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)


def evaluation_mode(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        model.eval()


def mode_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        model[2].eval()


def frozen_norm(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].eval()


class OrderOfRank:
    """Draws from a generator that the run cannot seed."""

    def __init__(self, seed: int, samples: int = SAMPLES) -> None:
        self.order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist()[:samples]

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def shuffled(rank: int) -> TensorDataset:
    x, y = data().tensors
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(rank))
    return TensorDataset(x[order], y[order])


MISTAKES: dict[str, tuple[Script, str]] = {
    "token mean": (Script(loss=token_mean), "warning: .*not a mean over samples: on rank 0.*tutti.Weighted"),
    "token mean, counted calls": (Script(lambda: net(Counts()), token_mean), "warning: .*not a mean over samples"),
    "negatives": (Script(loss=contrastive), "warning: .*not a mean over samples"),
    "sum": (Script(loss=summed), "warning: .*not a mean over samples"),
    "sum of draws": (Script(loss=noisy_sum), "warning: .*not a mean over samples"),
    "statistics": (Script(lambda: net(Centred())), "warning: .*not a mean over samples"),
    "broadcast by hand": (Script(loss=column_by_hand), "warning: .*not a mean over samples"),
    "broadcast": (Script(loss=column), r"ScriptError: F.mse_loss .*\(8, 1\).*\(8,\).*view_as"),
    "rate": (Script(change=rate_of_rank), "RankMismatchError: step 2: 'lr' of group 0 of AdamW is 0.1 on rank 0 and 0"),
    "decay": (Script(change=decay_of_rank), "RankMismatchError: step 1: 'weight_decay' of group 0 of AdamW"),
    "betas": (
        Script(change=betas_of_rank),
        r"RankMismatchError: step 1: 'betas' of group 0 of AdamW is \(0.9, 0.9",
    ),
    "weights": (Script(change=weights_of_rank), r"RankMismatchError: step 2: the weights of '0.weight' differ"),
    "evaluation mode": (Script(change=evaluation_mode), "warning: Sequential is in evaluation mode in training steps"),
    "mode": (
        Script(lambda: net(nn.Dropout(0.5)), change=mode_of_rank),
        "RankMismatchError: step 1: module '2' is in training mode on rank 0 and in evaluation mode on rank 1",
    ),
    "order": (Script(sampler=OrderOfRank), "RankMismatchError: step 1: the order of samples"),
    "epoch": (
        Script(sampler=lambda rank: OrderOfRank(3, SAMPLES - rank)),
        "RankMismatchError: step 1: the order of samples in the epoch differs",
    ),
    "first sample": (
        Script(dataset=shuffled),
        "RankMismatchError: sample 0 of the data set has other values on rank 1 than on rank 0",
    ),
    "values": (
        Script(dataset=shuffled, split=2),
        "RankMismatchError: step 1: ranks 0 and 1 compute the same samples together, but have read other values",
    ),
    "dropout": (Script(lambda: net(AlwaysDrops()), evaluates=True), "warning: module .* calls dropout with dropout on"),
}

CORRECT: dict[str, Script] = {
    "plain": Script(evaluates=True),
    "weighted": Script(loss=counted_token_mean),
    "noise": Script(loss=noisy),
    "dropout": Script(lambda: net(nn.Dropout(0.5)), evaluates=True),
    "batch norm": Script(lambda: net(nn.BatchNorm1d(8)), evaluates=True),
    "frozen norm": Script(lambda: net(nn.BatchNorm1d(8)), change=frozen_norm),
    "counter": Script(lambda: net(Counts()), evaluates=True),
    "schedule": Script(change=rate_of_all),
    "weights": Script(change=weights_of_all),
    "sampler": Script(sampler=lambda rank: OrderOfRank(3)),
    "summed by torch": Script(loss=partial(F.mse_loss, reduction="sum")),
    "shard": Script(shard=2),
    "shard, level 3": Script(shard=2, level=3),
    "split": Script(split=2),
    "stage": Script(stage=2),
}


def said(name: str, script: Script, ranks: int) -> tuple[list[str], list[Any]]:
    """Train, and return what was found and what the counters counted."""
    folder = Path.cwd() / f"guard-{os.getpid()}-{name.replace(' ', '-')}"
    plan = Plan(
        batch=BatchPlan(global_batch_size=8 * ranks),
        mesh=script.mesh or {"replicate": ranks},
        sharding=ShardingPlan(level=script.level),
    )
    serialization.save(plan, file := Path(f"{folder}.json"))
    os.environ.update(TUTTI_PLAN=str(file), TUTTI_RUN_FOLDER=str(folder))
    job = tutti.Job(global_batch_size=8 * ranks)
    model = script.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rank = job.rank
    sampler = {} if script.sampler is None else {"sampler": script.sampler(rank)}
    found = []
    try:
        model, optimizer, loader = job.prepare(
            model, optimizer, script.dataset(rank), script.loss, **(sampler or {"shuffle": False})
        )
        for step, batch in enumerate(loader):
            if script.change is not None:
                script.change(rank, step, model, optimizer)
            job.step(batch)
            if step == 2:
                break
        if script.evaluates:
            job.evaluate(data())
    except tutti.TuttiError as error:
        found.append(f"{type(error).__name__}: {error}")
    counted = [(m.calls, len(m.seen), float(m.count)) for m in model.modules() if isinstance(m, Counts)]
    metrics = folder / "metrics.jsonl"
    rows = map(json.loads, metrics.read_text().splitlines()) if rank == 0 and metrics.exists() else ()
    found += [f"warning: {row['sentence']}" for row in rows if row["kind"] == "guard"]
    return found, counted


def all_said(scripts: dict[str, Script], ranks: int) -> dict[str, tuple[list[str], list[Any]]]:
    return {name: said(name, script, ranks) for name, script in scripts.items()}


def mistakes_said(ranks: int) -> dict[str, tuple[list[str], list[Any]]]:
    return all_said({name: script for name, (script, _) in MISTAKES.items()}, ranks)


def correct_said(ranks: int) -> dict[str, tuple[list[str], list[Any]]]:
    fitting = {name: script for name, script in CORRECT.items() if ranks == 2 or not script.mesh}
    return all_said(fitting, ranks)


@functools.cache
def of_mistakes(ranks: int) -> dict[str, list[str]]:
    return {name: found for name, (found, _) in run_ranks(mistakes_said, ranks, ranks, timeout_s=120)[0].items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    found = of_mistakes(2)[name]
    assert len(found) == 1
    assert re.match(MISTAKES[name][1], found[0]), found[0]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_correct_program_raises_nothing(ranks: int) -> None:
    for results in run_ranks(correct_said, ranks, ranks, timeout_s=120):
        assert {name: found for name, (found, _) in results.items() if found} == {}
        calls, seen, count = results["counter"][1][0]
        assert calls == seen == count, "the guard's own forwards leave no trace"


def reported(folder: str) -> list[str]:
    """Train with a mistake; what the report's findings say."""
    said(folder, MISTAKES["token mean"][0], 2)
    run = Path.cwd() / f"guard-{os.getpid()}-{folder}"
    return [] if int(os.environ["RANK"]) else [f.sentence for f in build_report(run).findings if f.code == "GUARD"]


def test_the_report_says_what_was_found() -> None:
    sentences, other = run_ranks(reported, 2, "reported")
    assert other == []
    assert [sentence.startswith("The loss of Sequential is not a mean over samples") for sentence in sentences] == [
        True
    ]


class FreshLoss:
    """A loss that scripts make anew in every step."""

    def __call__(self, model: Any, batch: Any) -> Any:
        return model(batch)


def test_a_loss_that_is_made_anew_in_every_step_is_one_loss() -> None:
    def made() -> list[Any]:
        return [
            partial(F.mse_loss, reduction="sum"),
            partial(FreshLoss()),
            FreshLoss(),
            lambda model, batch: model(batch),
        ]

    for first, again in zip(made(), made(), strict=True):
        assert code_of(CountedLoss(first)) is code_of(CountedLoss(again)) is code_of(again)
    assert code_of(token_mean) is not code_of(contrastive)
