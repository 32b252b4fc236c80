"""Loss scaling beside codes: what overflows on one rank is seen by all, and skipped by all; what is kept back follows
the scale.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from harness import run_ranks
from parallel.test_compressed_multirank import case, data
from parallel.test_compressed_plans_multirank import halves
from tutti.compression.reducer import TensorStates, states_by_tensor
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.parallel.compressed.compressor import sizes_of
from tutti.parallel.layout import gather_whole, to_local
from tutti.parallel.part_guards import reading_parts

CODES = ("float64", "float32", "bfloat16", "float16", "bytegrad", "qsgd", "terngrad")

MESHES: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"replicate": 2}},
    "ZeRO-1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "ZeRO-2": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
}

STEPS, SPOILT = 7, 3
"""In this step a gradient of rank 1 overflows, and in no other."""

KEEPING = (
    "bfloat16,feedback=true",
    "bytegrad,feedback=true",
    "one-bit",
    "top-k,density=0.1",
    "top-k,density=0.1,sparse=true",
    "top-k,density=0.02,gain=0.6,window=2",
    "dgc,density=0.1",
    "top16-q4",
    "powersgd",
)

WITH_PARTS = tuple(words for words in KEEPING if "gain" not in words)
"""Of sums of which each rank gets its part."""


@dataclass
class Run:
    """After every step: whole parameters, and the loss scale. In the end: what this rank keeps back, by parameter."""

    states: list[dict[str, torch.Tensor]]
    scales: list[float]
    kept: dict[str, TensorStates] = field(default_factory=dict)


@reading_parts()
def trained(
    words: str | None, plan: dict[str, Any], *, growth: int = 2000, resume: str | None = None, steps: int = STEPS
) -> Run:
    """`growth`: updates after which the loss scale is doubled. The run is saved after its last step."""
    fields = {"batch": BatchPlan(global_batch_size=8), "precision": "float16", **case(words, **plan)[1]}
    os.environ["TUTTI_PLAN"] = str(serialization.save(Plan(**fields), Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=8, on_nonfinite="skip", resume=resume)
    model: Any = halves()
    rule = torch.optim.SGD if words is not None and words.startswith("dgc") else torch.optim.AdamW
    model, _, loader = job.prepare(model, rule(model.parameters(), lr=0.01), data())
    run, made = job._run(), Run([], [])
    run.state.scaler.set_growth_interval(growth)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        if run.state.progress.step == SPOILT and run.parallel.world.rank == 1:
            output.register_hook(lambda gradient: gradient * (1e6 if gradient.dtype is not torch.float64 else math.inf))
        return F.cross_entropy(output, batch[1])

    while len(made.states) < steps:
        for batch in loader:
            job.forward_backward(loss, batch)
            job.update()
            parts = {name: to_local(p).clone() for name, p in model.named_parameters()}
            made.states.append(gather_whole(run.parallel.layout, run.parallel.world, parts))
            made.scales.append(run.state.scaler.get_scale())
            if len(made.states) == steps:
                break
    compressor = run.parallel.replica.compressor
    names = {p: name for name, p in model.named_parameters()}
    for bucket, exchange in ({} if compressor is None else compressor.exchanges).items():
        for p, one in zip(bucket.parameters, states_by_tensor(exchange, sizes_of(bucket)), strict=True):
            made.kept[names[p]] = one
    job.save()
    return made


def all_trained(plan: dict[str, Any]) -> dict[str, Run]:
    found = {}
    for words in (None, *CODES):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{words}")
        found[str(words)] = trained(words, plan)
    return found


@pytest.mark.parametrize(
    "mesh", ["replicas", *(pytest.param(name, marks=pytest.mark.long) for name in ("ZeRO-1", "ZeRO-2"))]
)
def test_what_overflows_on_one_rank_is_skipped_by_all(mesh: str) -> None:
    """And the scale is lowered alike; what loses nothing is bit for bit the run without a code."""
    ranks = run_ranks(all_trained, 2, MESHES[mesh])
    for words in ("None", *CODES):
        for run in (rank[words] for rank in ranks):
            assert run.scales == [2.0**12] * SPOILT + [2.0**11] * (STEPS - SPOILT), words
            for step in range(1, STEPS):
                moved = any(
                    not torch.equal(run.states[step][name], run.states[step - 1][name]) for name in run.states[0]
                )
                assert moved == (step != SPOILT), (words, step)
            for mine, first in zip(run.states, ranks[0][words].states, strict=True):
                assert all(value.isfinite().all() and torch.equal(value, first[name]) for name, value in mine.items())
    for words in ("float64", "float32"):
        for got, exact in zip(ranks[0][words].states, ranks[0]["None"].states, strict=True):
            assert all(torch.equal(value, exact[name]) for name, value in got.items()), words


def scaled_and_not(plan: dict[str, Any]) -> dict[str, list[Run]]:
    """In float64, which autocast leaves as it is: a scale that is a power of two rounds nothing there."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, list[Run]] = {}
    for words in KEEPING if plan["mesh"] != {"shard": 2} or plan["sharding"].level == 1 else WITH_PARTS:
        found[words] = []
        for precision, interval in (("full", 2000), ("float16", 2)):
            os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{words}-{precision}")
            found[words].append(trained(words, {**plan, "precision": precision}, growth=interval))
    return found


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ("replicas", 2),
        pytest.param("ZeRO-1", 2, marks=pytest.mark.long),
        pytest.param("ZeRO-2", 2, marks=pytest.mark.long),
    ],
)
def test_what_is_kept_back_follows_the_loss_scale(mesh: str, ranks: int) -> None:
    """A scale that grows, falls and grows changes no bit of a training."""
    found = run_ranks(scaled_and_not, ranks, MESHES[mesh])
    assert found[0].keys() >= {*WITH_PARTS}
    for words in found[0]:
        for plain, scaled in (rank[words] for rank in found):
            assert scaled.scales == [2.0**at for at in (12, 13, 13, 12, 12, 13, 13)], words
            assert set(plain.scales) == {1.0}
            for step, (got, exact) in enumerate(zip(scaled.states, plain.states, strict=True)):
                assert all(torch.equal(value, exact[name]) for name, value in got.items()), (words, step)


