"""Several optimizers, losses and backward passes for an update: N ranks against a plain loop on one device."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.optim import SGD, Adafactor, Adam, Muon
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.parallel.layout import gather_whole, local_tensors, to_local

SAMPLES, BATCH, EPOCHS = 23, 7, 2
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Layers in two parts, for two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Gan(nn.Module):
    """A generator and a discriminator, called by the loss functions."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.discriminator(x)


class Odd(Net):
    """A parameter of 0 dims, one without elements, an integer one, a complex one, a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.offset = nn.Parameter(torch.arange(3, dtype=torch.int32), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.aslant = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        turned = (super().forward(x) * self.scale + self.offset).to(torch.complex128) @ self.turn
        return (turned.real + turned.imag.square()) @ self.aslant


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(SAMPLES) % 3)


def classification(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def penalty(model: nn.Module, batch: Batch) -> Tensor:
    return model(-batch[0]).square().mean()


def halved(model: nn.Module, batch: Batch) -> Tensor:
    return classification(model, batch) / 2


def real_or_fake(model: Any, batch: Batch) -> Tensor:
    fake = model.generator(batch[0].flip(1)).detach()
    return softplus(-model.discriminator(batch[0])).mean() + softplus(model.discriminator(fake)).mean()


def deceives(model: Any, batch: Batch) -> Tensor:
    return softplus(-model.discriminator(model.generator(batch[0].flip(1)))).mean()


@dataclass
class Loop:
    """What a script does, by the words that differ between tutti and plain torch.

    Attributes:
        backward: (loss function, batch, optimizers that are zeroed first) -> loss.
        update: steps one optimizer, or all.
    """

    model: Any
    optimizers: list[Any]
    schedulers: list[Any]
    batches: Callable[[], Iterator[Batch]]
    backward: Callable[..., float]
    update: Callable[..., None]
    seen: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A way to train: what is made, and the body of an epoch."""

    model: Callable[[], nn.Module] = Net
    make: Callable[[Any], tuple[list[Any], list[Any]]]
    epoch: Callable[[Loop, int], None]
    clip: float | None = None
    job: dict[str, Any] = field(default_factory=dict)


def probe(model: Net) -> tuple[list[Any], list[Any]]:
    return [SGD(model.head.parameters(), lr=0.5)], []


def parts(model: Net) -> tuple[list[Any], list[Any]]:
    body, head = Adam(model.body.parameters(), lr=0.02), SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    return [body, head], [StepLR(body, 2, 0.5), LambdaLR(head, lambda step: 1 / (1 + step))]


def players(model: Gan) -> tuple[list[Any], list[Any]]:
    d, g = Adam(model.discriminator.parameters(), lr=0.02), Adam(model.generator.parameters(), lr=0.01)
    return [d, g], [StepLR(g, 3, 0.5), StepLR(d, 2, 0.7)]


def by_shape(model: Net) -> tuple[list[Any], list[Any]]:
    """Muon orthogonalises whole matrices, Adafactor keeps means of their rows and columns."""
    matrices = [p for p in model.body.parameters() if p.dim() == 2]
    vectors = [p for p in model.body.parameters() if p.dim() == 1]
    return [Muon(matrices, lr=0.02), Adafactor(model.head.parameters(), lr=0.05), SGD(vectors, lr=0.1)], []


def overlapping(model: Net) -> tuple[list[Any], list[Any]]:
    return [Adam(model.parameters(), lr=0.02), SGD(model.body.parameters(), lr=0.1, momentum=0.9)], []


def in_groups(model: Odd) -> tuple[list[Any], list[Any]]:
    decayed = [model.scale, model.empty, model.body[0].weight]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": []}, {"params": others, "lr": 0.02}]
    adam = Adam(groups, lr=0.01)
    return [adam], [LambdaLR(adam, [lambda step: 0.9**step, lambda step: 1.0, lambda step: 1 / (1 + step)])]


def one_loss(loop: Loop, epoch: int) -> None:
    for batch in loop.batches():
        loop.seen.append(loop.backward(classification, batch))
        loop.update()


