"""Attention with windows, documents and patterns against torch's own with the same mask, on values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nn.flex_on_cpu import differentiable_flex
from tutti.errors import ScriptError
from tutti.nn import attention, attention_blocks, block_sparse_attention, document_numbers, flex_blocks
from tutti.nn.flex_blocks import visible_blocks
from tutti.nn.sparse_attention import big_bird, sliding_window
from tutti.nn.visibility import SequenceMask, SequenceParts, over_parts

LENGTH = 22


def packed(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Documents in order, the last one padding; another sample whose documents are not in order."""
    ordered = torch.arange(length) // 7
    ordered[-3:] = -1
    draw = torch.Generator().manual_seed(5)
    return torch.stack([ordered, *(torch.randint(3, (length,), generator=draw) for _ in range(batch - 1))])


def inputs(length: int = LENGTH, width: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 4, length, width), (2, 2, length, width), (2, 2, length, width - 1)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense_mask(length: int, causal: bool, window: int | None, documents: Any, pattern: Any) -> torch.Tensor:
    """(batch or 1, 1, length, length), written pair by pair."""
    row, column = torch.arange(length)[:, None], torch.arange(length)
    mask = torch.ones(1, length, length, dtype=torch.bool)
    if causal:
        mask = mask & (column <= row)
    if window is not None:
        mask = mask & ((row - column).abs() < window)
    if pattern is not None:
        mask = mask & pattern.mask()
    if documents is not None:
        ids = documents[:, None, :]
        mask = mask & (documents[:, :, None] == ids) & (ids >= 0)
    return mask[:, None]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "causal window": {"causal": True, "window": 5, "scale": 0.3},
    "documents": {"documents": packed()},
    "causal documents": {"causal": True, "documents": packed()},
    "pattern": {"pattern": big_bird(LENGTH, 4, chosen=1)},
    "all": {"causal": True, "window": 9, "documents": packed(), "pattern": sliding_window(LENGTH, 4)},
}


def gap(tensors: list[torch.Tensor], **case: Any) -> float:
    """Largest difference of output and gradients from torch's attention with a dense mask."""
    scale = case.get("scale")
    mask = dense_mask(tensors[0].shape[2], *(case.get(name) for name in ("causal", "window", "documents", "pattern")))
    blind = ~mask.any(-1, keepdim=True)
    reference = F.scaled_dot_product_attention(*tensors, mask | blind, scale=scale, enable_gqa=True)
    reference = reference.masked_fill(blind, 0.0)
    out = attention(*tensors, **case)
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    pairs = zip(
        [out.detach(), *torch.autograd.grad(out, tensors, direction)],
        [reference.detach(), *torch.autograd.grad(reference, tensors, direction)],
        strict=True,
    )
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_attention_with_a_dense_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gap(inputs(), **CASES[name]) < 1e-12
    monkeypatch.setattr(attention_blocks, "TILE_COLUMNS", 4)
    monkeypatch.setattr(attention_blocks, "TILE_ELEMENTS", 1)
    assert gap(inputs(), **CASES[name]) < 1e-12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    with differentiable_flex():
        for name in ("window", "all"):
            assert gap(inputs(), **CASES[name]) < 1e-12, name
        keep = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.3
        keep[1] = False
        seen = block_sparse_attention(*inputs(), CASES["pattern"]["pattern"], keep=keep)
    expected = block_sparse_attention(*inputs(), CASES["pattern"]["pattern"], keep=keep)
    assert torch.allclose(seen, expected, atol=1e-12)