def in_folder(folder: str, precision: str, ranks: int, steps: int, before: str | None = None) -> dict[str, Run]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for words in KEEPING:
        os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/{words}"
        plan = {"mesh": {"replicate": ranks}, "precision": precision}
        resume = None if before is None else f"{before}/{words}"
        found[words] = trained(words, plan, growth=2, resume=resume, steps=steps)
    return found


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [pytest.param(2, "full", marks=pytest.mark.long), (3, "full"), pytest.param(2, "float16", marks=pytest.mark.long)],
)
def test_a_checkpoint_says_in_which_scale_it_keeps(tmp_path: Path, ranks: int, precision: str) -> None:
    """A run without a scale takes up all that was kept, unscaled; one with a scale goes on with it."""
    first = run_ranks(in_folder, 3, f"{tmp_path}/first", "float16", 3, STEPS)
    then = run_ranks(in_folder, ranks, f"{tmp_path}/then", precision, ranks, 0, f"{tmp_path}/first")
    for words in KEEPING:
        scale = first[0][words].scales[-1] if precision == "full" else 1.0
        assert first[0][words].scales[-1] == 2.0**13
        for name, kept in first[0][words].kept.items():
            for what in (what for what in kept if not what.startswith("shared.")):
                was = sum(rank[words].kept[name][what] for rank in first) / scale
                now = sum(rank[words].kept[name][what] for rank in then)
                assert float(was.abs().max()) > 0 or what != "residual" or kept[what].numel() < 20, (words, name)
                torch.testing.assert_close(now, was, rtol=1e-12, atol=1e-18, msg=f"{words} {name} {what}")
