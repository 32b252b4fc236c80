"""A layer of torch that a subclass or an instance changes keeps what it adds, on any number of ranks."""

import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import RankFailed, preload, run_ranks
from trainer.plain_loop import Trained, assert_same, by_plan, plain

preload("trainer.plain_loop")


class ActivatedNorm(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: F.batch_norm in a forward of its own, and an activation."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        momentum = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        mean, var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, momentum or 0.0, self.eps)
        return self.act(x)


class ScaledNorm(nn.BatchNorm2d):
    """What torch computes, times a parameter of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, channels).view(-1, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(input) * self.scale)


class FunctionalNorm(nn.Module):
    """Not a BatchNorm: buffers of its own, and the functional form; only a bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.batch_norm(x, None, self.shift, self.mean, self.var, self.training, 0.2, 1e-4, False).relu()


class LastNorm(nn.BatchNorm2d):
    """Normalises by constants even in training, without F.batch_norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input - self.running_mean.view(-1, 1, 1)) * self.running_var.view(-1, 1, 1).rsqrt()


class WhitenedNorm(nn.BatchNorm2d):
    """Statistics by hand: no F.batch_norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input - input.mean((0, 2, 3), keepdim=True)) * self.weight.view(-1, 1, 1)


def patched(channels: int) -> nn.Module:
    """An instance whose forward was replaced."""
    norm = nn.BatchNorm2d(channels)
    norm.forward = MethodType(lambda self, input: F.batch_norm(input.sin(), None, None, training=True), norm)  # type: ignore[method-assign]
    return norm


def hooked(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    norm.register_forward_hook(lambda module, args, output: output.tanh())
    norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return norm


def parametrised(channels: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(channels), dim=None)


def partly_frozen(channels: int) -> nn.Module:
    norm = nn.Sequential(nn.BatchNorm2d(channels).eval(), nn.BatchNorm2d(channels))
    norm[0].running_mean.fill_(0.3)
    return norm


NORMS: dict[str, Any] = {
    "activated": ActivatedNorm,
    "activated, cumulative": lambda channels: ActivatedNorm(channels, momentum=None),
    "activated, not tracked": lambda channels: ActivatedNorm(channels, track_running_stats=False, affine=False),
    "scaled": ScaledNorm,
    "functional": FunctionalNorm,
    "constants": LastNorm,
    "instance": patched,
    "hooks": hooked,
    "parametrised": parametrised,
    "partly frozen": partly_frozen,
    "torch's SyncBatchNorm": nn.SyncBatchNorm,
}


class Net(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), NORMS[norm](4), nn.Conv2d(4, 4, 3), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


NORMS["by hand"] = WhitenedNorm
X = torch.randn(25, 1, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 1

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"mesh": {"replicate": 0}},
    "microbatches": {"mesh": {"replicate": 0}, "microbatches": 2},
    "recompute": {"mesh": {"replicate": 0}, "recompute": "body*"},
    "recompute the norm": {"mesh": {"replicate": 0}, "recompute": "body.1"},
}


def options(plan: str, ranks: int) -> dict[str, Any]:
    chosen = PLANS[plan]
    return {**chosen, "mesh": {axis: degree or ranks for axis, degree in chosen["mesh"].items()}}


def trained(ranks: int, plans: list[str], norms: list[str]) -> dict[tuple[str, str], Trained]:
    torch.set_default_dtype(torch.float64)
    return {
        (norm, plan): by_plan(lambda norm=norm: Net(norm), X, 7, **options(plan, ranks))
        for plan in plans
        for norm in norms
    }


@functools.cache
def on_ranks(ranks: int) -> list[dict[tuple[str, str], Trained]]:
    plans = {1: ["recompute"], 2: list(PLANS), 3: ["microbatches"]}[ranks]
    return run_ranks(trained, ranks, ranks, plans, [norm for norm in NORMS if norm != "by hand"])


@functools.cache
def on_one_device(norm: str, microbatches: int) -> Trained:
    torch.set_default_dtype(torch.float64)
    try:
        return plain(lambda: Net(norm), X, 7, microbatches)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "by hand"])
def test_batch_norms_of_others_keep_what_they_add(norm: str, ranks: int) -> None:
    for results in on_ranks(ranks):
        for (kind, plan), many in results.items():
            if kind == norm:
                assert_same(many, on_one_device(norm, PLANS[plan].get("microbatches", 1)))


def test_statistics_by_hand_are_refused_by_name() -> None:
    with pytest.raises(RankFailed, match=r"module 'body.1' \(WhitenedNorm\) takes the statistics of a batch by other"):
        run_ranks(trained, 2, 2, ["replicate"], ["by hand"])


class ScaledLinear(nn.Linear):
    """As a LoRA layer of old: a subclass that adds to torch's forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.5 + input.mean(-1, keepdim=True)


class Residual(nn.MultiheadAttention):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        return super().forward(query, key, value, **options)[0].tanh(), None


def with_bias_parametrised() -> nn.Module:
    linear = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(linear, "bias", nn.Tanh())
    return linear


def patched_linear() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.forward = lambda input: F.linear(input.sin(), linear.weight, linear.bias)  # type: ignore[method-assign]
    return linear


def patched_attention() -> nn.Module:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    plain_forward = attention.forward
    attention.forward = lambda *args, **options: (plain_forward(*args, **options)[0] * 2, None)  # type: ignore[method-assign]
    return attention


class DroppedLSTM(nn.LSTM):
    def forward(self, input: torch.Tensor, hx: Any = None) -> Any:
        output, state = super().forward(input, hx)
        return output * 0.5, state


BLOCKS: dict[str, Any] = {
    "linear subclass": lambda: ScaledLinear(8, 8),
    "linear, parametrised bias": with_bias_parametrised,
    "linear, patched": patched_linear,
    "attention subclass": lambda: Residual(8, 2, batch_first=True),
    "attention, patched": patched_attention,
    "recurrent, weight norm": lambda: nn.utils.weight_norm(nn.LSTM(8, 8, batch_first=True), "weight_hh_l0"),
    "recurrent subclass": lambda: DroppedLSTM(8, 8, batch_first=True),
}


class Block(nn.Module):
    """One of the layers between two that are divided."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.inner, self.head = BLOCKS[kind](), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mlp(x[:, 0])
        if isinstance(self.inner, nn.MultiheadAttention):
            x = self.inner(x, x, x, need_weights=False)[0]
        else:
            x = self.inner(x)
        return self.head((x[0] if isinstance(x, tuple) else x).mean(1))


def divided(kinds: list[str]) -> dict[str, Trained]:
    torch.set_default_dtype(torch.float64)
    return {kind: by_plan(functools.partial(Block, kind), X, 7, {"split": 2}) for kind in kinds}


def test_layers_with_forwards_of_their_own_stay_whole_under_split() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        expected = {kind: plain(functools.partial(Block, kind), X, 7) for kind in BLOCKS}
    finally:
        torch.set_default_dtype(torch.float32)
    for results in run_ranks(divided, 2, list(BLOCKS)):
        for kind, many in results.items():
            assert_same(many, expected[kind])
