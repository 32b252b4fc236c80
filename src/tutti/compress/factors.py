"""Sufficient factors (Xie et al. 2014): a linear layer's weight gradient is a sum of few outer products, so send those.

With K rows a rank, K (p - 1) (M + N) numbers travel instead of 2 (p - 1)/p M N; K counts every row that the layer
sees, so tokens, not sequences.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutti.compress.exchange import Rounds, Wire
from tutti.errors import ScriptError


def worth(rows: int, ranks: int, out_features: int, in_features: int) -> bool:
    """Whether factors are fewer bytes than a ring's sum: K p < 2 M N / (M + N)."""
    return rows * ranks * (out_features + in_features) < 2 * out_features * in_features


class Factors:
    """The factors of one weight of a step on this rank: rows of the output's gradient beside rows of the input."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def add(self, gradient: Tensor, inputs: Tensor) -> None:
        """(K, M) of the output's gradient and (K, N) of the input."""
        self.rows.append(torch.cat([gradient, inputs], dim=1))

    def take(self, width: int, like: Tensor) -> Tensor:
        """(K, M + N) of everything added since the last time; K may be 0."""
        rows, self.rows = self.rows, []
        return torch.cat(rows) if rows else like.new_zeros(0, width)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
    """`torch.nn.functional.linear` whose backward leaves the weight without a gradient and puts it into `factors`."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    out = _Linear.apply(rows, weight, factors)  # type: ignore[no-untyped-call]
    out = out if bias is None else out + bias
    return out.view(*inputs.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


class FactorSum:
    """Sums a weight's gradient over a group by its factors. All ranks make it alike; `rows` may differ between them."""

    def __init__(self, group: Any = None) -> None:
        self.wire = Wire(group)

    def step_nbytes(self, rows: int, out_features: int, in_features: int, itemsize: int = 4) -> int:
        """Bytes a rank sends in a step with so many rows on each: K (p - 1) (M + N), and a count to each rank."""
        return (self.wire.size - 1) * (rows * (out_features + in_features) * itemsize + 8)

    def rounds(self, factors: Factors, into: Tensor) -> Rounds:
        """Leave the sum, (M, N), in `into`: bit for bit the same on all ranks, since each computes it from all rows."""
        size, (out_features, in_features) = self.wire.size, into.shape
        mine = factors.take(out_features + in_features, into).to(into.dtype)
        if mine.shape[1] != out_features + in_features:
            raise ScriptError(
                f"factors of width {mine.shape[1]} do not make a weight of shape {tuple(into.shape)}; "
                "give each weight its own Factors"
            )
        count = torch.tensor([len(mine)], dtype=torch.int64, device=into.device)
        counts = count.new_empty(size)
        yield [self.wire.all_gather(counts, count)]
        everything = mine.new_empty(int(counts.sum()), mine.shape[1])
        to_each = mine.repeat(size, 1)
        yield [self.wire.all_to_all(everything, to_each, (counts.tolist(), [len(mine)] * size))]
        gradient, inputs = torch.split(everything, [out_features, in_features], dim=1)
        torch.mm(gradient.t(), inputs, out=into)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, factors: Factors) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.factors = factors
        return inputs @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.factors.add(gradient, inputs)
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None
