"""Parts of tensors, blocks of models, and which optimizers may be given parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from tutti.errors import PlanError
from tutti.optim.large_batch import LAMB, LARS, NovoGrad, nvlamb
from tutti.optim.optimizer_traits import check_takes_parts, is_by_norms, is_elementwise
from tutti.parallel.sharding.sharded_unit import ShardPieces, blocks_of, even_bounds

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(torch.Size), min_size=1, max_size=4)


def cuts(shapes: list[torch.Size], degree: int) -> list[tuple[int, tuple[int, ...]]]:
    loads = [0] * degree
    return [even_bounds(shape, loads) for shape in shapes]


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 6))
def test_pieces_cover_every_tensor_once(shapes: list[torch.Size], degree: int) -> None:
    pieces = ShardPieces.cut(shapes, cuts(shapes, degree), degree)
    wholes = [torch.randn(shape) for shape in shapes]
    segments = torch.zeros(degree, pieces.size)
    pieces.collect(segments, list(wholes))
    again = [torch.full(shape, torch.nan) for shape in shapes]
    pieces.scatter(segments, again)
    for whole, back in zip(wholes, again, strict=True):
        assert torch.equal(whole, back)
    for index, shape in enumerate(shapes):
        numels = [rank[index].numel for rank in pieces.ranks]
        dim, _ = even_bounds(shape, [0] * degree)
        assert sum(numels) == shape.numel()
        assert max(numels) - min(numels) <= shape.numel() // shape[dim]


def test_a_missing_tensor_is_zeros() -> None:
    shapes = [torch.Size([4]), torch.Size([3, 2])]
    pieces = ShardPieces.cut(shapes, cuts(shapes, 2), 2)
    segments = torch.full((2, pieces.size), torch.nan)
    pieces.collect(segments, [None, torch.ones(3, 2)])
    back = [torch.empty(shape) for shape in shapes]
    pieces.scatter(segments, back)
    assert torch.equal(back[0], torch.zeros(4))
    assert torch.equal(back[1], torch.ones(3, 2))


def test_what_does_not_divide_goes_where_least_is() -> None:
    loads = [0, 0, 0]
    for _ in range(6):
        even_bounds(torch.Size([4, 2]), loads)
    assert loads == [16, 16, 16]


ELEMENTWISE = {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"}


class TrustRatio(torch.optim.SGD):
    """Scales a parameter's gradient by norms of the whole parameter, as LARS and LAMB do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.norm() / parameter.grad.norm())
        super().step(closure)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | {"Adafactor", "Muon", "LBFGS"}))
def test_which_optimizers_may_have_parts(name: str) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    assert is_elementwise(kind([nn.Parameter(torch.ones(2, 2))])) == (name in ELEMENTWISE)


def test_an_optimizer_with_norms_may_not() -> None:
    assert not is_elementwise(TrustRatio([nn.Parameter(torch.ones(2))], lr=0.1))
    assert is_elementwise(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9, nesterov=True))


class OwnNorm(LARS):
    """Looks at what it holds beside the norms that it is told."""

    def _update(self, live: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        for parameter, _ in live:
            parameter.grad /= parameter.grad.abs().max()
        super()._update(live)


@pytest.mark.parametrize("make", [LARS, LAMB, nvlamb, NovoGrad])
def test_an_optimizer_whose_norms_can_be_told_may(make: Callable[..., Optimizer]) -> None:
    optimizer = make([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not is_elementwise(optimizer)
    assert is_by_norms(optimizer)
    check_takes_parts(optimizer)


@pytest.mark.parametrize("kind", [OwnNorm, TrustRatio])
def test_an_optimizer_with_norms_of_its_own_is_refused(kind: type[Optimizer]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)  # type: ignore[call-arg]
    assert not is_by_norms(optimizer)
    with pytest.raises(PlanError, match=f"{kind.__name__} does not treat .* use sharding level 1"):
        check_takes_parts(optimizer)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def test_blocks_are_elements_of_lists_that_are_not_lists_of_blocks() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(linear(), nn.ReLU())
    model.stages = nn.ModuleList([nn.Sequential(nn.Sequential(linear(), linear()), nn.Sequential(linear()))])
    model.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
    names = [name for name, _ in blocks_of(model)]
    assert names == ["stem.0", "stages.0.0", "stages.0.1", "layers.0", "layers.1"]


def test_a_block_that_is_there_twice_is_one() -> None:
    one = linear()
    assert [name for name, _ in blocks_of(nn.Sequential(one, nn.ReLU(), one))] == ["0"]
