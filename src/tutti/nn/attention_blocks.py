"""Attention of some queries to some keys: merged into their attention to other keys, and its backward.

The log-sum-exp of the scores is what merging needs (Milakov and Gimelshein 2018, arXiv 1805.02867). Backward of a block
takes the output and the log-sum-exp over all keys, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from tutti.nn.attention_kernels import Kernel, choose_kernel
from tutti.nn.flex_blocks import flex_takes, flex_with_lse
from tutti.nn.visibility import Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """How some queries attend to some keys.

    Attributes:
        scale: factor of the scores.
        causal: whether row i sees columns 0..i only.
        mask: boolean (True: seen), or values to add to the scores; it has up to 5 dims, the last being
            (batch, key heads, group, rows, columns), of which all but the last may be 1.
        visible: which keys are seen, by position and document.
        dropout: share of the probabilities that is dropped.
        seed: seed of the dropout.
        engine: what computes it: a fused kernel, FlexAttention, or tiles of plain operations.
    """

    scale: float
    causal: bool = False
    mask: torch.Tensor | None = None
    visible: Visibility | None = None
    dropout: float = 0.0
    seed: int = 0
    engine: "Engine" = "tiles"

    @property
    def engine_name(self) -> str:
        """The engine's name, for messages and reports."""
        return self.engine if isinstance(self.engine, str) else self.engine.name


Engine = Kernel | Literal["flex", "tiles"]
"""A fused kernel; FlexAttention; plain operations on tiles of scores, which compute everything on every device."""


