"""State that forward writes from its batch: as on one device, or refused by the module's name before the update.

The kinds are those of public reports: codebooks by moving averages (pytorch#63916), max_norm (pytorch#37246), running
statistics, data-dependent initial values, queues, counters.
"""

import functools
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from harness import RankFailed, preload, run_ranks
from trainer.plain_loop import Trained, assert_same, by_plan, plain
from tutti.config.partitioning import cut

preload("trainer.plain_loop")


class Codebook(nn.Module):
    """Vectors replaced by the nearest of a codebook, which follows them by moving averages; a commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        book = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.register_buffer("book", book)
        self.register_buffer("size", torch.ones(4))
        self.register_buffer("sums", book.clone())

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        index = torch.cdist(z, self.book).argmin(1)
        chosen = self.book[index]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, 4).to(z.dtype)
                self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                self.book.copy_(self.sums / self.size[:, None])
        return z + (chosen - z).detach() + (z - chosen.detach()).square().mean()


class LazyMask(nn.Module):
    """Registers a mask of the batch's size in forward, and keeps the largest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask") or len(self.mask) < len(x):
            self.register_buffer("mask", torch.ones(len(x)), persistent=False)
        return x * self.mask[: len(x), None]


class LazyScale(nn.Module):
    """Registers a buffer of the first batch's values in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().abs().mean(0), persistent=False)
        return x / self.scale


class ActNorm(nn.Module):
    """Initial values from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.log_scale.copy_(-x.std(0).log())
                self.ready.fill_(True)
        return (x + self.shift) * self.log_scale.exp()


class Renorm(nn.BatchNorm1d):
    """Batch renormalisation (Ioffe 2017) by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        mean, std = x.mean(0), (x.var(0, unbiased=False) + self.eps).sqrt()
        r = (std.detach() / self.running_var.sqrt()).clamp(0.5, 2)
        d = ((mean.detach() - self.running_mean) / self.running_var.sqrt()).clamp(-1, 1)
        with torch.no_grad():
            self.running_mean += 0.1 * (mean - self.running_mean)
            self.running_var += 0.1 * (std.square() - self.running_var)
        return ((x - mean) / std * r + d) * self.weight + self.bias


class Queue(nn.Module):
    """Keys of the last batches, as in MoCo; the random direction is drawn anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "keys", torch.randn(30, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        )
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ self.keys.clone().t()).softmax(1) @ self.keys.clone()
        if self.training:
            rows = (int(self.at) + torch.arange(len(x))) % 30
            self.keys[rows] = x.detach()
            self.at.copy_((self.at + len(x)) % 30)
        return x + scores


class MovingMean(nn.Module):
    """A moving average of the batch's mean, read in evaluation and in the next step; the buffer is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x - self.mean
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
        return result


class LastMean(nn.Module):
    """Read in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.copy_(x.detach().mean(0))
            return x
        return x - self.mean


class Seen(nn.Module):
    """Counts samples and sums squares; the scale follows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("squares", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x / (self.squares / (self.count + 1)).sqrt()
        if self.training:
            self.count += len(x)
            self.squares += x.detach().square().sum(0)
        return result


class Harmless(nn.Module):
    """Buffers that differ between ranks, or change, and on which nothing depends: caches, draws, counters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("noise", torch.zeros(6), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("last", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        self.noise.normal_()
        if len(self.cache) < len(x):
            self.cache = torch.arange(len(x), dtype=x.dtype).cos()
        self.last = x.detach().mean(0)
        return x + 0 * self.cache[: len(x), None] + 0 * self.noise


class Rows(nn.Module):
    """An embedding whose rows have at most some norm, tied to what follows."""

    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag] = nn.Embedding) -> None:
        super().__init__()
        self.rows = kind(17, 6, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x.abs() * 10).long() % 17
        found = self.rows(index[:, :3])
        found = found.mean(1) if found.dim() == 3 else found
        return found + (x @ self.rows.weight[:6]).tanh()


def spectral(old: bool) -> nn.Module:
    wrap = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    return wrap(nn.Linear(6, 6))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "lazy mask": LazyMask,
    "lazy scale": LazyScale,
    "codebook": Codebook,
    "data-dependent init": ActNorm,
    "renorm": lambda: Renorm(6),
    "queue": Queue,
    "moving mean": MovingMean,
    "last mean": LastMean,
    "seen": Seen,
    "codebook, gather": lambda: tutti.synchronized(Codebook(), "gather"),
    "data-dependent init, gather": lambda: tutti.synchronized(ActNorm(), "gather"),
    "renorm, gather": lambda: tutti.synchronized(Renorm(6), "gather"),
    "queue, gather": lambda: tutti.synchronized(Queue(), "gather"),
    "norm inside, gather": lambda: tutti.synchronized(nn.Sequential(Codebook(), nn.BatchNorm1d(6)), "gather"),
    "moving mean, mean": lambda: tutti.synchronized(MovingMean(), "mean"),
    "seen, sum": lambda: tutti.synchronized(Seen(), "sum"),
    "codebook, first": lambda: tutti.synchronized(Codebook(), "first"),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
    ),
    "max_norm": Rows,
    "max_norm, bags": lambda: Rows(nn.EmbeddingBag),
    "spectral norm": lambda: spectral(old=False),
    "spectral norm, old": lambda: spectral(old=True),
    "harmless": Harmless,
}
REFUSED = ("lazy scale", "codebook", "data-dependent init", "renorm", "queue", "moving mean", "last mean", "seen")
NOT_RECOMPUTED = ("lazy mask",)
"""Forward writes them at times only."""
INEXACT = ("codebook, first", "harmless")
"""These only have to run, and to agree on all ranks."""

