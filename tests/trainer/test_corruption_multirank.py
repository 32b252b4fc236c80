"""A bit that is flipped on one replica is found within as many steps as lie between two comparisons."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.config.sync_notation import parse_sync
from tutti.parallel.layout import to_local
from tutti.trainer.hash_schedule import LARGEST_PART, HashSchedule, HashTimes

FLIPPED, STEPS = 14, 60
"""The step after which a bit of the last rank is flipped, and all steps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`flips`: what is flipped on the last rank after step `flipped`, or "rounding"; `plan`: its fields."""

    flips: str = "weight"
    plan: dict[str, Any] = field(default_factory=dict)
    save_at: int | None = None
    flipped: int = FLIPPED


@dataclass
class Seen:
    """How a training ended: the sentence, the last step, the steps between comparisons, and the checkpoints."""

    said: str
    step: int
    every: int
    good_step: int | None
    checkpoints: list[str]
    warned: list[str]


def flip(tensor: torch.Tensor) -> None:
    """Flip a low bit of the mantissa of a value: no norm shows it, and rounding does not absorb it."""
    with torch.no_grad():
        to_local(tensor).view(torch.int64).reshape(-1)[3] ^= 1 << 12


def round_otherwise(tensor: torch.Tensor) -> None:
    """Change the last bit of each value, as other devices would."""
    with torch.no_grad():
        to_local(tensor).view(torch.int64).bitwise_xor_(1)


def trained(case: Case, number: int) -> Seen:
    size = int(os.environ["WORLD_SIZE"])
    plan = Plan(**{"batch": BatchPlan(global_batch_size=12), "mesh": {"replicate": size}, **case.plan})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    job = tutti.Job(global_batch_size=12)
    data = TensorDataset(torch.randn(12 * STEPS, 6, dtype=torch.float64), torch.arange(12 * STEPS) % 3)
    model, optimizer, loader = job.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.01), data, nn.functional.cross_entropy
    )
    run, said = job._run(), ""
    try:
        for batch in loader:
            job.step(batch)
            if job.global_step >= 10:  # else as often as times on this machine allow
                run.loop.guard.hashes.following = -(-job.global_step // 10) * 10
            if job.global_step == case.flipped and job.rank == size - 1:
                if case.flips == "rounding":
                    for tensor in model.parameters():
                        round_otherwise(tensor)
                else:
                    flip(model[2].weight if case.flips == "weight" else optimizer.state[model[0].bias]["exp_avg"])
            if job.global_step == case.save_at:
                job.save()
    except tutti.TuttiError as error:
        said = str(error)
    if run.state.consistency.diverged:
        run.state.consistency.finish(run.parallel)
    hashes = run.loop.guard.hashes
    names = sorted(path.name for path in run.output.folder.checkpoints.glob("*")) if case.save_at else []
    return Seen(said, job.global_step, hashes.every, hashes.good_step, names, sorted(run.loop.guard.said))


def all_trained(cases: list[Case]) -> list[Seen]:
    return [trained(case, number) for number, case in enumerate(cases)]


def test_the_replica_that_differs_from_most_is_named() -> None:
    cases = [
        Case(),
        Case(flips="state", save_at=FLIPPED),  # later it is in the weights, too
        Case(save_at=FLIPPED + 1),
        # An update of ZeRO-1 would write the values of their owners over it.
        Case(plan={"mesh": {"shard": 3}, "sharding": ShardingPlan(level=1)}, save_at=FLIPPED),
        Case(plan={"sync": parse_sync("local:4")}),
        Case(flips="rounding"),
        Case(flipped=2),
        Case(flips="rounding", flipped=2),
    ]
    ranks = run_ranks(all_trained, 3, cases)
    assert all([seen.said for seen in rank] == [seen.said for seen in ranks[0]] for rank in ranks)
    weight, state, saved, sharded, diverged, rounded, early, always = ranks[0]
    for seen in (weight, sharded):
        assert (
            "the weights of '2.weight' on rank 2 differ from what ranks 0, 1 have, which agree (1 of 24 v" in seen.said
        )
    assert "the state 'exp_avg' of '0.bias' in Adam on rank 2 differs from what ranks 0, 1 have" in state.said
    assert "the host of rank 2 may be faulty" in weight.said
    assert (weight.good_step, weight.step) == (10, 20)
    assert weight.said.startswith("silent corruption: after step 20, ")
    assert "all bits were equal after step 10" in weight.said
    assert saved.said.startswith(f"silent corruption: after step {FLIPPED + 1}, ")
    assert saved.checkpoints + sharded.checkpoints == [], "what is damaged is not saved"
    assert (diverged.said, diverged.step) == ("", STEPS), "replicas differ as they should"
    assert (rounded.said, rounded.step, rounded.good_step) == ("", STEPS, 10)
    assert [each for each in rounded.warned if "differ by rounding since step 10, first in the weights of '" in each]
    assert "the weights of '2.weight' on rank 2 differ from what ranks 0, 1 have, which agree (1 of 24 v" in early.said
    assert "; all other bits are equal. Memory or processor of the host of rank 2 may be faulty" in early.said
    assert (early.good_step, early.step) == (None, 3)
    assert (always.said, always.step, always.good_step) == ("", STEPS, None)
    assert [each for each in always.warned if "differ by rounding from the beginning, first in the weig" in each]


def test_of_two_replicas_none_is_blamed() -> None:
    first, second = run_ranks(all_trained, 2, [Case()])
    assert first[0].said == second[0].said
    assert (
        "the weights of '2.weight' differ between ranks 0 and 1, and which of them is right cannot be" in first[0].said
    )


@pytest.mark.parametrize(("reading_s", "step_s"), [(1e-4, 2e-3), (12e-3, 70e-3), (0.2, 1e-3), (1e-6, 1.0)])
def test_comparisons_take_at_most_their_part_of_the_time(reading_s: float, step_s: float) -> None:
    schedule = HashSchedule()
    times = [HashTimes(reading_s=reading_s * part, exchange_s=5e-4 / part, step_s=step_s / part) for part in (0.5, 1)]
    schedule.choose(3, times)
    assert schedule.every >= 10
    assert (reading_s + 5e-4) / (schedule.every * step_s) <= LARGEST_PART * (1 + 1e-9)
    assert schedule.following == 3 + schedule.every
