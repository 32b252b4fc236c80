"""Block-sparse attention against one masked softmax over all pairs, on values and gradients."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.errors import ScriptError
from tutti.nn import sparse_attention as sparse
from tutti.nn.sparse_attention import (
    BlockPattern,
    BlockSparseSelfAttention,
    big_bird,
    block_sparse_attention,
    dense_attention,
    global_tokens,
    random_blocks,
    sliding_window,
    strided,
)

PATTERNS = {
    "window": lambda length, size: sliding_window(length, size, 1),
    "global": lambda length, size: global_tokens(length, size, [0, length // 2]),
    "random": lambda length, size: random_blocks(length, size, 2, seed=5),
    "random, causal": lambda length, size: random_blocks(length, size, 2, seed=5, causal=True),
    "strided": lambda length, size: strided(length, size, 3),
    "longformer": lambda length, size: sliding_window(length, size, 2) | global_tokens(length, size),
    "big bird": lambda length, size: big_bird(length, size, chosen=2, seed=1),
    "some see nothing": lambda length, size: BlockPattern(
        length=length,
        block_size=size,
        seen=tuple((i - 1,) if i % 2 else () for i in range(sparse.number_of_blocks(length, size))),
    ),
}


def inputs(length: int, heads: int = 4, key_heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, length, 6), (2, key_heads, length, 6), (2, key_heads, length, 5)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gap(pattern: BlockPattern, tensors: list[torch.Tensor], **options: Any) -> float:
    """Largest difference of output and gradients from the dense reference."""
    results = []
    for function in (block_sparse_attention, dense_attention):
        out = function(*tensors, pattern, **options)
        direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, tensors, direction)])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("length", [48, 61])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_a_masked_softmax(name: str, causal: bool, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = PATTERNS[name](length, 8)
    tensors = inputs(length)
    assert gap(pattern, tensors, causal=causal) < 1e-12
    monkeypatch.setattr(sparse, "TILE_ELEMENTS", 1)  # one row of blocks at a time
    keep = torch.rand(2, length, generator=torch.Generator().manual_seed(2)) > 0.3
    keep[1] = False
    assert gap(pattern, tensors, causal=causal, scale=0.4, keep=keep) < 1e-12


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_pattern(data: st.DataObject) -> None:
    length, size = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 9))
    count = sparse.number_of_blocks(length, size)
    rows = [data.draw(st.sets(st.integers(0, count - 1))) for _ in range(count)]
    pattern = BlockPattern(length=length, block_size=size, seen=tuple(tuple(sorted(row)) for row in rows))
    assert gap(pattern, inputs(length), causal=data.draw(st.booleans())) < 1e-12


def test_queries_without_a_key_get_zero_and_give_no_gradient() -> None:
    pattern = BlockPattern(length=8, block_size=4, seen=((), (0,)))
    tensors = inputs(8)
    out = block_sparse_attention(*tensors, pattern)
    assert not out[:, :, :4].any()
    assert out[:, :, 4:].all()
    grads = torch.autograd.grad(out.sum(), tensors)
    assert not grads[0][:, :, :4].any()
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_patterns_show_what_they_say() -> None:
    window = sliding_window(20, 4, 1).mask()
    assert torch.equal(window, (torch.arange(20)[:, None] // 4 - torch.arange(20) // 4).abs() <= 1)
    marks = global_tokens(20, 4, [6]).mask()
    assert marks[:, 4:8].all()
    assert marks[4:8].all()
    assert marks.sum() == 20 * 4 * 2 - 16
    assert all(len(row) == 2 for row in random_blocks(80, 4, 2, seed=0).seen)
    assert random_blocks(80, 4, 2, seed=0) != random_blocks(80, 4, 2, seed=1)
    assert not random_blocks(80, 4, 2, seed=0, causal=True).mask()[:4, 4:].any()
    assert strided(20, 4, 2).seen == ((0, 2, 4), (1, 3), (0, 2, 4), (1, 3), (0, 2, 4))
    both = sliding_window(20, 4, 1) | strided(20, 4, 2)
    assert torch.equal(both.mask(), window | strided(20, 4, 2).mask())
    assert big_bird(4096, 64, chosen=3).density < 0.15


def test_memory_and_work_grow_linearly() -> None:
    """Twice the sequence has twice the pairs of blocks, global rows included."""
    count = [sum(map(len, big_bird(length, 16, chosen=3).seen)) for length in (2048, 4096)]
    assert 1.9 < count[1] / count[0] < 2.1
    padded = [
        sum(rows.columns.numel() for rows in sparse._groups(big_bird(n, 16, chosen=3), False, torch.device("cpu")))
        for n in (2048, 4096)
    ]
    assert padded[1] / padded[0] < 2.1
    assert padded[1] < 1.6 * count[1]


def test_no_probabilities_are_kept_for_backward() -> None:
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    tensors, pattern = inputs(256), sliding_window(256, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block_sparse_attention(*tensors, pattern)
    assert sum(kept) < 2 * sum(tensor.numel() for tensor in tensors)


def test_low_precision_keeps_sums_in_float32() -> None:
    tensors, pattern = inputs(64), big_bird(64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = block_sparse_attention(*(tensor.float() for tensor in tensors), pattern)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), dense_attention(*tensors, pattern), atol=0.03)


def test_a_layer_is_attention_over_the_pattern_between_two_linear_layers() -> None:
    torch.manual_seed(0)
    layer = BlockSparseSelfAttention(12, 3, functools.partial(sliding_window, block_size=4), causal=True).double()
    x = torch.randn(2, 10, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(2, 10, 3, 3, 4).permute(2, 0, 3, 1, 4)
    expected = dense_attention(q, k, v, sliding_window(10, 4), causal=True).transpose(1, 2).reshape(2, 10, 12)
    assert torch.allclose(layer(x), layer.merge(expected), atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: block_sparse_attention(q, k, v, sliding_window(9, 4)), "pattern for 9 tokens"),
        (lambda q, k, v: block_sparse_attention(q[:, :3], k, v, sliding_window(8, 4)), "are a multiple"),
        (lambda q, k, v: block_sparse_attention(q, k, v, sliding_window(8, 4), keep=torch.ones(2, 3)), "keep has"),
        (lambda q, k, v: BlockPattern(length=8, block_size=4, seen=((0,),)), "has 2 rows"),
        (lambda q, k, v: BlockPattern(length=8, block_size=4, seen=((1, 0), ())), "ascending"),
        (lambda q, k, v: sliding_window(8, 4) | sliding_window(8, 2), "no union"),
        (lambda q, k, v: global_tokens(8, 4, [8]), "from 0 to 7"),
        (lambda q, k, v: strided(8, 4, 0), "stride"),
        (lambda q, k, v: BlockSparseSelfAttention(10, 3, sliding_window), "multiple"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        call(*inputs(8))
