"""Ring attention: keys and values are sent around the ring of ranks; each rank attends its queries to them in turn.

Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889); zig-zag order of the tokens for causal balance as in Brandon et al.
2023 (arXiv 2311.09431). It is exact: forward merges partial outputs by their log-sum-exp. Backward sends keys and
values around a second time, and their gradients follow one step behind. Each transfer overlaps the computation of the
block before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from tutti.comm.point_to_point import ring_all_reduce_nbytes, start_messages
from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.data.seeds import derive_seed
from tutti.parallel.context.sequence_order import SequenceOrder, gather_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of ring attention: this rank sends to the next one and receives from the previous one.

    Attributes:
        order: which tokens each rank holds.
        group: their process group, in ring order.
        channel: where communication is counted.
    """

    order: SequenceOrder
    group: Any
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)

    def pass_on(self, tensor: torch.Tensor) -> tuple[torch.Tensor, CommHandle]:
        """Start sending `tensor` to the next rank.

        Returns:
            The buffer for the previous rank's tensor, and the handle to wait for.
        """
        rank, degree = self.order.index, self.order.degree
        received = torch.empty_like(tensor)
        works = start_messages([((rank - 1) % degree, received)], [((rank + 1) % degree, tensor)], self.group)
        return received, self.channel.start(works, tensor.numel() * tensor.element_size())


