"""Optimizers for large batches: golden values, laws of scale, parts of tensors, exclusions."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import PlanError, ScriptError
from tutti.optim.large_batch import LAMB, LARS, NovoGrad, nvlamb, parameter_groups

GENTLE, STEEP = [[0.6, 0.8], [0.8, -0.6]], [[6.0, 8.0], [0.8, -0.6]]
MAKE: dict[str, Callable[[Any], Any]] = {
    "lars": lambda p: LARS(p, 0.1, weight_decay=1e-4),
    "lamb": lambda p: LAMB(p, 0.1),
    "nvlamb": lambda p: nvlamb(p, 0.1),
    "novograd": lambda p: NovoGrad(p, 0.1),
}


def after(make: Callable[[Any], Any], gradients: list[list[float]]) -> Tensor:
    weight = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer = make([weight])
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    ("name", "gradients", "golden"),
    [
        ("lars", GENTLE, [2.99903009, 3.9995396202]),
        ("lamb", GENTLE, [2.2009995843, 3.5898100162]),
        ("nvlamb", GENTLE, [2.2009995843, 3.5898100162]),
        ("lamb", STEEP, [2.30020159, 3.35857011]),
        ("nvlamb", STEEP, [2.20099958, 3.58981002]),
        ("novograd", GENTLE, [2.802121032, 3.902828041]),
    ],
)
def test_golden_values(name: str, gradients: list[list[float]], golden: list[float]) -> None:
    torch.testing.assert_close(
        after(MAKE[name], gradients), torch.tensor(golden, dtype=torch.float64), rtol=0, atol=1e-8
    )


def test_nesterov_by_hand() -> None:
    """Two steps of v = .9 v + s, w -= .9 v + s."""
    got = after(lambda p: LARS(p, 0.1, nesterov=True), GENTLE)
    w, v = torch.tensor([3.0, 4.0]).double(), torch.zeros(2).double()
    for gradient in GENTLE:
        g = torch.tensor(gradient, dtype=torch.float64)
        s = 0.1 * 0.001 * w.norm() / g.norm() * g
        v = 0.9 * v + s
        w = w - (0.9 * v + s)
    torch.testing.assert_close(got, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_is_the_rate_outside(nesterov: bool) -> None:
    """u = .9 u + l g and w -= lr u (nesterov: lr (.9 u + l g)), while the rate jumps; without it, another thing."""
    rates, draw = [0.1, 0.1, 1.0, 0.01, 0.3], torch.Generator().manual_seed(0)
    given = torch.randn(len(rates), 4, dtype=torch.float64, generator=draw)
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    plain = nn.Parameter(weight.detach().clone())
    optimizer = LARS([weight], 0.1, trust=0.5, nesterov=nesterov, momentum_correction=True)
    other = LARS([plain], 0.1, trust=0.5, nesterov=nesterov)
    w, u = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for rate, gradient in zip(rates, given, strict=True):
        for one, parameter in ((optimizer, weight), (other, plain)):
            one.param_groups[0]["lr"], parameter.grad = rate, gradient.clone()
            one.step()
        step = 0.5 * w.norm() / gradient.norm() * gradient
        u = 0.9 * u + step
        w = w - rate * (0.9 * u + step if nesterov else u)
    torch.testing.assert_close(weight.detach(), w, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(plain.detach(), w)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 4), nn.LayerNorm(4)
        self.last = nn.Linear(4, 2, bias=False)
        self.double()


def gradients(model: nn.Module, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("name", MAKE)
def test_parts_of_tensors_give_what_whole_tensors_give(name: str) -> None:
    torch.manual_seed(0)
    whole = Net()
    halves = [[nn.Parameter(half) for half in p.detach().clone().flatten().split(3)] for p in whole.parameters()]
    parts = [part for tensor in halves for part in tensor]
    of = [number for number, tensor in enumerate(halves) for _ in tensor]
    number_of = dict(zip(parts, of, strict=True))

    def summed(squares: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        turn: dict[nn.Parameter, int] = {}
        keys = []
        for parameter in parameters:
            turn[parameter] = turn.get(parameter, -1) + 1
            keys.append(turn[parameter] * len(halves) + number_of[parameter])
        at = torch.tensor(keys)
        return torch.zeros(2 * len(halves), dtype=squares.dtype).index_add_(0, at, squares)[at]

    one, other = MAKE[name](whole.parameters()), MAKE[name](parts)
    other.over_parts = summed
    if name == "nvlamb":
        other.global_norm = lambda held: torch.cat([p.grad for p in held]).norm()
    for step in range(4):
        gradients(whole, step)
        for parameter, tensor in zip(whole.parameters(), halves, strict=True):
            assert parameter.grad is not None
            for part, gradient in zip(tensor, parameter.grad.flatten().split(3), strict=True):
                part.grad = gradient.clone()
        one.step()
        other.step()
    for parameter, tensor in zip(whole.parameters(), halves, strict=True):
        torch.testing.assert_close(torch.cat([part.detach() for part in tensor]), parameter.detach().flatten())


def test_bias_and_norm_are_neither_adapted_nor_decayed() -> None:
    torch.manual_seed(0)
    model = Net()
    groups = parameter_groups(model, 0.1)
    assert [len(group["params"]) for group in groups] == [2, 3]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = LARS(groups, 0.5, momentum=0.0)
    gradients(model, 0)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        plain = before[name] - 0.5 * parameter.grad
        assert torch.allclose(parameter, plain) == (parameter.dim() < 2), name


class CellNorm(nn.Module):
    """A normalisation that torch does not know, with dims like a matrix's and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 6))
        self.inner = nn.Linear(4, 4)


