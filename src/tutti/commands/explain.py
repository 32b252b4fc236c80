"""`tutti.explain`: where a plan places every module of a script, its bytes on each rank and its collectives."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.commands.capture import SCRIPT_TIMEOUT_S, capture_script, process_restored
from tutti.commands.describe import describe_captured, samples_of
from tutti.commands.inputs import cluster_for, write_spec
from tutti.commands.messages import messages, status
from tutti.commands.plan_options import PlanOptions, options_of
from tutti.commands.planning import costed, plan_for, warn_if_changed
from tutti.commands.values import (
    StrPath,
    needed_path,
)
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.compression import Compression
from tutti.config.mesh_axes import parse_mesh
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Explanation
from tutti.config.vocabulary import Relaxation
from tutti.errors import PlanError, ScriptError

if TYPE_CHECKING:
    from tutti.trainer.capture import CapturedScript


def explain(
    script: StrPath,
    arguments: Sequence[object] = (),
    *,
    plan: StrPath | Plan | None = None,
    mesh: str | Mapping[str, int] | None = None,
    nproc: int | None = None,
    cluster: StrPath | ClusterSpec | None = None,
    max_devices: int | None = None,
    compress: str | Compression | None = None,
    relax: Relaxation = "exact",
    output: StrPath | None = None,
    timeout: float = SCRIPT_TIMEOUT_S,
    verbose: bool = False,
) -> Explanation:
    """Return where a plan places every module of a script, its bytes on each rank and its collectives.

    The plan is the given one, that of a mesh, plain data parallelism on `nproc` ranks, or the best for the cluster.

    Args:
        script: the script; it runs up to `job.prepare` in this process.
        arguments: the script's own arguments.
        plan: a Plan, or a file of one.
        mesh: a mesh, such as {"replicate": 2, "split": 2} or "dp=2,tp=2".
        nproc: the number of ranks.
        cluster: the machines, if the best plan is to be explained: as for `tutti.plan`.
        max_devices: the best plan uses at most this many ranks.
        compress: codec of gradient reductions.
        relax: how far the best plan may deviate in order to send less.
        output: also write the plan to this file.
        timeout: seconds that the script may take to get as far as `job.prepare`.
        verbose: show on standard error what is being done, and what the script prints.

    Raises:
        TuttiError: what `tutti plan --explain` would refuse, with the same sentence.
    """
    options = replace(options_of(locals()), explain=True, as_json=True)  # a layout needs no costs
    with messages(shown=verbose), process_restored(needed_path("script", script)):
        return explained(options).explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A plan, the model that it is for, and where it places the model's modules."""

    plan: Plan
    model: ModelSpec
    explanation: Explanation


def explained(options: PlanOptions) -> Explained:
    """Explain the plan that is given, or the best one, for a script; write the plan if a file is named."""
    if options.model is not None or not options.target:
        raise ScriptError("--explain, --mesh and --plan lay out the modules of a script; name a script")
    if options.mesh is not None and options.plan is not None:
        raise PlanError("--mesh and --plan both set the mesh; give only one (a plan file has a mesh)")
    stated = options.plan is not None or options.mesh is not None or options.nproc is not None
    if options.relax != "exact" and stated:
        raise PlanError(
            f"--relax {options.relax} lets the planner choose, but --plan, --mesh or --nproc already set what to "
            "explain; plan with --output first, then explain that file with --plan"
        )
    if options.tries is not None or options.scaling:
        raise PlanError(
            "--try and --scaling search for plans, but --explain, --mesh or --plan already set the plan; leave one out"
        )
    path = Path(options.target[0])
    with status("reading the model"):
        captured = capture_script(path, options.target[1:], timeout_s=options.timeout_s)
    captured = replace(captured, plan=captured.plan.compressed(options.compress))
    with suppress(Exception):  # an error is told where samples are needed
        captured.samples(2)
    plan = _plan(options, captured, path.stem).compressed(options.compress)
    model = describe_captured(captured, name=path.stem)
    warn_if_changed(plan, model)
    explanation = _explain(captured, plan, _tensors(model))
    if options.html is not None or (options.cluster is not None and not options.as_json):
        costed(model)  # a layout needs no costs, but the timeline of a step does
    plan = replace(plan, share_device=plan.share_device or options.share_device)
    if options.output is not None:
        write_spec(plan, options.output)
    return Explained(plan=plan, model=model, explanation=explanation)


def layout_of(options: PlanOptions, plan: Plan) -> Explanation:
    """Return where the chosen plan places the modules of the options' script."""
    path = Path(options.target[0])
    with status("reading the model"):
        captured = capture_script(path, options.target[1:], timeout_s=options.timeout_s)
    return _explain(captured, plan, _tensors(describe_captured(captured, name=path.stem)))


def _plan(options: PlanOptions, captured: "CapturedScript", name: str) -> Plan:
    from tutti.parallel.annotated_plan import with_annotations

    if options.plan is not None:
        given = options.plan if isinstance(options.plan, Plan) else serialization.load(Plan, options.plan)
        return with_annotations(given, captured.model, stated_mesh=True)
    if options.mesh is not None:
        plan = captured.plan.on(parse_mesh(options.mesh))
        return with_annotations(plan, captured.model, stated_mesh=True)
    if options.nproc is not None:
        plan = replace(captured.plan, mesh={"replicate": options.nproc})
        return with_annotations(plan, captured.model, stated_mesh=False)
    cluster = cluster_for(options.cluster)
    limit = options.max_devices
    return plan_for(captured, cluster, name=name, max_devices=limit, scope="all", relax=options.relax).best


def _tensors(model: ModelSpec) -> float:
    """Return how many tensors of a parameter's size the optimizer keeps for each parameter, on average."""
    gradients = sum(module.gradient_nbytes for module in model.modules)
    return sum(module.optimizer_nbytes for module in model.modules) / gradients if gradients else 0.0


def _explain(captured: "CapturedScript", plan: Plan, tensors: float) -> Explanation:
    from tutti.parallel.preview import explain_layout

    def sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return samples_of(captured, 2, "the script")[:2]

    return explain_layout(captured.model, plan, sample=sample, optimizer_tensors=tensors)
