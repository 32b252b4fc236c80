"""Ranks that take different batches are noticed in the same step, and all of them stop with one sentence."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.config.sync_notation import parse_sync
from tutti.errors import RankMismatchError
from tutti.trainer.step_message import MOST_WORD, StepMessage, StepPlace, samples_digest

SKIPS = {"each rank another": {0: 4, 1: 5}, "one rank": {1: 4}}
"""Form of the fault -> the batch that each rank skips, counted from 0: after the steps that are compared anyway."""

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "ZeRO-1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "ZeRO-3": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)},
    "split": {"mesh": {"split": 2}},
    "stage": {"mesh": {"stage": 2}},
    "local SGD": {"sync": parse_sync("local:4")},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan's fields, and which batch each rank skips; `stream`: samples have no numbers; `deferred`: as on a GPU."""

    plan: dict[str, Any] = field(default_factory=dict)
    skips: dict[int, int] = field(default_factory=dict)
    stream: bool = False
    deferred: bool = False


class Stream(IterableDataset[Any]):
    """Twelve batches of samples that have no numbers."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(48):
            yield torch.full((6,), float(number)), torch.tensor(number % 3)


def _train(case: Case) -> tuple[str, int]:
    """Train, leaving out batches; return the error's sentence, and how many steps were made before."""
    mesh = {"mesh": {"replicate": 2}, **case.plan}
    serialization.save(Plan(batch=BatchPlan(global_batch_size=4), **mesh), Path("plan.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUTTI_PLAN", "plan.json")
        job = tutti.Job(global_batch_size=4, seed=3)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        data: Any = Stream() if case.stream else TensorDataset(torch.randn(48, 6), torch.arange(48) % 3)
        model, _, loader = job.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.01), data, nn.functional.cross_entropy
        )
        job._run().loop.device_decides = case.deferred
        try:
            for _ in job.epochs(1):
                for number, batch in enumerate(loader):
                    if number != case.skips.get(job.rank):
                        job.step(batch)
        except RankMismatchError as error:
            return str(error), job.global_step
        return "", job.global_step


CASES = [("replicate", "one rank"), *((plan, "each rank another") for plan in PLANS)]


@pytest.mark.parametrize(("plan", "form"), CASES)
def test_skipped_batches_are_noticed_in_the_same_step(plan: str, form: str) -> None:
    one, other = run_ranks(_train, 2, Case(plan=PLANS[plan], skips=SKIPS[form]))
    assert one == other
    said, made = one
    assert made == 4  # those before the first batch that was skipped
    assert said.startswith("step 5: ranks are out of step: rank 0 is in batch ")
    batches = (6, 5) if len(SKIPS[form]) == 2 else (5, 6)
    assert f"rank 0 is in batch {batches[0]} of epoch 1 (samples " in said
    assert f", rank 1 in batch {batches[1]} of epoch 1 (samples " in said
    assert "job.should_stop(condition)" in said


def test_the_guard_says_the_same_where_it_looks_first() -> None:
    one, other = run_ranks(_train, 2, Case(skips={0: 1, 1: 2}))
    assert one == other
    assert one[1] == 1
    assert one[0].startswith("step 2: ranks are out of step: rank 0 is in batch 3 of epoch 1")


def test_a_stream_is_known_by_its_positions() -> None:
    said, made = run_ranks(_train, 2, Case(skips=SKIPS["one rank"], stream=True))[0]
    assert made == 4
    assert "rank 0 is in batch 5 of epoch 1 (4 samples), rank 1 in batch 6 of epoch 1 (4 samples)" in said


def test_where_the_device_decides_it_is_noticed_a_step_later() -> None:
    one, other = run_ranks(_train, 2, Case(skips=SKIPS["one rank"], deferred=True))
    assert one == other
    assert one[0].startswith("step 5: ranks are out of step: rank 0 is in batch 5 of epoch 1")


def test_nothing_is_said_of_ranks_in_step() -> None:
    assert run_ranks(_train, 2, Case()) == [("", 12)] * 2
    asynchronous = {"sync": parse_sync("asynchronous")}
    assert run_ranks(_train, 2, Case(plan=asynchronous, skips=SKIPS["each rank another"]))[0][0] == ""


def test_marks_of_many_ranks_are_exact_in_a_sum() -> None:
    places = [
        StepPlace(step=1, call=0, epoch=1, batch=1, samples=4, first=(), digest=(1 << 40) - 1 - (rank == 3))
        for rank in range(5)
    ]
    total = torch.zeros(2 + 3 * 5, dtype=torch.float64)
    for rank, place in enumerate(places):
        part = torch.zeros(2 + 3 * 5, dtype=torch.float64)
        StepMessage(world_size=5, rank=rank, place=place).put(part, word=MOST_WORD - 1 - rank)
        total += part
    message = StepMessage(world_size=5, rank=0, place=places[0])
    assert message.words(total.tolist()) == [MOST_WORD - 1 - rank for rank in range(5)]
    assert not message.in_step(total.tolist())
    assert StepMessage(world_size=2, rank=0, place=places[0]).in_step([0.0] * 4 + [float(places[0].digest << 12)] * 2)


def test_digests_tell_samples_orders_and_numbers_apart() -> None:
    order = np.random.default_rng(0).permutation(1000)
    digests = {samples_digest(order[begin : begin + 8], (step,)) for begin in range(900) for step in range(3)}
    assert len(digests) == 2700
    assert max(digests) < 1 << 40
    assert samples_digest(order[:8]) != samples_digest(order[:8][::-1])
    assert samples_digest(np.array([2, 0])) != samples_digest(np.array([2]), ())


def test_samples_of_a_rank_are_those_it_loads() -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=8, num_microbatches=2), mesh={"replicate": 2, "stage": 2})
    place = StepPlace(step=1, call=0, epoch=1, batch=1, samples=8, first=(), digest=0)
    message = StepMessage(world_size=4, rank=0, place=place, indices=np.arange(10, 18), plan=plan)
    of = {rank: message.samples_of(rank) for rank in range(4)}
    assert sorted(map(tuple, of.values())) == [(10, 11, 14, 15)] * 2 + [(12, 13, 16, 17)] * 2
    assert StepMessage(world_size=4, rank=0, place=place).samples_of(0) == []