def two_losses(loop: Loop, epoch: int) -> None:
    for batch in loop.batches():
        loop.seen.append(loop.backward(classification, batch))
        loop.seen.append(loop.backward(penalty, batch, zeroed=[]))
        loop.update()


def over_batches(loop: Loop, epoch: int) -> None:
    """Two batches for an update; the last of an epoch waits for the first of the next."""
    for batch in loop.batches():
        waiting = len(loop.seen) % 2
        loop.seen.append(loop.backward(halved, batch, zeroed=[] if waiting else None))
        if waiting:
            loop.update()


def each_in_turn(loop: Loop, epoch: int) -> None:
    """One backward pass, from which two optimizers step one after the other."""
    for batch in loop.batches():
        loop.seen.append(loop.backward(classification, batch))
        for optimizer in loop.optimizers:
            loop.update(optimizer)
            loop.seen.append(optimizer.param_groups[0]["lr"])


def adversaries(loop: Loop, epoch: int) -> None:
    for batch in loop.batches():
        for optimizer, loss in zip(loop.optimizers, (real_or_fake, deceives), strict=True):
            loop.seen.append(loop.backward(loss, batch))
            loop.update(optimizer)
            loop.seen.append(optimizer.param_groups[0]["lr"])


def critic_twice(loop: Loop, epoch: int) -> None:
    d, g = loop.optimizers
    for number, batch in enumerate(loop.batches()):
        loop.seen.append(loop.backward(real_or_fake, batch))
        loop.update(d)
        if number % 2:
            loop.seen.append(loop.backward(deceives, batch))
            loop.update(g)


def patient_generator(loop: Loop, epoch: int) -> None:
    """The generator accumulates over two batches, while the discriminator steps in each."""
    d, g = loop.optimizers
    for batch in loop.batches():
        loop.seen.append(loop.backward(real_or_fake, batch, zeroed=[d]))
        loop.update(d)
        last = len(loop.seen) % 4 == 3
        loop.seen.append(loop.backward(deceives, batch, zeroed=[] if last else [g]))
        if last:
            loop.update(g)


def unfrozen(loop: Loop, epoch: int) -> None:
    loop.model.body.requires_grad_(epoch > 0)
    if epoch == 1:
        loop.optimizers[0].add_param_group({"params": list(loop.model.body.parameters()), "lr": 0.05})
    one_loss(loop, epoch)


HABITS = {
    "unowned": Habit(make=probe, epoch=one_loss, clip=0.1),
    "two losses": Habit(make=parts, epoch=two_losses),
    "over batches": Habit(make=parts, epoch=over_batches, clip=0.2),
    "each in turn": Habit(make=parts, epoch=each_in_turn, clip=0.1),
    "shared": Habit(make=overlapping, epoch=each_in_turn),
    "unfrozen": Habit(make=probe, epoch=unfrozen),
    "whole tensors": Habit(make=by_shape, epoch=one_loss),
    "odd": Habit(model=Odd, make=in_groups, epoch=one_loss),
    "adversaries": Habit(model=Gan, make=players, epoch=adversaries, clip=0.05),
    "patient generator": Habit(model=Gan, make=players, epoch=patient_generator),
    "critic twice": Habit(
        model=Gan,
        make=players,
        epoch=critic_twice,
        job={"lr_rule": tutti.LRRule(scale="none", warmup="gradual", warmup_steps=3, warmup_start_lr=0.001)},
    ),
}

Trained = tuple[list[float], dict[str, Tensor]]


