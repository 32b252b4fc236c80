"""FlexAttention: attention with windows, documents, blocks and masks, compiled for accelerators.

`torch.nn.attention.flex_attention` (Dong et al. 2024, arXiv 2412.05496) generates a kernel for a mask and skips blocks
of the scores of which nothing is seen. Which blocks these are is computed here from a few numbers for each block, so
that no mask of (queries x keys) is ever in memory and the host need not wait for the device.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tutti.nn.visibility import Visibility

DEVICES = ("cuda", "xpu")
"""Devices for which FlexAttention has a backward pass; on the CPU it has none in torch 2.13."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SMALLEST_HEAD = 16
"""Smallest head size of the generated kernels."""

BLOCK = 128
"""Tokens of a block of scores."""


def flex_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether FlexAttention computes and differentiates attention of these tensors."""
    heads_fit = min(q.shape[-1], v.shape[-1]) >= SMALLEST_HEAD
    return q.device.type in DEVICES and q.dtype in DTYPES and heads_fit and q.numel() > 0 and k.numel() > 0


def flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, visible: Visibility | None, scale: float
) -> torch.Tensor:
    """Attention of (batch, heads, rows, d) to (batch, key heads, columns, d); rows that see no key are 0."""
    blocks = None if visible is None else _block_mask(visible, None)
    grouped = q.shape[1] != k.shape[1]
    return _function(q.device.type)(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]


def flex_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: Visibility | None,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp (batch, heads, rows), which is -inf for rows that see no key.

    Args:
        q: (batch, heads, rows, d).
        k: (batch, key heads, columns, d).
        v: (batch, key heads, columns, d_v).
        visible: which keys are seen; None: all.
        causal: whether row i sees columns 0..i only, as well.
        mask: (batch or 1, heads or 1, rows or 1, columns), boolean, or values to add to the scores.
        scale: factor of the scores.
    """
    if visible is None:
        rows, columns = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        visible = Visibility(causal=causal, window=None, rows=rows, columns=columns)
    elif causal:
        visible = replace(visible, causal=True)
    added = mask is not None and mask.dtype != torch.bool
    blocks = _block_mask(visible, None if added else mask)
    options: dict[str, Any] = {"score_mod": _adds(mask)} if mask is not None and added else {}
    out, aux = _function(q.device.type)(
        q,
        k,
        v,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
        **options,
    )
    return out, aux.lse


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _function(device: str) -> Callable[..., Any]:
    """FlexAttention, compiled where that gives a fused kernel and nobody is compiling already."""
    plain: Callable[..., Any] = flex_attention
    return plain if device == "cpu" or torch.compiler.is_compiling() else _compiled()


