"""Plans that sum linear layers' weights by sufficient factors: one device's run in fewer bytes, decided by layer."""

import copy
import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from against_one import Subject, Trained, assert_agree
from harness import run_ranks
from parallel.test_compressed_multirank import case
from trainer.several import Case, on_ranks, refusals, train_cases
from tutti.compression.sufficient_factors import FactoredLinear
from tutti.config import serialization
from tutti.config.compression import factors_pay, factors_sent_nbytes, parse_compression
from tutti.config.plan import BatchPlan, PipelinePlan, Plan, ShardingPlan, SyncPlan
from tutti.trainer.metrics import read_rows

STEPS, WORDS, WIDE = 4, 40, 90


class Uses(nn.Module):
    """Linear layers used in every way: once, twice, with a weight of another's, of an embedding's, outside of the
    layer, by some samples only, not at all, and one whose rows are never fewer bytes.
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.once, self.twice, self.other = nn.Linear(WIDE, 100), nn.Linear(100, 100), nn.Linear(100, 100, bias=False)
        self.tied = nn.Linear(100, 100)
        self.tied.weight = self.other.weight
        self.outside = nn.Linear(100, 100)
        self.some, self.never = nn.Linear(100, 100), nn.Linear(100, 100)
        self.down, self.small = nn.Linear(100, WIDE), nn.Linear(WIDE, 5)
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.drop = nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.once(self.words(x))))
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        hidden = torch.tanh(self.tied(torch.tanh(self.other(hidden))))
        hidden = torch.tanh(self.outside(hidden)) + 0.1 * F.linear(hidden, self.outside.weight)
        some = x[:, 0] < 5
        if bool(some.any()):
            hidden = torch.where(some[:, None, None], torch.tanh(self.some(hidden)), hidden)
        hidden = self.drop(torch.tanh(self.down(hidden)))
        return self.head(hidden.mean(1)) + F.pad(self.small(hidden).sum(1), (0, WORDS - 5))


def texts() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(WORDS, (30, 3), generator=draw), torch.randint(WORDS, (30,), generator=draw))


def uses() -> Subject:
    return Subject(model=Uses, data=texts(), loss_fn=F.cross_entropy, batch=10)


def dropping() -> Subject:
    return replace(uses(), model=functools.partial(Uses, 0.3))


def clipped() -> Subject:
    return replace(uses(), job={"clip_norm": 0.05})


def look(run: Any) -> dict[str, Any]:
    names = {p: name for name, p in run.parallel.model.named_parameters()}
    weights = sorted(names[p] for p in run.parallel.replica.factored.weights)
    rows = (
        [row for row in read_rows(run.output.folder.metrics) if row["kind"] == "step"]
        if run.parallel.world.is_main
        else []
    )
    plain = sum(
        bucket.sent_nbytes for bucket in run.parallel.replica._buckets if not bucket.group.bucket_reducer.one_per_bucket
    )
    copied = copy.deepcopy(run.parallel.model)
    left = [module for module in copied.modules() if isinstance(module, FactoredLinear)]
    assert left
    assert not any(module.factors.collecting for module in left)
    share = sum(part.count for part in run.state.loader.share.parts)
    return {"weights": weights, "rows": rows, "plain": plain, "ways": run.parallel.replica.transports, "share": share}


@functools.cache
def one_per_bucket(microbatches: int = 1) -> Trained:
    subject = {"one": (uses, {"batch": {"num_microbatches": microbatches}})}
    return on_ranks(subject, 1, steps=STEPS)[0]["one"]


def factors(make: Any = uses, **plan: Any) -> Case:
    return case("factors", make, bucket_nbytes=9000, **plan)


BY_FACTORS = ["down.weight", "never.weight", "once.weight", "other.weight", "some.weight", "twice.weight"]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def test_factors_are_one_devices_run_in_fewer_bytes(world_size: int) -> None:
    """What goes by factors is decided by bytes, after a first step in which all are tried; bytes are the formula's."""
    mesh = {"replicate": world_size}
    found = on_ranks({"run": factors(mesh=mesh)}, world_size, steps=STEPS, look=look if world_size > 1 else None)
    assert_agree(one_per_bucket(), [rank["run"] for rank in found])
    first = found[0]["run"].state
    assert all(torch.equal(rank["run"].state[name], value) for rank in found for name, value in first.items())
    if world_size == 1:
        return
    facts = found[0]["run"].facts
    # 10 samples of 3 tokens, 2 calls of one: 60 rows < 100; the embedding's has more than factors, and so has outside's
    assert facts["weights"] == BY_FACTORS
    assert "sufficient factors of linear layers" in facts["ways"]
    share = facts["share"] * 3
    shapes = {"once": (100, 90, 1), "twice": (100, 100, 2), "other": (100, 100, 2), "down": (90, 100, 1)}
    assert all(factors_pay(30 * calls, m, n) for m, n, calls in shapes.values())
    sent = sum(factors_sent_nbytes(share * calls, m, n, world_size, 8) for m, n, calls in shapes.values())
    for row in facts["rows"][1:]:
        rest = row["sent_nbytes"] - sent - facts["plain"]
        # of the layer that some samples use: their rows or none; and of one that nobody uses: that there are none
        each = (factors_sent_nbytes(rows, 100, 100, world_size, 8) for rows in (0, share))
        assert rest - factors_sent_nbytes(0, 100, 100, world_size, 8) in each


