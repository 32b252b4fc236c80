"""Blocks of ring attention by torch's fused kernel for CPUs, where it computes them; else by tiles.py, tile by tile.

The kernel gives the log-sum-exp by which partial outputs are merged, and its backward takes that of all keys
(FlashAttention-2: Dao 2023, arXiv 2307.08691, section 3.1). Arguments and shapes are those of tiles.py.
"""

import torch

from tutti.parallel.context import tiles
from tutti.parallel.context.tiles import Block, Queries

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fits(block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel computes this block."""
    plain = block.mask is None and not block.dropout
    square = not block.causal or q.shape[-2] == k.shape[-2]
    there = q.numel() > 0 and k.numel() > 0
    return plain and square and there and k.shape == v.shape and q.device.type == "cpu" and q.dtype in DTYPES


def attend(
    block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Let the queries also see these keys: `out` and `lse` are merged with them, in place."""
    if not fits(block, q, k, v):
        tiles.attend(block, q, k, v, out, lse)
        return
    q, k, v = map(_by_rows, (q, k, v))
    for one in range(q.shape[2]):
        seen, seen_lse = _forward(q[:, :, one], k, v, 0.0, block.causal, scale=block.scale)
        tiles.merge(out[:, :, one], lse[:, :, one], seen.to(out.dtype), seen_lse)


def attend_backward(
    block: Block, queries: Queries, k: torch.Tensor, v: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
) -> None:
    """Add this block's part to the gradients: of the queries, of these keys and of their values."""
    if not fits(block, queries.q, k, v):
        tiles.attend_backward(block, queries, k, v, grad_k, grad_v)
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