def _adds(values: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A score function that adds values of shape (batch or 1, heads or 1, rows or 1, columns)."""
    of_batch, of_head, of_row = (size > 1 for size in values.shape[:3])

    def add(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        none = j * 0
        return score + values[b if of_batch else none, h if of_head else none, i if of_row else none, j]

    return add


def _sees(visible: Visibility, mask: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """A mask function. It captures tensors and flags only, since a changing number would compile a kernel each."""
    causal, window = visible.causal, visible.window
    rows, columns, keep, blocks = visible.rows, visible.columns, visible.keep, visible.blocks
    row_blocks, column_blocks = (None if blocks is None else x // visible.block_size for x in (rows, columns))
    row_documents, column_documents = visible.row_documents, visible.column_documents
    of_batch, of_head, of_row = (False,) * 3 if mask is None else (size > 1 for size in mask.shape[:3])

    def sees(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        row, column = rows[i], columns[j]
        seen = column >= 0
        if causal:
            seen = seen & (column <= row)
        if window is not None:
            seen = seen & ((row - column).abs() < window)
        if blocks is not None and row_blocks is not None and column_blocks is not None:
            seen = seen & blocks[row_blocks[i], column_blocks[j]]
        if row_documents is not None and column_documents is not None:
            document = column_documents[b, j]
            seen = seen & (row_documents[b, i] == document) & (document >= 0)
        if keep is not None:
            seen = seen & keep[b, j]
        if mask is not None:
            none = j * 0
            seen = seen & mask[b if of_batch else none, h if of_head else none, i if of_row else none, j]
        return seen

    return sees


def _block_mask(visible: Visibility, mask: torch.Tensor | None) -> BlockMask:
    """Which blocks of the scores are computed, and which need no mask, for the kernels."""
    some, whole = visible_blocks(visible, mask, BLOCK)
    partly = some & ~whole
    counts = [x.sum(-1, dtype=torch.int32) for x in (partly, whole)]
    order = [x.to(torch.int8).argsort(stable=True, dim=-1, descending=True).to(torch.int32) for x in (partly, whole)]
    return BlockMask.from_kv_blocks(
        counts[0],
        order[0],
        counts[1],
        order[1],
        BLOCK_SIZE=BLOCK,
        mask_mod=_sees(visible, mask),
        seq_lengths=(len(visible.rows), len(visible.columns)),
    )


def visible_blocks(visible: Visibility, mask: torch.Tensor | None, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of `size` rows and `size` columns: whether it may have a seen pair; whether all pairs are seen.

    Both are (batch or 1, heads or 1, blocks of rows, blocks of columns). Documents that are not in order, and blocks of
    a pattern beside a window, may be said to have a seen pair though they have none; the mask then hides it.
    """
    low_row, high_row = (x[:, None] for x in _extremes(visible.rows, size))
    low, high = (x[None, :] for x in _extremes(visible.columns, size))
    some = torch.ones_like(low_row <= low)
    rows, columns = len(visible.rows), len(visible.columns)
    whole = some.clone()
    if rows % size:
        whole[-1] = False
    if columns % size:
        whole[:, -1] = False
    if visible.causal:
        some, whole = some & (low <= high_row), whole & (high <= low_row)
    if visible.window is not None:
        nearest, farthest = torch.maximum(low - high_row, low_row - high), torch.maximum(high - low_row, high_row - low)
        some, whole = some & (nearest < visible.window), whole & (farthest < visible.window)
    if visible.blocks is not None:
        touched = [
            _touched(x // visible.block_size, len(visible.blocks), size) for x in (visible.rows, visible.columns)
        ]
        seen, unseen = (touched[0] @ x.float() @ touched[1].T for x in (visible.blocks, ~visible.blocks))
        some, whole = some & (seen > 0), whole & (unseen == 0)
    some, whole = some[None, None], whole[None, None]
    if visible.row_documents is not None and visible.column_documents is not None:
        low_row, high_row = (x[:, None, :, None] for x in _extremes(visible.row_documents, size))
        low, high = (x[:, None, None, :] for x in _extremes(visible.column_documents, size))
        some = some & (low <= high_row) & (low_row <= high) & (high >= 0)
        whole = whole & (low == high) & (low_row == high_row) & (low == low_row) & (low >= 0)
    if visible.keep is not None:
        low, high = (x[:, None, None, :] > 0 for x in _extremes(visible.keep.to(torch.int8), size))
        some, whole = some & high, whole & low
    if mask is not None:
        by_columns = _extremes(mask.to(torch.int8), size)
        by_rows = by_columns if mask.shape[-2] == 1 else [_extremes(x.mT, size)[n].mT for n, x in enumerate(by_columns)]
        some, whole = some & (by_rows[1] > 0), whole & (by_rows[0] > 0)
    return some, whole


def _extremes(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest value of each block of the last dim; the last value fills the last block."""
    short = -x.shape[-1] % size
    if short:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)
    least, greatest = x.unflatten(-1, (-1, size)).aminmax(dim=-1)  # type: ignore[no-untyped-call]
    return least, greatest


def _touched(blocks: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """(blocks of `size` tokens, `count`): 1 where a block has a token of that block of a pattern, else 0."""
    number = torch.arange(len(blocks), device=blocks.device) // size
    touched = torch.zeros(-(-len(blocks) // size), count, dtype=torch.float32, device=blocks.device)
    touched[number, blocks] = 1.0
    return touched
