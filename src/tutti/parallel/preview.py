"""Preview: the mechanisms applied to a model without memory, rank by rank, without ranks.

The process group is torch's `fake` one, whose collectives do nothing, so a layout of many ranks is known on one, and
what the mechanisms refuse is refused before anything starts.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from tutti.config.plan import Plan
from tutti.config.prediction import Explanation, ModulePlacement
from tutti.config.refusals import check_plan
from tutti.errors import PlanError
from tutti.parallel.compressed.compressor import compressed_words
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.exchanged import exchanges
from tutti.parallel.layout import Held, Layout, local
from tutti.parallel.mesh import Mesh
from tutti.parallel.parallelize import parallelize
from tutti.parallel.pipeline.build import Sample, cut_stages

MOST_RANKS = 16
"""Ranks that are previewed; of a larger world evenly spread ones."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What one rank would hold: local bytes and cuts by name."""

    rank: int
    nbytes: dict[str, int] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)


def explain_layout(
    model: nn.Module, plan: Plan, *, sample: Sample | None = None, optimizer_tensors: float = 2.0
) -> Explanation:
    """Where `plan` puts every module of `model` (on the meta device; it is copied).

    `sample`: gives arguments of the model for a few samples, with which stages are found, and gradients that nothing
    wants; `optimizer_tensors`: tensors of a parameter's size that the optimizer keeps. Raises what preparing a Job by
    this plan would.
    """
    if dist.is_initialized():
        raise PlanError("a plan is explained in a process without ranks; this one has joined a world")
    check_plan(plan)
    count = min(plan.world_size, MOST_RANKS)
    chosen = sorted({rank * plan.world_size // count for rank in range(count)})
    if plan.degree("stage") > 1 and sample is None:
        raise PlanError("stages are found by following a forward; give a sample of the model's arguments")
    ranks = [_preview(model, plan, rank, sample or _nothing) for rank in chosen]
    sampled = " of those looked at" if len(chosen) < plan.world_size else ""  # others like them hold it, too
    whole = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    parameters = [sum(rank.nbytes.values()) for rank in ranks]
    gradients = [sum(size for name, size in rank.nbytes.items() if name in trainable) for rank in ranks]
    divided = plan.degree("shard") if plan.sharding.level == 1 else 1
    return Explanation(
        mesh=dict(plan.mesh),
        ranks=tuple(chosen),
        modules=tuple(_modules(model, ranks, whole, exchanges(model, plan, sample), sampled)),
        parameter_nbytes=sum(whole.values()),
        parameter_nbytes_per_rank=tuple(parameters),
        gradient_nbytes_per_rank=tuple(gradients),
        state_nbytes_per_rank=tuple(
            round(p + g + optimizer_tensors * g / divided) for p, g in zip(parameters, gradients, strict=True)
        ),
    )


def _nothing() -> tuple[tuple[object, ...], dict[str, object]]:
    return (), {}


def _preview(model: nn.Module, plan: Plan, rank: int, sample: Sample) -> _Rank:
    own = copy.deepcopy(model)
    with _fake_world(rank, plan.world_size):
        mesh = Mesh(plan.mesh, rank)
        layout = Layout.of(own, mesh)
        stages = cut_stages(own, plan, layout, sample)
        parallelize(own, plan, layout, BatchScope(world_size=mesh.data_degree), stages)
        result = _Rank(rank=rank)
        for name, parameter in own.named_parameters():
            part = local(parameter)
            result.nbytes[name] = part.numel() * part.element_size()
            result.held[name] = held = layout.of_name(name)
            axes = [axis for axis in held.sums if mesh.degree(axis) > 1]
            if parameter.requires_grad and axes:
                result.sums[name] = "gradients summed over " + " x ".join(axes) + compressed_words(plan, axes)
    return result


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _modules(
    model: nn.Module,
    ranks: Sequence[_Rank],
    whole: dict[str, int],
    exchanged: dict[str, tuple[str, ...]],
    sampled: str,
) -> Iterator[ModulePlacement]:
    first_of = {id(p): name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        own = [f"{name}.{key}" if name else key for key, p in module.named_parameters(recurse=False)]
        tied = [first_of[id(p)] for _, p in module.named_parameters(recurse=False)]
        if not own and not exchanged[name]:
            continue
        sums = dict.fromkeys(rank.sums[key] for rank in ranks for key in tied if key in rank.sums)
        yield ModulePlacement(
            name=name,
            kind=type(module).__name__,
            placement=_placement(own, tied, ranks, sampled),
            nbytes=sum(whole[key] for key in tied if key in own),
            nbytes_per_rank=tuple(sum(rank.nbytes.get(key, 0) for key in tied if key in own) for rank in ranks),
            collectives=(*exchanged[name], *sums),
        )


def _placement(own: list[str], tied: list[str], ranks: Sequence[_Rank], sampled: str) -> str:
    if not own:
        return "no parameters"
    if not set(own) & set(tied):
        return f"tied to {tied[0]}"
    holders = [rank for rank in ranks if any(key in rank.nbytes for key in tied)]
    where = "" if len(holders) == len(ranks) else f", on ranks {_spans([rank.rank for rank in holders])}{sampled}"
    cuts = {(key, cut.dim) for rank in holders for key in tied if key in rank.held for cut in rank.held[key].cuts}
    if not cuts:
        return "whole" + where
    dims = sorted({(key.rpartition(".")[2], dim) for key, dim in cuts})
    return "divided: " + ", ".join(f"{key} along dim {dim}" for key, dim in dims) + where


def _spans(ranks: list[int]) -> str:
    """0,1,2,5 as "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
