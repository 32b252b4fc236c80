"""After a bad batch, parameters and optimizers go back to the newest checkpoint, as one plain loop does it."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import RankFailed, run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.config.sync_notation import parse_sync

BATCH, STEPS, EVERY = 8, 14, 4
BAD = {"nan": float("nan"), "huge": 1e6}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1)).double()


def data(bad: dict[int, float]) -> TensorDataset:
    torch.manual_seed(4)
    inputs, targets = torch.randn(BATCH * STEPS, 5).double(), torch.randn(BATCH * STEPS, 1).double()
    for batch, value in bad.items():
        targets[batch * BATCH + 3] = value
    return TensorDataset(inputs, targets)


def optimizer_of(network: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def on_one_device(bad: dict[int, float], order: list[list[int]], limit: bool) -> dict[str, Any]:
    """The plain loop. The learning rate, which StepLR computes from the last one, goes on as if nothing was bad."""
    samples, network = data(bad), model()
    optimizer, schedule = optimizer_of(network)
    saved: tuple[Any, Any] | None = None
    for step, numbers in enumerate(order):
        inputs, targets = samples[numbers]
        before = copy.deepcopy(network.state_dict())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(inputs), targets)
        if loss.isfinite() and not (limit and loss > 1e6):
            loss.backward()
            optimizer.step()
            schedule.step()
        else:
            rates = [group["lr"] for group in optimizer.param_groups]
            network.load_state_dict(before if saved is None else saved[0])
            if saved is not None:
                optimizer.load_state_dict(saved[1])
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if (step + 1) % EVERY == 0:
            saved = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
    return dict(network.state_dict())


def train(folder: str, bad: dict[int, float], options: dict[str, Any], plan: str = "") -> dict[str, torch.Tensor]:
    if plan:
        os.environ["TUTTI_PLAN"] = plan
    job = tutti.Job(global_batch_size=BATCH, folder=folder, on_nonfinite="rollback", seed=0, **options)
    network = model()
    optimizer, schedule = optimizer_of(network)
    network, optimizer, loader = job.prepare(
        network, optimizer, data(bad), nn.functional.mse_loss, scheduler=schedule, shuffle=False
    )
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
    return {name: value.clone() for name, value in job.state_dict().items()}


def check(found: dict[str, torch.Tensor], bad: dict[int, float], limit: bool = False) -> None:
    order = [list(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS)]
    for name, value in on_one_device(bad, order, limit).items():
        if "num_batches" not in name:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    ("bad", "options"),
    [({6: BAD["nan"]}, {}), ({2: BAD["nan"], 9: BAD["nan"]}, {}), ({12: BAD["huge"]}, {"loss_limit": 10.0})],
    ids=["once", "before a checkpoint, and after", "a loss far too large"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_goes_back_and_goes_on_with_the_next_batch(
    ranks: int, bad: dict[int, float], options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"checkpoint_every": EVERY, **options}
    found = run_ranks(train, ranks, str(tmp_path / "run"), bad, options)
    check(found[0], bad, "loss_limit" in options)


def test_ranks_with_parts_of_the_parameters_go_back_together(tmp_path: Path) -> None:
    plan = Plan(mesh={"shard": 2}, batch=BatchPlan(global_batch_size=BATCH), sharding=ShardingPlan(level=3))
    file = serialization.save(plan, tmp_path / "plan.json")
    bad = {6: BAD["nan"]}
    found = run_ranks(train, 2, str(tmp_path / "run"), bad, {"checkpoint_every": EVERY}, str(file))
    check(found[0], bad)


def test_steps_that_fail_again_and_again_end_the_run(tmp_path: Path) -> None:
    bad = dict.fromkeys(range(4, 12), BAD["nan"])
    with pytest.raises(RankFailed, match="step 8 failed, although the parameters had been rolled back 3 times"):
        run_ranks(train, 2, str(tmp_path / "run"), bad, {"checkpoint_every": 3})


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    plan = Plan(mesh={"replicate": 2}, batch=BatchPlan(global_batch_size=BATCH), sync=parse_sync("local:2"))
    file = serialization.save(plan, tmp_path / "plan.json")
    with pytest.raises(RankFailed, match="'rollback' needs replicas that are equal"):
        run_ranks(train, 2, str(tmp_path / "run"), {}, {}, str(file))
