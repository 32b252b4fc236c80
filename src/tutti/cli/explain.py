"""`tutti plan --explain`: where a plan puts every module, as a tree a person can read. Nothing is run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.cli.common import capture_script, cluster_for, console, emit
from tutti.errors import PlanError, ScriptError

if TYPE_CHECKING:
    from rich.tree import Tree

    from tutti.cli.plan_options import Options
    from tutti.config.cluster import ClusterSpec
    from tutti.config.model import ModelSpec
    from tutti.config.plan import Plan
    from tutti.config.prediction import Explanation, ModulePlacement
    from tutti.trainer.capture import CapturedScript


def explain_script(options: "Options") -> None:
    """Explain the plan that the command line names, or the best one, for its script."""
    from tutti.cli.describe import describe_captured
    from tutti.cli.planning import costed, warn_if_changed, write_spec

    if options.model is not None or not options.target:
        raise ScriptError("--explain, --mesh and --plan need a script: the layout is that of its modules")
    if options.mesh is not None and options.plan is not None:
        raise PlanError("--mesh and --plan both say how ranks are arranged; give one (a plan file has a mesh)")
    stated = options.plan is not None or options.mesh is not None or options.nproc is not None
    if options.relax != "exact" and stated:
        raise PlanError(
            f"--relax {options.relax} lets the planner choose, and --plan, --mesh or --nproc say what is explained; "
            "plan with --output first, then explain that file with --plan"
        )
    if options.tries is not None or options.scaling:
        raise PlanError(
            "--try and --scaling search for plans, and --explain, --mesh or --plan say which; leave one out"
        )
    path = Path(options.target[0])
    with console.status("looking at the model"):
        captured = capture_script(path, options.target[1:])
    captured = replace(captured, plan=captured.plan.compressed(options.compress))
    plan = _plan(options, captured, path.stem).compressed(options.compress)
    model = describe_captured(captured, name=path.stem)
    warn_if_changed(plan, model)
    explanation = _explain(captured, plan, _tensors(model))
    if options.html is not None or (options.cluster is not None and not options.as_json):
        costed(model)  # a layout needs no costs, a step does
    if options.output is not None:
        write_spec(plan, options.output)
    if options.html is not None:
        from tutti.cli.predict import write_plan_page

        write_plan_page(model, cluster_for(options.cluster), plan, options.html)
    if options.as_json:
        emit(explanation)
        return
    _show(explanation)
    if options.cluster is not None:  # else this machine would have to be measured
        _show_step(model, cluster_for(options.cluster), plan)
    if options.output is not None:
        target = " ".join(options.target)
        console.print(f"plan written to {options.output}: tutti run --plan {options.output} {target}", soft_wrap=True)


def show_layout(options: "Options", plan: "Plan") -> None:
    """Where a plan that was chosen puts the modules of the command line's script."""
    from tutti.cli.describe import describe_captured

    path = Path(options.target[0])
    with console.status("looking at the model"):
        captured = capture_script(path, options.target[1:])
    _show(_explain(captured, plan, _tensors(describe_captured(captured, name=path.stem))))


def _plan(options: "Options", captured: "CapturedScript", name: str) -> "Plan":
    from tutti.cli.planning import plan_for
    from tutti.config import serialization
    from tutti.config.mesh_words import parse_mesh
    from tutti.config.plan import Plan
    from tutti.parallel.annotated_plan import with_annotations

    if options.plan is not None:
        return with_annotations(serialization.load(Plan, options.plan), captured.model, stated_mesh=True)
    if options.mesh is not None:
        plan = replace(captured.plan, mesh=parse_mesh(options.mesh))
        return with_annotations(plan, captured.model, stated_mesh=True)
    if options.nproc is not None:
        plan = replace(captured.plan, mesh={"replicate": options.nproc})
        return with_annotations(plan, captured.model, stated_mesh=False)
    cluster = cluster_for(options.cluster)
    limit = options.max_devices
    return plan_for(captured, cluster, name=name, max_devices=limit, scope="all", relax=options.relax).best


