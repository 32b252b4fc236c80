"""The `table` axis: embedding tables and wide linear layers are divided over ranks that compute different samples.

A holder sees the rows that all ranks of the axis look up, so a table's gradient is not reduced over `table`. The
vectors return to the ranks that asked, and the following layers are data parallel (Naumov et al. 2019, DLRM, section
4). Linear layers that a rule names are divided in the same sense (table_linear.py).
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tutti.config.plan import LayoutRule, find_placement
from tutti.errors import PlanError
from tutti.nn.embedding_tables import Bags, EmbeddingTables, bags_of
from tutti.parallel.embedding.table_linear import divide_linear, wanted_linears
from tutti.parallel.embedding.table_lookup import (
    AnyTable,
    DividedLookup,
    Peers,
    PlaceableTable,
    TablePlacement,
    place_tables,
)
from tutti.parallel.layout import Layout
from tutti.parallel.tensor.layer_patterns import computes_as


def divide_tables(model: nn.Module, rules: Sequence[LayoutRule], layout: Layout) -> None:
    """Divide the nn.EmbeddingBag and nn.Embedding modules of `model` over the `table` axis.

    Whole tables are given to ranks, the largest first. Tables too large for balance, and those that a layout rule
    places `split` or `row`, are cut by rows; `replicate` keeps a table whole on every rank. Tables within an
    EmbeddingTables share one exchange; others have one each. Linear layers are divided where a rule says `column`,
    `row` or `split`.

    Raises:
        PlanError: there is nothing to divide, or something cannot be divided.
    """
    mesh = layout.mesh
    if mesh.degree("table") == 1:
        return
    tables = {name: m for name, m in model.named_modules() if isinstance(m, nn.EmbeddingBag | nn.Embedding)}
    wanted = [table for name in tables if (table := _table(name, tables[name], rules, layout)) is not None]
    linears = wanted_linears(model, rules, layout)
    if not wanted and not linears:
        raise PlanError(
            f"mesh.table = {mesh.degree('table')}, but the model has no embedding table to divide and no layout rule "
            "names a linear layer; use tutti.nn.EmbeddingTables, nn.EmbeddingBag or nn.Embedding, place a linear "
            "layer 'split', or make these ranks replicate"
        )
    places = place_tables(wanted, mesh.degree("table"))
    group = mesh.new_group("table")
    peers = Peers(
        group=group,
        size=mesh.degree("table"),
        own=mesh.index("table"),
        vectors=layout.channel("vectors", "table"),
        indices=layout.channel("indices", "table"),
    )
    together = _together(model)
    for name, place in places.items():
        module = tables[name]
        lookup = DividedLookup({module: place}, module.weight.dtype, peers)
        if module not in together:
            module.forward = DividedForward(module, lookup)  # type: ignore[method-assign]
        elif isinstance(before := together[module].lookup, DividedLookup):
            before.places[module] = place
        else:
            together[module].lookup = lookup
        _take_part(module, name, place, peers.own, layout)
    for name, columns in linears.items():
        divide_linear(model, name, columns, peers, layout)


def _together(model: nn.Module) -> dict[nn.Module, EmbeddingTables]:
    """The tables that are looked up together, by the module that does it."""
    owners = [module for module in model.modules() if isinstance(module, EmbeddingTables)]
    return {table: owner for owner in owners for table in owner.tables.values()}


def _table(name: str, module: AnyTable, rules: Sequence[LayoutRule], layout: Layout) -> PlaceableTable | None:
    """A table to be placed, or None for one that stays whole. Raises PlanError for one that cannot be divided."""
    placement = find_placement(rules, name)
    if placement == "column":
        raise PlanError(f"layout: table {name!r} cannot be cut by columns; use 'split' (along rows) or 'replicate'")
    if placement == "replicate":
        return None
    if not computes_as(module, nn.Embedding, nn.EmbeddingBag):
        if placement == "auto":
            return None
        raise PlanError(
            f"table {name!r} ({type(module).__name__}) has a forward of its own or a parametrised weight, so its rows "
            "cannot be looked up on other ranks; place it 'replicate', or leave it out of the rule"
        )
    weight = f"{name}.weight" if name else "weight"
    tied = next((names for names in layout.tied if weight in names), None)
    if tied:
        if placement == "auto":
            return None
        raise PlanError(f"{' and '.join(tied)} are one tensor, so {name!r} cannot be divided; place it 'replicate'")
    for setting in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, setting):
            raise PlanError(
                f"table {name!r} has {setting}, which depends on all rows that a batch looks up; leave it out, or "
                "place the table 'replicate'"
            )
    if placement != "auto" and module.num_embeddings < layout.mesh.degree("table"):
        raise PlanError(
            f"table {name!r} has {module.num_embeddings} rows, fewer than mesh.table = {layout.mesh.degree('table')}; "
            "place it 'auto' or 'replicate'"
        )
    nbytes = module.weight.numel() * module.weight.element_size()
    return PlaceableTable(name=name, rows=module.num_embeddings, nbytes=nbytes, by_rows=placement != "auto")


def _take_part(module: AnyTable, name: str, place: TablePlacement, own: int, layout: Layout) -> None:
    weight, full = module.weight, f"{name}.weight" if name else "weight"
    layout.set_reduce_axes(full, [axis for axis in layout.shard_of(full).sums if axis != "table"])
    if place.owner is None:
        begin, end = place.bounds[own : own + 2]
        layout.cut(full, 0, (begin, end))
        module.weight = nn.Parameter(weight.detach()[begin:end].clone(), requires_grad=weight.requires_grad)
    elif place.owner != own:
        module._parameters["weight"] = None


class DividedForward:
    """The forward of an nn.EmbeddingBag or nn.Embedding whose rows are on several ranks, or on another rank."""

    def __init__(self, module: AnyTable, lookup: DividedLookup) -> None:
        self.module, self.lookup = module, lookup

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self.module).forward, self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DividedForward":
        return DividedForward(memo.get(id(self.module), self.module), self.lookup.__deepcopy__(memo))

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if isinstance(self.module, nn.Embedding):
            rows = input.reshape(-1).long()
            vectors = self.lookup.start([self.module], [Bags(rows=rows, count=len(rows))])()[0]
            return vectors.reshape(*input.shape, vectors.shape[-1])
        if per_sample_weights is not None and self.module.mode != "sum":
            raise ValueError(f"per_sample_weights need mode='sum', not {self.module.mode!r}")
        bags = bags_of(input, offsets, per_sample_weights, include_last=bool(self.module.include_last_offset))
        return self.lookup.start([self.module], [bags])()[0]
