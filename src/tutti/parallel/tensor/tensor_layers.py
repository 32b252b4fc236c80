"""The forwards of divided modules: linear, embedding, attention, norm and recurrent layers.

Each replaces the forward of one module, whose parameters have the same names and are this rank's parts.
"""

import math
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from tutti.errors import ScriptError
from tutti.parallel.tensor.partition_ranges import Among, RankRanges, even
from tutti.parallel.tensor.tensor_activation import PartPlacement, SplitTensor, all_whole, fit, parted, whole
from tutti.parallel.tensor.tensor_collectives import (
    SplitGroup,
    add,
    add_take,
    copy,
    draws_whole,
    gather,
    gather_copy,
    own_stream,
    pieces,
    take,
)


class ParallelEntry:
    """Where whole activations enter divided layers.

    Consecutive layers with the same input (q, k and v; gate and up) share one copy of it, so that its gradient is
    all-reduced once.
    """

    def __init__(self, group: SplitGroup) -> None:
        self.group = group
        self._last: tuple[weakref.ref[torch.Tensor], int, bool, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelEntry":
        return self

    def forget(self) -> None:
        """Drop the reference to the last activation."""
        self._last = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The whole `x` as a plain tensor, for computation on parts."""
        with_grad = torch.is_grad_enabled() and x.requires_grad
        last = self._last
        if last is not None and last[0]() is x and last[1:3] == (x._version, with_grad):
            return last[3]
        if isinstance(x, SplitTensor):
            place = x.place
            with torch._C.DisableTorchFunctionSubclass():
                if place.spread.disjoint:
                    result = gather_copy(x, place.dim, place.spread, place.group)
                else:
                    result = copy(whole(x), self.group)
        else:
            result = copy(x, self.group)
        self._last = (weakref.ref(x), x._version, with_grad, result)
        return result


@dataclass(slots=True, kw_only=True, eq=False)
class ColumnForward:
    """x -> this rank's outputs of x W' + b, as a part.

    Attributes:
        spread: ranges of the outputs that each rank holds.
        shared: whether the parameters are whole, because several ranks need the same outputs; this rank then uses its
            rows of them.
    """

    module: nn.Module
    entry: ParallelEntry
    spread: RankRanges
    shared: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, group = self.entry(x), self.entry.group
        weight = _weight(self.module)
        bias: torch.Tensor | None = self.module._parameters.get("bias")
        if self.shared:
            ranges = self.spread.parts[group.rank]
            weight, bias = pieces(weight, 0, ranges), None if bias is None else pieces(bias, 0, ranges)
        result = F.linear(x, weight, bias)
        return parted(result, PartPlacement(dim=result.ndim - 1, spread=self.spread, group=group))


@dataclass(slots=True, kw_only=True, eq=False)
class RowForward:
    """x -> x W' + b, whole: each rank's inputs give a term, the terms are all-reduced, and the bias is added once.

    Attributes:
        spread: ranges of the inputs that each rank holds.
        by_tokens: whether the terms are reduce-scattered along dim 1 (the sequence) instead.
    """

    module: nn.Module
    group: SplitGroup
    spread: RankRanges
    by_tokens: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        group, bias = self.group, self.module._parameters.get("bias")
        with torch._C.DisableTorchFunctionSubclass():
            term = F.linear(fit(x, -1, self.spread, group), _weight(self.module))
            if self.by_tokens and term.ndim == 3 and term.shape[1] >= group.size:
                spread = even(term.shape[1], group.size)
                part = add_take(term, 1, spread, group)
                part = part if bias is None else part + copy(bias, group)
                return parted(part, PartPlacement(dim=1, spread=spread, group=group))
            result = add(term, group)
            return result if bias is None else result + bias


@dataclass(slots=True, kw_only=True, eq=False)
class VocabularyForward:
    """Indices -> vectors: each rank looks up the rows it holds, and the results are all-reduced."""

    module: nn.Embedding
    group: SplitGroup
    spread: RankRanges

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        module = self.module
        indices = whole(indices)
        weight, padding = module._parameters["weight"], module.padding_idx
        assert weight is not None
        if indices.numel():
            low, high = indices.aminmax()
            torch._assert_async(
                (low >= 0) & (high < self.spread.size),
                f"an index is outside the {self.spread.size} rows of an embedding",
            )
        (start, stop), *_ = (*self.spread.parts[self.group.rank], (0, 0))
        if stop == start:  # more ranks than rows: this rank has none, but must take part in the all-reduce
            return add(weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum(), self.group)
        inside = (indices >= start) & (indices < stop)
        local_padding = None if padding is None or not start <= padding < stop else padding - start
        part = F.embedding(torch.where(inside, indices - start, 0), weight, local_padding)
        part = part.masked_fill(~inside.unsqueeze(-1), 0.0)
        return add(part, self.group)


@dataclass(slots=True, kw_only=True, eq=False)
class TokensForward:
    """A norm over the features of (batch, tokens, features); each rank computes its part of the tokens."""

    module: nn.Module
    group: SplitGroup
    plain: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, SplitTensor) and x.ndim == 3 and x.shape[1] >= self.group.size:
            spread = even(x.shape[1], self.group.size)
            with torch._C.DisableTorchFunctionSubclass():
                x = parted(fit(x, -2, spread, self.group), PartPlacement(dim=1, spread=spread, group=self.group))
        return self.plain(x)  # type: ignore[no-any-return]


@dataclass(slots=True, kw_only=True, eq=False)
class SamplesForward:
    """Any module; each rank computes its part of the samples.

    Samples lie along dim 0 of every tensor argument, and of the tensor that the module returns. Parameters are whole,
    and their gradients are summed over the ranks.
    """

    module: nn.Module
    group: SplitGroup
    plain: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = all_whole((args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        counts = {len(tensor) for tensor in tensors if tensor.ndim}
        if len(counts) != 1:
            raise ScriptError(
                f"a {type(self.module).__name__} with placement 'row' computes a part of the samples on each rank, but "
                f"dim 0 of its arguments has several sizes: {sorted(counts)}; keep the module whole with "
                "LayoutRule(modules=..., placement='replicate')"
            )
        count = counts.pop()
        group = self.group
        spread = Among(group.size, group.weights).parted(count)
        place = PartPlacement(dim=0, spread=spread, group=group)
        if not all(spread.parts) or draws_whole():  # compute all samples, and use this rank's
            result = pieces(self._checked(self.plain(*args, **kwargs), count), 0, spread.parts[group.rank])
            return parted(result.clone(), place)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: take(t, 0, spread, group), (args, kwargs))
        with own_stream(tensors[0].device, group) if self.module.training else nullcontext():
            result = self.plain(*args, **kwargs)
        return parted(self._checked(result, spread.local(group.rank)) * 1, place)

    def _checked(self, result: Any, count: int) -> torch.Tensor:
        if isinstance(result, torch.Tensor) and result.ndim and len(result) == count:
            return result
        raise ScriptError(
            f"a {type(self.module).__name__} with placement 'row' computes a part of the samples on each rank, but "
            "does not return one tensor with a row for each sample; keep the module whole with "
            "LayoutRule(modules=..., placement='replicate')"
        )


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer has its weight as (inputs, outputs), as transformers' Conv1D has."""
    return not isinstance(module, nn.Linear)


def _weight(module: nn.Module) -> torch.Tensor:
    """The weight of a linear layer as (outputs, inputs)."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.t() if is_transposed(module) else weight


@dataclass(slots=True, kw_only=True, eq=False)
class HeadsForward:
    """The forward of an nn.MultiheadAttention; `heads` are the ranges of heads that each rank holds.

    The projections compute this rank's heads; fused weights are this rank's rows of q, k and v, concatenated. The
    output projection is divided by its inputs, and its terms are all-reduced.
    """

    module: nn.MultiheadAttention
    entry: ParallelEntry
    heads: RankRanges

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module, group = self.module, self.entry.group
        batched, count = query.dim() == 3, self.heads.local(group.rank)
        q, k, v = self._projected(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif module.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        heads = self._place(1)
        q, k, v = (t.view(*t.shape[:-1], count, module.head_dim).permute(1, 2, 0, 3) for t in (q, k, v))
        q, k, v = parted(q, heads), parted(k, heads), parted(v, heads)
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        out, weights = self._attended(q, k, v, mask, need_weights)
        out = out.permute(2, 0, 1, 3).flatten(2)  # (query, batch, heads x head size)
        if not batched:
            out = out.squeeze(1)
        elif module.batch_first:
            out = out.transpose(0, 1)
        out = module.out_proj(out)
        if weights is None:
            return out, None
        weights = self._averaged(weights) if average_attn_weights else weights
        return out, weights if batched else weights.squeeze(0)

    def _place(self, dim: int, unit: int = 1) -> PartPlacement:
        return PartPlacement(dim=dim, spread=self.heads.scaled(unit), group=self.entry.group)

    def _projected(self, query: Any, key: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parameters, entry = self.module._parameters, self.entry
        fused, bias = parameters.get("in_proj_weight"), parameters.get("in_proj_bias")
        if fused is not None:
            matrices: list[Any] = list(fused.chunk(3))
        else:
            matrices = [parameters[f"{letter}_proj_weight"] for letter in "qkv"]
        biases: list[Any] = [None] * 3 if bias is None else list(bias.chunk(3))
        if fused is not None and query is key is value:
            q, k, v = F.linear(entry(query), fused, bias).chunk(3, -1)
            return q, k, v
        q, k, v = (F.linear(entry(x), w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True))
        return q, k, v

    def _mask(self, q: torch.Tensor, k: torch.Tensor, padding: Any, attention: Any) -> torch.Tensor | None:
        """Both masks as one additive mask (batch or 1, heads or 1, query or 1, key), whole."""
        terms = []
        if attention is not None:
            shape = attention.shape
            heads = self.heads.size
            terms.append(attention[None, None] if attention.dim() == 2 else attention.view(-1, heads, *shape[1:]))
        if padding is not None:
            terms.append(padding.view(q.shape[0], 1, 1, k.shape[2]))
        terms = [_to_add(whole(term), q.dtype) for term in terms]
        return None if not terms else terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, need_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rate = self.module.dropout if self.module.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, rate), None
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        return weights @ v, weights

    def _averaged(self, weights: torch.Tensor) -> torch.Tensor:
        """The mean over all heads, (batch, query, key)."""
        if not isinstance(weights, SplitTensor):
            return weights.mean(1)
        with torch._C.DisableTorchFunctionSubclass():
            return add(weights.sum(1) / self.heads.size, self.entry.group)


def _to_add(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as values to add to the scores; True in a boolean mask hides."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def projections(module: nn.MultiheadAttention) -> list[tuple[str, int, int]]:
    """The parameters that are cut by heads, without the output projection.

    Returns:
        (parameter, dim, number of times the heads repeat along it) for each.
    """
    cuts = []
    for name, repeats in (("in_proj_weight", 3), ("in_proj_bias", 3)):
        if module._parameters.get(name) is not None:
            cuts.append((name, 0, repeats))
    if module._parameters.get("in_proj_weight") is None:
        cuts += [(f"{letter}_proj_weight", 0, 1) for letter in "qkv"]
    return cuts


GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
"""Gates of each kind of cell: rows of a weight per hidden unit."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecurrentForward:
    """The forward of an nn.LSTM, nn.GRU or nn.RNN; `units` are the ranges of hidden units that each rank holds.

    The ranges are the same in all layers. Input-to-hidden products of all time steps are computed at once. Each time
    step then needs one all-gather of the hidden state.
    """

    module: nn.RNNBase
    entry: ParallelEntry
    units: RankRanges

    def __call__(self, input: Any, hx: Any = None) -> tuple[torch.Tensor, Any]:
        module, group = self.module, self.entry.group
        if isinstance(input, PackedSequence):
            raise ScriptError(
                f"a {module.mode} that is divided over the split axis got a packed sequence; give it padded sequences, "
                "or keep the module whole: LayoutRule(modules=..., placement='replicate')"
            )
        x, batched = whole(input), input.dim() == 3
        x = x.unsqueeze(1) if not batched else x.transpose(0, 1) if module.batch_first else x  # (time, batch, features)
        directions = 2 if module.bidirectional else 1
        states = self._initial(hx, x, directions * module.num_layers, batched)
        finals: list[tuple[torch.Tensor, ...]] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                out, last = self._run(x, [s[number] for s in states], layer, direction)
                outputs.append(out)
                finals.append(last)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if module.dropout > 0 and layer < module.num_layers - 1:
                x = F.dropout(x, module.dropout, module.training)
        stacked = [gather(torch.stack(column), 2, self.units, group) for column in zip(*finals, strict=True)]
        if not batched:
            x, stacked = x.squeeze(1), [s.squeeze(1) for s in stacked]
        elif module.batch_first:
            x = x.transpose(0, 1)
        return x, tuple(stacked) if module.mode == "LSTM" else stacked[0]

    def _initial(self, hx: Any, x: torch.Tensor, count: int, batched: bool) -> list[torch.Tensor]:
        """Initial h (and c), whole: (layers x directions, batch, hidden) each."""
        kinds = 2 if self.module.mode == "LSTM" else 1
        if hx is None:
            return [x.new_zeros(count, x.shape[1], self.module.hidden_size)] * kinds
        states = [whole(state) for state in (hx if isinstance(hx, tuple | list) else (hx,))]
        return states if batched else [state.unsqueeze(1) for state in states]

    def _run(
        self, x: torch.Tensor, initial: list[torch.Tensor], layer: int, direction: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """One layer in one direction: all outputs, whole, and this rank's part of the last state."""
        parameters, group = self.module._parameters, self.entry.group
        suffix = f"l{layer}" + ("_reverse" if direction else "")
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w_ih, w_hh, b_ih, b_hh = (parameters.get(f"{name}_{suffix}") for name in names)
        assert w_ih is not None
        assert w_hh is not None
        inputs = F.linear(self.entry(x), w_ih, b_ih)
        state = tuple(take(value, 1, self.units, group) for value in initial)
        full = copy(initial[0], group)
        steps = range(x.shape[0])
        outputs: list[torch.Tensor] = []
        for t in reversed(steps) if direction else steps:
            state = _cell(self.module.mode, inputs[t], F.linear(full, w_hh, b_hh), state)
            outputs.append(state[0])
            full = gather_copy(state[0], 1, self.units, group)
        stacked = torch.stack(outputs[::-1] if direction else outputs)
        return gather(stacked, 2, self.units, group), state


def _cell(mode: str, x: torch.Tensor, h: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """One time step of this rank's units, from the gates' two products, by torch's definitions."""
    if mode == "LSTM":
        i, f, g, o = (x + h).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if mode == "GRU":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        z = (xz + hz).sigmoid()
        n = (xn + (xr + hr).sigmoid() * hn).tanh()
        return ((1 - z) * n + z * state[0],)
    return ((x + h).tanh() if mode == "RNN_TANH" else (x + h).relu(),)


def recurrent_parameters(module: nn.RNNBase) -> list[str]:
    """Names of the parameters, all of which are cut by gates along dim 0."""
    return [name for name in module._parameters if module._parameters[name] is not None]