X = torch.randn(25, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 1


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), MODULES[kind](), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


PLANS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "microbatches": {"microbatches": 2},
    "recompute": {"recompute": "body.1"},
}


def trained(ranks: int, plans: list[str], kinds: list[str], axis: str = "replicate") -> dict[tuple[str, str], Trained]:
    torch.set_default_dtype(torch.float64)
    results = {}
    for plan in plans:
        for kind in kinds:
            results[kind, plan] = by_plan(functools.partial(Net, kind), X, 7, {axis: ranks}, **PLANS[plan])
    return results


@functools.cache
def on_ranks(ranks: int) -> list[dict[tuple[str, str], Trained]]:
    plans = {1: ["recompute"], 2: list(PLANS), 3: ["microbatches"]}[ranks]
    return run_ranks(
        trained,
        ranks,
        ranks,
        plans,
        [kind for kind in MODULES if kind not in (*REFUSED, *NOT_RECOMPUTED)],
    )


@functools.cache
def on_one_device(kind: str, microbatches: int) -> Trained:
    return on_one_device_of(functools.partial(Net, kind), microbatches)


def on_one_device_of(build: Callable[[], nn.Module], microbatches: int = 1) -> Trained:
    torch.set_default_dtype(torch.float64)
    try:
        return plain(build, X, 7, microbatches)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", [kind for kind in MODULES if kind not in (*REFUSED, *NOT_RECOMPUTED)])
def test_state_is_that_of_one_device(kind: str, ranks: int) -> None:
    first = on_ranks(ranks)[0]
    for results in on_ranks(ranks):
        for (other, plan), many in results.items():
            if other != kind:
                continue
            if kind not in INEXACT:
                assert_same(many, on_one_device(kind, PLANS[plan].get("microbatches", 1)))
            elif kind != "harmless":
                assert_same(many, first[kind, plan])


def test_a_cache_that_forward_registers_may_differ() -> None:
    for results in run_ranks(trained, 2, 2, ["replicate", "microbatches"], ["lazy mask"]):
        for (_, plan), many in results.items():
            one = on_one_device("lazy mask", PLANS[plan].get("microbatches", 1))
            assert_same(many, one)


@pytest.mark.parametrize("kind", REFUSED)
def test_state_of_unknown_kind_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RankFailed, match=r"module 'body.1' \(.*tutti.synchronized\(module, \"gather\"\)"):
        run_ranks(trained, 2, 2, ["replicate"], [kind])


def test_sharded_parameters_that_forward_writes_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"forward writes parameters of .*mesh.shard"):
        run_ranks(trained, 2, 2, ["replicate"], ["data-dependent init, gather"], "shard")


class Gain(nn.Module):
    """A parameter of one element, of which one rank of two has a part, and moving averages, one of them complex."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("waves", torch.zeros(6, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.waves.mul_(0.9).add_(0.1 * torch.complex(x, 2 * x).detach().mean(0))
        return x * self.gain


def gain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), tutti.synchronized(Gain(), "mean"), nn.Linear(6, 3))


def trained_and_evaluated(ranks: int) -> tuple[list[Trained], float, float]:
    """Train with `Gain` by two plans; evaluate a BatchNorm of batch statistics where ranks have 1 and 2 batches."""
    torch.set_default_dtype(torch.float64)
    many = [by_plan(gain_net, X, 7, {axis: ranks}) for axis in ("shard", "replicate")]
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run-evaluated")  # by the last plan, of replicas
    job = tutti.Job(global_batch_size=7)
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 3))
    x, y = X[:9], torch.arange(9) % 3
    bounds = cut(9, ranks)
    pieces = [slice(s, min(s + 4, stop)) for begin, stop in pairwise(bounds) for s in range(begin, stop, 4)]
    expected = sum(float(F.cross_entropy(model(x[piece]), y[piece], reduction="sum")) for piece in pieces) / 9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer, TensorDataset(x, y), F.cross_entropy)
    return many, job.evaluate(TensorDataset(x, y), batch_size=4)["loss"], expected


def test_parts_complex_state_and_unequal_evaluation() -> None:
    one = on_one_device_of(gain_net)
    for many, loss, expected in run_ranks(trained_and_evaluated, 2, 2):
        for trained_by_plan in many:
            assert_same(trained_by_plan, one)
        assert loss == pytest.approx(expected, rel=1e-12)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(tutti.TuttiError, match="use 'gather', 'mean', 'sum' or 'first'"):
        tutti.synchronized(nn.Linear(1, 1), "max")  # type: ignore[arg-type]
