"""Random draws: what ranks draw for their samples is, joined, what one device draws for all of them."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tutti.data.batches import MicrobatchShare
from tutti.verification.matched_randomness import AlignedRandom, rows_of

SIZES = (3, 1, 2)

Draw = Callable[[torch.Tensor], torch.Tensor]


def parts() -> list[MicrobatchShare]:
    starts = [sum(SIZES[:rank]) for rank in range(len(SIZES))]
    return [
        MicrobatchShare(start=7 + s, count=n, slice_start=7, slice_size=6) for s, n in zip(starts, SIZES, strict=True)
    ]


def drawn(
    draw: Draw, value: torch.Tensor, part: MicrobatchShare, guide: dict[int, tuple[int, ...]] | None
) -> AlignedRandom:
    torch.manual_seed(5)
    mode = AlignedRandom(part, guide)
    with mode:
        mode.result = draw(value)  # type: ignore[attr-defined]
        mode.rest = torch.rand(4)  # type: ignore[attr-defined]
    return mode


def whole_and_shares(draw: Draw, value: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One device's result on all six samples, and the ranks' results on theirs, joined along `dim`."""
    whole = drawn(draw, value, MicrobatchShare(start=7, count=6, slice_start=7, slice_size=6), None)
    shares = torch.split(value, SIZES, dim)
    ranks = [drawn(draw, share, part, whole.draws) for share, part in zip(shares, parts(), strict=True)]
    for rank in ranks:
        assert not rank.unaligned
        assert torch.equal(rank.rest, whole.rest)  # type: ignore[attr-defined]
    return whole.result, torch.cat([rank.result for rank in ranks], dim)  # type: ignore[attr-defined]


OPERATORS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(*x.shape),
    "randint": lambda x: torch.randint(100, x.shape),
    "randint from": lambda x: torch.randint(50, 100, x.shape),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of a deviation": lambda x: torch.normal(0.0, x.abs()),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, x.shape),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_joined_draws_are_those_of_one_device(name: str) -> None:
    whole, joined = whole_and_shares(OPERATORS[name], torch.randn(6, 5), 0)
    assert torch.equal(whole, joined)
    assert len(torch.unique(whole.float())) > 1


def test_samples_in_the_second_dim() -> None:
    whole, joined = whole_and_shares(OPERATORS["dropout"], torch.randn(4, 6, 5), 1)
    assert torch.equal(whole, joined)


def test_samples_flattened_with_tokens() -> None:
    def noise(value: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(value.flatten(0, 1)).view_as(value)

    whole, joined = whole_and_shares(noise, torch.zeros(6, 4, 5), 0)
    assert torch.equal(whole, joined)


def test_what_has_no_samples_is_alike_on_all_ranks() -> None:
    def noise(value: torch.Tensor) -> torch.Tensor:
        return torch.rand(5).expand(len(value), 5)

    whole, joined = whole_and_shares(noise, torch.zeros(6, 5), 0)
    assert torch.equal(whole, joined)
    assert torch.equal(whole[0], whole[1])


def test_ranks_that_pad_less_get_the_leading_draws() -> None:
    full = torch.arange(6 * 4 * 5).view(6, 4, 5)
    place = rows_of((6, 4, 5), (2, 3, 5), parts()[2])
    assert place is not None
    assert torch.equal(place(full), full[4:6, :3])
    place = rows_of((24, 5), (6, 5), parts()[2])
    assert place is not None
    assert torch.equal(place(full.flatten(0, 1)), full[4:6, :3].flatten(0, 1))


def test_recompute_finds_the_same_mask() -> None:
    value = torch.randn(3, 50, requires_grad=True)
    torch.manual_seed(5)
    with AlignedRandom(parts()[0], {}):
        output = checkpoint(lambda x: F.dropout(x * 2, 0.5), value, use_reentrant=False)
        output.sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad != 0, output != 0)


def test_own_generators_are_left_alone_and_remembered() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(3, 2, generator=torch.Generator().manual_seed(3))
    mode = drawn(lambda x: torch.rand(3, 2, generator=generator), torch.zeros(3, 2), parts()[0], {})
    assert torch.equal(mode.result, expected)  # type: ignore[attr-defined]
    assert mode.own_generator == ["rand"]


def test_what_cannot_be_aligned_is_remembered() -> None:
    whole = drawn(torch.poisson, torch.ones(6, 5), MicrobatchShare(start=7, count=6, slice_start=7, slice_size=6), None)
    assert drawn(torch.poisson, torch.ones(3, 5), parts()[0], whole.draws).unaligned == ["poisson"]


def test_the_least_precise_dtype_is_remembered() -> None:
    mode = drawn(lambda x: (x.double() + 1).float() * 2, torch.zeros(3, 2, dtype=torch.float64), parts()[0], {})
    assert mode.lowest is torch.float32
