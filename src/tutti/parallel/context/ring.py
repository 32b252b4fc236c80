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
from tutti.parallel.context.fused import attend, attend_backward
from tutti.parallel.context.order import Order
from tutti.parallel.context.tiles import Block, Queries, accumulate_dtype, empty_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks that keys and values travel round: this one sends to the next and receives from the one before.

    `group`: their process group, in their order; `channel`: where exchanges are counted.
    """

    order: Order
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
    block = Block(scale=scale, causal=causal, mask=mask, dropout=dropout, seed=seed)
    with torch.autocast(q.device.type, enabled=False):
        return _RingAttention.apply(q, k, v, block, ring)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, ring: Ring) -> torch.Tensor:
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


def _backward_round(
    block: Block, ring: Ring, queries: Queries, k: torch.Tensor, v: torch.Tensor
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


def _seen(block: Block, order: Order, owner: int, rows: int) -> tuple[slice, slice, Block] | None:
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