class CellNorm2d(CellNorm):
    pass


class Mean(nn.LayerNorm):
    pass


class Experts(nn.Module):
    """Biases, and their like, of two and more dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.up_bias = nn.Parameter(torch.ones(2, 4, 4)), nn.Parameter(torch.ones(2, 4))
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.unbiased = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "adapted"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm([4, 6, 6])), ["0.weight"]),
        (nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.RMSNorm((4, 4)), Mean((4, 4))), ["0.weight"]),
        (nn.Sequential(CellNorm(), CellNorm2d()), ["0.inner.weight", "1.inner.weight"]),
        (
            Experts(),
            ["weight", "attention.in_proj_weight", "attention.out_proj.weight", "unbiased.weight"],
        ),
    ],
    ids=["layer norm of 3 dims", "torch's", "by class name", "biases"],
)
def test_normalisations_and_biases_of_any_dims_are_left_out(model: nn.Module, adapted: list[str]) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    first, second = parameter_groups(model, 0.1)
    assert [names[parameter] for parameter in first["params"]] == adapted
    assert [names[parameter] for parameter in second["params"]] == [n for n in names.values() if n not in adapted]
    assert (first["weight_decay"], first["adapt"], second["weight_decay"], second["adapt"]) == (0.1, True, 0.0, False)


@pytest.mark.parametrize("name", MAKE)
def test_zeros_are_safe(name: str) -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2))]
    optimizer = MAKE[name](weights)
    for _ in range(3):
        weights[0].grad, weights[1].grad, weights[2].grad = torch.ones(3), torch.zeros(3), torch.zeros(2)
        optimizer.step()
    assert all(weight.isfinite().all() for weight in weights)
    assert weights[0].abs().max() > 0


@pytest.mark.parametrize("name", MAKE)
def test_state_goes_on_from_its_checkpoint(name: str) -> None:
    torch.manual_seed(0)
    one, other = Net(), Net()
    first, second = MAKE[name](one.parameters()), MAKE[name](other.parameters())
    for step in range(2):
        gradients(one, step)
        first.step()
    other.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in ((one, first), (other, second)):
        gradients(model, 7)
        optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rates_below_zero_are_refused() -> None:
    with pytest.raises(PlanError, match="lr"):
        LARS([nn.Parameter(torch.ones(2))], -1.0)


@pytest.mark.parametrize("name", MAKE)
def test_sparse_gradients_are_refused_with_the_remedy(name: str) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = MAKE[name](table.parameters())
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ScriptError, match=r"the parameter of shape \(5, 3\) has a sparse gradient.* sparse=False"):
        optimizer.step()
    assert not optimizer.state
