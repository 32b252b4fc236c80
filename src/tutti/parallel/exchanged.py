"""What a plan's mechanisms exchange for each module in a step, in words: for explaining a plan."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd
from torch.utils._pytree import tree_leaves

from tutti.config.plan import Plan
from tutti.nn import EmbeddingTables, MixtureOfExperts
from tutti.parallel.embedding.linear import divided_linears
from tutti.parallel.pipeline.build import Sample
from tutti.parallel.pipeline.infer import of_experts
from tutti.parallel.pipeline.standin import StandIns
from tutti.parallel.tensor import describe_split, rules_for_others
from tutti.parallel.tensor.decisions import features
from tutti.parallel.tensor.describe import Exchange

_SHARDED = {
    1: "gathered over shard after the update",
    2: "gathered over shard (forward), gradients summed into parts",
    3: "gathered over shard (forward, backward), gradients summed into parts",
}


def exchanges(model: nn.Module, plan: Plan, sample: Sample | None = None) -> dict[str, tuple[str, ...]]:
    """Module name -> what is exchanged for it in a step, besides sums of gradients over replicas.

    `model`: one that nothing has touched, on any device. With a `sample` gradients that nothing wants are left out, as
    the run leaves them out: that of the input of a module before which nothing is trained.
    """
    found: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
    first = frozenset() if sample is None else first_trained(model, sample)
    if plan.degree("split") > 1:
        degree, others = plan.degree("split"), rules_for_others(plan)
        for one in describe_split(model, plan.layout, degree, rules_for_others=others, weights=plan.split_weights):
            for exchange in one.exchanges:
                if one.name in first and _of_input(exchange):
                    continue
                values = f" of {exchange.values} values a row" if exchange.values else ""
                found[one.name].append(f"{exchange.when}: {exchange.kind} over split{values}")
    if plan.degree("table") > 1 and plan.degree("split") == 1:
        for name, columns in divided_linears(model, plan.layout).items():
            inputs, outputs = features(model.get_submodule(name))
            there, back = (inputs, f"a part of {outputs}") if columns else (f"a part of {inputs}", outputs)
            gradients = "the gradients of what comes back" if name in first else "their gradients"
            found[name].append(f"over table, a row: {there} values there and {back} back, and {gradients}")
    for name, module in model.named_modules():
        found[name] += [words for applies, words in _rules(plan, wanted=name not in first) if applies(module)]
    return {name: tuple(words) for name, words in found.items()}


def first_trained(model: nn.Module, sample: Sample) -> frozenset[str]:
    """Names of the modules that are called and get no tensor that needs a gradient, as a forward without values says;
    none where that cannot be followed.
    """
    model = copy.deepcopy(model)  # forward may leave tensors in it
    stand_ins = StandIns(model)
    with_gradient: dict[str, bool] = {}

    def called(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # what else a recurrent layer gets is no input that is copied: its first state
        given = (args or tuple(kwargs.values()))[:1] if isinstance(module, nn.RNNBase) else (args, kwargs)
        tracked = any(leaf.requires_grad for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        with_gradient[name] = with_gradient.get(name, False) or tracked
        if id(module) in stand_ins.stacked:
            return of_experts(*args, **kwargs)
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    try:
        args, kwargs = sample()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), stand_ins.in_place(frozenset(), called):
            model(*args, **kwargs)
    except Exception:  # the script's own code, on tensors without values
        return frozenset()
    return frozenset(name for name, tracked in with_gradient.items() if not tracked)


def _of_input(exchange: Exchange) -> bool:
    """Whether it is of the gradient of the module's input; scattered are those of states between a layer's steps."""
    return exchange.when == "backward" and exchange.kind != "reduce-scatter"


def _rules(plan: Plan, *, wanted: bool) -> Sequence[tuple[Callable[[nn.Module], bool], str]]:
    """`wanted`: whether the gradient of the module's input is."""
    rules: list[tuple[Callable[[nn.Module], bool], str]] = []
    if plan.degree("shard") > 1:
        rules.append((_has_parameters, _SHARDED[plan.sharding.level]))
    if plan.degree("space") > 1:
        when = "forward and backward" if wanted else "forward"
        rules.append((_looks_at_neighbours, f"halos with neighbours over space, {when}"))
    if plan.data_parallel_degree * plan.degree("space") > 1:
        rules.append((_over_batch, "batch statistics, forward and backward"))
    if plan.degree("expert") > 1:
        rules.append((lambda module: isinstance(module, MixtureOfExperts), "all-to-all of tokens over expert, 4 times"))
    if plan.degree("table") > 1:
        tables = (EmbeddingTables, nn.EmbeddingBag)
        rules.append((lambda module: isinstance(module, tables), "all-to-all of indices and vectors over table"))
    return rules


def _has_parameters(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _looks_at_neighbours(module: nn.Module) -> bool:
    if isinstance(module, _ConvNd):
        return any(size > 1 for size in module.kernel_size)
    return isinstance(module, _MaxPoolNd | _AvgPoolNd)


def _over_batch(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)
