"""A loss or gradient that is not finite, or a loss above the limit: step, rank, module and samples are named."""

import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.errors import TrainingError
from tutti.trainer.loss_checks import _above_limit
from tutti.trainer.run_state import GuardState

SAMPLES, SIZE, BAD = 32, 8, 21
"""Samples, those of a global batch, and the one that is bad."""


class Root(nn.Module):
    """A square root: NaN below 0; at 0 its gradient is infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


class Net(nn.Module):
    """A root of the second column, within the forward of a module or in one of its own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(1))
        self.root = Root() if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        column = x[:, 1:2] * self.scale
        rooted = column.sqrt() if self.root is None else self.root(column)
        return self.last(self.norm(torch.tanh(self.first(x))) + rooted)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`value`: of the bad sample's second column; `plan`: its fields; `deferred`: as on an accelerator."""

    value: float = -1.0
    own: bool = True
    plan: dict[str, Any] = field(default_factory=dict)
    deferred: bool = False
    weights: bool = False
    loss: bool = False
    dropout: bool = False


CASES = {
    "module": (Case(), "it arises in the forward of module 'root' (Root); samples: 21"),
    "deferred": (Case(deferred=True), "it arises in the forward of module 'root' (Root); samples: 21"),
    "microbatches": (
        Case(plan={"batch": BatchPlan(global_batch_size=SIZE, num_microbatches=2)}),
        "it arises in the forward of module 'root' (Root); samples: 21",
    ),
    "within a forward": (
        Case(own=False),
        "it arises in the forward of the model (Net), before it calls 'last'; samples: 21",
    ),
    "input": (Case(value=torch.nan), "on ranks 0, 1; the model's input has such values already; samples of rank 0: 21"),
    "weights": (
        Case(value=1.0, weights=True),
        "the parameter 'weight' of module 'last' (Linear) is not finite already",
    ),
    "loss": (Case(value=1.0, loss=True), "what modules return is finite, so it arises in the loss function"),
    "ZeRO-3": (
        Case(plan={"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)}),
        "it arises in the forward of module 'root' (Root); samples: 21",
    ),
    "gradient": (Case(value=0.0), "it arises in the backward of module 'root' (Root); samples: 21"),
    "gradient, deferred": (
        Case(value=0.0, deferred=True),
        "it arises in the backward of module 'root' (Root); samples: 21",
    ),
    "gradient, within a forward": (
        Case(value=0.0, own=False),
        "it arises in the backward of the model (Net)",
    ),
    "gradient, ZeRO-3": (
        Case(value=0.0, plan={"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)}),
        "it arises in the backward of module 'root' (Root); samples: 21",
    ),
    "split": (Case(plan={"mesh": {"split": 2}}), "it arises in the forward of module 'root' (Root); samples"),
    "stage": (Case(plan={"mesh": {"stage": 2}}), "it arises in the forward of module 'root' (Root); samples"),
}


def prepared(case: Case, **settings: Any) -> tuple[tutti.Job, nn.Module, Any]:
    world = int(os.environ["WORLD_SIZE"])
    plan = Plan(**{"batch": BatchPlan(global_batch_size=SIZE), "mesh": {"replicate": world}, **case.plan})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(list(Path.cwd().glob('run-*')))}")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(SAMPLES, 6, generator=generator, dtype=torch.float64) + 0.5
    inputs[BAD, 1] = case.value
    torch.manual_seed(0)
    built: Any = Net(case.own).double()
    job = tutti.Job(global_batch_size=SIZE, **settings)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.01, momentum=0.9)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(output, target)
        return value + (value.detach() - 1e9).sqrt() if case.loss else value

    built, _, loader = job.prepare(built, optimizer, TensorDataset(inputs, torch.arange(SAMPLES) % 3), loss)
    job._run().loop.device_decides = case.deferred
    return job, built, loader


def stopped(names: list[str]) -> dict[str, str]:
    """The sentence of each case; and that parameters, buffers and generators are as the sentence says."""
    found = {}
    for name in names:
        case = CASES[name][0]
        job, built, loader = prepared(case)
        if case.weights:
            with torch.no_grad():
                built.last.weight[0, 0] = torch.inf
        state: dict[str, torch.Tensor] = {}
        try:
            for batch in itertools.chain(loader, loader):
                if not case.plan:
                    state = {key: value.clone() for key, value in built.state_dict().items()}
                job.step(batch)
            job._run().loop.accumulation.clear()
            found[name] = "nothing was found"
        except tutti.TuttiError as error:
            found[name] = str(error)
            if not case.deferred and not case.plan:
                moved = [key for key, value in built.state_dict().items() if not torch.equal(value, state[key])]
                assert not moved, (name, moved)
    return found


def test_step_rank_module_and_samples_are_named() -> None:
    ranks = run_ranks(stopped, 2, list(CASES))
    for name, (_, words) in CASES.items():
        said = ranks[0][name]
        assert words in said, (name, said)
        assert ranks[1][name] == said
        assert said.startswith("the loss is finite, but the gradient" if "gradient" in name else "the loss is NaN"), (
            said
        )
        if not {"split", "stage"} & set(CASES[name][0].plan.get("mesh", {})):
            assert " on rank" in said


def fails_again() -> str:
    """What a rank says if rank 1 cannot compute the batch again while the other waits for its BatchNorm."""
    job, built, loader = prepared(Case())

    def only_to_train(module: nn.Module, args: Any) -> None:
        if job.rank == 1 and not torch.is_grad_enabled():
            raise ValueError("called twice")

    built.first.register_forward_pre_hook(only_to_train)
    try:
        for batch in loader:
            job.step(batch)
    except Exception as error:
        return str(error)
    return "nothing was found"


def test_a_rank_that_cannot_compute_the_batch_again_leaves_no_other_waiting() -> None:
    first, second = run_ranks(fails_again, 2)
    assert "rank 1 failed when the batch was computed again" in second, second
    assert "ValueError: called twice" in second
    assert first != "nothing was found", first


@dataclass
class Spike:
    """A training whose targets are now and then very far away: parameters at the end, losses, rows of skipped steps."""

    parameters: dict[str, torch.Tensor]
    losses: list[float]
    rows: list[dict[str, Any]]
    said: str = ""


SPIKES, EPOCHS = (5, 20), 8


def targets() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    values = inputs.sum(dim=1, keepdim=True)
    values[list(SPIKES)] += 1e3
    return inputs, values


def line() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def spiky(stop_after: int | None, settings: dict[str, Any]) -> Spike:
    """Train with good targets for the first three epochs, so that losses are known, then with spikes."""
    world = int(os.environ["WORLD_SIZE"])
    plan = Plan(batch=BatchPlan(global_batch_size=4), mesh={"replicate": world})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run")
    job, built = tutti.Job(global_batch_size=4, keep_checkpoints=0, **settings), line()
    inputs, values = targets()
    spikes, losses, said = values.clone(), [], ""
    values[list(SPIKES)] -= 1e3
    optimizer = torch.optim.SGD(built.parameters(), lr=0.05, momentum=0.9)
    prepared = job.prepare(built, optimizer, TensorDataset(inputs, values), nn.MSELoss(), shuffle=False)
    run = job._run()
    try:
        for epoch in job.epochs(EPOCHS):
            if epoch >= 3:
                values.copy_(spikes)
            for batch in prepared[2]:
                losses.append(job.step(batch))
                if job.global_step == stop_after:
                    job.save()
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        job = None
    except tutti.TuttiError as error:
        said = str(error)
    run.output.log.write()
    rows = [json.loads(row) for row in run.output.folder.metrics.read_text().splitlines()]
    skipped = [row for row in rows if row["kind"] == "skipped"]
    return Spike({key: value.clone() for key, value in built.state_dict().items()}, losses, skipped, said)


def without_spikes() -> dict[str, torch.Tensor]:
    """What one device computes if it leaves out the batches that have the spikes."""
    model, (inputs, values) = line(), targets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, 4):
            batch = range(start, start + 4)
            target = values[start : start + 4].clone()
            if set(batch) & set(SPIKES):
                if epoch >= 3:
                    continue
                target -= 1e3 * torch.tensor([[float(sample in SPIKES)] for sample in batch], dtype=torch.float64)
            optimizer.zero_grad()
            F.mse_loss(model(inputs[start : start + 4]), target).backward()
            optimizer.step()
    return model.state_dict()


def test_a_loss_above_the_limit_is_skipped_as_if_its_batch_were_not_there() -> None:
    limit = {"on_nonfinite": "skip", "loss_limit": 50.0}
    expected = without_spikes()
    first, second = run_ranks(spiky, 2, None, limit)
    for name, value in expected.items():
        assert torch.allclose(first.parameters[name], value, rtol=0, atol=1e-12), name
        assert torch.equal(first.parameters[name], second.parameters[name])
    assert [row["step"] for row in first.rows] == [8 * e + b for e in range(3, EPOCHS) for b in (2, 6)]
    sentence = first.rows[0]["sentence"]
    assert "above 50 times the median of the 25 before it" in sentence
    assert "it is largest on rank 0 (" in sentence  # samples 4 and 5 of 4 to 7
    assert sentence.endswith("samples of rank 0: 4, 5")
    assert first.rows[-1]["sentence"].endswith("; samples of the batch: 20, 21, 22, 23")  # not computed again


def test_a_loss_above_the_limit_stops_the_run() -> None:
    (stopped,) = run_ranks(spiky, 1, None, {"loss_limit": 50.0})
    assert stopped.said.startswith("the loss at step 26 is ")
    assert "parameters are as they were after step 25" in stopped.said


def test_each_loss_of_a_step_is_counted_by_itself() -> None:
    guard, losses = GuardState(), {str(call): [1.0] * 10 for call in range(2)}
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(loss_limit=50.0),
        state=SimpleNamespace(progress=SimpleNamespace(recent_losses=losses)),
        loop=SimpleNamespace(guard=guard, statistics=SimpleNamespace(restore=lambda: None)),
    )

    def step(number: int) -> None:
        for call, loss in enumerate((900.0, 1.0)):
            message: Any = SimpleNamespace(computed=None, place=SimpleNamespace(call=call, step=number))
            assert bool(_above_limit(run, message, loss)) == (loss > 1)

    for number in range(1, 21):
        step(number)
    with pytest.raises(TrainingError, match="above loss_limit in 21 steps in a row"):
        step(21)


def test_a_resumed_run_judges_losses_as_if_it_had_not_been_stopped() -> None:
    """The losses before the checkpoint count: alone, those after it would be too few to judge by."""
    limit = {"on_nonfinite": "skip", "loss_limit": 50.0}
    whole, resumed = run_ranks(resumed_spiky, 1, limit)[0]
    assert (len(whole.losses), len(resumed.losses)) == (64, 39)
    assert all(torch.equal(value, resumed.parameters[name]) for name, value in whole.parameters.items())


def resumed_spiky(limit: dict[str, Any]) -> tuple[Spike, Spike]:
    whole = spiky(None, limit)
    spiky(25, limit)
    return whole, spiky(None, {**limit, "resume": "run"})
