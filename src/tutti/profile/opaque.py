"""Attention and recurrent layers as one operator each: their cost by closed formula, not by what they decompose into.

Both are autograd functions over meta tensors: they compute nothing, give results of the right shape, keep for backward
what a fused kernel keeps, and enter their own cost.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.profile.cost import Cost

Enter = Callable[[Cost, bool, int], None]
"""Takes a cost, whether it is of the backward, and the number of kernel launches."""


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, enter: Enter) -> Tensor:
    """Scaled dot product attention as a fused kernel does it (Dao et al. 2022, FlashAttention).

    Shapes: query (batch, heads, s, d), key (batch, key_heads, t, d), value (batch, key_heads, t, dv); the result is
    (batch, heads, s, dv). Forward: Q K^T and P V, 2 s t (d + dv) FLOPs a head, at full cost also when causal.
    Backward: five such products for the forward's two (the scores are computed again). Kept: query, key, value,
    the mask, the result, and one float32 number a row of scores.
    """
    return _Attention.apply(query, key, value, mask, enter)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enter: Enter) -> Tensor:
        shape = (*query.shape[:-1], value.shape[-1])
        # Fused kernels keep the query's layout, so that merging the heads afterwards copies nothing.
        result = torch.empty_like(query) if query.shape == shape else query.new_empty(shape)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        head_dims = query.shape[-1] + value.shape[-1]
        flops = 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * head_dims
        read = _nbytes(query, key, value, *(() if mask is None else (mask,)))
        enter(Cost(kind="attention", flops=flops, nbytes=read + _nbytes(result, rows)), False, 1)
        ctx.save_for_backward(query, key, value, result, rows, mask)
        ctx.enter, ctx.flops = enter, flops
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, result, rows, _ = ctx.saved_tensors
        nbytes = _nbytes(query, key, value, result, rows, *gradients) + _nbytes(query, key, value)
        ctx.enter(Cost(kind="attention", flops=2.5 * ctx.flops, nbytes=nbytes), True, 1)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """One call of torch.lstm, gru, rnn_tanh or rnn_relu: `input` is (batch, seq, in), (seq, batch, in) or packed."""

    input: Tensor
    states: tuple[Tensor, ...]  # (layers x directions, batch, hidden) each
    parameters: tuple[Tensor, ...]
    layers: int
    directions: int
    steps: int

    @property
    def tokens(self) -> int:
        return math.prod(self.input.shape[:-1])

    @property
    def matrices(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters if parameter.dim() == 2]

    @property
    def kept_per_token(self) -> int:
        """Elements kept for backward: gates, cell and hidden state of every layer and direction."""
        hidden_weights = self.matrices[1 :: len(self.matrices) // (self.layers * self.directions)]
        return sum(weight.shape[0] + len(self.states) * weight.shape[1] for weight in hidden_weights)


def recurrence_of(args: Sequence[Any]) -> Recurrence:
    """Read the arguments of torch.lstm and its kin, of padded or packed sequences."""
    packed = isinstance(args[3], (list, tuple))  # (data, batch_sizes, state, weights, ...), else without sizes
    hidden, parameters, _, layers, _, _, bidirectional = args[2:9] if packed else args[1:8]
    return Recurrence(
        input=args[0],
        states=(hidden,) if isinstance(hidden, Tensor) else tuple(hidden),
        parameters=tuple(parameters),
        layers=layers,
        directions=2 if bidirectional else 1,
        steps=len(args[1]) if packed else args[0].shape[1 if args[8] else 0],
    )


def recurrent(call: Recurrence, *, enter: Enter) -> tuple[Tensor, ...]:
    """The recurrent layer as one operator: (output, last state) or, of an LSTM, (output, last hidden, last cell).

    Forward FLOPs: 2 x the elements of all weight matrices for each token, so 2 x 4 (in + hidden) hidden for each token
    of an LSTM layer; backward the same for the weights' gradients and once more for the inputs'. Gate arithmetic is not
    counted. Launches: two a step, layer and direction.
    """
    return _Recurrent.apply(call, enter, call.input, *call.states, *call.parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Recurrence, enter: Enter, input: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        width = tensors[0].shape[-1] * call.directions
        output = input.new_empty((*input.shape[:-1], width))
        reserve = input.new_empty((call.tokens, call.kept_per_token))
        last = tuple(torch.empty_like(state) for state in tensors[: len(call.states)])
        flops = 2.0 * call.tokens * sum(weight.numel() for weight in call.matrices)
        nbytes = _nbytes(input, output, reserve, *tensors)
        enter(Cost(kind="rnn", flops=flops, nbytes=nbytes), False, 2 * call.steps * call.layers * call.directions)
        ctx.save_for_backward(input, output, reserve, *tensors)
        ctx.call, ctx.enter = call, enter
        ctx.set_materialize_grads(False)
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call: Recurrence = ctx.call
        input, output, reserve, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        first = 0 if needed[0] else sum(w.numel() for w in _input_weights(call))
        through = sum(weight.numel() for weight in call.matrices) - first
        trained = sum(t.numel() for t, need in zip(tensors, needed[1:], strict=True) if need and t.dim() == 2)
        results = [torch.empty_like(t) if need else None for t, need in zip((input, *tensors), needed, strict=True)]
        moved = _nbytes(input, output, reserve, *tensors, *(g for g in (*gradients, *results) if g is not None))
        ctx.enter(Cost(kind="rnn", flops=2.0 * call.tokens * (through + trained), nbytes=moved), True, 0)
        return None, None, *results


def _input_weights(call: Recurrence) -> list[Tensor]:
    """The first layer's input weights, of each direction: they carry the input's gradient."""
    each = len(call.matrices) // (call.layers * call.directions)
    return [call.matrices[each * direction] for direction in range(call.directions)]


def _nbytes(*tensors: Tensor) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
