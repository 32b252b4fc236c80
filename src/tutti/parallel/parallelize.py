"""Parallelize: the plan's mechanisms take the model apart, in an order one can read."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.config.plan import Plan
from tutti.errors import PlanError, ScriptError
from tutti.parallel.chunks import apply_chunks
from tutti.parallel.data.batchnorm import BatchScope, share_statistics
from tutti.parallel.embedding.divide import divide_tables
from tutti.parallel.expert.divide import divide_experts
from tutti.parallel.layout import Held, Layout
from tutti.parallel.pipeline.build import Stages
from tutti.parallel.recompute import apply_recompute
from tutti.parallel.sharding.divide import shard
from tutti.parallel.sharding.shards import Shards
from tutti.parallel.spatial.apply import cut_space
from tutti.parallel.tensor import split_model

BUILT = ("replicate", "shard", "context", "expert", "table", "space", "split", "stage")
"""The axes whose mechanism is there."""


def parallelize(
    model: nn.Module, plan: Plan, layout: Layout, scope: BatchScope, stages: Stages | None = None
) -> Shards:
    """Change `model` in place so that this rank computes its part, and write into `layout` what it holds.

    `stages`: where the model is cut, known before anything else is done to it. Returns what the step and the optimizers
    must know of sharding.

    Raises PlanError for what cannot work, naming the module and the remedy.
    """
    mesh = layout.mesh
    for axis in mesh.degrees:
        if axis not in BUILT:
            raise PlanError(f"mesh.{axis} = {mesh.degree(axis)}: this version has no such mechanism; use {BUILT}")
    divide_experts(model, plan.layout, layout, scope)
    divide_tables(model, plan.layout, layout)
    split_model(model, plan, layout)
    if stages is not None:
        stages.keep_own(model, layout)
    apply_chunks(model, plan.layout)
    recomputed = apply_recompute(model, plan.layout, scope)
    if scope.world_size > 1 or recomputed:
        share_statistics(model, scope)
    if mesh.degree("space") > 1:
        cut_space(model, plan, layout, scope)
    return shard(model, plan.sharding, layout)


def rebind(
    optimizers: Iterable[Optimizer], originals: Mapping[str, nn.Parameter], model: nn.Module, layout: Layout
) -> None:
    """Make optimizers hold the parameters the model has now, in the same groups with the same settings.

    `originals`: by name, the parameters before the model was taken apart. Parameters that are on other ranks leave.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    fate: dict[int, nn.Parameter | None] = {}
    for name, parameter in originals.items():
        fate[id(parameter)] = now.get(name) if fate.get(id(parameter)) is None else fate[id(parameter)]
    if all(new is not None and id(new) == old for old, new in fate.items()):
        return
    for optimizer in optimizers:
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise ScriptError(
                f"{type(optimizer).__name__} has already made steps, and the plan replaces parameters; give prepare a "
                "fresh optimizer, and resume its state from a checkpoint"
            )
        for group in optimizer.param_groups:
            kept = [fate.get(id(parameter), parameter) for parameter in group["params"]]
            group["params"] = [parameter for parameter in kept if parameter is not None]
        for name, parameter in originals.items():  # state that stands before the first step, as Adagrad's
            new = fate[id(parameter)]
            if parameter in optimizer.state and new is not parameter:
                state = optimizer.state.pop(parameter)
                if new is not None:
                    optimizer.state[new] = _part(state, layout.of_name(name))


def _part(state: dict[str, Any], held: Held) -> dict[str, Any]:
    """The state of a parameter's part, where a tensor has the parameter's shape."""
    whole = {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == held.shape}
    return {key: held.take(value).clone() if key in whole else value for key, value in state.items()}
