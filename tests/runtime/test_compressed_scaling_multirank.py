"""Loss scaling beside codes that keep nothing back: what overflows on one rank is seen by all, and skipped by all."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from harness import run_ranks
from runtime.test_compressed_multirank import case, data
from runtime.test_compressed_plans_multirank import halves
from tutti.runtime.layout import gather_whole, local
from tutti.spec import codec
from tutti.spec.plan import BatchPlan, Plan, Sharding

CODES = ("float64", "float32", "bfloat16", "float16", "bytegrad", "qsgd", "terngrad")

MESHES: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"replicate": 2}},
    "ZeRO-1": {"mesh": {"shard": 2}, "sharding": Sharding(level=1)},
    "ZeRO-2": {"mesh": {"shard": 2}, "sharding": Sharding(level=2)},
}

STEPS, SPOILT = 7, 3
"""In this step a gradient of rank 1 overflows, and in no other."""


@dataclass
class Run:
    """After every step: whole parameters, and the loss scale."""

    states: list[dict[str, torch.Tensor]]
    scales: list[float]


def trained(words: str | None, plan: dict[str, Any]) -> Run:
    fields = {"batch": BatchPlan(global_batch_size=8), "precision": "float16", **case(words, **plan)[1]}
    os.environ["TUTTI_PLAN"] = str(codec.save(Plan(**fields), Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=8)
    model: Any = halves()
    model, _, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), data())
    run, made = job._run(), Run([], [])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        if run.progress.step == SPOILT and run.world.rank == 1:
            output.register_hook(lambda gradient: gradient * 1e6)
        return F.cross_entropy(output, batch[1])

    while len(made.states) < STEPS:
        for batch in loader:
            job.forward_backward(loss, batch)
            job.update()
            parts = {name: local(p).clone() for name, p in model.named_parameters()}
            made.states.append(gather_whole(run.layout, run.world, parts))
            made.scales.append(run.scaler.get_scale())
            if len(made.states) == STEPS:
                break
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
    ranks = run_ranks(all_trained, 2, MESHES[mesh], timeout_s=110)
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
