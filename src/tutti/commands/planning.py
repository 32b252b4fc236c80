"""Helpers of all commands that plan: from a captured script to a ModelSpec and a Choice."""

import time
from typing import TYPE_CHECKING, Any

from tutti.commands.messages import warn
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError
from tutti.planner import Choice, PlanRequest, PrecisionPolicy, Scope, changed_modules, choose

if TYPE_CHECKING:
    from tutti.trainer.capture import CapturedScript

SEARCH_S = 7.0
"""Time limit of a search in seconds. It returns the best plan found by then and says what it left out."""

MIXED_SEARCH_S = 40.0
"""Time limit in seconds where devices differ: several orders of nodes, shares and cuts are tried."""


def model_spec_of(captured: "CapturedScript", *, name: str = "model") -> ModelSpec:
    """Return the ModelSpec of what a script gave to `Job.prepare`.

    Raises:
        DataError: no sample can be read from its data set.
    """
    from tutti.commands.describe import describe_captured

    return describe_captured(captured, name=name)


def costed(model: ModelSpec) -> ModelSpec:
    """Return the model unchanged if its costs are known.

    Raises:
        PlanError: its passes could not be traced, so it would seem to cost nothing.
    """
    if not model.untraced:
        return model
    raise PlanError(
        f"{model.name}: {model.untraced}; so the cost of a step is unknown, and no plan can be predicted: correct that,"
        " or train without a prediction (tutti run --nproc N)"
    )


def plan_for(
    captured: "CapturedScript",
    cluster: ClusterSpec,
    *,
    name: str = "model",
    nproc: int | None = None,
    max_devices: int | None = None,
    precision: PrecisionPolicy = "script",
    allow_microbatches: bool = False,
    scope: Scope = "prefer-data",
    **request_fields: Any,
) -> Choice:
    """Choose a plan for a captured script. Its batch, layout and synchronisation stay.

    Args:
        captured: what the script gave to `Job.prepare`.
        cluster: the machines.
        name: the model's name.
        nproc: exact number of ranks.
        max_devices: largest number of ranks.
        precision: the script's precision, a given one, or the fastest.
        allow_microbatches: num_microbatches may change even where that changes results.
        scope: which meshes to try. By default the plan is data parallel, unless that does not fit or the script's
            annotations ask for more.
        request_fields: other fields of `PlanRequest`.

    Raises:
        PlanError: no plan fits, or the model cannot be costed.
    """
    request = PlanRequest(
        script=captured.plan,
        max_devices=max_devices,
        degree=nproc,
        precision=precision,
        allow_microbatches=allow_microbatches,
        scope=scope,
        demanded=demanded(captured),
        samples=barred(captured),
        **request_fields,
    )
    return search(costed(model_spec_of(captured, name=name)), cluster, request)


def search(model: ModelSpec, cluster: ClusterSpec, request: PlanRequest, limit_s: float | None = None) -> Choice:
    """Call `choose` with this process' clock; the default time limit depends on the cluster."""
    if limit_s is None:
        kinds = {(node.device, node.devices_per_node) for node in cluster.nodes}
        limit_s = MIXED_SEARCH_S if len(kinds) > 1 else SEARCH_S
    return choose(model, cluster, request, clock=time.monotonic, limit_s=limit_s)


def demanded(captured: "CapturedScript") -> dict[AxisName, int]:
    """Return the degrees of the axes that a script's annotations ask for; 0 means any degree above one."""
    from tutti.parallel.annotated_plan import read_annotations

    marks = read_annotations(captured.model)
    degrees: dict[AxisName, int] = {}
    if marks.stages:
        degrees["stage"] = len(marks.stages) + 1
    if marks.splits:
        degrees["split"] = max((mark.degree or 0 for mark in marks.placed.values()), default=0)
    if marks.sharded:
        degrees["shard"] = max((mark.degree or 0 for mark in marks.sharded.values()), default=0)
    return degrees


def barred(captured: "CapturedScript") -> dict[str, float | None]:
    """Return the compressed strategies that the script's model cannot use, as None, for `PlanRequest.samples`.

    No codec takes sparse gradients.
    """
    from torch import nn

    from tutti.planner.relaxed_strategies import RELAXED_STRATEGIES

    modules = captured.model.modules()
    sparse = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module in modules)
    return {strategy.words: None for strategy in RELAXED_STRATEGIES if strategy.compress is not None} if sparse else {}


def warn_if_changed(plan: Plan, model: ModelSpec) -> None:
    """Warn on standard error if `model` differs from the one that `plan` was made for."""
    words = changed_modules(plan, model)
    if words:
        warn(f"warning: {words}")
