"""Attention over parts of sequences against dense attention over the whole, on values and gradients."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness import run_ranks
from nn.flex_on_cpu import differentiable_flex
from tutti import nn
from tutti.comm.world import join_world
from tutti.errors import ScriptError
from tutti.nn import attention_blocks
from tutti.nn.sparse_attention import big_bird
from tutti.nn.visibility import SequenceParts, over_parts
from tutti.parallel.context.context_attention import Attention
from tutti.parallel.context.ring_attention import Ring
from tutti.parallel.context.sequence_order import SequenceOrder

BATCH, WIDTH = 2, 4


def dense(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, scale: float | None = None) -> torch.Tensor:
    """softmax(q k^T scale + mask) v, rows without a key 0; the reference."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        size = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(scores, -1).nan_to_num() @ v


def cases(length: int, kind: str) -> dict[str, dict[str, Any]]:
    """Name -> arguments; "local": the mask is cut along keys before it is given."""
    draw = torch.Generator().manual_seed(3)
    keep = torch.rand(BATCH, 1, 1, length, generator=draw) > 0.3
    keep[1] = False  # a sample that sees nothing
    keep[0, ..., 0] = True
    bias = torch.randn(BATCH, 1, 1, length, generator=draw, dtype=torch.float64)
    some = torch.rand(length, length, generator=draw) > 0.4
    heads = torch.rand(1, 12, length, length, generator=draw) > 0.4
    found: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "scaled": {"causal": True, "scale": 0.7},
        "grouped": {"causal": True, "key_heads": 3},
        "one key head": {"key_heads": 1},
        "wide values": {"causal": True, "value_width": 7},
        "padding": {"mask": keep, "local": True},
        "padding, shown many times": {"mask": keep, "local": True, "shown": True},
        "padding, whole": {"mask": keep},
        "padding and causal": {"mask": keep, "local": True, "causal": True},
        "added": {"mask": bias, "local": True},
        "any mask, whole": {"mask": some},
        "any mask by heads, grouped": {"mask": heads, "key_heads": 3},
        "any mask and causal": {"mask": some, "causal": True},
    }
    return found