def test_beside_other_parts_of_a_plan_it_is_that_too() -> None:
    """Accumulation, unlike shares, clipping, recomputing and optimizer states that are divided."""
    two, batch = {"replicate": 2}, {"num_microbatches": 2}
    cases = {
        "accumulated": factors(mesh=two, batch=batch),
        "shares": factors(mesh=two, shares=(4, 1), batch=batch),
        "ZeRO-1": factors(mesh={"shard": 2}, sharding=ShardingPlan(level=1), batch=batch),
    }
    for rank in on_ranks(cases, 2, steps=STEPS):
        for name, got in rank.items():
            assert_agree(one_per_bucket(2), [got])
            assert name


def beside_exact() -> list[tuple[Trained, Trained]]:
    """The same ranks and draws of dropout, with gradients and with factors."""
    mesh = {"replicate": 3}
    cases = {
        "gradients": case(None, dropping, mesh=mesh),
        "factors": factors(dropping, mesh=mesh),
        "clipped gradients": case(None, clipped, mesh=mesh),
        "clipped": factors(clipped, mesh=mesh),
    }
    found = train_cases(cases, STEPS, None)
    return [(found["gradients"], found["factors"]), (found["clipped gradients"], found["clipped"])]


@pytest.mark.long
def test_with_dropout_and_clipping_they_are_the_gradients_of_the_same_ranks() -> None:
    for pairs in run_ranks(beside_exact, 3):
        for exact, got in pairs:
            assert_agree(exact, [got])


def resumed(calls: list[tuple[int, str | None, str]]) -> list[dict[str, torch.Tensor]]:
    """Parameters after so many steps, of a run that goes on from a checkpoint and leaves one."""
    torch.set_default_dtype(torch.float64)
    found = []
    for steps, resume, folder in calls:
        sync = SyncPlan(bucket_nbytes=9000, compress=parse_compression("factors"))
        plan = Plan(batch=BatchPlan(global_batch_size=10), mesh={"replicate": 3}, sync=sync)
        os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
        os.environ["TUTTI_RUN_FOLDER"] = folder
        job = tutti.Job(global_batch_size=10, resume=resume)
        model = dropping().model()
        model, _, loader = job.prepare(model, torch.optim.AdamW(model.parameters()), texts(), F.cross_entropy)
        run = job._run()
        while run.state.progress.step < steps:
            for batch in loader:
                job.step(batch)
                if run.state.progress.step == steps:
                    break
        assert len(run.parallel.replica.factored.weights) == 6
        job.save()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.long
def test_resuming_changes_no_bit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        calls = [(6, None, f"{folder}/whole"), (4, None, f"{folder}/a"), (6, f"{folder}/a", f"{folder}/b")]
        for whole, _, again in run_ranks(resumed, 3, calls):
            assert all(torch.equal(again[name], value) for name, value in whole.items())


@pytest.mark.long
def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    given = [
        factors(mesh={"stage": 2}, pipeline=PipelinePlan(cuts=("down",)), batch={"num_microbatches": 2}),
        factors(mesh={"shard": 2}, sharding=ShardingPlan(level=2)),
    ]
    for rank in run_ranks(refusals, 2, given):
        for said, got in zip(("mesh.stage = 2", "sharding.level = 2"), rank, strict=True):
            assert got.startswith("PlanError: sync.compress = 'factors' with " + said), got
