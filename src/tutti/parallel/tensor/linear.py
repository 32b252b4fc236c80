"""Linear layers over the split axis: by columns (outputs), by rows (inputs), and embeddings by vocabulary.

Each replaces the forward of one module, which keeps its parameters under their names, as this rank's parts.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tutti.errors import ScriptError
from tutti.parallel.tensor.exchange import SplitGroup, add, add_take, copy, gather_copy, pieces, take
from tutti.parallel.tensor.parted import Parted, Place, all_whole, fit, parted, whole
from tutti.parallel.tensor.spread import Among, Spread, even
from tutti.parallel.tensor.streams import draws_whole, own_stream


class Entry:
    """Where whole activations enter divided layers. Layers that follow each other on the same input (q, k and v; gate
    and up) share one copy, so that their gradients are summed over ranks in one exchange.
    """

    def __init__(self, group: SplitGroup) -> None:
        self.group = group
        self._last: tuple[weakref.ref[torch.Tensor], int, bool, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Entry":
        return self

    def forget(self) -> None:
        """Let go of the last activation."""
        self._last = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The whole `x` as a plain tensor, for uses on parts."""
        with_grad = torch.is_grad_enabled() and x.requires_grad
        last = self._last
        if last is not None and last[0]() is x and last[1:3] == (x._version, with_grad):
            return last[3]
        if isinstance(x, Parted):
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
    """x -> parts of x W' + b: this rank's outputs. `spread`: of the outputs; `shared`: the parameters are whole and
    this rank's part of them is taken, because several ranks need the same outputs.
    """

    module: nn.Module
    entry: Entry
    spread: Spread
    shared: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, group = self.entry(x), self.entry.group
        weight = _weight(self.module)
        bias: torch.Tensor | None = self.module._parameters.get("bias")
        if self.shared:
            ranges = self.spread.parts[group.rank]
            weight, bias = pieces(weight, 0, ranges), None if bias is None else pieces(bias, 0, ranges)
        result = F.linear(x, weight, bias)
        return parted(result, Place(dim=result.ndim - 1, spread=self.spread, group=group))


@dataclass(slots=True, kw_only=True, eq=False)
class RowForward:
    """x -> x W' + b, whole: every rank's inputs give a term; the bias is added once. `spread`: of the inputs;
    `by_tokens`: the result is left as parts along its second dim (the sequence).
    """

    module: nn.Module
    group: SplitGroup
    spread: Spread
    by_tokens: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        group, bias = self.group, self.module._parameters.get("bias")
        with torch._C.DisableTorchFunctionSubclass():
            term = F.linear(fit(x, -1, self.spread, group), _weight(self.module))
            if self.by_tokens and term.ndim == 3 and term.shape[1] >= group.size:
                spread = even(term.shape[1], group.size)
                part = add_take(term, 1, spread, group)
                part = part if bias is None else part + copy(bias, group)
                return parted(part, Place(dim=1, spread=spread, group=group))
            result = add(term, group)
            return result if bias is None else result + bias


@dataclass(slots=True, kw_only=True, eq=False)
class VocabularyForward:
    """Indices -> vectors: every rank looks up the rows it holds, and the results are added."""

    module: nn.Embedding
    group: SplitGroup
    spread: Spread

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        module = self.module
        indices = whole(indices)
        weight, padding = module._parameters["weight"], module.padding_idx
        assert weight is not None
        if indices.numel():
            low, high = indices.aminmax()
            torch._assert_async(
                (low >= 0) & (high < self.spread.size),
                f"an index of an embedding is not among its {self.spread.size} rows",
            )
        (start, stop), *_ = (*self.spread.parts[self.group.rank], (0, 0))
        if stop == start:  # more ranks than rows: this one only takes part
            return add(weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum(), self.group)
        inside = (indices >= start) & (indices < stop)
        own = None if padding is None or not start <= padding < stop else padding - start
        part = F.embedding(torch.where(inside, indices - start, 0), weight, own)
        part = part.masked_fill(~inside.unsqueeze(-1), 0.0)
        return add(part, self.group)


@dataclass(slots=True, kw_only=True, eq=False)
class TokensForward:
    """A norm of whole rows (batch, tokens, features), each rank on its part of the tokens."""

    module: nn.Module
    group: SplitGroup
    plain: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, Parted) and x.ndim == 3 and x.shape[1] >= self.group.size:
            spread = even(x.shape[1], self.group.size)
            with torch._C.DisableTorchFunctionSubclass():
                x = parted(fit(x, -2, spread, self.group), Place(dim=1, spread=spread, group=self.group))
        return self.plain(x)  # type: ignore[no-any-return]


@dataclass(slots=True, kw_only=True, eq=False)
class SamplesForward:
    """Any module, each rank on its part of the samples (dim 0 of every tensor it gets and of the one it returns).

    Its parameters are whole, their gradients are sums over ranks.
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
                f"a {type(self.module).__name__} placed 'row' runs on parts of the samples, but its arguments have "
                f"{sorted(counts)} of them; keep it whole with LayoutRule(modules=..., placement='replicate')"
            )
        count = counts.pop()
        group = self.group
        spread = Among(group.size, group.weights).parted(count)
        place = Place(dim=0, spread=spread, group=group)
        if not all(spread.parts) or draws_whole():  # all of it, of which this rank's samples count
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
            f"a {type(self.module).__name__} placed 'row' runs on parts of the samples, but does not return one tensor "
            "with a row for each; keep it whole with LayoutRule(modules=..., placement='replicate')"
        )


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (inputs, outputs), as transformers' Conv1D does."""
    return not isinstance(module, nn.Linear)


def _weight(module: nn.Module) -> torch.Tensor:
    """A linear layer's weight as (outputs, inputs)."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.t() if is_transposed(module) else weight
