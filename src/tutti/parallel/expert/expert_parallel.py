"""The exchanges of a mixture of experts: the counts of all ranks that share its microbatch, and the tokens.

Capacity, the order in which tokens are dropped and the load-balancing loss are those of the whole microbatch, so they
do not depend on the number of ranks. One gather a layer tells every rank all counts; the sizes of the all-to-alls
follow.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.config.partitioning import cut
from tutti.config.plan import LayoutRule, find_placement
from tutti.errors import PlanError
from tutti.nn.mixture import (
    Experts,
    MixtureOfExperts,
    Routing,
    SingleDevice,
    Tally,
    count_choices,
    on_device,
    take_tallies,
)
from tutti.parallel.all_to_all import AllToAllRoute, exchange, land, launch
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.layout import GRADIENT_AXES, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharers:
    """The ranks that share every microbatch.

    Attributes:
        group: of all of them.
        rank: this rank's position in the group.
        scope: whether this rank's samples count in the current pass.
        channel: accounting of the counts.
    """

    size: int
    rank: int
    group: Any
    scope: BatchScope
    channel: CommChannel = field(default_factory=untracked_channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertHolders:
    """The ranks over which experts are divided.

    Attributes:
        group: of these ranks.
        places: their positions among the sharers, in order.
        bounds: holder i has the experts bounds[i] .. bounds[i + 1] - 1.
        own: this rank's position among the holders.
    """

    group: Any
    places: tuple[int, ...]
    bounds: tuple[int, ...]
    own: int

    @property
    def experts(self) -> tuple[int, int]:
        """This rank's experts, (start, stop)."""
        return self.bounds[self.own], self.bounds[self.own + 1]


class OwnSlice(SingleDevice):
    """One rank computes the whole microbatch, so nothing is exchanged; forward may run again within backward."""

    def __init__(self, scope: BatchScope) -> None:
        self.scope = scope

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnSlice":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SingleDevice, ()

    @property
    def recomputing(self) -> bool:
        return self.scope.recomputing


class SharedSlice:
    """`tutti.nn.mixture.ExpertExchange` over ranks. Without holders no token is sent."""

    def __init__(self, sharers: Sharers, holders: ExpertHolders | None, channel: CommChannel) -> None:
        self.sharers, self.holders, self.channel = sharers, holders, channel

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedSlice":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model works without the other ranks."""
        return SingleDevice, ()

    @property
    def recomputing(self) -> bool:
        return self.sharers.scope.recomputing

    def agree(self, counts: Tensor, probability_sums: Tensor, *, training: bool) -> Routing:
        """Gather every rank's counts and sum the probabilities; evaluation without holders needs no exchange."""
        if not self.sharers.scope.counts:
            counts, probability_sums = torch.zeros_like(counts), probability_sums * 0.0
        if not training and self.holders is None:
            return Routing(counts=counts.cpu()[None], rank=0, probability_sums=probability_sums)
        total, everyone = _GatherCounts.apply(probability_sums, counts, self.sharers)  # type: ignore[no-untyped-call]
        return Routing(counts=everyone, rank=self.sharers.rank, probability_sums=total)

    def compute(self, experts: Experts, rows: Tensor, kept: Tensor) -> Tensor:
        """Compute the rows of local experts while the other rows are in flight, in backward as well."""
        if self.holders is None:
            here = kept[self.sharers.rank if len(kept) > 1 else 0]
            return experts.run_experts(rows, here.tolist())
        return self.divided(experts, rows, kept[list(self.holders.places)], self.holders)

    def divided(self, experts: Experts, rows: Tensor, kept: Tensor, holders: ExpertHolders) -> Tensor:
        """`kept`: (holders, experts), the rows that each holder's tokens send to every expert."""
        position, (first, last) = holders.own, holders.experts
        asked = [int(kept[position, a:b].sum()) for a, b in pairwise(holders.bounds)]
        answered = kept[:, first:last].clone()
        local_sizes = answered[position].tolist()
        answered[position] = 0
        begin, end = sum(asked[:position]), sum(asked[: position + 1])
        asked[position] = 0
        route = AllToAllRoute(holders.group, position, asked, answered.sum(1).tolist(), self.channel)
        pending = launch(torch.cat([rows[:begin], rows[end:]]), route)
        stayed = experts.run_experts(rows[begin:end], local_sizes)
        arrived = land(pending, route)
        order = on_device(_by_expert(answered), rows.device)
        results = experts.run_experts(arrived.index_select(0, order), answered.sum(0).tolist())
        returned = exchange(results.index_select(0, torch.argsort(order)), route.back())
        return torch.cat([returned[:begin], stayed, returned[begin:]])