def plain(habit: Habit) -> Trained:
    """One device, with nothing of tutti but the warm-up's formula written out."""
    torch.manual_seed(1)
    model = habit.model().double()
    optimizers, schedulers = habit.make(model)
    x, y = data().tensors
    updates = {id(optimizer): 0 for optimizer in optimizers}
    first = {id(optimizer): optimizer.param_groups[0]["lr"] for optimizer in optimizers}

    def batches() -> Iterator[Batch]:
        yield from zip(x.split(BATCH), y.split(BATCH), strict=True)

    def backward(loss: Any, batch: Batch, zeroed: list[Any] | None = None) -> float:
        if zeroed is None:
            model.zero_grad()
        for optimizer in zeroed or ():
            optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        return float(value.detach())

    def update(optimizer: Any = None) -> None:
        chosen = optimizers if optimizer is None else [optimizer]
        clipped = list(model.parameters()) if optimizer is None else optimizer.param_groups[0]["params"]
        if habit.clip is not None:
            torch.nn.utils.clip_grad_norm_(clipped, habit.clip)
        for one in chosen:
            count = updates[id(one)]
            rate = one.param_groups[0]["lr"]
            if "lr_rule" in habit.job and count < 3:
                target = first[id(optimizers[0])]
                one.param_groups[0]["lr"] = rate * (0.001 + (target - 0.001) * count / 3) / target
            one.step()
            one.param_groups[0]["lr"] = rate
            updates[id(one)] += 1
            for scheduler in schedulers:
                if scheduler.optimizer is one:
                    scheduler.step()

    loop = Loop(model, optimizers, schedulers, batches, backward, update)
    for epoch in range(EPOCHS):
        habit.epoch(loop, epoch)
    return loop.seen, {name: value.clone() for name, value in model.state_dict().items()}


def with_tutti(habit: Habit, fields: dict[str, Any]) -> Trained:
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), **fields)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=BATCH, clip_norm=habit.clip, **habit.job)
    torch.manual_seed(1)
    model = habit.model().double()
    optimizers, schedulers = habit.make(model)
    model, optimizers, loader = job.prepare(model, optimizers, data(), shuffle=False, scheduler=schedulers)

    def backward(loss: Any, batch: Batch, zeroed: list[Any] | None = None) -> float:
        # only the habit in which one optimizer waits while another steps has to say what is zeroed
        explicit = {"zero_grad": zeroed} if habit is HABITS["patient generator"] else {}
        return job.forward_backward(loss, batch, **explicit)

    loop = Loop(model, optimizers, schedulers, lambda: iter(loader), backward, job.update)
    for epoch in job.epochs(EPOCHS):
        habit.epoch(loop, epoch)
    run = job._run()
    tensors = {name: to_local(tensor) for name, tensor in local_tensors(model)}
    return loop.seen, gather_whole(run.parallel.layout, run.parallel.world, tensors)


def train_all(names: list[str], fields: dict[str, Any]) -> dict[str, Trained]:
    results = {}
    for number, name in enumerate(names):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        results[name] = with_tutti(HABITS[name], fields)
    return results


IN_LAYERS = [name for name in HABITS if HABITS[name].model is not Gan]
OF_PARTS = [name for name in HABITS if name != "whole tensors"]
SHARD = {"mesh": {"shard": 2}}
PLANS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "1": (list(HABITS), {"mesh": {"replicate": 1}}),
    "2": (list(HABITS), {"mesh": {"replicate": 2}}),
    "3": (list(HABITS), {"mesh": {"replicate": 3}}),
    "zero1": (list(HABITS), {**SHARD, "sharding": ShardingPlan(level=1)}),
    "zero2": (OF_PARTS, {**SHARD, "sharding": ShardingPlan(level=2)}),
    "zero3": (OF_PARTS, {**SHARD, "sharding": ShardingPlan(level=3)}),
    "split": ([name for name in IN_LAYERS if name in OF_PARTS and name != "odd"], {"mesh": {"split": 2}}),
    "stage": (IN_LAYERS, {"mesh": {"stage": 2}}),
}


QUICK = ("2", "zero3", "stage")
"""Plans of the quick suite."""


@pytest.mark.parametrize("plan", [p if p in QUICK else pytest.param(p, marks=pytest.mark.long) for p in PLANS])
def test_updates_are_those_of_a_plain_loop(plan: str) -> None:
    names, fields = PLANS[plan]
    size = Plan(batch=BatchPlan(global_batch_size=1), mesh=fields["mesh"]).world_size
    expected = {name: plain(HABITS[name]) for name in names}
    for rank, results in enumerate(run_ranks(train_all, size, names, fields)):
        for name, (seen, state) in expected.items():
            words = f"{name}, rank {rank}: {{}}".format
            torch.testing.assert_close(
                torch.tensor(results[name][0]), torch.tensor(seen), rtol=1e-12, atol=1e-14, msg=words
            )
            for key, value in state.items():
                found = results[name][1][key]
                torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-13, msg=words)
