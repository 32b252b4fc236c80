"""Scripts that the guard watches, mistakes and their correct twins; each is trained by `said`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

import tutti
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.trainer.metrics import read_rows

Loss = Callable[[Any, Any], Any]

SAMPLES = 64


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, x.sum(1) + 1)


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 1), nn.Flatten(0))


class Script:
    """A training of a few steps. What is not said is as in a correct program."""

    def __init__(
        self,
        model: Callable[[], nn.Module] = net,
        loss: Loss = F.mse_loss,
        change: Callable[[int, int, nn.Module, torch.optim.Optimizer], None] | None = None,
        dataset: Callable[[int], Dataset[Any]] = lambda rank: data(),
        sampler: Callable[[int], Any] | None = None,
        evaluates: bool = False,
        level: Any = 1,
        between: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
        epoch: bool = False,
        loader: Callable[[int], dict[str, Any]] = lambda rank: {},
        settings: Callable[[int], dict[str, Any]] = lambda rank: {},
        optimizer: Callable[[nn.Module], Any] = lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        **mesh: int,
    ) -> None:
        self.model, self.loss, self.change, self.dataset = model, loss, change, dataset
        self.sampler, self.evaluates, self.level, self.mesh = sampler, evaluates, level, mesh
        self.between, self.epoch, self.loader = between, epoch, loader
        self.settings, self.optimizer = settings, optimizer


class Counts(nn.Module):
    """Counts its calls in Python and in a buffer, keeps what it saw, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.count += 1
        return x * (1 + 0.1 * len(self.seen))


class AlwaysDrops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)


class Centred(nn.Module):
    """Statistics of the batch by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def this_rank() -> int:
    return int(os.environ["RANK"])


class Picky(nn.Module):
    """Fails on one rank for fewer samples than a batch has there, as code does that needs a kind of sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if this_rank() == 1 and len(x) < 5:
            raise ValueError("too few samples")
        return x


def blocks() -> list[nn.Module]:
    """Layers whose parameters sharding gathers one after another."""
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]


class OfRank(nn.Module):
    """Computes with the rank; what it counts by itself is no difference of the loss."""

    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.matters, self.own = matters, torch.Generator().manual_seed(this_rank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.matters * this_rank())


class OwnNoise(nn.Module):
    """Draws from a generator of its own, which ranks may seed as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(this_rank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.own)


class Overflows(nn.Module):
    """Is not finite in evaluation, as a model that has diverged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x / 0.0 * 0.0


class Scaled(nn.Module):
    """Multiplies with one buffer, and holds another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("note", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


_calls = 0


class CountingLoss:
    """Counts its calls by an attribute, a list, a tensor, a global and a closure, and computes with them."""

    def __init__(self) -> None:
        self.calls, self.seen, self.count = 0, [], torch.zeros(())
        self.draws = torch.Generator().manual_seed(7)
        self.inner = counting_closure()
        self.drawn: list[float] = []

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        global _calls
        _calls += 1
        self.calls += 1
        self.seen.append(len(output))
        self.count += 1
        self.drawn.append(float(torch.rand((), generator=self.draws)))
        return (output - target).square().mean() * (1 + 0.1 * self.calls + 0.01 * self.inner())


def counting_closure() -> Callable[[], int]:
    calls = 0

    def called() -> int:
        nonlocal calls
        calls += 1
        return calls

    return called


def of_rank(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) * (1 + 0.01 * this_rank())


def token_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = target > 0.5
    return ((output - target).square() * mask).sum() / mask.sum()


def counted_token_mean(output: torch.Tensor, target: torch.Tensor) -> Any:
    mask = target > 0.5
    return tutti.Weighted(((output - target).square() * mask).sum(), mask.sum())


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, None] * target[None], torch.arange(len(output)))


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def of_chosen_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A second mean over rows that a half of rank 0's samples has none of."""
    return F.mse_loss(output, target) + F.mse_loss(output[target > 3.153], target[target > 3.153])


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target - torch.randn_like(target)).square().mean()


