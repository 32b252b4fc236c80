"""Preview: where a plan puts a model and what it communicates, found in one process and without allocating memory.

The process group is torch's `fake` one, whose collectives do nothing. Plans that mechanisms refuse are refused
here, before any rank starts.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd
from torch.utils._pytree import tree_leaves

from tutti.config.plan import Plan
from tutti.config.prediction import Explanation, ModulePlacement
from tutti.config.refusals import check_plan
from tutti.config.shard_engine import describe_engine
from tutti.errors import PlanError
from tutti.nn import EmbeddingTables, MixtureOfExperts
from tutti.parallel.compressed.compressor import compressed_words
from tutti.parallel.data.batchnorm import BatchScope, is_batch_norm
from tutti.parallel.embedding.table_linear import divided_linears
from tutti.parallel.layout import Layout, TensorShard, to_local
from tutti.parallel.mesh import Mesh
from tutti.parallel.parallelize import parallelize
from tutti.parallel.pipeline.placeholders import StandIns
from tutti.parallel.pipeline.shape_inference import of_experts
from tutti.parallel.pipeline.stage_building import Sample, cut_stages
from tutti.parallel.tensor import describe_split, rules_for_others
from tutti.parallel.tensor.layer_patterns import features
from tutti.parallel.tensor.tensor_plan import PlannedCollective

MOST_RANKS = 16
"""The most ranks that are previewed, evenly spread over the world."""


@dataclass(slots=True, kw_only=True)
class _RankPreview:
    """What one rank would hold, by name of the tensor."""

    rank: int
    nbytes: dict[str, int] = field(default_factory=dict)
    held: dict[str, TensorShard] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)


def explain_layout(
    model: nn.Module, plan: Plan, *, sample: Sample | None = None, optimizer_tensors: float = 2.0
) -> Explanation:
    """Explain where a plan puts every module of a model.

    Args:
        model: the model on the meta device; it is copied.
        plan: the plan.
        sample: returns arguments of the model for a few samples. Stages, and modules whose input needs no gradient, are
            found with it; stages require it.
        optimizer_tensors: tensors of a parameter's size that the optimizer holds.

    Raises:
        PlanError: as preparing a Job by this plan would, or this process has joined a world.
    """
    if dist.is_initialized():
        raise PlanError("this process has joined a world; explain plans in a process that has not")
    check_plan(plan)
    count = min(plan.world_size, MOST_RANKS)
    chosen = sorted({rank * plan.world_size // count for rank in range(count)})
    if plan.degree("stage") > 1 and sample is None:
        raise PlanError("finding the stages takes a forward pass; give a sample of the model's arguments")
    ranks = [_preview(model, plan, rank, sample or _nothing) for rank in chosen]
    sampled = " of those previewed" if len(chosen) < plan.world_size else ""  # other ranks may hold it, too
    whole = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    parameters = [sum(rank.nbytes.values()) for rank in ranks]
    gradients = [sum(size for name, size in rank.nbytes.items() if name in trainable) for rank in ranks]
    divided = plan.degree("shard") if plan.sharding.level == 1 else 1
    return Explanation(
        mesh=dict(plan.mesh),
        ranks=tuple(chosen),
        modules=tuple(_modules(model, ranks, whole, collectives_by_module(model, plan, sample), sampled)),
        parameter_nbytes=sum(whole.values()),
        parameter_nbytes_per_rank=tuple(parameters),
        gradient_nbytes_per_rank=tuple(gradients),
        state_nbytes_per_rank=tuple(
            round(p + g + optimizer_tensors * g / divided) for p, g in zip(parameters, gradients, strict=True)
        ),
        engine=describe_engine(plan),
    )


def _nothing() -> tuple[tuple[object, ...], dict[str, object]]:
    return (), {}


def _preview(model: nn.Module, plan: Plan, rank: int, sample: Sample) -> _RankPreview:
    divided = copy.deepcopy(model)
    with _fake_world(rank, plan.world_size):
        mesh = Mesh(plan.mesh, rank)
        layout = Layout.of(divided, mesh)
        stages = cut_stages(divided, plan, layout, sample)
        parallelize(divided, plan, layout, BatchScope(world_size=mesh.data_degree), stages)
        result = _RankPreview(rank=rank)
        for name, parameter in divided.named_parameters():
            part = to_local(parameter)
            result.nbytes[name] = part.numel() * part.element_size()
            result.held[name] = held = layout.shard_of(name)
            axes = [axis for axis in held.sums if mesh.degree(axis) > 1]
            if parameter.requires_grad and axes:
                result.sums[name] = "gradients reduced over " + " x ".join(axes) + compressed_words(plan, axes)
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
    ranks: Sequence[_RankPreview],
    whole: dict[str, int],
    exchanged: dict[str, tuple[str, ...]],
    sampled: str,
) -> Iterator[ModulePlacement]:
    first_of = {id(p): name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        own_names = [f"{name}.{key}" if name else key for key, p in module.named_parameters(recurse=False)]
        tied = [first_of[id(p)] for _, p in module.named_parameters(recurse=False)]
        if not own_names and not exchanged[name]:
            continue
        sums = dict.fromkeys(rank.sums[key] for rank in ranks for key in tied if key in rank.sums)
        yield ModulePlacement(
            name=name,
            kind=type(module).__name__,
            placement=_placement(own_names, tied, ranks, sampled),
            nbytes=sum(whole[key] for key in tied if key in own_names),
            nbytes_per_rank=tuple(sum(rank.nbytes.get(key, 0) for key in tied if key in own_names) for rank in ranks),
            collectives=(*exchanged[name], *sums),
        )


def _placement(own: list[str], tied: list[str], ranks: Sequence[_RankPreview], sampled: str) -> str:
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
    """Format 0,1,2,5 as "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