def masks(length: int) -> dict[str, dict[str, Any]]:
    """Name -> arguments of tutti.nn.attention for whole sequences."""
    documents = torch.stack([torch.arange(length) // 7, torch.arange(length) * 5 % 3])
    documents[0, -3:] = -1
    pattern = big_bird(length, 4, chosen=1)
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": 4},
        "causal window": {"causal": True, "window": 4, "scale": 0.7},
        "documents": {"documents": documents},
        "causal documents": {"causal": True, "documents": documents},
        "pattern": {"pattern": pattern},
        "causal pattern, window and documents": {
            "pattern": pattern,
            "causal": True,
            "window": 11,
            "documents": documents,
        },
    }


def compare_masked(attention: Attention, *, flex: bool = False) -> dict[str, float]:
    """Largest difference of output and gradients of each mask from those of whole sequences, on this rank."""
    order, gaps = attention.order, {}
    parts = SequenceParts(attend=attention.masked, part=attention.part, length=attention.length)
    for name, case in masks(attention.length).items():
        if flex and name not in ("causal window", "causal pattern, window and documents"):
            continue
        torch.manual_seed(7)
        sizes = [(12, WIDTH), (3, WIDTH), (3, 5)]
        whole = [torch.randn(BATCH, heads, attention.length, width, requires_grad=True) for heads, width in sizes]
        out = nn.attention(*whole, **case)
        direction = torch.randn_like(out)
        expected = [out, *torch.autograd.grad(out, whole, direction)]
        mine = [order.take(x.detach(), 2).requires_grad_() for x in whole]
        if "documents" in case:
            case = {**case, "documents": order.take(case["documents"], 1)}
        with over_parts(parts), differentiable_flex(4) if flex else nullcontext():
            got = nn.attention(*mine, **case)
            grads = torch.autograd.grad(got, mine, order.take(direction, 2))
        pairs = zip((got, *grads), expected, strict=True)
        gaps[f"tutti, {name}"] = max(float((a.detach() - order.take(b.detach(), 2)).abs().max()) for a, b in pairs)
    return gaps


def attention_of(kind: str, length: int) -> Attention:
    world = join_world()
    order = SequenceOrder(kind=kind, degree=world.world_size, index=world.rank)  # type: ignore[arg-type]
    return Attention(ring=Ring(order=order, group=dist.new_group()), length=length)


def compare(kind: str, length: int, tile: tuple[int, int] | None) -> dict[str, float]:
    """Largest difference of each case's output and gradients from the dense reference, on this rank."""
    torch.set_default_dtype(torch.float64)
    if tile:
        attention_blocks.TILE_COLUMNS, attention_blocks.TILE_ELEMENTS = tile
    attention = attention_of(kind, length)
    order, gaps = attention.order, {}
    for name, case in cases(length, kind).items():
        torch.manual_seed(7)
        key_heads = case.get("key_heads", 12)
        sizes = [(12, WIDTH), (key_heads, WIDTH), (key_heads, case.get("value_width", WIDTH))]
        whole = [torch.randn(BATCH, heads, length, width, requires_grad=True) for heads, width in sizes]
        mask, causal, scale = case.get("mask"), case.get("causal", False), case.get("scale")
        out = dense(*whole, mask, causal, scale)
        direction = torch.randn_like(out)
        expected = [out, *torch.autograd.grad(out, whole, direction)]
        mine = [order.take(x.detach(), 2).requires_grad_() for x in whole]
        if case.get("local"):
            mask = order.take(mask, 3)
        if case.get("shown"):
            mask = mask.expand(-1, -1, attention.part, -1)
        got = attention(*mine, mask, 0.0, causal, scale, key_heads != 12)
        grads = torch.autograd.grad(got, mine, order.take(direction, 2))
        pairs = zip((got, *grads), expected, strict=True)
        gaps[name] = max(float((one - order.take(other, 2)).abs().max()) for one, other in pairs)
    gaps |= compare_masked(attention)
    return gaps


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
def test_attention_over_parts_is_the_wholes(kind: str, ranks: int) -> None:
    for gaps in run_ranks(compare, ranks, kind, 24, (3, 64) if ranks != 3 else None):
        assert len(gaps) == 22
        assert max(gaps.values()) < 1e-12, gaps


def compare_flex() -> tuple[dict[str, float], set[str]]:
    torch.set_default_dtype(torch.float64)
    attention = attention_of("ring", 24)
    return compare_masked(attention, flex=True), attention.ring.engines


@pytest.mark.long
def test_flex_attention_on_the_ring_is_the_wholes() -> None:
    for gaps, engines in run_ranks(compare_flex, 2):
        assert engines == {"flex"}
        assert len(gaps) == 2
        assert max(gaps.values()) < 1e-12, gaps


def dropped(kind: str) -> list[torch.Tensor]:
    """Probabilities after dropout (values are the identity), without it, and how far backward's mask is from it."""
    torch.set_default_dtype(torch.float64)
    length = 32
    attention = attention_of(kind, length)
    order = attention.order
    torch.manual_seed(1)
    q, k = (torch.randn(1, 2, length, WIDTH) for _ in range(2))
    v = torch.eye(length).expand(1, 2, -1, -1)
    parts = [order.take(x, 2).requires_grad_() for x in (q, k, v)]
    torch.manual_seed(order.index)
    got = attention(*parts, dropout_p=0.25)
    plain = order.take(dense(q, k, v), 2)
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(4))
    grad_q, grad_v = torch.autograd.grad(got, (parts[0], parts[2]), direction)
    kept = (got.detach() != 0) / 0.75
    again = order.take(q, 2).requires_grad_()
    reference = (torch.softmax(again @ k.transpose(-2, -1) / 2, -1) * kept) @ v
    expected_q = torch.autograd.grad(reference, again, direction)[0]
    mine = got.detach().transpose(-2, -1) @ direction
    dist.all_reduce(mine)
    return [got.detach(), plain * kept, grad_q, expected_q, grad_v, order.take(mine, 2)]