def noisy_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target - 0.1 * torch.randn_like(target)).square().sum()


def column(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[:, None], target)


def column_by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, None] - target).square().mean()


def rate_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        optimizer.param_groups[0]["lr"] *= 1 + rank


def decay_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.01 * rank


def rate_of_all(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9


def weights_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1 and rank == 1:
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)


def betas_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, 0.99 if rank else 0.999)


def weights_of_all(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)


def evaluation_mode(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        model.eval()


def mode_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        model[2].eval()


def frozen_norm(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].eval()


def scale_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].scale.fill_(1.0 + 0.1 * rank * step)


def scale_of_all(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].scale.fill_(1.0 + 0.1 * step)
    model[2].note.fill_(rank)


def state_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1 and rank == 1:
        optimizer.state.clear()


def state_of_all(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        optimizer.state.clear()


def hook_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1 and step == 0:
        model[0].register_forward_hook(lambda module, args, output: output * 1.1)


def logging_on_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        if step == 0:
            model[0].register_forward_hook(lambda module, args, output: _logged.append(float(output.mean())))
        assert len(_logged) == step


_logged: list[float] = []


def late_weights_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step >= 2:
        weights_of_rank(rank, 1, model, optimizer)


def late_rate_of_rank(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 3:
        rate_of_rank(rank, 1, model, optimizer)


def gradient_of_rank(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.grad = model[0].weight.grad * (1 + rank)


def gradient_missing(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        model[0].weight.grad = None


def gradient_of_all(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.grad = model[0].weight.grad * 0.5


def no_gradient(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=rank < 2)


class LastOfRank(Dataset[Any]):
    """Only its last sample differs between ranks."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = data()[index]
        return x + this_rank() * (index == SAMPLES - 1), y


class Noisy(Dataset[Any]):
    """Draws, from torch's generator or from its own."""

    def __init__(self, own: bool) -> None:
        self.generator = torch.Generator().manual_seed(this_rank()) if own else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = data()[index]
        return x + 0.01 * torch.randn(6, generator=self.generator), y


class Stream(IterableDataset[Any]):
    """All samples on every rank, or those that a rank thinks are its own."""

    def __init__(self, divides: bool) -> None:
        self.divides = divides

    def __iter__(self) -> Any:
        samples = [data()[index] for index in range(SAMPLES)]
        return iter(samples[this_rank() :: 2] if self.divides else samples)


def kind_of_rank(model: nn.Module) -> torch.optim.Optimizer:
    return (torch.optim.SGD if this_rank() else torch.optim.AdamW)(model.parameters(), lr=0.1)


def decay_groups(*splits: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Two groups, of which the first has so many parameters, by rank."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first = splits[this_rank() % len(splits)]
        parameters = [*model.parameters()]
        return torch.optim.SGD([{"params": parameters[:first]}, {"params": parameters[first:]}], lr=0.1)

    return optimizer


def collate_of_rank(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x + this_rank(), y


def collate_with_noise(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x + 0.01 * torch.randn_like(x), y


class OrderOfRank:
    """Draws from a generator that the run cannot seed."""

    def __init__(self, seed: int, samples: int = SAMPLES) -> None:
        self.order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist()[:samples]

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def shuffled(rank: int) -> TensorDataset:
    x, y = data().tensors
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(rank))
    return TensorDataset(x[order], y[order])


MISTAKES: dict[str, tuple[Script, str]] = {
    "token mean": (Script(loss=token_mean), "warning: .*not a mean over samples: on rank 0.*tutti.Weighted"),
    "token mean, counted calls": (Script(lambda: net(Counts()), token_mean), "warning: .*not a mean over samples"),
    "negatives": (Script(loss=contrastive), "warning: .*not a mean over samples"),
    "negatives, ZeRO-3": (Script(loss=contrastive, shard=2, level=3), "warning: .*not a mean over samples"),
    "sum, ZeRO-2": (Script(loss=summed, shard=2, level=2), "warning: .*not a mean over samples"),
    "chosen rows": (
        Script(loss=of_chosen_rows),
        "warning: .*not a mean over samples: on rank .* the loss of half of them is not finite",
    ),
    "sum": (Script(loss=summed), "warning: .*not a mean over samples"),
    "sum of draws": (Script(loss=noisy_sum), "warning: .*not a mean over samples"),
    "statistics": (Script(lambda: net(Centred())), "warning: .*not a mean over samples"),
    "broadcast by hand": (Script(loss=column_by_hand), "warning: .*not a mean over samples"),
    "broadcast": (Script(loss=column), r"ScriptError: F.mse_loss .*\(8, 1\).*\(8,\).*view_as"),
    "broadcast of counts": (
        Script(loss=lambda output, target: F.poisson_nll_loss(output[:, None], target)),
        r"ScriptError: F.poisson_nll_loss .*\(8, 1\).*\(8,\).*view_as",
    ),
    "rate": (Script(change=rate_of_rank), "RankMismatchError: step 2: 'lr' of group 0 of AdamW is 0.1 on rank 0 and 0"),
    "decay": (Script(change=decay_of_rank), "RankMismatchError: step 1: 'weight_decay' of group 0 of AdamW"),
    "betas": (
        Script(change=betas_of_rank),
        r"RankMismatchError: step 1: 'betas' of group 0 of AdamW is \(0.9, 0.9",
    ),
    "weights": (Script(change=weights_of_rank), r"RankMismatchError: step 2: the weights of '0.weight' differ"),
    "evaluation mode": (Script(change=evaluation_mode), "warning: Sequential is in evaluation mode in training steps"),
    "mode": (
        Script(lambda: net(nn.Dropout(0.5)), change=mode_of_rank),
        "RankMismatchError: step 1: module '2' is in training mode on rank 0 and in evaluation mode on rank 1",
    ),
    "order": (Script(sampler=OrderOfRank), "RankMismatchError: step 1: the order of samples"),
    "epoch": (
        Script(sampler=lambda rank: OrderOfRank(3, SAMPLES - rank)),
        "RankMismatchError: step 1: the order of samples in the epoch differs",
    ),
    "first sample": (
        Script(dataset=shuffled),
        "RankMismatchError: sample 0 of the data set has other values on rank 1 than on rank 0",
    ),
    "values": (
        Script(dataset=shuffled, split=2),
        "RankMismatchError: step 1: ranks 0 and 1 compute the same samples together, but have read other values",
    ),
    "dropout": (Script(lambda: net(AlwaysDrops()), evaluates=True), "warning: module .* calls dropout with dropout on"),
    "loss of rank": (
        Script(loss=of_rank),
        "warning: the loss function depends on the rank: the same 4 samples .* on rank 0 and .* on rank 1",
    ),
    "forward of rank": (
        Script(lambda: net(OfRank(True))),
        r"warning: the forward of module '2' \(OfRank\) depends on the rank",
    ),
    "hook": (
        Script(change=hook_of_rank),
        "warning: the forward of Sequential, before it calls '1', depends on the rank: .* "
        r"\(hooks of the script differ between rank 0 and rank 1\)",
    ),
    "buffer": (
        Script(lambda: net(Scaled()), change=scale_of_rank),
        r"ScriptError: module '2' \(Scaled\) has other values of 'scale' on rank 1 than on rank 0",
    ),
    "state": (
        Script(change=state_of_rank),
        "RankMismatchError: step 2: the state 'step' of '0.weight' in AdamW differs between the replicas on ranks 0",
    ),
    "gradient": (
        Script(between=gradient_of_rank),
        "RankMismatchError: step 1: the gradient of '0.weight' differs between the replicas on ranks 0 and 1",
    ),
    "gradient missing": (
        Script(between=gradient_missing),
        "RankMismatchError: step 1: the gradient of '0.weight' differs between the replicas on ranks 0 and 1",
    ),
    "no gradient": (Script(between=no_gradient), "warning: AdamW updates nothing: every gradient is zero or None"),
    "last sample": (
        Script(dataset=lambda rank: LastOfRank()),
        "RankMismatchError: sample 63 of the data set has other values on rank 1 than on rank 0",
    ),
    "sample of a worker": (
        Script(dataset=lambda rank: LastOfRank(), loader=lambda rank: {"num_workers": 1}),
        "RankMismatchError: sample 63 of the data set has other values on rank 1 than on rank 0",
    ),
    "collate": (
        Script(loader=lambda rank: {"collate_fn": collate_of_rank}),
        "RankMismatchError: collate_fn makes other values of the same samples on rank 1 than on rank 0",
    ),
    "stream": (
        Script(dataset=lambda rank: Stream(True)),
        "RankMismatchError: step 1: the stream gives other samples on rank 1 than on rank 0",
    ),
    "statistics in evaluation": (
        Script(lambda: net(nn.BatchNorm1d(8, track_running_stats=False)), evaluates=True),
        r"warning: the output of module '2' \(BatchNorm1d\) for a sample depends on the other samples of the batch",
    ),
    "optimizer": (
        Script(optimizer=kind_of_rank),
        "RankMismatchError: step 1: the class of optimizer 0 is AdamW on rank 0 and SGD on rank 1",
    ),
    "groups": (
        Script(optimizer=decay_groups(2, 3)),
        r"RankMismatchError: step 1: 'params' of group 0 of SGD is 2 parameters \(....\) on rank 0 and 3 parameters",
    ),
    "clipping": (
        Script(settings=lambda rank: {"clip_norm": 1.0 + rank}),
        "RankMismatchError: step 1: 'clip_norm' of the Job is 1.0 on rank 0 and 2.0 on rank 1",
    ),
    "weights in evaluation": (
        Script(change=late_weights_of_rank, evaluates=True),
        "RankMismatchError: evaluation after step 3: the weights of '0.weight' differ between the replicas on ranks 0",
    ),
    "weights at the end": (
        Script(change=late_weights_of_rank, epoch=True, dataset=lambda rank: Subset(data(), range(48))),
        "RankMismatchError: the end of training: the weights of '0.weight' differ between the replicas on ranks 0",
    ),
    "rate at the end": (
        Script(change=late_rate_of_rank, epoch=True),
        r"RankMismatchError: after step \d+: 'lr' of group 0 of AdamW is 0.1 on rank 0 and 0.2 on rank 1",
    ),
}

CORRECT: dict[str, Script] = {
    "plain": Script(evaluates=True),
    "weighted": Script(loss=counted_token_mean),
    "noise": Script(loss=noisy),
    "dropout": Script(lambda: net(nn.Dropout(0.5)), evaluates=True),
    "not finite in evaluation": Script(lambda: net(Overflows()), evaluates=True),
    "batch norm": Script(lambda: net(nn.BatchNorm1d(8)), evaluates=True),
    "frozen norm": Script(lambda: net(nn.BatchNorm1d(8)), change=frozen_norm),
    "counter": Script(lambda: net(Counts()), evaluates=True),
    "schedule": Script(change=rate_of_all),
    "weights": Script(change=weights_of_all),
    "sampler": Script(sampler=lambda rank: OrderOfRank(3)),
    "summed by torch": Script(loss=partial(F.mse_loss, reduction="sum")),
    "unneeded rank": Script(lambda: net(OfRank(False))),
    "noise of its own": Script(lambda: net(OwnNoise())),
    "logging on a rank": Script(change=logging_on_rank),
    "counting loss": Script(loss=CountingLoss()),
    "buffer": Script(lambda: net(Scaled()), change=scale_of_all),
    "state": Script(change=state_of_all),
    "gradient": Script(between=gradient_of_all),
    "noisy samples": Script(dataset=lambda rank: Noisy(own=False)),
    "samples with noise of their own": Script(dataset=lambda rank: Noisy(own=True)),
    "samples of a worker": Script(dataset=lambda rank: Noisy(own=False), loader=lambda rank: {"num_workers": 1}),
    "collate with noise": Script(loader=lambda rank: {"collate_fn": collate_with_noise}),
    "epoch": Script(epoch=True, evaluates=True),
    "stream": Script(dataset=lambda rank: Stream(False)),
    "stream of a worker": Script(dataset=lambda rank: Stream(False), loader=lambda rank: {"num_workers": 1}),
    "groups": Script(optimizer=decay_groups(2), settings=lambda rank: {"clip_norm": 1.0}, evaluates=True),
    "shard": Script(shard=2, epoch=True),
    "shard, level 3": Script(shard=2, level=3, epoch=True),
    "split": Script(split=2, epoch=True),
    "stage": Script(stage=2, epoch=True),
    "fails on fewer samples": Script(lambda: net(Picky())),
    "fails on fewer samples, ZeRO-3 by messages": Script(lambda: net(Picky(), *blocks()), shard=2, level=3),
    "negatives of the whole batch, split": Script(loss=contrastive, split=2),
    "negatives of the whole batch, stage": Script(loss=contrastive, stage=2),
}


def said(name: str, script: Script, ranks: int, lines: set[str] | None = None) -> tuple[list[str], list[Any]]:
    """Train, and return what was found and what the counters counted; add to `lines` what the terminal showed."""
    folder = Path.cwd() / f"guard-{os.getpid()}-{name.replace(' ', '-')}"
    plan = Plan(
        batch=BatchPlan(global_batch_size=8 * ranks),
        mesh=script.mesh or {"replicate": ranks},
        sharding=ShardingPlan(level=script.level),
    )
    serialization.save(plan, file := Path(f"{folder}.json"))
    memory = "off" if name.endswith("by messages") else "on"  # as between hosts, all ranks take part in each gather
    os.environ.update(TUTTI_PLAN=str(file), TUTTI_RUN_FOLDER=str(folder), TUTTI_SHARED_MEMORY=memory)
    job = tutti.Job(global_batch_size=8 * ranks, **script.settings(this_rank()))
    model = script.model()
    optimizer = script.optimizer(model)
    rank = job.rank
    arguments = script.loader(rank) | (
        {"shuffle": False} if script.sampler is None else {"sampler": script.sampler(rank)}
    )
    found = []
    try:
        model, optimizer, loader = job.prepare(model, optimizer, script.dataset(rank), script.loss, **arguments)
        for _ in job.epochs(1) if script.epoch else range(1):
            for step, batch in enumerate(loader):
                if script.change is not None:
                    script.change(rank, step, model, optimizer)
                if script.between is None:
                    job.step(batch)
                else:
                    job.forward_backward(lambda model, batch: script.loss(model(batch[0]), batch[1]), batch)
                    script.between(rank, model, optimizer)
                    job.update()
                if step == 2 and not script.epoch:
                    break
        if script.evaluates:
            job.evaluate(data())
    except tutti.TuttiError as error:
        found.append(f"{type(error).__name__}: {error}")
    if lines is not None and job._prepared is not None:
        lines |= job._prepared.output.screen._said
    counted = [(m.calls, len(m.seen), float(m.count)) for m in model.modules() if isinstance(m, Counts)]
    if isinstance(one := script.loss, CountingLoss):
        counted.append((one.calls, len(one.seen), float(one.count), _calls, one.inner(), one.drawn))
    metrics = folder / "metrics.jsonl"
    rows = read_rows(metrics) if rank == 0 else ()
    found += [f"warning: {row['sentence']}" for row in rows if row["kind"] == "guard"]
    return found, counted
