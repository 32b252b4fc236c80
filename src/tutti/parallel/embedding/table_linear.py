"""Linear layers divided over ranks that compute different samples (Krizhevsky 2014, "one weird trick").

For a layer with many parameters and small activations, it is cheaper to send activations than to reduce gradients. Cut
by columns, a rank receives all ranks' rows, computes its outputs for them, and returns those. Cut by rows, it receives
its inputs of all rows, and each row's rank adds up the partial results of all ranks. Backward is the mirror image. A
rank's gradient is that of the whole batch, so it is not reduced over `table`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tutti.config.partitioning import cut
from tutti.config.plan import LayoutRule, by_columns, find_chunks, find_placement
from tutti.config.refusals import check_width
from tutti.errors import PlanError
from tutti.parallel.all_to_all import AllToAllRoute, plain_exchange
from tutti.parallel.embedding.table_lookup import Peers
from tutti.parallel.layout import Layout
from tutti.parallel.tensor.layer_patterns import features, is_linear


def dividable_linears(model: nn.Module) -> dict[str, int]:
    """Names of the linear layers that could be divided (tied weights aside), with their numbers of inputs."""
    return {
        name: features(module)[0]
        for name, module in model.named_modules()
        if is_linear(module) and not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
    }


def divided_linears(model: nn.Module, rules: Sequence[LayoutRule]) -> dict[str, bool]:
    """Names of the linear layers that rules divide, and whether by columns."""
    placements = {name: find_placement(rules, name) for name, module in model.named_modules() if _is_any_linear(module)}
    return {
        name: by_columns(placement, *features(model.get_submodule(name)))
        for name, placement in placements.items()
        if placement not in ("auto", "replicate")
    }


def wanted_linears(model: nn.Module, rules: Sequence[LayoutRule], layout: Layout) -> dict[str, bool]:
    """`divided_linears` over `table`; none beside a `split` axis, to which the rules then apply.

    Raises:
        PlanError: a layer cannot be divided.
    """
    if layout.mesh.degree("split") > 1:
        return {}
    linears = divided_linears(model, rules)
    for name, columns in linears.items():
        _check(model, name, columns, rules, layout)
    return linears


def _is_any_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_linear(module)


def _check(model: nn.Module, name: str, columns: bool, rules: Sequence[LayoutRule], layout: Layout) -> None:
    mesh = layout.mesh
    module = model.get_submodule(name)
    whole = "; place it 'replicate', or leave it out of the rule"
    parent = model.get_submodule(name.rpartition(".")[0])
    if not is_linear(module) or isinstance(parent, nn.MultiheadAttention):
        raise PlanError(f"layer {name!r} cannot be divided over table: its weight is used by other code{whole}")
    weight = f"{name}.weight" if name else "weight"
    tied = next((names for names in layout.tied if weight in names), None)
    if tied:
        raise PlanError(f"{' and '.join(tied)} are one tensor, so {name!r} cannot be divided over table{whole}")
    check_width(name, features(module)[columns], columns=columns, degree=mesh.degree("table"))
    for axis in ("stage", "space"):
        if mesh.degree(axis) > 1:
            raise PlanError(
                f"layer {name!r} divided over table with mesh.{axis} = {mesh.degree(axis)}: its rows would not be on "
                f"the ranks that it expects{whole}"
            )
    path = name.split(".")
    above = [".".join(path[:end]) for end in range(1, len(path) + 1)]
    chunked = next((outer for outer in above if find_chunks(rules, outer) > 1), None)
    if chunked is not None:
        raise PlanError(
            f"layer {name!r} divided over table, within {chunked!r}, which runs in chunks: ranks may have different "
            f"numbers of chunks{whole}"
        )


def divide_linear(model: nn.Module, name: str, columns: bool, peers: Peers, layout: Layout) -> None:
    """Give this rank its part of the layer `name`, and a forward that exchanges rows with the other ranks."""
    module = model.get_submodule(name)
    inputs, outputs = features(module)
    bounds = tuple(cut(outputs if columns else inputs, peers.size))
    part = bounds[peers.own : peers.own + 2]
    transposed = not isinstance(module, nn.Linear)
    _take(module, name, "weight", int(columns == transposed), part, layout)
    if columns and module._parameters.get("bias") is not None:
        _take(module, name, "bias", 0, part, layout)
    peers = replace(peers, vectors=layout.channel("activations", "table"))
    module.forward = DividedLinear(module, bounds, columns, peers)
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0  # its fused kernel for evaluation takes whole parameters


def _take(module: nn.Module, name: str, leaf: str, dim: int, part: tuple[int, ...], layout: Layout) -> None:
    whole, full = module._parameters[leaf], f"{name}.{leaf}" if name else leaf
    assert whole is not None
    begin, end = part
    layout.set_reduce_axes(full, [axis for axis in layout.shard_of(full).sums if axis != "table"])
    layout.cut(full, dim, (begin, end))
    local = whole.detach().narrow(dim, begin, end - begin).clone(memory_format=torch.contiguous_format)
    setattr(module, leaf, nn.Parameter(local, requires_grad=whole.requires_grad))


class DividedLinear:
    """The forward of a linear layer whose outputs (`columns`) or inputs are on several ranks, cut at `bounds`."""

    def __init__(self, module: nn.Module, bounds: tuple[int, ...], columns: bool, peers: Peers) -> None:
        self.module, self.bounds, self.columns, self.peers = module, bounds, columns, peers

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self.module).forward, self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DividedLinear":
        return DividedLinear(memo.get(id(self.module), self.module), self.bounds, self.columns, self.peers)

    def __call__(self, input: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), both whole, for this rank's own samples."""
        parameter, bias = self.module._parameters["weight"], self.module._parameters.get("bias")
        assert parameter is not None
        weight = parameter if isinstance(self.module, nn.Linear) else parameter.t()
        if torch.is_autocast_enabled(input.device.type) and input.dtype is not torch.float64:
            # cast as the product would, so that fewer bytes are sent
            input = input.to(torch.get_autocast_dtype(input.device.type))
        x = input.reshape(-1, input.shape[-1])
        rows = rows_of(len(x), self.bounds, self.peers, x.device)
        if self.columns:
            y = my_rows(F.linear(everyone(x, rows), weight, bias), rows)
        else:
            y = summed(F.linear(my_features(x, rows), weight), rows)
            y = y if bias is None else y + bias.to(y.dtype)
        return y.view(*input.shape[:-1], y.shape[-1])


HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`counts[i]`: rows of rank i; `bounds`: rank i has features bounds[i] .. bounds[i + 1] - 1."""

    peers: Peers
    counts: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def mine(self) -> int:
        return self.counts[self.peers.own]

    @property
    def widths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.bounds)]

    def exchange(self, values: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return plain_exchange(
            values, AllToAllRoute(self.peers.group, self.peers.own, send, receive, self.peers.vectors)
        )


def rows_of(count: int, bounds: tuple[int, ...], peers: Peers, device: torch.device) -> Rows:
    """Exchange the number of rows of each rank."""
    ones = [1] * peers.size
    announced = torch.full((peers.size,), count, dtype=torch.int64, device=device)
    counts = plain_exchange(announced, AllToAllRoute(peers.group, peers.own, ones, ones, peers.indices)).tolist()
    return Rows(peers=peers, counts=tuple(counts), bounds=bounds)


def everyone(x: Tensor, rows: Rows) -> Tensor:
    """(my rows, f) -> (all rows, f)."""
    return _Move.apply(x, _everyone, _summed, rows)  # type: ignore[no-any-return, no-untyped-call]


def summed(terms: Tensor, rows: Rows) -> Tensor:
    """(all rows, f) -> (my rows, f), summed over the ranks."""
    return _Move.apply(terms, _summed, _everyone, rows)  # type: ignore[no-any-return, no-untyped-call]


def my_features(x: Tensor, rows: Rows) -> Tensor:
    """(my rows, features) -> (all rows, my features)."""
    return _Move.apply(x, _my_features, _my_rows, rows)  # type: ignore[no-any-return, no-untyped-call]


def my_rows(part: Tensor, rows: Rows) -> Tensor:
    """(all rows, my features) -> (my rows, features)."""
    return _Move.apply(part, _my_rows, _my_features, rows)  # type: ignore[no-any-return, no-untyped-call]


def _everyone(x: Tensor, rows: Rows) -> Tensor:
    return rows.exchange(x.repeat(rows.peers.size, 1), [rows.mine] * rows.peers.size, list(rows.counts))


def _summed(terms: Tensor, rows: Rows) -> Tensor:
    """A reduce-scatter with as many bytes as a ring's; ranks add in rank order, half precisions in float32."""
    received = rows.exchange(terms, list(rows.counts), [rows.mine] * rows.peers.size)
    stacked = received.view(rows.peers.size, rows.mine, terms.shape[1])
    return stacked.sum(0, dtype=torch.float32).to(terms.dtype) if terms.dtype in HALVES else stacked.sum(0)


def _my_features(x: Tensor, rows: Rows) -> Tensor:
    width = rows.widths[rows.peers.own]
    parts = torch.cat([part.reshape(-1) for part in torch.split(x, rows.widths, 1)])
    received = rows.exchange(
        parts, [rows.mine * columns for columns in rows.widths], [count * width for count in rows.counts]
    )
    return received.view(-1, width)


def _my_rows(part: Tensor, rows: Rows) -> Tensor:
    sizes = [rows.mine * width for width in rows.widths]
    received = rows.exchange(part.reshape(-1), [count * part.shape[1] for count in rows.counts], sizes)
    return torch.cat([piece.view(rows.mine, -1) for piece in torch.split(received, sizes)], 1)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        there: Callable[[Tensor, Rows], Tensor],
        back: Callable[[Tensor, Rows], Tensor],
        rows: Rows,
    ) -> Tensor:
        ctx.returned = back, rows
        return there(values, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back, rows = ctx.returned
        return back(gradient.contiguous(), rows), None, None, None