@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
def test_dropout_is_the_same_in_backward_and_drops_its_share(kind: str) -> None:
    results = run_ranks(dropped, 2, kind)
    for got, expected, grad_q, expected_q, grad_v, expected_v in results:
        assert torch.allclose(got, expected, atol=1e-12)
        assert torch.allclose(grad_q, expected_q, atol=1e-12)
        assert torch.allclose(grad_v, expected_v, atol=1e-12)
        assert 0.15 < float((got == 0).double().mean()) < 0.35
    assert not torch.equal(results[0][0] == 0, results[1][0] == 0)


def refusals() -> list[str]:
    """What each call that cannot be known to be right says."""
    length, said = 16, []
    ring, exchange = attention_of("ring", length), attention_of("all-to-all", length)
    q = torch.randn(1, 3, 8, 4)
    other = torch.randn(1, 3, 5, 4)
    calls = [
        lambda: ring(q, q, q, torch.ones(8, 8, dtype=torch.bool)),
        lambda: ring(q, q, q, torch.zeros(1, 1, 1, 16, requires_grad=True)),
        lambda: ring(q, q, q, torch.ones(8, 5)),
        lambda: ring(other, q, q),
        lambda: ring(q, other, other, torch.ones(8, 5, dtype=torch.bool)),
        lambda: ring(q, other, other, is_causal=True),
        lambda: exchange(q, q, q),
    ]
    for call in calls:
        with pytest.raises(ScriptError) as error:
            call()
        said.append(str(error.value))
    keys_whole = ring(q, other, other, torch.ones(1, 1, 1, 5, dtype=torch.bool))
    assert torch.equal(keys_whole, F.scaled_dot_product_attention(q, other, other))
    return said


def test_what_cannot_be_known_is_refused() -> None:
    words = [
        "use is_causal=True",
        "learned bias",
        "8 x 5",
        "queries must be parts",
        "keys, with a causal",
        "keys, with a causal",
    ]
    words.append('use context = "ring"')
    for said in run_ranks(refusals, 2):
        for sentence, part in zip(said, words, strict=True):
            assert part in sentence


def low_precision() -> float:
    """How far bfloat16 attention under autocast is from float64's."""
    attention = attention_of("ring", 64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention(*(attention.order.take(x, 2) for x in (q, k, v)), is_causal=True)
    assert got.dtype == torch.bfloat16
    return float(
        (got.double() - attention.order.take(dense(q.double(), k.double(), v.double(), None, True), 2)).abs().max()
    )


def test_under_autocast_sums_are_kept_in_float32() -> None:
    assert max(run_ranks(low_precision, 2)) < 0.03


@pytest.mark.parametrize(("kind", "degree"), [("ring", 3), ("all-to-all", 4)])
def test_parts_lie_in_order_and_join_again(kind: str, degree: int) -> None:
    whole = torch.arange(48).reshape(2, 24)
    orders = [SequenceOrder(kind=kind, degree=degree, index=rank) for rank in range(degree)]  # type: ignore[arg-type]
    parts = [order.take(whole, 1) for order in orders]
    assert torch.equal(orders[0].join(parts, 1), whole)
    assert all(torch.equal(order.positions(24, "cpu"), part[0]) for order, part in zip(orders, parts, strict=True))
    seen = [int((torch.tril(torch.ones(24, 24))[order.positions(24, "cpu")]).sum()) for order in orders]
    assert (len(set(seen)) == 1) == (kind == "ring")  # under a causal mask all ranks of the ring have the same work