class _GatherTokens(torch.autograd.Function):
    """All ranks' tokens along dim 2 in order; the gradient is the sum over ranks of this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ring: Ring) -> torch.Tensor:
        ctx.ring = ring
        with ring.channel.waiting((ring.order.degree - 1) * part.numel() * part.element_size()):
            return gather_whole(part, 2, ring.order, ring.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring: Ring = ctx.ring  # type: ignore[attr-defined]
        total = gradient.contiguous().clone()
        with ring.channel.waiting(ring_all_reduce_nbytes(total, ring.order.degree)):
            dist.all_reduce(total, group=ring.group)
        return ring.order.take(total, 2), None


def gather_tokens(part: torch.Tensor, ring: Ring) -> torch.Tensor:
    """(batch, heads, tokens of this rank, d) -> (batch, heads, all tokens in order, d). Collective, as is backward."""
    return _GatherTokens.apply(part, ring)  # type: ignore[no-any-return, no-untyped-call]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    ring: Ring,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks. Collective.

    Args:
        q: (batch, kv_heads, group, rows, d), this rank's part of the sequences in `ring.order`.
        k: (batch, kv_heads, rows, d), likewise.
        v: (batch, kv_heads, rows, d_v), likewise.
        ring: the ranks.
        scale: factor of the scores.
        causal: whether a query sees only keys up to its own position.
        mask: as in `AttentionBlock`, with this rank's rows and all columns of the whole sequence; it gets no gradient.
        dropout: share of the probabilities that is dropped.

    Returns:
        (batch, kv_heads, group, rows, d_v). Rows that see no key are 0.
    """
    seed = int(torch.randint(2**62, (), dtype=torch.int64)) if dropout else 0
    block = AttentionBlock(scale=scale, causal=causal, mask=mask, dropout=dropout, seed=seed)
    with torch.autocast(q.device.type, enabled=False):
        return _RingAttention.apply(q, k, v, block, ring)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """How some queries attend to some keys.

    Attributes:
        scale: factor of the scores.
        causal: whether row i sees columns 0..i only.
        mask: boolean (True: seen), or values to add to the scores.
        dropout: share of the probabilities that is dropped.
        seed: seed of the dropout.
    """

    scale: float
    causal: bool = False
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    seed: int = 0


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock, ring: Ring
    ) -> torch.Tensor:
        out, lse = empty_state(q, v.shape[-1])
        for owner, keys, values in _round(ring, k, v):
            part = _visible(block, ring.order, owner, q.shape[-2])
            if part is not None:
                rows, columns, seen_block = part
                attend(
                    seen_block,
                    q[..., rows, :],
                    keys[:, :, columns],
                    values[:, :, columns],
                    out[..., rows, :],
                    lse[..., rows],
                )
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, block.mask)
        ctx.block, ctx.ring = replace(block, mask=None), ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors  # type: ignore[attr-defined]
        ring: Ring = ctx.ring  # type: ignore[attr-defined]
        block = replace(ctx.block, mask=mask)  # type: ignore[attr-defined]
        grad_out = grad_out.contiguous()
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        queries = Queries(q=q, out=out, lse=lse, grad_out=grad_out, delta=delta, grad_q=grad_q)
        with torch.autocast(q.device.type, enabled=False):
            grad_k, grad_v = _backward_round(block, ring, queries, k, v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


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


def _backward_round(
    block: AttentionBlock, ring: Ring, queries: Queries, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the queries' gradients; returns the gradients of this rank's keys and values after a whole round."""
    dtype = accumulate_dtype(k.dtype)
    arriving = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
    handle: CommHandle | None = None
    for owner, keys, values in _round(ring, k, v):
        grads = torch.zeros_like(arriving)
        grad_keys, grad_values = _unpack(grads, k, v)
        part = _visible(block, ring.order, owner, queries.q.shape[-2])
        if part is not None:
            rows, columns, seen_block = part
            attend_backward(
                seen_block,
                queries.of(rows),
                keys[:, :, columns],
                values[:, :, columns],
                grad_keys[:, :, columns],
                grad_values[:, :, columns],
            )
        _wait(handle)
        arriving, handle = ring.pass_on(grads.add_(arriving))
    _wait(handle)
    return _unpack(arriving, k, v)


def _round(ring: Ring, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(owner, keys, values) of this rank, then of the previous ranks in turn; the next are received meanwhile."""
    current = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(ring.order.degree):
        last = step == ring.order.degree - 1
        following, handle = (current, None) if last else ring.pass_on(current)
        yield (ring.order.index - step) % ring.order.degree, *_unpack(current, k, v)
        _wait(handle)
        current = following


def _unpack(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


def _wait(handle: CommHandle | None) -> None:
    if handle is not None:
        handle.wait()


def _visible(
    block: AttentionBlock, order: SequenceOrder, owner: int, rows: int
) -> tuple[slice, slice, AttentionBlock] | None:
    """Which of this rank's rows see which of `owner`'s columns, and the block of both; None if none do.

    Causal, zig-zag: all rows see the first half of an earlier owner's columns. Only the second half of the rows sees a
    later owner's columns, and it sees all of them.
    """
    mask = None if block.mask is None else order.take(block.mask, -1, owner)
    seen_block = replace(block, mask=mask, seed=derive_seed(block.seed, owner) if block.dropout else 0)
    if not block.causal or owner == order.index:
        return slice(0, rows), slice(0, rows), seen_block
    seen_block, half = replace(seen_block, causal=False), rows // 2
    if owner < order.index:
        top, left = slice(0, rows), slice(0, half)
    else:
        top, left = slice(half, rows), slice(0, rows)
    if mask is not None:
        taken = mask if mask.shape[-2] == 1 else mask[..., top, :]
        seen_block = replace(seen_block, mask=taken[..., left])
    return top, left, seen_block


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the fused CPU kernel supports."""


def fits(block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch's fused CPU kernel computes this block."""
    plain = block.mask is None and not block.dropout
    square = not block.causal or q.shape[-2] == k.shape[-2]
    not_empty = q.numel() > 0 and k.numel() > 0
    return plain and square and not_empty and k.shape == v.shape and q.device.type == "cpu" and q.dtype in DTYPES


def attend(
    block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Let the queries also attend to these keys: merge the result into `out` and `lse`, in place."""
    if not fits(block, q, k, v):
        attend_tiles(block, q, k, v, out, lse)
        return
    q, k, v = map(_by_rows, (q, k, v))
    for head in range(q.shape[2]):
        seen, seen_lse = _forward(q[:, :, head], k, v, 0.0, block.causal, scale=block.scale)
        merge(out[:, :, head], lse[:, :, head], seen.to(out.dtype), seen_lse)


def attend_backward(
    block: AttentionBlock,
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> None:
    """Add this block's gradients: to `queries.grad_q`, and to those of these keys and values."""
    if not fits(block, queries.q, k, v):
        attend_tiles_backward(block, queries, k, v, grad_k, grad_v)
        return
    q, k, v, out, grad_out = map(_by_rows, (queries.q, k, v, queries.out, queries.grad_out))
    for head in range(q.shape[2]):
        lse = _as_laid_out(queries.lse[:, :, head])
        query, key, value = _backward(
            grad_out[:, :, head], q[:, :, head], k, v, out[:, :, head], lse, 0.0, block.causal, scale=block.scale
        )
        queries.grad_q[:, :, head] += query
        grad_k += key
        grad_v += value


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dim is contiguous: the kernel takes that for granted and gives wrong results otherwise."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _as_laid_out(lse: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows) with rows before heads in memory, as the kernel's backward requires."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


TILE_COLUMNS = 1024
"""Largest number of keys in a tile."""

TILE_ELEMENTS = 2**22
"""Approximate number of scores in memory at a time."""


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
    for number, (rows, columns) in enumerate(_tiles(q, k, block.causal)):
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
    for number, (rows, columns) in enumerate(_tiles(queries.q, k, block.causal)):
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


def _tiles(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of each tile; those above the diagonal are left out if `causal`."""
    rows, columns = q.shape[-2], k.shape[-2]
    wide = min(columns, TILE_COLUMNS)
    tall = max(16, TILE_ELEMENTS // max(1, q[..., 0, 0].numel() * wide))
    for top in range(0, rows, tall):
        for left in range(0, columns, wide):
            if not causal or left < top + tall:
                yield slice(top, min(top + tall, rows)), slice(left, min(left + wide, columns))


def _scores(block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
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
    draw.manual_seed(derive_seed(block.seed, tile))
    factors = torch.empty_like(like).bernoulli_(1.0 - block.dropout, generator=draw)
    return factors.div_(max(1.0 - block.dropout, 1e-30))
