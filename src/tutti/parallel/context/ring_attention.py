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
from tutti.nn.attention_blocks import (
    AttentionBlock,
    Queries,
    accumulate_dtype,
    attend,
    attend_backward,
    empty_state,
    with_engine,
)
from tutti.nn.visibility import Visibility
from tutti.parallel.context.sequence_order import SequenceOrder, gather_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of ring attention: this rank sends to the next one and receives from the previous one.

    Attributes:
        order: which tokens each rank holds.
        group: their process group, in ring order.
        channel: where communication is counted.
        engines: names of what computed attention so far.
    """

    order: SequenceOrder
    group: Any
    channel: CommChannel = field(default_factory=untracked_channel, compare=False)
    engines: set[str] = field(default_factory=set, compare=False)

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
    visible: Visibility | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks. Collective.

    Each block is computed by the kernel that `with_engine` names; which one is the same for all blocks of a call.

    Args:
        q: (batch, kv_heads, group, rows, d), this rank's part of the sequences in `ring.order`.
        k: (batch, kv_heads, rows, d), likewise.
        v: (batch, kv_heads, rows, d_v), likewise.
        ring: the ranks.
        scale: factor of the scores.
        causal: whether a query sees only keys up to its own position.
        mask: as in `AttentionBlock`, with this rank's rows and all columns of the whole sequence; it gets no gradient.
        visible: likewise, which keys are seen by position and document.
        dropout: share of the probabilities that is dropped.

    Returns:
        (batch, kv_heads, group, rows, d_v). Rows that see no key are 0.
    """
    seed = int(torch.randint(2**62, (), dtype=torch.int64)) if dropout else 0
    block = AttentionBlock(scale=scale, causal=causal, mask=mask, visible=visible, dropout=dropout, seed=seed)
    block = with_engine(block, q, k, v)
    ring.engines.add(block.engine_name)
    with torch.autocast(q.device.type, enabled=False):
        return _RingAttention.apply(q, k, v, block, ring)  # type: ignore[no-any-return, no-untyped-call]


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
    reach = None if block.visible is None else block.visible.reach
    if reach is not None and order.distance(owner, rows) >= reach:
        return None
    mask = None if block.mask is None else order.take(block.mask, -1, owner)
    visible = None if block.visible is None else block.visible.take_columns(lambda x: order.take(x, -1, owner))
    seed = derive_seed(block.seed, owner) if block.dropout else 0
    seen_block = replace(block, mask=mask, visible=visible, seed=seed)
    if not block.causal or owner == order.index:
        return slice(0, rows), slice(0, rows), seen_block
    seen_block, half = replace(seen_block, causal=False), rows // 2
    if owner < order.index:
        top, left = slice(0, rows), slice(0, half)
    else:
        top, left = slice(half, rows), slice(0, rows)
    if visible is not None:
        seen_block = replace(seen_block, visible=visible.part(top, left))
    if mask is not None:
        taken = mask if mask.shape[-2] == 1 else mask[..., top, :]
        seen_block = replace(seen_block, mask=taken[..., left])
    return top, left, seen_block
