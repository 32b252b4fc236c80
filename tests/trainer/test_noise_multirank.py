"""The gradient noise scale on 1 to 4 ranks: that of single samples' gradients, and without a trace."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from harness import run_ranks
from trainer.training import Mlp, Tagger, vectors
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.data.batches import share_of
from tutti.optim.gradient_noise_scale import estimate_noise
from tutti.trainer.metrics import read_rows


@dataclass(frozen=True)
class Case:
    """A short run. `rate` 0 keeps the parameters where they are, so that every step can be computed again."""

    batch: int = 12
    microbatches: int = 2
    shares: tuple[float, ...] = ()
    rate: float = 0.0
    tokens: bool = False
    every: int | None = 1
    clip_norm: float | None = None


def sentences() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(row, row.roll(-1)) for row in torch.randint(0, 11, (30, 7), generator=draw)]


def token_loss(output: Tensor, target: Tensor) -> tutti.Weighted:
    """A mean over the tokens that count: of every sample another number."""
    counts = target > 3
    losses = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return tutti.Weighted((losses * counts.flatten()).sum(), counts.sum())


def sample_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def model_and_data(case: Case) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(5)
    model = (Tagger() if case.tokens else Mlp()).double()
    return model, sentences() if case.tokens else vectors(30), token_loss if case.tokens else sample_loss


def train(cases: list[Case], world_size: int) -> list[dict[str, Any]]:
    results = []
    for number, case in enumerate(cases):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        batch = BatchPlan(global_batch_size=case.batch, num_microbatches=case.microbatches)
        shares = case.shares[:world_size]
        plan = Plan(batch=batch, mesh={"replicate": world_size}, shares=shares if len(shares) == world_size else ())
        file = Path.cwd() / f"plan-{number}-{os.environ['RANK']}.json"  # ranks share the folder
        serialization.save(plan, file)
        os.environ["TUTTI_PLAN"] = str(file)
        job = tutti.Job(global_batch_size=case.batch, seed=4, noise_every=case.every, clip_norm=case.clip_norm)
        model, data, loss = model_and_data(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=case.rate, momentum=0.9)
        model, optimizer, loader = job.prepare(model, optimizer, data, loss)
        batches, losses = [], []
        for _ in job.epochs(2):
            for one in loader:
                batches.append(job._run().state.loader.indices.tolist())
                losses.append(job.step(one))
        rows = []
        if job.is_main:
            written = read_rows(Path.cwd() / f"run-{number}" / "metrics.jsonl")
            rows = [row for row in written if row["kind"] == "step"]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        results.append({"batches": batches, "losses": losses, "rows": rows, "state": state, "plan": plan})
    return results


def by_hand(case: Case, plan: Plan, indices: list[int]) -> tuple[float, float]:
    """(|G|^2, S) of one step from gradients of single samples; S of the plan's unit, a sample."""
    model, data, loss = model_and_data(case)
    gradients, counts = [], []
    for index in indices:
        model.zero_grad()
        x, y = data[index]
        value = loss(model(x[None]), y[None])
        total, count = (value.total, float(value.count)) if case.tokens else (value, 1.0)
        total.backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
        counts.append(count)
    units, totals = sum(counts), torch.stack(gradients)
    within, parts = 0.0, 0
    for rank in range(plan.world_size):
        for part in share_of(len(indices), rank, plan).parts:
            mine = slice(part.start, part.start + part.count)
            count = sum(counts[mine])
            if count:
                within += float((totals[mine].sum(0) / count).square().sum()) * count
                parts += 1
    whole = float((totals.sum(0) / units).square().sum())
    found = estimate_noise(within, whole, units, parts)
    assert found is not None
    return found.square, found.variance * len(indices) / units


MEASURED = [
    Case(),
    Case(batch=7, microbatches=3, shares=(3.0, 1.0, 2.0, 1.5)),
    Case(batch=9, microbatches=2, shares=(1.0, 0.0, 2.0, 1.0)),
    Case(batch=12, microbatches=12),
    Case(batch=10, microbatches=4, tokens=True),
    Case(batch=12, every=3),
]


@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
def test_estimates_are_those_of_single_samples(world_size: int) -> None:
    for case, got in zip(MEASURED, run_ranks(train, world_size, MEASURED, world_size)[0], strict=True):
        found = {row["noise"]["step"]: row["noise"] for row in got["rows"] if "noise" in row}
        assert list(found) == list(range(1, len(got["batches"]), case.every or 1))
        for step, noise in found.items():
            square, variance = by_hand(case, got["plan"], got["batches"][step - 1])
            assert noise["square"] == pytest.approx(square, rel=1e-9, abs=1e-12 * variance)
            assert noise["variance"] == pytest.approx(variance, rel=1e-9)
        last = got["rows"][-1] if "noise" in got["rows"][-1] else None
        if last is not None and last["noise_scale"] is not None:
            ratio = last["noise"]["variance_mean"] / last["noise"]["square_mean"]
            assert last["noise_scale"] == pytest.approx(ratio)


TRAINED = [
    Case(rate=0.1),
    Case(rate=0.1, batch=7, microbatches=3, shares=(3.0, 1.0, 2.0, 1.5), clip_norm=0.1),
    Case(rate=0.1, batch=10, tokens=True),
]


@pytest.mark.parametrize("world_size", [1, 3])
def test_measuring_changes_no_bit(world_size: int) -> None:
    without = [Case(**{**vars(case), "every": None}) for case in TRAINED]
    results = run_ranks(train, world_size, [*TRAINED, *without], world_size)
    for ranks in results:
        for one, other in zip(ranks[: len(TRAINED)], ranks[len(TRAINED) :], strict=True):
            assert one["losses"] == other["losses"]
            assert all(torch.equal(value, other["state"][name]) for name, value in one["state"].items())
    assert any("noise" in row for row in results[0][0]["rows"])
    assert not any("noise" in row for row in results[0][-1]["rows"])


def alone() -> list[dict[str, Any]]:
    """One rank, one piece: nothing to compare."""
    return train([Case(microbatches=1)], 1)


def test_one_piece_is_not_measured_but_trained() -> None:
    (got,) = run_ranks(alone, 1)[0]
    assert len(got["rows"]) == len(got["batches"])
    assert not any("noise" in row for row in got["rows"])


def in_precisions() -> list[list[dict[str, float]]]:
    """The same steps in float32, and in float16 with loss scaling."""
    found = []
    for precision in ("full", "float16"):
        folder = Path.cwd() / precision
        os.environ["TUTTI_RUN_FOLDER"] = str(folder)
        job = tutti.Job(global_batch_size=12, num_microbatches=2, seed=4, noise_every=1, precision=precision)
        torch.manual_seed(5)
        model = Mlp()
        x, y = vectors(30).tensors
        data = torch.utils.data.TensorDataset(x.float(), y)
        model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data, sample_loss)
        for _ in job.epochs(2):
            for batch in loader:
                job.step(batch)
        rows = read_rows(folder / "metrics.jsonl")
        found.append([row["noise"] for row in rows if "noise" in row])
    return found


def test_loss_scaling_is_taken_out() -> None:
    full, half = run_ranks(in_precisions, 1)[0]
    assert len(full) == len(half) > 3
    for one, other in zip(full, half, strict=True):
        assert other["variance"] == pytest.approx(one["variance"], rel=0.02)
        assert other["square"] == pytest.approx(one["square"], abs=0.02 * one["variance"])
