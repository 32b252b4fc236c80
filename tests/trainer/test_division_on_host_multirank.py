"""A model that waits in host memory until it is divided: the values of one device, and only its part on the device."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fakegpu
import tutti
from against_one import Subject, Trained, assert_agree, train
from fakegpu import needs_fakegpu
from harness import run_ranks
from parallel import pipeline_subjects, shard_subjects
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.layout import Layout, to_local
from tutti.parallel.mesh import Mesh
from tutti.parallel.parallelize import parallelize, rebind
from tutti.parallel.preview import _fake_world
from tutti.trainer import prepare
from tutti.trainer.deferred_init import materialize, set_values_aside

STEPS = 3
SPLIT = (
    LayoutRule(modules="blocks.*.wide", placement="column"),
    LayoutRule(modules="blocks.*.narrow", placement="row"),
)


def tables() -> Subject:
    """Adagrad has its state before the first step, and a rank holds a part of the table."""
    return Subject(
        model=lambda: nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(16, 3)),
        data=TensorDataset(
            torch.randint(12, (16, 4), generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
        ),
        loss_fn=F.cross_entropy,
        optimizer=torch.optim.Adagrad,
    )


CASES: dict[str, tuple[Callable[[], Subject], dict[str, Any]]] = {
    "level 3": (shard_subjects.tied, {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)}),
    "level 2": (shard_subjects.convolutions, {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)}),
    "stages": (pipeline_subjects.gpt, {"mesh": {"stage": 2}}),
    "split": (shard_subjects.tied, {"mesh": {"split": 2}, "layout": SPLIT}),
    "tables": (tables, {"mesh": {"table": 2}}),
}


def trained(names: list[str], on_host: bool) -> list[Trained]:
    """As on a device of its own memory: the values are set aside while the model is divided."""
    if on_host:
        stays = prepare.stays_on_host
        prepare.stays_on_host = lambda model, plan, device: stays(model, plan, torch.device("cuda"))
    results = []
    for name in names:
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(results)}-{on_host}")
        make, plan = CASES[name]
        results.append(train(make, plan if on_host else {}, STEPS, torch.float64))
    return results


@pytest.mark.parametrize(
    "names", [["level 3", "stages"], pytest.param(["level 2", "split", "tables"], marks=pytest.mark.long)]
)
def test_values_are_those_of_one_device(names: list[str]) -> None:
    one = run_ranks(trained, 1, names, False)[0]
    many = run_ranks(trained, 2, names, True)
    for index, expected in enumerate(one):
        assert_agree(expected, [results[index] for results in many])


def kept() -> list[bool]:
    """Whether the parameters that a rank holds whole are the script's own, and those that it does not hold are gone."""
    stays = prepare.stays_on_host
    prepare.stays_on_host = lambda model, plan, device: stays(model, plan, torch.device("cuda"))
    plan = Plan(batch=BatchPlan(global_batch_size=4), mesh={"stage": 2})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
    job.prepare(model, optimizer, dataset, F.mse_loss)
    held = {id(p): p for p in optimizer.param_groups[0]["params"]}
    return [id(parameter) in held for parameter in before.values()]


def test_whole_parameters_stay_the_script_s() -> None:
    assert sorted(run_ranks(kept, 2)) == [[False, False, True, True], [True, True, False, False]]


def state_on_device() -> tuple[list[str], list[float]]:
    """Adagrad, which makes its state at once, given a model that is moved to the device afterwards."""
    device = fakegpu.load()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    layout = Layout.of(model, Mesh({}, 0), (optimizer,))
    originals = dict(model.named_parameters())
    model.to(device)
    rebind((optimizer,), originals, model, layout)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optimizer.step()
    sums = [optimizer.state[parameter]["sum"] for parameter in model.parameters()]
    return [each.device.type for each in sums], [float(value) for each in sums for value in each.flatten().cpu()]


@needs_fakegpu
def test_state_that_an_optimizer_makes_at_once_follows_the_model_to_the_device() -> None:
    assert run_ranks(state_on_device, 1)[0] == ([fakegpu.NAME] * 2, [1.5] * 3)


def device_peaks(level: int) -> list[tuple[int, int, int]]:
    """For each rank: bytes of its part, bytes of the model, and the most that the device held while it was divided."""
    device = fakegpu.load()
    rules = tuple(LayoutRule(modules=f"*.{layer}", placement=how) for layer, how in ((0, "column"), (2, "row")))
    mesh, sharding = ({"shard": 4}, ShardingPlan(level=level)) if level else ({"split": 4}, ShardingPlan())
    batch = BatchPlan(global_batch_size=8)
    plan = Plan(batch=batch, mesh=mesh, layout=() if level else rules, sharding=sharding)
    results = []
    for rank in range(4):
        results.append(device_peak(plan, rank, device))
        gc.collect()
    return results


def device_peak(plan: Plan, rank: int, device: torch.device) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)) for _ in range(4)))
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _fake_world(rank, 4):
        layout = Layout.of(model, Mesh(plan.mesh, rank))
        torch.ops.fakegpu.reset_peak()
        before = fakegpu.live_nbytes()
        tape, originals = set_values_aside(model)
        with tape:
            shards = parallelize(model, plan, layout, BatchScope())
        materialize(model, tape, device, shards, originals)
        peak = torch.ops.fakegpu.peak_nbytes() - before
        for name, p in model.named_parameters():
            part = to_local(p)
            assert part.device.type == fakegpu.NAME, name
            if not shards.packs():
                assert torch.equal(part.cpu(), layout.shard_of(name).take(whole[name])), name
    nbytes = sum(to_local(p).numel() * p.element_size() for p in model.parameters())
    return nbytes, sum(value.numel() * value.element_size() for value in whole.values()), peak


@needs_fakegpu
@pytest.mark.parametrize("level", [3, pytest.param(0, marks=pytest.mark.long)])
def test_the_device_never_holds_more_than_a_rank_s_part(level: int) -> None:
    for part, whole, peak in run_ranks(device_peaks, 1, level)[0]:
        assert part < 0.3 * whole
        assert part <= peak < 1.2 * part, (part, peak, whole)