_SHARDED = {
    1: "gathered over shard after the update",
    2: "gathered over shard (forward), gradients reduce-scattered",
    3: "gathered over shard (forward, backward), gradients reduce-scattered",
}


def collectives_by_module(model: nn.Module, plan: Plan, sample: Sample | None = None) -> dict[str, tuple[str, ...]]:
    """Describe the collectives of each module in a step, except gradient reductions over replicas.

    Args:
        model: the undivided model, on any device.
        plan: the plan.
        sample: returns arguments of the model. With it, the gradient of an input is left out where nothing before the
            module is trained, as a run leaves it out.

    Returns:
        Descriptions by module name.
    """
    collectives: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
    first = frozenset() if sample is None else modules_without_input_gradient(model, sample)
    if plan.degree("split") > 1:
        degree, others = plan.degree("split"), rules_for_others(plan)
        for split in describe_split(model, plan.layout, degree, rules_for_others=others, weights=plan.split_weights):
            for exchange in split.exchanges:
                if split.name in first and _of_input(exchange):
                    continue
                values = f" of {exchange.values} values per row" if exchange.values else ""
                collectives[split.name].append(f"{exchange.when}: {exchange.kind} over split{values}")
    if plan.degree("table") > 1 and plan.degree("split") == 1:
        for name, columns in divided_linears(model, plan.layout).items():
            inputs, outputs = features(model.get_submodule(name))
            sent, returned = (inputs, f"a part of {outputs}") if columns else (f"a part of {inputs}", outputs)
            gradients = "the gradients of the returned values" if name in first else "their gradients"
            collectives[name].append(
                f"over table, per row: {sent} values sent and {returned} returned, and {gradients}"
            )
    for name, module in model.named_modules():
        collectives[name] += [words for applies, words in _rules(plan, wanted=name not in first) if applies(module)]
    return {name: tuple(words) for name, words in collectives.items()}


def modules_without_input_gradient(model: nn.Module, sample: Sample) -> frozenset[str]:
    """Find the modules whose inputs need no gradient, by a forward pass without values; empty if that fails."""
    model = copy.deepcopy(model)  # forward may leave tensors in it
    stand_ins = StandIns(model)
    with_gradient: dict[str, bool] = {}

    def called(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # of a recurrent layer only the first argument is an input that is copied; the other is its initial state
        given = (args or tuple(kwargs.values()))[:1] if isinstance(module, nn.RNNBase) else (args, kwargs)
        tracked = any(leaf.requires_grad for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        with_gradient[name] = with_gradient.get(name, False) or tracked
        if id(module) in stand_ins.stacked:
            return of_experts(module, *args, **kwargs)
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    try:
        args, kwargs = sample()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), stand_ins.in_place(frozenset(), called):
            model(*args, **kwargs)
    except Exception:  # the script's own code, on tensors without values
        return frozenset()
    return frozenset(name for name, tracked in with_gradient.items() if not tracked)


def _of_input(exchange: PlannedCollective) -> bool:
    """Return whether a collective reduces the gradient of the module's input.

    A reduce-scatter in backward is of an RNN's states between its steps.
    """
    return exchange.when == "backward" and exchange.kind != "reduce-scatter"


def _rules(plan: Plan, *, wanted: bool) -> Sequence[tuple[Callable[[nn.Module], bool], str]]:
    """Pairs of (applies to a module, description); `wanted`: whether the gradient of the module's input is needed."""
    rules: list[tuple[Callable[[nn.Module], bool], str]] = []
    if plan.degree("shard") > 1:
        rules.append((_has_parameters, _SHARDED[plan.sharding.level]))
    if plan.degree("space") > 1:
        when = "forward and backward" if wanted else "forward"
        rules.append((_reads_neighbours, f"halos with neighbours over space, {when}"))
    if plan.data_parallel_degree * plan.degree("space") > 1:
        rules.append((is_batch_norm, "batch statistics, forward and backward"))
    if plan.degree("expert") > 1:
        rules.append((lambda module: isinstance(module, MixtureOfExperts), "all-to-all of tokens over expert, 4 times"))
    if plan.degree("table") > 1:
        tables = (EmbeddingTables, nn.EmbeddingBag)
        rules.append((lambda module: isinstance(module, tables), "all-to-all of indices and vectors over table"))
    return rules


def _has_parameters(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _reads_neighbours(module: nn.Module) -> bool:
    if isinstance(module, _ConvNd):
        return any(size > 1 for size in module.kernel_size)
    return isinstance(module, _MaxPoolNd | _AvgPoolNd)
