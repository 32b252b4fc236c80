"""Attention of some queries to some keys, tile by tile: the arithmetic inside ring attention.

Online softmax: partial outputs are merged by their log-sum-exp (Milakov and Gimelshein 2018, arXiv 1805.02867), and
backward computes each tile's probabilities again from the final log-sum-exp (FlashAttention, Dao et al. 2022, arXiv
2205.14135, algorithm 4), so no more than one tile of probabilities is held at a time.

Shapes: queries (batch, kv_heads, group, rows, d): `group` query heads share a key head. Keys (batch, kv_heads,
columns, d), values (batch, kv_heads, columns, d_v). Masks broadcast to (batch, kv_heads, group, rows, columns).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tutti.data.seeds import derive_seed

TILE_COLUMNS = 1024
TILE_ELEMENTS = 2**22
"""Scores held at a time, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How some queries look at some keys. `causal`: row i sees columns 0..i; `mask`: boolean (True: seen) or added;
    `dropout`: share of probabilities dropped, drawn from `seed`.
    """

    scale: float
    causal: bool = False
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """What queries bring to the way back. `out`, `lse`: final, of all keys; `delta`: row sums of grad_out * out;
    `grad_q`: what each block's part is added to.
    """

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    delta: torch.Tensor
    grad_q: torch.Tensor

    def of(self, rows: slice) -> "Queries":
        """Those of some rows, as views."""
        return Queries(
            q=self.q[..., rows, :],
            out=self.out[..., rows, :],
            lse=self.lse[..., rows],
            grad_out=self.grad_out[..., rows, :],
            delta=self.delta[..., rows],
            grad_q=self.grad_q[..., rows, :],
        )


def empty_state(q: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of queries that have seen no key: zeros and -inf, in the dtype sums are kept in."""
    dtype = accumulate_dtype(q.dtype)
    out = torch.zeros(*q.shape[:-1], value_size, dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def attend(
    block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Let the queries also see these keys: `out` and `lse` are merged with them, in place."""
    for number, (rows, columns) in enumerate(_tiles(q, k, block.causal)):
        scores = _scores(block, q, k, rows, columns)
        tile_lse = torch.logsumexp(scores, -1)
        probabilities = _exp(scores, tile_lse)
        if block.dropout:
            probabilities *= _kept(block, number, probabilities)
        seen = _by_keys(probabilities.to(v.dtype), v[:, :, columns]).to(out.dtype)
        merge(out[..., rows, :], lse[..., rows], seen, tile_lse)


def merge(out: torch.Tensor, lse: torch.Tensor, seen: torch.Tensor, seen_lse: torch.Tensor) -> None:
    """Merge what the queries saw of some keys into what they saw of others, in place."""
    after = torch.logaddexp(lse, seen_lse)
    out.mul_(_exp(lse[..., None], after)).addcmul_(seen, _exp(seen_lse[..., None], after))
    lse.copy_(after)


def attend_backward(
    block: Block, queries: Queries, k: torch.Tensor, v: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
) -> None:
    """Add this block's part to the gradients: of the queries, of these keys and of their values."""
    for number, (rows, columns) in enumerate(_tiles(queries.q, k, block.causal)):
        here = queries.of(rows)
        probabilities = _exp(_scores(block, queries.q, k, rows, columns), here.lse)
        slope = _by_keys(here.grad_out, v[:, :, columns].transpose(-2, -1)).to(here.lse.dtype)
        dropped = probabilities
        if block.dropout:
            kept = _kept(block, number, probabilities)
            dropped, slope = probabilities * kept, slope * kept
        grad_v[:, :, columns] += _by_queries(dropped.to(v.dtype), here.grad_out).to(grad_v.dtype)
        slope = ((slope - here.delta[..., None]) * probabilities * block.scale).to(here.q.dtype)
        here.grad_q.add_(_by_keys(slope, k[:, :, columns]).to(here.grad_q.dtype))
        grad_k[:, :, columns] += _by_queries(slope, here.q).to(grad_k.dtype)


def _tiles(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of one tile after another; those above the diagonal are left out."""
    rows, columns = q.shape[-2], k.shape[-2]
    wide = min(columns, TILE_COLUMNS)
    tall = max(16, TILE_ELEMENTS // max(1, q[..., 0, 0].numel() * wide))
    for top in range(0, rows, tall):
        for left in range(0, columns, wide):
            if not causal or left < top + tall:
                yield slice(top, min(top + tall, rows)), slice(left, min(left + wide, columns))


def _scores(block: Block, q: torch.Tensor, k: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    keys = k[:, :, columns].transpose(-2, -1)
    scores = _by_keys(q[..., rows, :], keys).to(accumulate_dtype(q.dtype)) * block.scale
    if block.mask is not None:
        mask = block.mask[..., rows if block.mask.shape[-2] > 1 else slice(None), columns]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if block.causal and columns.stop > rows.start + 1:
        row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(columns.start, columns.stop, device=q.device) > row, -torch.inf)
    return scores


def _exp(values: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(values - lse) along the last dim; 0 where nothing was seen (lse is -inf)."""
    lse = lse[..., None]
    return torch.exp(values - lse.masked_fill(lse == -torch.inf, 0.0))


def _by_keys(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(b, h, g, rows, x) @ (b, h, x, y): heads of a group share the right side, which is not copied."""
    batch, heads, group, rows, inner = left.shape
    product = left.reshape(batch, heads, group * rows, inner) @ right
    return product.view(batch, heads, group, rows, -1)


def _by_queries(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sum over group and rows of left (b, h, g, rows, x), transposed, @ right (b, h, g, rows, y)."""
    return left.flatten(2, 3).transpose(-2, -1) @ right.flatten(2, 3)


def _kept(block: Block, tile: int, like: torch.Tensor) -> torch.Tensor:
    """1 / (1 - dropout) where a probability is kept, 0 elsewhere; the same in forward and backward."""
    draw = torch.Generator(like.device)
    draw.manual_seed(derive_seed(block.seed, tile))
    kept = torch.empty_like(like).bernoulli_(1.0 - block.dropout, generator=draw)
    return kept.div_(max(1.0 - block.dropout, 1e-30))
