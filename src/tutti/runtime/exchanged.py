"""What a plan's mechanisms exchange for each module in a step, in words: for explaining a plan."""

from collections.abc import Callable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from tutti.nn import EmbeddingTables, MixtureOfExperts
from tutti.runtime.split import describe_split, rules_for_others
from tutti.runtime.split.decisions import features
from tutti.runtime.table.linear import divided_linears
from tutti.spec.plan import Plan

_SHARDED = {
    1: "gathered over shard after the update",
    2: "gathered over shard (forward), gradients summed into parts",
    3: "gathered over shard (forward, backward), gradients summed into parts",
}


def exchanges(model: nn.Module, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Module name -> what is exchanged for it in a step, besides sums of gradients over replicas.

    `model`: one that nothing has touched, on any device.
    """
    found: dict[str, list[str]] = {name: [] for name, _ in model.named_modules()}
    if plan.degree("split") > 1:
        for one in describe_split(model, plan.layout, plan.degree("split"), rules_for_others=rules_for_others(plan)):
            for exchange in one.exchanges:
                values = f" of {exchange.values} values a row" if exchange.values else ""
                found[one.name].append(f"{exchange.when}: {exchange.kind} over split{values}")
    if plan.degree("table") > 1 and plan.degree("split") == 1:
        for name, columns in divided_linears(model, plan.layout).items():
            inputs, outputs = features(model.get_submodule(name))
            there, back = (inputs, f"a part of {outputs}") if columns else (f"a part of {inputs}", outputs)
            found[name].append(f"over table, a row: {there} values there and {back} back, and their gradients")
    for name, module in model.named_modules():
        found[name] += [words for applies, words in _rules(plan) if applies(module)]
    return {name: tuple(words) for name, words in found.items()}


def _rules(plan: Plan) -> Sequence[tuple[Callable[[nn.Module], bool], str]]:
    rules: list[tuple[Callable[[nn.Module], bool], str]] = []
    if plan.degree("shard") > 1:
        rules.append((_has_parameters, _SHARDED[plan.sharding.level]))
    if plan.degree("space") > 1:
        rules.append((_looks_at_neighbours, "halos with neighbours over space, forward and backward"))
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
