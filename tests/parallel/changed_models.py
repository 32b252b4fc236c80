"""Changes that scripts make on a model after prepare, each beside the same change in a plain loop.

The plain loop is PyTorch on one device: it uses nothing of tutti. Its sources are named where a bug report exists.
"""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.utils.data import TensorDataset

import tutti
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.parallel.layout import gather_whole, local_tensors, to_local

BATCH, STEPS, SAMPLES = 8, 6, 24

Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""(model, optimizer, step): called before each step, in the plain loop and in the script."""


class Block(nn.Module):
    """A residual block with flags that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(12, 12), nn.Dropout(0.0)
        self.skip, self.doubles, self.scale = False, False, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.skip:
            return x
        y = x + self.scale * self.drop(torch.tanh(self.inner(x)))
        return torch.cat([y, x]) if self.doubles else y


class Net(nn.Module):
    """Embedding-free network of blocks; the model's own forward reads attributes too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)
        self.temperature, self.depth, self.calls = 1.0, 4, 0
        self.warms = False
        self.register_buffer("shift", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.act(self.stem(x)) + self.shift
        for block in self.blocks[: self.depth]:
            before, x = x, block(x)
            if len(x) > len(before):
                x = x[: len(before)] + x[len(before) :]
        return self.head(self.norm(x)) / (self.calls if self.warms else self.temperature)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)


class Habit:
    """A change with what it needs around it."""

    def __init__(self, change: Change | None = None, *, before: Callable[[nn.Module], None] | None = None) -> None:
        self.change, self.before = change, before

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.change is not None:
            self.change(model, optimizer, step)


def start(habit: Habit) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    if habit.before is not None:
        habit.before(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a plain loop."""
    torch.set_default_dtype(torch.float64)
    habit = HABITS[name]()
    model, optimizer = start(habit)
    inputs, targets = data()
    losses = []
    for step in range(STEPS):
        habit.apply(model, optimizer, step)
        first = step * BATCH % SAMPLES
        x, y = inputs[first : first + BATCH], targets[first : first + BATCH]
        optimizer.zero_grad()
        loss = habit.loss(model(x.to(next(model.parameters()).dtype)), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {key: value.detach().double() for key, value in model.state_dict().items()}


def trained(name: str, plan_fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses under a plan, and this rank's parameters."""
    torch.set_default_dtype(torch.float64)
    fields = {"batch": {}, **plan_fields}
    batch = BatchPlan(global_batch_size=BATCH, **fields.pop("batch"))
    os.environ["TUTTI_PLAN"] = str(
        serialization.save(Plan(batch=batch, **fields), Path.cwd() / f"p-{os.getpid()}.json")
    )
    habit = HABITS[name]()
    job = tutti.Job(global_batch_size=BATCH)
    model, optimizer = start(habit)

    def unpack(batch: Any) -> Any:
        return (batch[0].to(next(model.parameters()).dtype),), {}, batch[1]

    model, optimizer, loader = job.prepare(
        model, optimizer, TensorDataset(*data()), habit.loss, shuffle=False, unpack=unpack
    )
    losses: list[float] = []
    while len(losses) < STEPS:
        for number in loader:
            habit.apply(model, optimizer, len(losses))
            losses.append(job.step(number))
    run = job._run()
    parts = {key: to_local(value).detach() for key, value in local_tensors(model)}
    return losses, {
        key: value.double() for key, value in gather_whole(run.parallel.layout, run.parallel.world, parts).items()
    }


def outcomes(names: Sequence[str], plans: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """(losses, weights), or what was said instead, for each habit under each plan, one after another."""
    found: dict[tuple[str, str], Any] = {}
    for number, name in enumerate(names):
        for key, fields in plans.items():
            os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}-{key}")
            try:
                found[name, key] = trained(name, fields)
            except Exception as error:
                import traceback

                found[name, key] = f"{type(error).__name__}: {error}" + (
                    traceback.format_exc() if os.environ.get("TB") else ""
                )
    return found


def refusal_of(name: str, plan_fields: dict[str, Any]) -> str:
    """What one habit says under one plan; "trained" if nothing."""
    try:
        trained(name, plan_fields)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def wrapped() -> str:
    """What prepare says to a model in torch's DataParallel."""
    job = tutti.Job(global_batch_size=BATCH)
    model = nn.DataParallel(Net())
    try:
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(*data()), F.cross_entropy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "prepared"


class Gan(nn.Module):
    """Two networks, without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class WholeGan(Gan):
    """The same with a forward, which pipeline stages are found by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.generator(x))


def critic_loss(model: Any, batch: Any) -> torch.Tensor:
    real, fake = model.critic(batch[0]), model.critic(model.generator(batch[0]).detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.softplus(-model.critic(model.generator(batch[0]))).mean()


def _gan_parts(kind: type[Gan]) -> tuple[Gan, list[torch.optim.Optimizer]]:
    torch.manual_seed(1)
    model = kind()
    return model, [torch.optim.Adam(part.parameters(), lr=0.01) for part in (model.critic, model.generator)]


def plain_gan() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop of `gan`."""
    torch.set_default_dtype(torch.float64)
    model, optimizers = _gan_parts(WholeGan)
    inputs, losses = data()[0], []
    for first in range(0, SAMPLES, BATCH):
        for function, optimizer in zip((critic_loss, generator_loss), optimizers, strict=True):
            optimizer.zero_grad()
            loss = function(model, (inputs[first : first + BATCH],))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def gan(plan_fields: dict[str, Any], whole: bool = True) -> Any:
    """Alternating updates of two networks."""
    torch.set_default_dtype(torch.float64)
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), **plan_fields)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=BATCH)
    model, optimizers = _gan_parts(WholeGan if whole else Gan)
    try:
        model, optimizers, loader = job.prepare(
            model, optimizers, TensorDataset(*data()), F.cross_entropy, shuffle=False
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    losses = []
    for batch in loader:
        for function, optimizer in zip((critic_loss, generator_loss), optimizers, strict=True):
            losses.append(job.forward_backward(function, batch))
            job.update(optimizer)
    run = job._run()
    parts = {key: to_local(value).detach() for key, value in local_tensors(model)}
    return losses, gather_whole(run.parallel.layout, run.parallel.world, parts)


def denoised(plan_fields: dict[str, Any]) -> list[float]:
    """Losses of a model that predicts noise, which the loss function draws, as in diffusion."""
    torch.set_default_dtype(torch.float64)
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), **plan_fields)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=BATCH)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = job.prepare(model, optimizer, TensorDataset(*data()), F.cross_entropy, shuffle=False)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        noise, level = torch.randn_like(batch[0]), random.random() + np.random.rand()
        return F.mse_loss(model(batch[0] + level * noise), noise)

    losses = []
    for batch in loader:
        losses.append(job.forward_backward(loss, batch))
        job.update()
    return losses


def at(step: int, change: Callable[[nn.Module], Any]) -> Callable[[], Habit]:
    """A change at one step."""
    return lambda: Habit(lambda model, optimizer, now: change(model) if now == step else None)


class Collected(Habit):
    """A forward hook collects activations for the loss (pytorch/pytorch#35191)."""

    def __init__(self, where: str, *, early: bool) -> None:
        self.seen: list[torch.Tensor] = []
        self.where, self.early = where, early
        super().__init__(None, before=self._register if early else None)

    def _register(self, model: nn.Module) -> None:
        model.get_submodule(self.where).register_forward_hook(lambda module, args, output: self.seen.append(output))

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0 and not self.early:
            self._register(model)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        penalty = sum(tensor.square().mean() for tensor in self.seen)
        self.seen.clear()
        return F.cross_entropy(output, target) + 0.5 * penalty


def freeze(where: str, trained: bool) -> Callable[[nn.Module], Any]:
    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(where):
                parameter.requires_grad_(trained)

    return change


def gradual_unfreezing() -> Habit:
    """Frozen before prepare, unfrozen block by block."""

    def change(model: nn.Module, optimizer: Any, step: int) -> None:
        if step >= 2:
            freeze(f"blocks.{5 - step}", True)(model)

    return Habit(change, before=freeze("blocks", False))


def freezing_and_back() -> Habit:
    def change(model: nn.Module, optimizer: Any, step: int) -> None:
        freeze("stem", step % 2 == 0)(model)
        freeze("blocks.2", step % 3 != 1)(model)

    return Habit(change)


def curriculum() -> Habit:
    def change(model: Any, optimizer: Any, step: int) -> None:
        model.temperature, model.depth = 1.0 + step, 1 + step % 4
        for block in model.blocks:
            block.scale = 1.0 / (1 + step)

    return Habit(change)


def counting() -> Habit:
    """A counter of forwards in the model's own forward, as warm-ups of a temperature use."""

    def before(model: Any) -> None:
        model.warms = True

    return Habit(before=before)


def set_doubles(model: Any) -> None:
    model.blocks[2].doubles = True


def first_half_unfrozen() -> Habit:
    """Everything that the first stage holds is frozen before prepare."""

    def before(model: nn.Module) -> None:
        freeze("stem", False)(model)
        freeze("blocks", False)(model)

    return Habit(lambda model, optimizer, step: freeze("stem", True)(model) if step == 2 else None, before=before)


def set_skip(model: Any) -> None:
    model.blocks[1].skip = model.blocks[3].skip = True


def other_forward(model: Any) -> None:
    block = model.blocks[2]
    block.forward = lambda x: x + 2 * block.inner(x)


def other_forward_of_all(model: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model.stem(x)
        for block in model.blocks:
            x = block(x) + 1
        return model.head(x)

    model.forward = forward


def other_act(model: Any) -> None:
    model.act = nn.Tanh()


def other_head(model: Any) -> None:
    model.head = nn.Linear(12, 3)


def adapter(model: Any) -> None:
    model.blocks[1].adapter = nn.Linear(12, 12)


def frozen_on_rank_0(model: nn.Module) -> None:
    if os.environ["RANK"] == "0":
        freeze("blocks.1", False)(model)


def to_float(model: Any) -> None:
    model.float()


def reassigned(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)


def assigned(model: Any) -> None:
    values = [*model.named_parameters(), *model.named_buffers()]  # a divided model refuses state_dict
    model.load_state_dict({key: value.detach() * 1 for key, value in values}, assign=True, strict=False)


def other_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def parametrized(model: Any) -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    parametrize.register_parametrization(model.blocks[0].inner, "weight", Double())


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.blocks[0].inner, "weight", amount=0.3)


def other_buffer(model: Any) -> None:
    model.shift = torch.full((12,), 0.5)


def new_buffer(model: Any) -> None:
    model.register_buffer("other", torch.ones(2))


def double_output(where: str) -> Callable[[nn.Module], Any]:
    return lambda model: model.get_submodule(where).register_forward_hook(lambda module, args, output: output * 2)


def half_input(where: str) -> Callable[[nn.Module], Any]:
    return lambda model: model.get_submodule(where).register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def half_gradient(where: str) -> Callable[[nn.Module], Any]:
    return lambda model: model.get_submodule(where).register_full_backward_hook(
        lambda module, given, wanted: tuple(None if g is None else g * 0.5 for g in given)
    )


def clamped_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def masked_gradient(model: nn.Module) -> None:
    weight = model.get_parameter("head.weight")
    weight.register_hook(lambda gradient: gradient * (torch.arange(12) % 2))


HABITS: dict[str, Callable[[], Habit]] = {
    "hook collects, unit": lambda: Collected("blocks.1", early=False),
    "hook collects, inside": lambda: Collected("blocks.1.inner", early=False),
    "hook collects, early": lambda: Collected("blocks.1", early=True),
    "hook collects, early inside": lambda: Collected("blocks.2.inner", early=True),
    "hook changes output": at(2, double_output("blocks.2")),
    "hook changes output of all": at(2, double_output("")),
    "hook changes input": at(2, half_input("blocks.0")),
    "hook inside changes output": at(2, double_output("blocks.0.inner")),
    "backward hook": at(2, half_gradient("blocks.2")),
    "backward hook of all": at(2, half_gradient("")),
    "gradients clamped": at(1, clamped_gradients),
    "gradient masked": at(1, masked_gradient),
    "gradual unfreezing": gradual_unfreezing,
    "freezing and back": freezing_and_back,
    "frozen in the second step": at(1, freeze("blocks.1", False)),
    "curriculum": curriculum,
    "skip": at(2, set_skip),
    "another structure": at(2, set_doubles),
    "counter in forward": counting,
    "first half unfrozen": first_half_unfrozen,
    "forward patched": at(2, other_forward),
    "forward of all patched": at(2, other_forward_of_all),
    "activation replaced": at(2, other_act),
    "head replaced": at(2, other_head),
    "layer added": at(2, adapter),
    "frozen on rank 0": at(2, frozen_on_rank_0),
    "to float": at(0, to_float),
    "to float later": at(2, to_float),
    "parameter reassigned": at(2, reassigned),
    "state assigned": at(2, assigned),
    "data assigned": at(2, other_data),
    "parametrized": at(2, parametrized),
    "pruned": at(2, pruned),
    "buffer replaced": at(2, other_buffer),
    "buffer added": at(2, new_buffer),
    "block in evaluation mode": at(1, lambda model: model.blocks[1].eval()),
}

ELSEWHERE = (
    "hook collects, inside",
    "hook collects, early",
    "hook collects, early inside",
    "hook changes output of all",
    "hook changes input",
    "backward hook",
    "backward hook of all",
    "forward of all patched",
    "another structure",
    "counter in forward",
    "first half unfrozen",
    "frozen on rank 0",
    "to float",
    "to float later",
)
"""Habits that are tested under a single plan, or under stages only."""
