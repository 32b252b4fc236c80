"""Sufficient factors (Xie et al. 2014): the weight gradient of a linear layer as a sum of few outer products.

With T rows over all p ranks, a rank sends T (p - 1)/p (M + N) numbers on average, instead of 2 (p - 1)/p M N. Every row
that the layer sees counts: tokens, not sequences.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tutti.compression.reducer import CountedCollectives, Rounds
from tutti.config.compression import factors_pay
from tutti.errors import ScriptError

_DENSE, _USED, _WIDE = 1, 2, 4
"""Flags that a rank sends with its number of rows: it has a gradient besides its factors; it has any gradient; its
factors must be sent in the gradient's dtype."""


class Factors:
    """This rank's factors of one weight in a step: rows of the output's gradient beside rows of the input.

    Args:
        max_rows: number of rows that are kept; None: any number. Further rows are added to an ordinary gradient, as are
            all rows while `collecting` is False.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        self.rows: list[Tensor] = []
        self.count, self.max_rows, self.collecting = 0, max_rows, True

    def __deepcopy__(self, memo: dict[int, Any]) -> "Factors":
        copy = Factors()
        copy.collecting = False  # a copy of the model takes no part in reductions
        return copy

    def takes(self, rows: int) -> bool:
        """Return whether this many more rows are kept."""
        return self.collecting and (self.max_rows is None or self.count + rows <= self.max_rows)

    def add(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add (K, M) rows of the output's gradient and (K, N) rows of the input."""
        self.rows.append(torch.cat([gradient, inputs], dim=1))
        self.count += len(gradient)

    def take(self, width: int, like: Tensor) -> Tensor:
        """Return the (K, M + N) rows added since the last call, and drop them; K may be 0.

        Args:
            width: M + N.
            like: tensor with the dtype and device of an empty result.
        """
        rows, self.rows, self.count = self.rows, [], 0
        return torch.cat(rows) if rows else like.new_zeros(0, width)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
    """Compute `torch.nn.functional.linear`, with a backward that puts the weight's gradient into `factors`.

    `weight.grad` then stays None, except for rows that `factors` does not take.

    Args:
        inputs: (..., N).
        weight: (M, N).
        bias: (M,), or None.
        factors: collects the weight's gradient.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    if torch.is_autocast_enabled(inputs.device.type):
        rows = rows.to(torch.get_autocast_dtype(inputs.device.type))
    out = _Linear.apply(rows, weight, bias, factors)  # type: ignore[no-untyped-call]
    return out.view(*inputs.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


class FactoredLinear(nn.Linear):
    """A linear layer whose weight has `factors`.

    An nn.Linear becomes one by a change of its class; nothing else of it changes.
    """

    factors: Factors

    def forward(self, input: Tensor) -> Tensor:
        """Compute as nn.Linear does. Plain tensors use factors, tensor subclasses do not."""
        if type(input) not in (Tensor, nn.Parameter) or not self.weight.requires_grad or not torch.is_grad_enabled():
            return super().forward(input)
        return linear(input, self.weight, self.bias, self.factors)


class FactorReducer:
    """Sums a weight's gradient over a group by its factors.

    All ranks make it with the same arguments; their numbers of rows may differ.

    Args:
        group: process group, None for all ranks.
        half: dtype in which rows are sent under mixed precision.

    Attributes:
        dense: whether the last reduction was of gradients, because that took fewer bytes or a rank had an ordinary
            gradient too.
        used: number of ranks that had any gradient.
    """

    def __init__(self, group: Any = None, half: torch.dtype | None = None) -> None:
        self.collectives, self.half = CountedCollectives(group), half
        self.dense, self.used = False, 0

    def rounds(self, factors: Factors, into: Tensor, dense: Tensor | None = None) -> Rounds:
        """Leave the (M, N) sum in `into`, bit for bit the same on all ranks, because each computes it from all rows.

        Args:
            factors: this rank's factors.
            into: (M, N) buffer for the sum.
            dense: (M, N) gradient of this rank besides the factors, if there is one.

        Raises:
            ScriptError: if the factors have another width than the weight.
        """
        size, (out_features, in_features) = self.collectives.size, into.shape
        local_rows = factors.take(out_features + in_features, into)
        if local_rows.shape[1] != out_features + in_features:
            raise ScriptError(
                f"factors of width {local_rows.shape[1]} do not fit a weight of shape {tuple(into.shape)}; "
                "give each weight its own Factors"
            )
        marks = (dense is not None) * _DENSE | (dense is not None or len(local_rows) > 0) * _USED
        marks |= (self.half is None or (len(local_rows) > 0 and local_rows.dtype != self.half)) * _WIDE
        header = torch.tensor([len(local_rows) << 3 | marks], dtype=torch.int64, device=into.device)
        everyone = header.new_empty(size)
        yield [self.collectives.all_gather(everyone, header)]
        headers = everyone.tolist()
        rows, self.used = [word >> 3 for word in headers], sum(bool(word & _USED) for word in headers)
        wide = any(word & _WIDE for word in headers)
        row_dtype = into.dtype if wide or self.half is None else self.half
        pays = factors_pay(sum(rows), out_features, in_features, into.element_size(), row_dtype.itemsize)
        self.dense = any(word & _DENSE for word in headers) or not pays
        if self.dense:
            local_gradient = product(local_rows, into) if len(local_rows) else torch.zeros_like(into)
            into.copy_(local_gradient if dense is None else local_gradient.add_(dense))
            yield [self.collectives.all_reduce(into if into.is_contiguous() else into.t())]
            return
        everything = into.new_empty(sum(rows), local_rows.shape[1], dtype=row_dtype)
        to_each = local_rows.to(row_dtype).repeat(size, 1)
        yield [self.collectives.all_to_all(everything, to_each, (rows, [len(local_rows)] * size))]
        into.copy_(product(everything, into))


def product(rows: Tensor, like: Tensor) -> Tensor:
    """Return the (M, N) gradient of factor rows.

    Args:
        rows: (K, M + N) factors.
        like: (M, N) tensor with the dtype of the result.
    """
    gradient, inputs = torch.split(rows.to(like.dtype), list(like.shape), dim=1)
    return gradient.t() @ inputs


class _Linear(torch.autograd.Function):
    """The linear function whose backward gives the weight's gradient to `factors`."""

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
        if torch.is_grad_enabled() or not ctx.factors.takes(len(gradient)):  # double backward needs it too
            whole = (gradient.t() @ inputs).to(weight.dtype) if needs[1] else None
        elif needs[1]:
            ctx.factors.add(gradient, inputs)
        first = gradient @ weight.to(gradient.dtype) if needs[0] else None
        return first, whole, gradient.sum(0).to(ctx.biased) if needs[2] else None, None
