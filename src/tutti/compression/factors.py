"""Sufficient factors (Xie et al. 2014): a linear layer's weight gradient is a sum of few outer products, so send those.

With T rows over all of p ranks, a rank sends T (p - 1)/p (M + N) numbers in the mean, instead of 2 (p - 1)/p M N. Every
row counts that the layer sees: tokens, not sequences.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tutti.compression.exchange import Rounds, Wire
from tutti.config.compression import factors_pay
from tutti.errors import ScriptError

_DENSE, _USED, _WIDE = 1, 2, 4
"""What a rank says of its factors beside their number of rows: part of its gradient is none, there is one at all, and
they are as wide as the gradient."""


class Factors:
    """The factors of one weight of a step on this rank: rows of the output's gradient beside rows of the input.

    `most`: rows that are kept; what comes beyond, and what comes while it is not `collecting`, becomes a gradient.
    """

    def __init__(self, most: int | None = None) -> None:
        self.rows: list[Tensor] = []
        self.count, self.most, self.collecting = 0, most, True

    def __deepcopy__(self, memo: dict[int, Any]) -> "Factors":
        copy = Factors()
        copy.collecting = False  # whoever copies a model has no part in its sums
        return copy

    def takes(self, rows: int) -> bool:
        """Whether so many more are kept."""
        return self.collecting and (self.most is None or self.count + rows <= self.most)

    def add(self, gradient: Tensor, inputs: Tensor) -> None:
        """(K, M) of the output's gradient and (K, N) of the input."""
        self.rows.append(torch.cat([gradient, inputs], dim=1))
        self.count += len(gradient)

    def take(self, width: int, like: Tensor) -> Tensor:
        """(K, M + N) of everything added since the last time; K may be 0."""
        rows, self.rows, self.count = self.rows, [], 0
        return torch.cat(rows) if rows else like.new_zeros(0, width)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
    """`torch.nn.functional.linear` whose backward leaves the weight without a gradient and puts it into `factors`."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    if torch.is_autocast_enabled(inputs.device.type):
        rows = rows.to(torch.get_autocast_dtype(inputs.device.type))
    out = _Linear.apply(rows, weight, bias, factors)  # type: ignore[no-untyped-call]
    return out.view(*inputs.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


class FactoredLinear(nn.Linear):
    """A linear layer whose weight has `factors`; a layer becomes one by its class, and nothing else of it changes."""

    factors: Factors

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear's, on plain tensors; on others it is that."""
        if type(input) not in (Tensor, nn.Parameter) or not self.weight.requires_grad or not torch.is_grad_enabled():
            return super().forward(input)
        return linear(input, self.weight, self.bias, self.factors)


class FactorSum:
    """Sums a weight's gradient over a group by its factors. All ranks make it alike; `rows` may differ between them.

    `half`: the dtype that rows have under mixed precision, in which they then travel. `dense`: whether the last sum was
    one of gradients, for it was fewer bytes, or some rank had a gradient that is none of factors; `used`: ranks that
    had any.
    """

    def __init__(self, group: Any = None, half: torch.dtype | None = None) -> None:
        self.wire, self.half = Wire(group), half
        self.dense, self.used = False, 0

    def rounds(self, factors: Factors, into: Tensor, dense: Tensor | None = None) -> Rounds:
        """Leave the sum, (M, N), in `into`: bit for bit the same on all ranks, since each computes it from all rows.

        `dense`: this rank's gradient beside the factors, if it has one.
        """
        size, (out_features, in_features) = self.wire.size, into.shape
        mine = factors.take(out_features + in_features, into)
        if mine.shape[1] != out_features + in_features:
            raise ScriptError(
                f"factors of width {mine.shape[1]} do not make a weight of shape {tuple(into.shape)}; "
                "give each weight its own Factors"
            )
        marks = (dense is not None) * _DENSE | (dense is not None or len(mine) > 0) * _USED
        marks |= (self.half is None or (len(mine) > 0 and mine.dtype != self.half)) * _WIDE
        said = torch.tensor([len(mine) << 3 | marks], dtype=torch.int64, device=into.device)
        everyone = said.new_empty(size)
        yield [self.wire.all_gather(everyone, said)]
        heard = everyone.tolist()
        rows, self.used = [one >> 3 for one in heard], sum(bool(one & _USED) for one in heard)
        wide = any(one & _WIDE for one in heard)
        kept = into.dtype if wide or self.half is None else self.half
        pays = factors_pay(sum(rows), out_features, in_features, into.element_size(), kept.itemsize)
        self.dense = any(one & _DENSE for one in heard) or not pays
        if self.dense:
            own = product(mine, into) if len(mine) else torch.zeros_like(into)
            into.copy_(own if dense is None else own.add_(dense))
            yield [self.wire.all_reduce(into if into.is_contiguous() else into.t())]
            return
        everything = into.new_empty(sum(rows), mine.shape[1], dtype=kept)
        to_each = mine.to(kept).repeat(size, 1)
        yield [self.wire.all_to_all(everything, to_each, (rows, [len(mine)] * size))]
        into.copy_(product(everything, into))


def product(rows: Tensor, like: Tensor) -> Tensor:
    """The gradient (M, N) that rows of factors stand for, in the dtype of `like`."""
    gradient, inputs = torch.split(rows.to(like.dtype), list(like.shape), dim=1)
    return gradient.t() @ inputs


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.factors, ctx.biased = factors, None if bias is None else bias.dtype
        low = None if bias is None else bias.to(inputs.dtype)
        return torch.nn.functional.linear(inputs, weight.to(inputs.dtype), low)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        whole = None
        if torch.is_grad_enabled() or not ctx.factors.takes(len(gradient)):  # a gradient of gradients needs it too
            whole = (gradient.t() @ inputs).to(weight.dtype) if needs[1] else None
        elif needs[1]:
            ctx.factors.add(gradient, inputs)
        first = gradient @ weight.to(gradient.dtype) if needs[0] else None
        return first, whole, gradient.sum(0).to(ctx.biased) if needs[2] else None, None