def with_engine(block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionBlock:
    """The block with the fastest engine that computes it for these tensors.

    | block | on accelerators | on the CPU |
    |---|---|---|
    | all keys, or causal | the fused kernel that torch would choose | torch's fused kernel |
    | masks, windows, documents, blocks | FlexAttention, compiled | tiles |
    | dropout; dtypes and head sizes that no kernel takes | tiles | tiles |
    """
    engine: Engine = "tiles"
    if not block.dropout:
        if block.mask is None and block.visible is None:
            engine = choose_kernel(q, k, v) or "tiles"
        if engine == "tiles" and flex_takes(q, k, v):
            engine = "flex"
    return replace(block, engine=engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """The queries' tensors for backward.

    Attributes:
        q: the queries.
        out: their output, over all keys.
        lse: their log-sum-exp, over all keys.
        grad_out: gradient of the output.
        delta: row sums of grad_out * out.
        grad_q: where each block's gradient is added.
    """

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    delta: torch.Tensor
    grad_q: torch.Tensor

    def of(self, rows: slice) -> "Queries":
        """Views of some rows."""
        return Queries(
            q=self.q[..., rows, :],
            out=self.out[..., rows, :],
            lse=self.lse[..., rows],
            grad_out=self.grad_out[..., rows, :],
            delta=self.delta[..., rows],
            grad_q=self.grad_q[..., rows, :],
        )


def attend(
    block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Let the queries also attend to these keys: merge the result into `out` and `lse`, in place."""
    if not q.numel() or not k.numel():
        return
    if block.engine == "tiles":
        attend_tiles(block, q, k, v, out, lse)
        return
    if block.engine == "flex":
        with torch.no_grad():
            seen, seen_lse = _flex(block, q, k, v)
    else:
        seen, seen_lse = block.engine.run(q, k, v, causal=block.causal, scale=block.scale)
    merge(out, lse, seen.to(out.dtype), seen_lse)


def attend_backward(
    block: AttentionBlock,
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> None:
    """Add this block's gradients: to `queries.grad_q`, and to those of these keys and values."""
    if not queries.q.numel() or not k.numel():
        return
    if block.engine == "tiles":
        attend_tiles_backward(block, queries, k, v, grad_k, grad_v)
        return
    if block.engine == "flex":
        grads = _flex_backward(block, queries, k, v)
    else:
        grads = block.engine.run_backward(
            queries.grad_out, queries.q, k, v, queries.out, queries.lse, causal=block.causal, scale=block.scale
        )
    for total, grad in zip((queries.grad_q, grad_k, grad_v), grads, strict=True):
        total += grad


def _flex(
    block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp by FlexAttention; differentiable where gradients are enabled."""
    mask = block.mask
    if mask is not None:
        mask = mask.reshape(*(1,) * (5 - mask.dim()), *mask.shape)
        heads = q.shape[1:3] if max(mask.shape[1:3]) > 1 else (1, 1)
        mask = mask.expand(-1, *heads, -1, -1).flatten(1, 2)
    out, lse = flex_with_lse(
        q.flatten(1, 2), k, v, visible=block.visible, causal=block.causal, mask=mask, scale=block.scale
    )
    return out.unflatten(1, q.shape[1:3]), lse.unflatten(1, q.shape[1:3])  # type: ignore[no-untyped-call]


def _flex_backward(
    block: AttentionBlock, queries: Queries, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """FlexAttention's backward takes no log-sum-exp over other keys, so the block's own output is computed again.

    The whole output is the sum of the blocks' outputs, each weighted by exp(its log-sum-exp - the merged one).
    """
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (queries.q, k, v)]
        out, lse = _flex(block, *inputs)
    weight = _exp(lse.detach()[..., None], queries.lse)  # 0 where the row sees nothing here
    grad_out = weight * queries.grad_out.to(weight.dtype)
    grad_lse = (grad_out * out.detach().to(weight.dtype)).sum(-1) - weight[..., 0] * queries.delta
    return torch.autograd.grad((out, lse), inputs, (grad_out.to(out.dtype), grad_lse.to(lse.dtype)))


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
        out, lse = empty_state(q, v.shape[-1])
        attend(block, q, k, v, out, lse)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.block = block
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        queries = Queries(q=q, out=out, lse=lse, grad_out=grad_out, delta=delta, grad_q=grad_q)
        attend_backward(ctx.block, queries, k, v, grad_k, grad_v)  # type: ignore[attr-defined]
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def attend_tiled(block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by tiles, in memory linear in the number of keys.

    Args:
        block: how queries attend.
        q: (batch, key heads, group, rows, d).
        k: (batch, key heads, columns, d).
        v: (batch, key heads, columns, d_v).

    Returns:
        (batch, key heads, group, rows, d_v). Rows that see no key are 0.
    """
    return _BlockAttention.apply(q, k, v, replace(block, engine="tiles"))  # type: ignore[no-any-return, no-untyped-call]


TILE_COLUMNS = 1024
"""Largest number of keys in a tile."""

TILE_ELEMENTS = 2**22
"""Approximate number of scores in memory at a time."""


SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of two tiles' dropout; odd, so that no two tiles of a block have the same."""


def empty_state(q: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of queries that have seen no key: zeros and -inf, in the dtype of accumulation."""
    dtype = accumulate_dtype(q.dtype)
    out = torch.zeros(*q.shape[:-1], value_size, dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over values of `dtype` are accumulated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def attend_tiles(
    block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """`attend` in tiles, without the fused kernel."""
    for number, (rows, columns) in enumerate(_tiles(block, q, k)):
        scores = _scores(block, q, k, rows, columns)
        tile_lse = torch.logsumexp(scores, -1)
        probabilities = _exp(scores, tile_lse)
        if block.dropout:
            probabilities *= _dropout_factors(block, number, probabilities)
        seen = _by_keys(probabilities.to(v.dtype), v[:, :, columns]).to(out.dtype)
        merge(out[..., rows, :], lse[..., rows], seen, tile_lse)


def merge(out: torch.Tensor, lse: torch.Tensor, seen: torch.Tensor, seen_lse: torch.Tensor) -> None:
    """Merge the queries' attention to some keys into their attention to other keys, in place."""
    after = torch.logaddexp(lse, seen_lse)
    out.mul_(_exp(lse[..., None], after)).addcmul_(seen, _exp(seen_lse[..., None], after))
    lse.copy_(after)


def attend_tiles_backward(
    block: AttentionBlock,
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> None:
    """`attend_backward` in tiles, without the fused kernel."""
    for number, (rows, columns) in enumerate(_tiles(block, queries.q, k)):
        tile = queries.of(rows)
        probabilities = _exp(_scores(block, queries.q, k, rows, columns), tile.lse)
        grad_probabilities = _by_keys(tile.grad_out, v[:, :, columns].transpose(-2, -1)).to(tile.lse.dtype)
        dropped = probabilities
        if block.dropout:
            factors = _dropout_factors(block, number, probabilities)
            dropped, grad_probabilities = probabilities * factors, grad_probabilities * factors
        grad_v[:, :, columns] += _by_queries(dropped.to(v.dtype), tile.grad_out).to(grad_v.dtype)
        grad_scores = (grad_probabilities - tile.delta[..., None]) * probabilities * block.scale
        grad_scores = grad_scores.to(tile.q.dtype)
        tile.grad_q.add_(_by_keys(grad_scores, k[:, :, columns]).to(tile.grad_q.dtype))
        grad_k[:, :, columns] += _by_queries(grad_scores, tile.q).to(grad_k.dtype)


def _tiles(block: AttentionBlock, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of each tile; tiles of which the positions say that nothing is seen are left out."""
    rows, columns = q.shape[-2], k.shape[-2]
    wide = min(columns, TILE_COLUMNS)
    tall = max(16, TILE_ELEMENTS // max(1, q[..., 0, 0].numel() * wide))
    for top in range(0, rows, tall):
        for left in range(0, columns, wide):
            tile = slice(top, min(top + tall, rows)), slice(left, min(left + wide, columns))
            above = block.causal and left >= top + tall
            if not above and (block.visible is None or not block.visible.part(*tile).is_out_of_reach()):
                yield tile


def _scores(block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    keys = k[:, :, columns].transpose(-2, -1)
    scores = _by_keys(q[..., rows, :], keys).to(accumulate_dtype(q.dtype)) * block.scale
    if block.mask is not None:
        mask = block.mask[..., rows if block.mask.shape[-2] > 1 else slice(None), columns]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if block.visible is not None:
        scores = scores.masked_fill(~block.visible.part(rows, columns).allowed()[:, None, None], -torch.inf)
    if block.causal and columns.stop > rows.start + 1:
        row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(columns.start, columns.stop, device=q.device) > row, -torch.inf)
    return scores


def _exp(values: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(values - lse) along the last dim; 0 where no key was seen (lse is -inf)."""
    lse = lse[..., None]
    return torch.exp(values - lse.masked_fill(lse == -torch.inf, 0.0))


def _by_keys(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(b, h, g, rows, x) @ (b, h, x, y): the query heads of a group share the right side, which is not copied."""
    batch, heads, group, rows, inner = left.shape
    product = left.reshape(batch, heads, group * rows, inner) @ right
    return product.view(batch, heads, group, rows, -1)


def _by_queries(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sum over group and rows of left (b, h, g, rows, x), transposed, @ right (b, h, g, rows, y)."""
    return left.flatten(2, 3).transpose(-2, -1) @ right.flatten(2, 3)


def _dropout_factors(block: AttentionBlock, tile: int, like: torch.Tensor) -> torch.Tensor:
    """1 / (1 - dropout) where a probability is kept, 0 elsewhere; the same in forward and backward."""
    draw = torch.Generator(like.device)
    draw.manual_seed((block.seed + tile * SEED_STEP) % 2**63)
    factors = torch.empty_like(like).bernoulli_(1.0 - block.dropout, generator=draw)
    return factors.div_(max(1.0 - block.dropout, 1e-30))