@pytest.mark.long
def test_the_compiled_kernel_skips_only_what_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's C++ kernel for CPUs reads the same block masks as those for GPUs; it is forward only, in float32."""
    monkeypatch.setattr(flex_blocks, "BLOCK", 32)
    tensors = [torch.randn(2, 2, 100, 16) for _ in range(3)]
    documents = packed(length=100)
    for case in ({"causal": True, "window": 40}, {"causal": True, "documents": documents}):
        mask = SequenceMask(**case).visibility(100, torch.device("cpu"))
        blocks = flex_blocks._block_mask(mask, None)
        compiled = torch.compile(flex_blocks.flex_attention)
        out = compiled(*tensors, block_mask=blocks, scale=0.25)
        expected = attention(*tensors, **case, scale=0.25)
        assert torch.allclose(out, expected, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_of_the_mask_are_those_with_a_seen_pair(data: st.DataObject) -> None:
    length, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    numbers = st.lists(st.integers(-1, 3), min_size=length, max_size=length)
    documents = torch.tensor([data.draw(numbers), sorted(data.draw(numbers))]) if data.draw(st.booleans()) else None
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))[None]
    pattern = sliding_window(length, data.draw(st.integers(1, 6)))
    mask = SequenceMask(
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(1, 12)),
        documents=documents,
        keep=data.draw(st.sampled_from([None, keep])),
        blocks=data.draw(st.sampled_from([None, pattern.table()])),
        block_size=pattern.block_size,
    )
    rows, columns = (torch.randperm(length)[: data.draw(st.integers(1, length))].sort().values for _ in range(2))
    visible = mask.visibility(length, torch.device("cpu"))
    visible = visible.take_rows(lambda x: x[..., rows]).take_columns(lambda x: x[..., columns])
    some, whole = visible_blocks(visible, None, size)
    allowed = visible.allowed()
    for i in range(some.shape[-2]):
        for j in range(some.shape[-1]):
            block = allowed[:, i * size : (i + 1) * size, j * size : (j + 1) * size]
            says_some, says_whole = (x[:, 0, i, j].expand(len(block)) for x in (some, whole))
            assert bool((block.flatten(1).any(1) <= says_some).all())
            assert bool((says_whole <= block.flatten(1).all(1)).all())


def test_work_is_that_of_the_window_and_of_the_documents() -> None:
    """Blocks of scores that are computed, of 64 x 64: a band, and squares along the diagonal."""
    band = SequenceMask(causal=True, window=128).visibility(4096, torch.device("cpu"))
    assert int(visible_blocks(band, None, 64)[0].sum()) == 3 * 64 - 3
    squares = SequenceMask(documents=(torch.arange(4096) // 256)[None]).visibility(4096, torch.device("cpu"))
    some, whole = visible_blocks(squares, None, 64)
    assert int(some.sum()) == int(whole.sum()) == 16 * 16


def test_tiles_out_of_reach_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    plain = attention_blocks._scores
    monkeypatch.setattr(attention_blocks, "_scores", lambda *args: computed.append(args) or plain(*args))
    monkeypatch.setattr(attention_blocks, "TILE_COLUMNS", 16)
    monkeypatch.setattr(attention_blocks, "TILE_ELEMENTS", 1)
    tensors = [torch.randn(1, 1, 128, 4) for _ in range(3)]
    attention(*tensors, causal=True, window=10)
    assert len(computed) == 8 + 7


def test_a_mask_of_any_shape_says_which_blocks_are_seen() -> None:
    visible = SequenceMask().visibility(12, torch.device("cpu"))
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    mask[0, 0, 5, 7] = True
    mask[1, 0, :4, :4] = True
    some, whole = visible_blocks(visible, mask, 4)
    assert some[:, 0].nonzero().tolist() == [[0, 1, 1], [1, 0, 0]]
    assert whole[:, 0].nonzero().tolist() == [[1, 0, 0]]
    row = torch.tensor([[[[True] * 5 + [False] * 7]]])
    some, whole = visible_blocks(visible, row, 4)
    assert some[0, 0].tolist() == [[True, True, False]] * 3
    assert whole[0, 0].tolist() == [[True, False, False]] * 3


def test_low_precision_keeps_sums_in_float32() -> None:
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*(tensor.float() for tensor in tensors), causal=True, window=5)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), attention(*tensors, causal=True, window=5), atol=0.03)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: attention(q, k[:, :, 1:], v), "same tokens"),
        (lambda q, k, v: attention(q[:, :3], k, v), "are a multiple"),
        (lambda q, k, v: attention(q, k, v, window=0), "window = 0"),
        (lambda q, k, v: attention(q, k, v, documents=torch.zeros(2, 3).long()), "one for each token"),
        (lambda q, k, v: attention(q, k, v, documents=torch.zeros(2, LENGTH)), "whole numbers"),
        (lambda q, k, v: attention(q, k, v, pattern=sliding_window(9, 4)), "pattern for 9 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[..., Any], words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        call(*inputs())


def test_documents_are_numbered_on_whole_sequences_only() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert document_numbers(positions).tolist() == [[1, 1, 1, 2, 2, 3]]
    with (
        over_parts(SequenceParts(attend=lambda *args: args[0], part=6, length=12)),
        pytest.raises(ScriptError, match="begin on other ranks"),
    ):
        document_numbers(positions)