class _GatherCounts(torch.autograd.Function):
    """(sum of every rank's sums of probabilities, every rank's counts on the CPU).

    Each rank's loss contributes to the sum's gradient, so backward adds the contributions.
    """

    @staticmethod
    def forward(ctx: Any, probability_sums: Tensor, counts: Tensor, sharers: Sharers) -> tuple[Tensor, Tensor]:
        ctx.sharers = sharers
        packed = torch.cat([counts.reshape(-1).double(), probability_sums.double()])
        everyone = [torch.empty_like(packed) for _ in range(sharers.size)]
        with sharers.channel.waiting((sharers.size - 1) * packed.numel() * packed.element_size()):
            dist.all_gather(everyone, packed, group=sharers.group)
        table = torch.stack(everyone)
        theirs = table[:, : counts.numel()].round().long().cpu().reshape(sharers.size, *counts.shape)
        ctx.mark_non_differentiable(theirs)
        return table[:, counts.numel() :].sum(0).to(probability_sums.dtype), theirs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        total, sharers = gradient.contiguous().clone(), ctx.sharers
        with sharers.channel.waiting(ring_all_reduce_nbytes(total, sharers.size)):
            dist.all_reduce(total, group=sharers.group)
        return total, None, None


def _by_expert(sizes: Tensor) -> Tensor:
    """The permutation from order by (sender, expert) to order by (expert, sender). `sizes`: (senders, experts)."""
    expert = torch.arange(sizes.shape[1]).repeat(len(sizes))
    return torch.argsort(expert.repeat_interleave(sizes.reshape(-1)), stable=True)


def sizes_of(bounds: Sequence[int]) -> list[int]:
    """Sizes of the runs between boundaries."""
    return [stop - start for start, stop in pairwise(bounds)]