def _tensors(model: object) -> float:
    """Tensors of a parameter's size that the optimizer keeps, on average."""
    from tutti.config.model import ModelSpec

    assert isinstance(model, ModelSpec)
    gradients = sum(module.gradient_nbytes for module in model.modules)
    return sum(module.optimizer_nbytes for module in model.modules) / gradients if gradients else 0.0


def _explain(captured: "CapturedScript", plan: "Plan", tensors: float) -> "Explanation":
    from tutti.parallel.preview import explain_layout

    return explain_layout(captured.model, plan, sample=lambda: captured.samples(2)[:2], optimizer_tensors=tensors)


def _show(explanation: "Explanation") -> None:
    from rich.console import Console

    from tutti.cli.describe import scaled

    out = Console(highlight=False)
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in explanation.mesh.items())
    shown = len(explanation.ranks)
    world = 1
    for degree in explanation.mesh.values():
        world *= degree
    ranks = f"all {world}" if shown == world else f"{shown} of {world}, evenly spread"
    out.print(f"[bold]Layout[/] over {mesh}; ranks looked at: {ranks}", soft_wrap=True)
    out.print(tree(explanation))
    for words, values in (
        ("parameters", explanation.parameter_nbytes_per_rank),
        ("gradients", explanation.gradient_nbytes_per_rank),
        ("parameters, gradients and optimizer state", explanation.state_nbytes_per_rank),
    ):
        out.print(f"{words} a rank: {spread(values)}", soft_wrap=True)
    out.print(
        f"the model whole: {scaled(explanation.parameter_nbytes, 'B')} of parameters; {explanation.evidence}: "
        "nothing was run",
        style="dim",
        soft_wrap=True,
    )


def _show_step(model: "ModelSpec", cluster: "ClusterSpec", plan: "Plan") -> None:
    from tutti.cli.outlook import ROWS, standard_output
    from tutti.cli.timeline_view import show_timeline
    from tutti.cost_model.tracks import timeline

    show_timeline(standard_output(), timeline(model, cluster, plan, most_tracks=ROWS))


def spread(values: tuple[int, ...]) -> str:
    """Equal bytes once, others as least to most."""
    from tutti.cli.describe import scaled

    least, most = scaled(min(values), "B") or "0 B", scaled(max(values), "B") or "0 B"
    return least if least == most else f"{least} to {most}"


def tree(explanation: "Explanation") -> "Tree":
    """Modules by their dotted names; equal numbered siblings are shown once."""
    from rich.tree import Tree

    root = Tree("model", guide_style="dim")
    branches: dict[str, Tree] = {"": root}
    for names, module in gathered(explanation.modules):
        parent = root
        parts = names.split(".") if names else []
        for count in range(1, len(parts)):
            key = ".".join(parts[:count])
            branches[key] = branches.get(key) or parent.add(parts[count - 1])
            parent = branches[key]
        label = _label(parts[-1] if parts else "(model)", module)
        branches[names] = parent.add(label)
    return root


def gathered(modules: "tuple[ModulePlacement, ...]") -> "Iterator[tuple[str, ModulePlacement]]":
    """(name, module) with runs of numbered siblings that differ in nothing else merged: layers.0-3.mlp."""
    groups: dict[tuple[object, ...], list[ModulePlacement]] = {}
    for module in modules:
        parts = module.name.split(".")
        shape = tuple("#" if part.isdecimal() else part for part in parts)
        facts = (module.kind, module.placement, module.nbytes, module.nbytes_per_rank, module.collectives)
        groups.setdefault((shape, facts), []).append(module)
    for members in groups.values():
        columns = zip(*(module.name.split(".") for module in members), strict=True)
        yield ".".join(_span(list(column)) for column in columns), members[0]


def _span(names: list[str]) -> str:
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    numbers = sorted(int(name) for name in distinct)
    dense = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if dense else ",".join(map(str, numbers))


def _label(name: str, module: "ModulePlacement") -> str:
    held = tuple(nbytes for nbytes in module.nbytes_per_rank if nbytes)
    nbytes = f", {spread(held)} a rank" if held else ""
    exchanged = f"  [dim]{'; '.join(module.collectives)}[/]" if module.collectives else ""
    return f"[bold]{name}[/] {module.kind}: {module.placement}{nbytes}{exchanged}"
