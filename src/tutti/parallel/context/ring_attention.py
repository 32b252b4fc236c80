"""Ring attention: keys and values travel round the ranks while each rank's queries look at those that are there.

Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889); zig-zag order of the tokens for causal balance as in Brandon et al.
2023 (arXiv 2311.09431). Exact: log-sum-exp merging in forward, and backward passes keys and values round a second
time, with their gradients travelling one step behind them. A transfer runs while the block before it is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from tutti.comm.point_to_point import start_messages
from tutti.comm.traffic import CommChannel, CommHandle, untracked_channel
from tutti.data.seeds import derive_seed
from tutti.parallel.context.sequence_order import SequenceOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks that keys and values travel round: this one sends to the next and receives from the one before.

    `group`: their process group, in their order; `channel`: where exchanges are counted.
    """

    order: SequenceOrder
    group: Any
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)

    def pass_on(self, tensor: torch.Tensor) -> tuple[torch.Tensor, CommHandle]:
        """Start sending `tensor` on; returns where the previous rank's arrives, and what to wait for."""
        me, degree = self.order.index, self.order.degree
        received = torch.empty_like(tensor)
        works = start_messages([((me - 1) % degree, received)], [((me + 1) % degree, tensor)], self.group)
        return received, self.channel.start(works, tensor.numel() * tensor.element_size())


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
    """Attention of this rank's queries to the keys of all ranks; every rank must call it together.

    q: (batch, kv_heads, group, rows, d), k and v: (batch, kv_heads, rows, d or d_v), the parts of a sequence in
    `ring.order`. `mask`: as in Block, over rows here and all columns of the whole sequence; no gradient passes to it.
    Returns (batch, kv_heads, group, rows, d_v). Rows that see no key are 0.
    """
    seed = int(torch.randint(2**62, (), dtype=torch.int64)) if dropout else 0
    block = AttentionBlock(scale=scale, causal=causal, mask=mask, dropout=dropout, seed=seed)
    with torch.autocast(q.device.type, enabled=False):
        return _RingAttention.apply(q, k, v, block, ring)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """How some queries look at some keys. `causal`: row i sees columns 0..i; `mask`: boolean (True: seen) or added;
    `dropout`: share of probabilities dropped, drawn from `seed`.
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
            part = _seen(block, ring.order, owner, q.shape[-2])
            if part is not None:
                rows, columns, one = part
                attend(
                    one, q[..., rows, :], keys[:, :, columns], values[:, :, columns], out[..., rows, :], lse[..., rows]
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


def _backward_round(
    block: AttentionBlock, ring: Ring, queries: Queries, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to the queries' gradients; returns those of this rank's keys and values, which have come round."""
    dtype = accumulate_dtype(k.dtype)
    arriving = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
    handle: CommHandle | None = None
    for owner, keys, values in _round(ring, k, v):
        grads = torch.zeros_like(arriving)
        grad_keys, grad_values = _unpack(grads, k, v)
        part = _seen(block, ring.order, owner, queries.q.shape[-2])
        if part is not None:
            rows, columns, one = part
            attend_backward(
                one,
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
    """(owner, keys, values) of this rank, then of the one before it, and so on round; the next are on their way."""
    here = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(ring.order.degree):
        last = step == ring.order.degree - 1
        coming, handle = (here, None) if last else ring.pass_on(here)
        yield (ring.order.index - step) % ring.order.degree, *_unpack(here, k, v)
        _wait(handle)
        here = coming


def _unpack(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


def _wait(handle: CommHandle | None) -> None:
    if handle is not None:
        handle.wait()


def _seen(
    block: AttentionBlock, order: SequenceOrder, owner: int, rows: int
) -> tuple[slice, slice, AttentionBlock] | None:
    """Which of this rank's rows see which of `owner`'s columns, and how; None: none do.

    Causal, zig-zag: of an earlier owner all rows see the first half; of a later one the second half sees all.
    """
    mask = None if block.mask is None else order.take(block.mask, -1, owner)
    one = replace(block, mask=mask, seed=derive_seed(block.seed, owner) if block.dropout else 0)
    if not block.causal or owner == order.index:
        return slice(0, rows), slice(0, rows), one
    one, half = replace(one, causal=False), rows // 2
    if owner < order.index:
        top, left = slice(0, rows), slice(0, half)
    else:
        top, left = slice(half, rows), slice(0, rows)
    if mask is not None:
        taken = mask if mask.shape[-2] == 1 else mask[..., top, :]
        one = replace(one, mask=taken[..., left])
    return top, left, one


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fits(block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel computes this block."""
    plain = block.mask is None and not block.dropout
    square = not block.causal or q.shape[-2] == k.shape[-2]
    there = q.numel() > 0 and k.numel() > 0
    return plain and square and there and k.shape == v.shape and q.device.type == "cpu" and q.dtype in DTYPES


def attend(
    block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Let the queries also see these keys: `out` and `lse` are merged with them, in place."""
    if not fits(block, q, k, v):
        attend_tiles(block, q, k, v, out, lse)
        return
    q, k, v = map(_by_rows, (q, k, v))
    for one in range(q.shape[2]):
        seen, seen_lse = _forward(q[:, :, one], k, v, 0.0, block.causal, scale=block.scale)
        merge(out[:, :, one], lse[:, :, one], seen.to(out.dtype), seen_lse)


def attend_backward(
    block: AttentionBlock,
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
) -> None:
    """Add this block's part to the gradients: of the queries, of these keys and of their values."""
    if not fits(block, queries.q, k, v):
        attend_tiles_backward(block, queries, k, v, grad_k, grad_v)
        return
    q, k, v, out, grad_out = map(_by_rows, (queries.q, k, v, queries.out, queries.grad_out))
    for one in range(q.shape[2]):
        lse = _as_laid_out(queries.lse[:, :, one])
        query, key, value = _backward(
            grad_out[:, :, one], q[:, :, one], k, v, out[:, :, one], lse, 0.0, block.causal, scale=block.scale
        )
        queries.grad_q[:, :, one] += query
        grad_k += key
        grad_v += value


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """With the last dim's values next to each other: the kernel takes for granted that they are, and says nothing."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _as_laid_out(lse: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows), rows before heads in memory, as the kernel's forward makes it and its backward takes it."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


TILE_COLUMNS = 1024


TILE_ELEMENTS = 2**22
"""Scores held at a time, about."""


def empty_state(q: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of queries that have seen no key: zeros and -inf, in the dtype sums are kept in."""
    dtype = accumulate_dtype(q.dtype)
    out = torch.zeros(*q.shape[:-1], value_size, dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def attend_tiles(
    block: AttentionBlock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
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


def attend_tiles_backward(
    block: AttentionBlock,
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
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


def _kept(block: AttentionBlock, tile: int, like: torch.Tensor) -> torch.Tensor:
    """1 / (1 - dropout) where a probability is kept, 0 elsewhere; the same in forward and backward."""
    draw = torch.Generator(like.device)
    draw.manual_seed(derive_seed(block.seed, tile))
    kept = torch.empty_like(like).bernoulli_(1.0 - block.dropout, generator=draw)
    return kept.div_(max(1.0 - block.dropout, 1e-30))