_ARGUMENTS = (
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],  # GPT-OSS
)


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` is a layer of stacked experts.

    Its parameters' first dim is the expert, and its forward takes (rows, chosen experts, their weights).
    """
    count = getattr(module, "num_experts", None)
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(count, int) or not parameters or any(p.dim() < 2 or p.shape[0] != count for p in parameters):
        return False
    return list(inspect.signature(module.forward).parameters)[:3] in _ARGUMENTS


def in_order(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The rows (n, width), choices (n, k) and weights (n, k) of a call of stacked experts, whatever their names."""
    call = inspect.signature(type(module).forward).bind(module, *arguments, **named)
    _, rows, chosen, weights, *_ = call.arguments.values()
    return rows, chosen, weights


def send_to_experts(module: nn.Module, holders: ExpertHolders, sizes: Sequence[int], layout: Layout) -> None:
    """Make `module`, which holds this rank's experts, send rows to the ranks that hold the others.

    `sizes`: number of experts on each rank.
    """
    module.forward = DividedExperts(
        module, holders, layout.channel("tokens", "expert"), layout.channel("routing", "expert")
    )
    setattr(module, "num_experts", sizes[holders.own])  # noqa: B010 (an attribute that nn.Module does not declare)


class DividedExperts:
    """The forward of one layer of stacked experts over a group of ranks."""

    def __init__(self, module: nn.Module, holders: ExpertHolders, channel: CommChannel, routing: CommChannel) -> None:
        self.module, self.holders, self.channel, self.routing = module, holders, channel, routing
        self.own: Callable[..., Any] | None = vars(module).get("forward")  # a forward of this instance

    def __deepcopy__(self, memo: dict[int, Any]) -> "DividedExperts":
        copied = DividedExperts(memo.get(id(self.module), self.module), self.holders, self.channel, self.routing)
        copied.own = self.own
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self.module).forward, self.module)

    def __call__(self, *arguments: Tensor, **named: Tensor) -> Tensor:
        """(n, width), (n, k), (n, k) -> (n, width)."""
        hidden_states, top_k_index, top_k_weights = in_order(self.module, arguments, named)
        chosen, holders = top_k_index.reshape(-1), self.holders
        counts = count_choices(chosen[None], holders.bounds[-1])[0]
        everyone = [torch.empty_like(counts) for _ in range(len(holders.bounds) - 1)]
        with self.routing.waiting((len(everyone) - 1) * counts.numel() * counts.element_size()):
            dist.all_gather(everyone, counts, group=holders.group)
        slots = torch.argsort(chosen, stable=True)
        tokens = slots.div(top_k_index.shape[1], rounding_mode="floor")
        local_rows = Sharers(size=1, rank=0, group=None, scope=BatchScope())
        slice = SharedSlice(local_rows, holders, self.channel)
        results = slice.divided(self, hidden_states.index_select(0, tokens), torch.stack(everyone).cpu(), holders)
        weighted = results * top_k_weights.reshape(-1).index_select(0, slots).unsqueeze(1)
        return torch.zeros_like(hidden_states).index_add(0, tokens, weighted.to(hidden_states.dtype))

    def run_experts(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Results of rows ordered by expert, `sizes[i]` rows for the i-th local one."""
        expert = torch.arange(len(sizes), device=rows.device)
        chosen = expert.repeat_interleave(torch.tensor(sizes, device=rows.device)).unsqueeze(1)
        forward = self.own or functools.partial(type(self.module).forward, self.module)
        results: Tensor = forward(rows, chosen, rows.new_ones(len(rows), 1))
        if len(rows) == 0:  # gradients must still be 0 rather than absent, and backward must pass here
            linked = [rows, *(p.reshape(-1)[:1] for p in self.module.parameters(recurse=False))]
            results = results + sum(tensor.sum() for tensor in linked) * 0.0
        return results


STACKS = ("input_weight", "input_bias", "output_weight", "output_bias")
"""A mixture's parameters whose first dim is the expert."""


def divide_experts(model: nn.Module, rules: Sequence[LayoutRule], layout: Layout, scope: BatchScope) -> None:
    """Share every mixture's microbatches over the ranks that compute it, and divide its experts over `expert`.

    Experts are divided in order, unevenly where the ranks do not divide their number. `replicate` in a layout rule
    keeps a mixture whole. Recognised are tutti.nn.MixtureOfExperts, and stacked experts as in transformers (Mixtral,
    Qwen).

    Raises:
        PlanError: there are no experts to divide, fewer than ranks, or weights that other modules share.
    """
    mesh = layout.mesh
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)}
    stacked = {name: module for name, module in model.named_modules() if is_stacked(module)}
    divided = [name for name in (*mixtures, *stacked) if mesh.degree("expert") > 1 and _divides(rules, name)]
    _check(model, mixtures, stacked, divided, layout)
    sharing = mesh.degree(*GRADIENT_AXES)
    if sharing == 1:
        for module in mixtures.values():
            module.exchange = OwnSlice(scope)
    if not (mixtures or stacked) or sharing == 1:
        return
    sharers = Sharers(
        size=sharing,
        rank=mesh.index(*GRADIENT_AXES),
        group=mesh.new_group(*GRADIENT_AXES),
        scope=scope,
        channel=layout.channel("routing", *GRADIENT_AXES),
    )
    group = mesh.new_group("expert") if divided else None
    members, all_ranks = mesh.ranks("expert"), mesh.ranks(*GRADIENT_AXES)
    for name, module in (mixtures | stacked).items():
        holders = None
        if name in divided:
            count = module.experts if isinstance(module, MixtureOfExperts) else module.num_experts
            bounds = tuple(cut(int(count), len(members)))
            places = tuple(all_ranks.index(rank) for rank in members)
            holders = ExpertHolders(group=group, places=places, bounds=bounds, own=mesh.index("expert"))
            _take_part(module, name, holders.experts, layout)
        if isinstance(module, MixtureOfExperts):
            module.exchange = SharedSlice(sharers, holders, layout.channel("tokens", "expert"))
        elif holders is not None:
            send_to_experts(module, holders, sizes_of(holders.bounds), layout)


def _divides(rules: Sequence[LayoutRule], name: str) -> bool:
    placement = find_placement(rules, name)
    if placement in ("column", "row"):
        raise PlanError(f"layout: experts of {name!r} cannot be placed {placement!r}; use 'split' or 'replicate'")
    return placement != "replicate"


def _take_part(module: nn.Module, name: str, experts: tuple[int, int], layout: Layout) -> None:
    """Replace the stacked parameters by this rank's experts."""
    keys = STACKS if isinstance(module, MixtureOfExperts) else tuple(module._parameters)
    for key in keys:
        whole = module._parameters[key]
        if whole is None:
            continue
        part = whole.detach()[slice(*experts)].clone()
        module._parameters[key] = nn.Parameter(part, requires_grad=whole.requires_grad)
        full = f"{name}.{key}" if name else key
        layout.cut(full, 0, experts)
        layout.set_reduce_axes(full, [axis for axis in layout.shard_of(full).sums if axis != "expert"])


def _check(
    model: nn.Module,
    found: dict[str, MixtureOfExperts],
    stacked: dict[str, nn.Module],
    divided: list[str],
    layout: Layout,
) -> None:
    degree, context = layout.mesh.degree("expert"), layout.mesh.degree("context")
    if degree > 1 and not divided:
        raise PlanError(
            f"mesh.expert = {degree}, but the model has no experts to divide; use tutti.nn.MixtureOfExperts, or make "
            "these ranks replicate"
        )
    for name in divided:
        module = found.get(name) or stacked[name]
        count = getattr(module, "experts" if name in found else "num_experts")
        if count < degree:
            raise PlanError(f"mesh.expert = {degree}, but {name!r} has {count} experts; lower it to {count}")
        parameter_names = {f"{name}.{key}" if name else key for key in module._parameters}
        tied = next(
            (names for names in layout.tied if parameter_names & set(names) and _of_modules(model, names) > 1), None
        )
        if tied:
            raise PlanError(f"{' and '.join(tied)} are one tensor, so {name!r} cannot be divided; place it 'replicate'")
    for name, mixture in found.items():
        if context > 1 and mixture.capacity_factor is not None:
            raise PlanError(
                f"mesh.context = {context}: the tokens of {name!r} lie on several ranks, so which ones exceed an "
                "expert's capacity is not defined as on one device; set capacity_factor=None"
            )
    routed = getattr(getattr(model, "config", None), "output_router_logits", False)
    if stacked and routed and layout.mesh.degree(*GRADIENT_AXES) > 1:
        raise PlanError(
            f"{type(model).__name__} computes its load-balancing loss from each rank's own tokens, which is not the "
            "global batch's; set config.output_router_logits=False, or use tutti.nn.MixtureOfExperts"
        )


def _of_modules(model: nn.Module, names: list[str]) -> int:
    """The number of modules that share the tensor with these names."""
    return len({id(model.get_submodule(name.rpartition(".")[0])) for name in names})


TALLY_NUMEL = 4
"""How many numbers a mixture reports: choices, dropped choices, passes, and the sum of its load-balancing losses."""


def mixtures_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the mixtures of experts in a whole model, the same on every rank."""
    return tuple(name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts))


def write_tallies(model: nn.Module, names: Sequence[str], numbers: torch.Tensor, copies: int) -> None:
    """Add this rank's counts since the last call to `numbers`, (len(names) * TALLY_NUMEL).

    A mixture counts for all ranks that share its microbatch, so `copies` ranks add the same.
    """
    tallies = take_tallies(model)
    for position, name in enumerate(names):
        tally = tallies.get(name)
        if tally is not None and tally.passes:
            part = numbers[position * TALLY_NUMEL : (position + 1) * TALLY_NUMEL]
            for place, count in enumerate((tally.assigned, tally.dropped, tally.passes, tally.balance)):
                part[place] += count
            part /= copies


def read_tallies(names: Sequence[str], numbers: Sequence[float]) -> dict[str, Tally]:
    """The counts by mixture, from the sum of all ranks' numbers."""
    rows = [numbers[start : start + TALLY_NUMEL] for start in range(0, len(names) * TALLY_NUMEL, TALLY_NUMEL)]
    return {
        name: Tally(assigned=round(assigned), dropped=round(dropped), passes=round(passes), balance=balance)
        for name, (assigned, dropped, passes, balance) in zip(names, rows, strict=True)
    }


class DeferredTallies(Mapping[str, Tally]):
    """`read_tallies` of numbers that the device still computes; they are read when somebody looks.

    Args:
        names: of the mixtures.
        read: returns the numbers.
    """

    def __init__(self, names: Sequence[str], read: Callable[[], Sequence[float]]) -> None:
        self._names, self._read = tuple(names), read

    def __getitem__(self, name: str) -> Tally:
        return read_tallies(self._names, self._read())[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
