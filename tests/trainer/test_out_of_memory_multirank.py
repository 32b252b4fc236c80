"""A rank runs out of memory: all compute the step again in more microbatches, as if the run had begun with these."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks

TOO_MUCH = 2**50
"""Bytes that no machine gives: the allocator itself refuses them."""


class Net(nn.Module):
    """Needs far too much memory where it gets more than `limit` samples at once, in forward or in backward."""

    def __init__(self, limit: int, where: str, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.drop, self.last = nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.limit, self.where, self.since = limit, where, 0
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        if len(x) > self.limit and self.training and self.since <= 0:
            if self.where == "forward":
                torch.empty(TOO_MUCH, dtype=torch.uint8)
            hidden = Greedy.apply(hidden)
        return self.last(torch.tanh(self.drop(hidden)))


class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
        return gradient


def data() -> TensorDataset:
    x = torch.randn(44, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output, target) * (1 + random.random() / 10)  # a script's own draws are repeated, too


class LateDraws:
    """Draws only from the fourth step on, when draws are watched no longer."""

    calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 3:
            np.random.random()
        return mse_loss(output, target)


def trained(
    limits: tuple[int, ...] = (99, 99),
    where: str = "forward",
    microbatches: int | None = None,
    *,
    since: int = 0,
    workers: int = 0,
    norm: bool = False,
    level: int = 0,
    change: bool = False,
    late: bool = False,
    resume: str | None = None,
    folder: str | None = None,
) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    os.environ.pop("TUTTI_MESH", None)
    if level:
        os.environ["TUTTI_MESH"] = "shard=2"
    if folder is not None:
        os.environ["TUTTI_RUN_FOLDER"] = folder
    job = tutti.Job(global_batch_size=8, num_microbatches=microbatches, keep_checkpoints=0, seed=3, resume=resume)
    said: list[str] = []
    job._context.screen.say = lambda sentence: said.append(sentence)  # type: ignore[method-assign]
    model = Net(limits[rank], where, norm)
    model.since = since
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, _, loader = job.prepare(model, optimizer, data(), LateDraws() if late else noisy, num_workers=workers)
    result: dict[str, Any] = {"losses": [], "failed": ""}
    try:
        for batch in loader:
            if change:
                batch = [batch[0] * 1.0, batch[1]]
            result["losses"].append(job.step(batch))
            model.since -= 1
    except tutti.TuttiError as error:
        result["failed"] = str(error)
    if not result["failed"]:
        job.save()
        result["state"] = job.state_dict()
    return result | {"said": [s for s in said if "microbatches" in s], "used": job._run().parallel.plan.batch}


def same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert not result["failed"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    for name, value in expected["state"].items():
        torch.testing.assert_close(result["state"][name], value, rtol=1e-12, atol=1e-12, msg=name)


def one_rank_runs_out(long: bool) -> dict[str, Any]:
    results = {"two": trained(microbatches=2), "four": trained(microbatches=4)}
    results["forward"] = trained((99, 2))
    results["backward"] = trained((2, 99), "backward")
    if long:
        results["twice"] = trained((99, 1), "backward")
        results["workers"] = trained((2, 99), workers=2)
        results["both"] = trained((2, 3))
    return results


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)])
def test_all_ranks_compute_the_step_again(long: bool) -> None:
    for results in run_ranks(one_rank_runs_out, 2, long):
        for name, result in results.items():
            if name in ("two", "four"):
                assert not result["said"]
                continue
            number = 4 if name == "twice" else 2
            same(result, results["four" if number == 4 else "two"])
            assert result["used"].num_microbatches == number
            assert len(result["said"]) == (2 if name == "twice" else 1)
            rank = 0 if name in ("backward", "workers", "both") else 1
            assert result["said"][0].startswith(f"rank {rank} ran out of memory at step 1 with num_microbatches = 1;")


def in_the_middle(folder: str) -> dict[str, Any]:
    """After two steps; then a resumed run, which begins with the number."""
    first = trained((99, 2), since=2, folder=f"{folder}/first")
    resumed = trained((99, 2), resume=f"{folder}/first", folder=f"{folder}/then")
    return {"first": first, "resumed": resumed}


def test_a_resumed_run_begins_with_the_number(tmp_path: Path) -> None:
    for results in run_ranks(in_the_middle, 2, str(tmp_path)):
        assert "at step 3 with" in results["first"]["said"][0]
        assert len(results["first"]["losses"]) == len(results["resumed"]["losses"]) == 6
        said = "num_microbatches = 2: the run that is resumed ran out of memory with fewer"
        assert results["resumed"]["said"] == [said]


def draws_of_later_steps() -> dict[str, Any]:
    ways = {"forward": trained((99, 2), since=3), "backward": trained((99, 2), "backward", since=3)}
    late = {where: trained((99, 2), where, since=4, late=True) for where in ("forward", "backward")}
    return {"watched": ways, "late": late}


def test_draws_are_repeated_or_refused_where_ranks_would_draw_differently() -> None:
    """In "forward" the rank fails before its draw, in "backward" after it."""
    for results in run_ranks(draws_of_later_steps, 2):
        same(results["watched"]["backward"], results["watched"]["forward"])
        refused, repeated = results["late"]["forward"]["failed"], results["late"]["backward"]["failed"]
        assert "has drawn from `random` or NumPy" in refused
        assert refused.endswith("start again with Job(num_microbatches=2)")
        assert not repeated


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stated": ({"microbatches": 1}, "stated by the script or the plan: start again with Job(num_microbatches=2)"),
    "batch norm": ({"norm": True}, "module 'norm' has statistics of a microbatch"),
    "sharded": ({"level": 3}, "inside forward at sharding level 3: start again with Job(num_microbatches=2)"),
    "changed": ({"change": True}, "the script has changed the batch"),
    "one sample": ({}, "num_microbatches = 4 ("),
}


def refused(name: str) -> str:
    limits = (0, 0) if name == "one sample" else (1, 1)
    failed: str = trained(limits, **REFUSED[name][0])["failed"]
    return failed


@pytest.mark.parametrize("name", ["stated", *[pytest.param(n, marks=pytest.mark.long) for n in list(REFUSED)[1:]]])
def test_what_cannot_be_repeated_names_the_number(name: str) -> None:
    for said in run_ranks(refused, 2, name):
        assert "ran out of memory at step 1 with num_microbatches = " in said
        assert REFUSED[name][1] in said
        assert ("one sample a rank already" in said) == (name == "one sample")


def alone() -> dict[str, Any]:
    return {"four": trained(microbatches=4), "automatic": trained((2,), "backward")}


@pytest.mark.long
def test_one_rank_alone() -> None:
    results = run_ranks(alone, 1)[0]
    same(results["automatic"], results["four"])
