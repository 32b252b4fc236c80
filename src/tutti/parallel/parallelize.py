"""Apply a plan's mechanisms of parallelism to a model, in a fixed order."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.comm.world import World
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError, ScriptError
from tutti.optim.optimizer_traits import check_takes_parts, check_takes_tensors
from tutti.parallel.data.batch_state import share_state
from tutti.parallel.data.batchnorm import BatchScope, share_statistics
from tutti.parallel.embedding.apply_table_parallel import divide_tables
from tutti.parallel.expert.expert_parallel import divide_experts
from tutti.parallel.layout import Layout, TensorShard
from tutti.parallel.offload.saved_activations import apply_offload
from tutti.parallel.pipeline.stage_building import StagePartition
from tutti.parallel.recompute import apply_chunks, apply_recompute
from tutti.parallel.sharding.parameter_sharding import shard
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.parallel.spatial.apply_spatial_parallel import cut_space
from tutti.parallel.tensor import split_model

IMPLEMENTED_AXES = ("replicate", "shard", "context", "expert", "table", "space", "split", "stage")
"""The axes that have a mechanism."""


def parallelize(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    scope: BatchScope,
    stages: StagePartition | None = None,
    device: torch.device | None = None,
) -> Shards:
    """Change `model` in place so that this rank computes its part, and record in `layout` what it holds.

    Args:
        model: the user's model.
        plan: the plan.
        layout: the layout of the undivided model.
        scope: the ranks over which batch statistics are computed.
        stages: where the model is cut into pipeline stages, found before the model is changed in any other respect.
        device: where this rank computes; None: on the CPU.

    Returns:
        The sharding that the step and the optimizers use.

    Raises:
        PlanError: a mechanism cannot divide a module; the message names the module and the remedy.
    """
    mesh = layout.mesh
    for axis in mesh.degrees:
        if axis not in IMPLEMENTED_AXES:
            raise PlanError(
                f"mesh.{axis} = {mesh.degree(axis)}: this version has no mechanism for this axis; use one of "
                f"{IMPLEMENTED_AXES}"
            )
    divide_experts(model, plan.layout, layout, scope)
    divide_tables(model, plan.layout, layout)
    split_model(model, plan, layout)
    if stages is not None:
        stages.keep_own(model, layout)
    if mesh.world_size > 1 or any(rule.recompute for rule in plan.layout):
        share_statistics(model, scope, stages.tracer.units.glue if stages is not None else ())
    share_state(model, scope, plan)
    if mesh.degree("space") > 1:
        cut_space(model, plan, layout, scope)
    apply_chunks(model, plan.layout)
    apply_recompute(model, plan.layout, scope)
    apply_offload(model, plan.layout, device or torch.device("cpu"))
    return shard(model, plan, layout, device)


def rebind(
    optimizers: Iterable[Optimizer], originals: Mapping[str, nn.Parameter], model: nn.Module, layout: Layout
) -> None:
    """Make optimizers hold the model's current parameters, in the same groups; parameters on other ranks are removed.

    State that exists before the first step, such as Adagrad's, follows its parameter, also to its device.

    Args:
        optimizers: the user's optimizers.
        originals: the parameters before the model was divided, by name.
        model: the divided model.
        layout: what this rank holds.

    Raises:
        ScriptError: an optimizer has already made steps.
    """
    optimizers = tuple(optimizers)
    _replace_parameters(optimizers, originals, model, layout)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
                    state[key] = value.to(parameter.device)


def _replace_parameters(
    optimizers: Iterable[Optimizer], originals: Mapping[str, nn.Parameter], model: nn.Module, layout: Layout
) -> None:
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
            current = [fate.get(id(parameter), parameter) for parameter in group["params"]]
            group["params"] = [parameter for parameter in current if parameter is not None]
        for name, parameter in originals.items():  # move state that exists before the first step, such as Adagrad's
            new = fate[id(parameter)]
            if parameter in optimizer.state and new is not parameter:
                state = optimizer.state.pop(parameter)
                if new is not None:
                    optimizer.state[new] = _shard_state(state, layout.shard_of(name))


def move_state(optimizers: Iterable[Optimizer]) -> None:
    """Move state that exists before the first step, such as Adagrad's, to where the parameters have been moved.

    Counts of steps stay on the CPU, where optimizers keep them, unless an option of the optimizer says otherwise.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts_too = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and (key != "step" or counts_too):
                        state[key] = value.to(parameter.device)


def check_optimizers(optimizers: Iterable[Optimizer], layout: Layout, world: World) -> None:
    """Check that the optimizers can update what a rank holds of their parameters. Collective.

    Raises:
        PlanError: on every rank, naming the optimizer.
    """
    axes = [axis for axis, degree in layout.mesh.degrees.items() if degree > 1 and axis not in _WHOLE_AXES]
    refusal, divided = None, " and ".join(f"mesh.{axis}" for axis in axes)
    try:
        for number, optimizer in enumerate(optimizers) if axes else ():
            names = {name for group in layout.states.groups[number] for name in group}
            if any(layout.shard_of(name).cuts for name in names):
                check_takes_parts(optimizer, divided, "replicas,")
            else:
                check_takes_tensors(optimizer, divided)
    except PlanError as error:
        refusal = str(error)
    refusals = [message for message in world.gather(refusal) if message is not None] if axes else []
    if refusals:
        raise PlanError(refusals[0])


_WHOLE_AXES: frozenset[AxisName] = frozenset(("replicate", "context", "space"))
"""Axes along which every rank holds all parameters and updates them alike."""


def _shard_state(state: dict[str, Any], held: TensorShard) -> dict[str, Any]:
    """Return the state of a parameter's shard: tensors of the parameter's shape are cut like the parameter."""
    whole = {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == held.shape}
    return {key: held.take(value).clone() if key in whole else value for key, value in state.items()}
