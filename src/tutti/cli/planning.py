"""What commands that plan have in common: from a captured script to a ModelSpec and a Choice."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.cli.options import console
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError, SpecError
from tutti.planner import Choice, PlanRequest, PrecisionPolicy, Scope, changed_modules, choose

if TYPE_CHECKING:
    from tutti.trainer.capture import CapturedScript

SEARCH_S = 7.0
"""A search of a uniform cluster ends after so many seconds with the best it has, and says what it left."""

MIXED_SEARCH_S = 40.0
"""The same where devices differ: several orders of nodes, shares and cuts are tried."""


def model_spec_of(captured: "CapturedScript", *, name: str = "model") -> ModelSpec:
    """The ModelSpec of what a script gave to `Job.prepare`. Raises DataError where no sample can be had."""
    from tutti.cli.describe import describe_captured

    return describe_captured(captured, name=name)


def costed(model: ModelSpec) -> ModelSpec:
    """The model as it is. Raises PlanError where its passes could not be followed: it would seem to cost nothing."""
    if not model.untraced:
        return model
    raise PlanError(
        f"{model.name}: {model.untraced}; so what a step costs is unknown, and no plan can be predicted: correct that, "
        "or train without a prediction (tutti run --nproc N)"
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
    """Choose a plan for a captured script: its batch, layout and sync stay; `nproc` fixes the number of ranks.

    Without more being said the plan is data parallel unless that does not fit, or the script's annotations ask for
    more. `request_fields`: other fields of the Request. Raises PlanError where nothing fits or the model cannot be
    costed.
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
    """`choose` under this process' clock."""
    if limit_s is None:
        kinds = {(node.device, node.devices_per_node) for node in cluster.nodes}
        limit_s = MIXED_SEARCH_S if len(kinds) > 1 else SEARCH_S
    return choose(model, cluster, request, clock=time.monotonic, limit_s=limit_s)


def demanded(captured: "CapturedScript") -> dict[AxisName, int]:
    """The axes that a script's annotations ask for with their degrees, 0 where any above one will do."""
    from tutti.parallel.annotated_plan import read_annotations

    marks = read_annotations(captured.model)
    found: dict[AxisName, int] = {}
    if marks.stages:
        found["stage"] = len(marks.stages) + 1
    if marks.splits:
        found["split"] = max((one.degree or 0 for one in marks.placed.values()), default=0)
    if marks.sharded:
        found["shard"] = max((one.degree or 0 for one in marks.sharded.values()), default=0)
    return found


def barred(captured: "CapturedScript") -> dict[str, float | None]:
    """Ways to send less that the script's model cannot go, for `Request.samples`: no code is for sparse gradients."""
    from torch import nn

    from tutti.planner.relaxed_strategies import RELAXED_STRATEGIES

    modules = captured.model.modules()
    sparse = any(isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse for one in modules)
    return {strategy.words: None for strategy in RELAXED_STRATEGIES if strategy.compress is not None} if sparse else {}


def warn_if_changed(plan: Plan, model: ModelSpec) -> None:
    """Say on standard error what is other in `model` than in the one that `plan` was made for."""
    words = changed_modules(plan, model)
    if words:
        console.print(f"warning: {words}", style="yellow", markup=False, soft_wrap=True)


def write_spec(value: Any, output: Path) -> None:
    """Write a spec where the user asked for it. Raises SpecError where that is impossible."""
    try:
        serialization.save(value, output)
    except OSError as error:
        raise SpecError(
            f"the {type(value).__name__} cannot be written to {output} ({error.strerror}); name another file"
        ) from None
