"""Blocks of attention by the fused kernel, against the same tile by tile."""

import pytest
import torch

from tutti.parallel.context import ring_attention
from tutti.parallel.context.ring_attention import AttentionBlock, Queries

SHAPES = {
    "one head": (1, 1, 1, 5, 5, 4),
    "more keys": (2, 3, 1, 7, 33, 8),
    "heads that share keys": (2, 2, 3, 16, 16, 8),
    "one query": (1, 2, 2, 1, 9, 6),
}
"""(batch, kv_heads, group, rows, columns, d)"""


def made(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient; `strided`: in memory with another dim last."""
    batch, heads, group, rows, columns, d = shape
    draw = torch.Generator().manual_seed(0)
    of_queries = (batch, heads, group, rows, d)
    sizes = [of_queries, (batch, heads, columns, d), (batch, heads, columns, d), of_queries]
    found = [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]
    return [one.transpose(-1, -2).contiguous().transpose(-1, -2) if strided else one for one in found]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_tiles(
    name: str, dtype: torch.dtype, tolerance: float, strided: bool
) -> None:
    """Of two blocks that are merged, so that each one's backward takes what both have seen."""
    q, k, v, grad = made(SHAPES[name], dtype, strided)
    causal = q.shape[-2] == k.shape[-2]
    blocks = [(AttentionBlock(scale=0.4, causal=causal), k, v), (AttentionBlock(scale=0.4), 0.5 * v, k)]
    assert all(ring_attention.fits(block, q, keys, values) for block, keys, values in blocks)
    seen, gradients = [], []
    for way in (ring_attention, ring_attention):
        out, lse = ring_attention.empty_state(q, v.shape[-1])
        for block, keys, values in blocks:
            way.attend(block, q, keys, values, out, lse)
        seen.append((out, lse))
    out, lse = seen[0]
    delta = (grad.to(lse.dtype) * out).sum(-1)
    for way in (ring_attention, ring_attention):
        sums = [torch.zeros_like(one, dtype=lse.dtype) for one in (q, k, v)]
        queries = Queries(q=q, out=out.to(dtype), lse=lse, grad_out=grad, delta=delta, grad_q=sums[0])
        for block, keys, values in blocks:
            way.attend_backward(block, queries, keys, values, *sums[1:])
        gradients.append(sums)
    for one, other in zip((*seen[0], *gradients[0]), (*seen[1], *gradients[1]), strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


def test_what_the_kernel_cannot_compute_goes_by_tiles() -> None:
    q, k, v, _ = made((1, 2, 1, 4, 6, 8), torch.float32, strided=False)
    assert ring_attention.fits(AttentionBlock(scale=1.0), q, k, v)
    assert not ring_attention.fits(AttentionBlock(scale=1.0, causal=True), q, k, v)
    assert not ring_attention.fits(AttentionBlock(scale=1.0, mask=torch.ones(4, 6, dtype=torch.bool)), q, k, v)
    assert not ring_attention.fits(AttentionBlock(scale=1.0, dropout=0.1), q, k, v)
    assert not ring_attention.fits(AttentionBlock(scale=1.0), q, k, v[..., :4])
    assert not ring_attention.fits(AttentionBlock(scale=1.0), q[..., :0, :], k, v)
