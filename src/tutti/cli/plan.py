"""`tutti plan`: the best plan for a script, or a described model, on a cluster, and why the others lost."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from tutti.cli.options import (
    SCRIPT_CONTEXT,
    ScriptCommand,
    compress_option,
    emit,
    json_option,
    relax_option,
    run_command,
    share_option,
    timeout_option,
)
from tutti.cli.plan_options import on_cluster, searching, showing
from tutti.commands.messages import console
from tutti.commands.plan_options import PlanOptions
from tutti.config.vocabulary import Precision, Unit

if TYPE_CHECKING:
    from rich.tree import Tree

    from tutti.config.cluster import ClusterSpec
    from tutti.config.model import ModelSpec
    from tutti.config.plan import Plan
    from tutti.config.prediction import Explanation, ModulePlacement


@click.command(cls=ScriptCommand, context_settings=SCRIPT_CONTEXT)
@click.option("--cluster", type=click.Path(path_type=Path), help="The cluster; this machine, measured, if not given.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Plan for a ModelSpec file (tutti describe --output) instead of a script.",
)
@click.option("--global-batch-size", type=click.IntRange(1), help="Without a script: the batch of a step.")
@click.option(
    "--unit", type=click.Choice(get_args(Unit)), default="samples", help="Without a script: what the batch counts."
)
@click.option("--max-devices", type=click.IntRange(1), help="Use at most this many ranks.")
@click.option("--nproc", type=click.IntRange(1), help="Use exactly this many ranks.")
@click.option(
    "--precision",
    type=click.Choice(["script", "auto", *get_args(Precision)]),
    help="script: keep the script's (the default with a script); auto: choose, which may change the numbers (the "
    "default without a script); or exactly this one.",
)
@click.option(
    "--allow-microbatches", is_flag=True, help="Let the number of microbatches change even where that changes results."
)
@searching
@on_cluster
@showing
@click.option(
    "--mesh",
    metavar="AXIS=N,...",
    help="Exactly this mesh, such as replicate=2,split=2; ranks along the last axis are nearest to each other.",
)
@compress_option
@relax_option
@click.option("--plan", type=click.Path(path_type=Path), help="Explain this plan for SCRIPT.")
@click.option(
    "--explain",
    is_flag=True,
    help="Explain the plan: speed against devices; for a script also where every module is placed, its bytes per "
    "rank and its collectives.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan to this file.")
@share_option
@timeout_option
@json_option
@click.argument(
    "target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]... | NAME [SIZES]... | FILE.json"
)
def command(**given: Any) -> None:
    """Choose how to train SCRIPT: mesh, microbatches, recompute and precision, by predicted time and memory.

    Instead of a script, name an architecture with its sizes: `tutti plan llama --layers 80 --global-batch-size 512`.
    With --cluster no hardware is needed. With --on a cluster is asked what it has. Options that tutti does not know,
    and all after --, are the script's.
    """
    from tutti.cli.plan_view import show_difference
    from tutti.commands.cluster_plans import checked_plan_on
    from tutti.commands.inputs import named_model
    from tutti.commands.plan import with_file

    options = with_file(PlanOptions(**given))
    if options.diff is not None:
        show_difference(*options.diff, as_json=options.as_json)
        return
    described = options.model is not None or named_model(options.target) is not None
    given_mesh = options.mesh is not None and options.relax == "exact"
    stated = (given_mesh and not described) or (options.explain and (options.nproc is not None or options.as_json))
    options = checked_plan_on(options)
    stated = stated and options.on is None
    if options.plan is not None or (stated and not described):
        _show_explained(options)
        return
    if options.explain and options.mesh is None and options.nproc is None:
        options = replace(options, scaling=True)  # it is part of the explanation
    _show_planned(options, described=described)


def _show_planned(options: PlanOptions, *, described: bool) -> None:
    """Search for the best plan, and show it or print it as JSON."""
    from tutti.cli.plan_view import document, show_choice
    from tutti.cli.prediction_view import page_of_choice, write_page
    from tutti.commands.explain import layout_of
    from tutti.commands.plan import planned

    result = planned(options)
    if options.html is not None:
        run = run_command(options.output, options.target) if options.output is not None else ""
        write_page(page_of_choice(result, options.top, run), options.html)
        console.print(f"page written to {options.html}", soft_wrap=True, markup=False)
    if options.as_json:
        emit(document(result))
        return
    if result.pools:
        from tutti.cli.pool_view import show_pools

        show_pools(result, options)
    show_choice(result, options)
    if options.explain and not described:
        _show(layout_of(options, result.plan))


def _show_explained(options: PlanOptions) -> None:
    """Explain the plan that the command line gives, or the best one, for its script."""
    from tutti.cli.predict import write_plan_page
    from tutti.commands.explain import explained
    from tutti.commands.inputs import cluster_for

    result = explained(options)
    if options.html is not None:
        write_plan_page(result.model, cluster_for(options.cluster), result.plan, options.html)
    if options.as_json:
        emit(result.explanation)
        return
    _show(result.explanation)
    if options.cluster is not None:  # without it, this machine would have to be measured first
        _show_step(result.model, cluster_for(options.cluster), result.plan)
    if options.output is not None:
        words = f"plan written to {options.output}: {run_command(options.output, options.target)}"
        console.print(words, markup=False, soft_wrap=True)


def _show(explanation: "Explanation") -> None:
    from tutti.cli.describe import scaled
    from tutti.terminal import results_console

    out = results_console()
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in explanation.mesh.items())
    shown = len(explanation.ranks)
    world = 1
    for degree in explanation.mesh.values():
        world *= degree
    ranks = f"all {world}" if shown == world else f"{shown} of {world}, evenly spread"
    out.print(f"[bold]Layout[/] over {mesh}; ranks shown: {ranks}", soft_wrap=True)
    if explanation.engine:
        out.print(f"sharding engine: {explanation.engine}", markup=False, soft_wrap=True)
    out.print(tree(explanation))
    for words, values in (
        ("parameters", explanation.parameter_nbytes_per_rank),
        ("gradients", explanation.gradient_nbytes_per_rank),
        ("parameters, gradients and optimizer state", explanation.state_nbytes_per_rank),
    ):
        out.print(f"{words} per rank: {spread(values)}", soft_wrap=True)
    out.print(
        f"the whole model: {scaled(explanation.parameter_nbytes, 'B')} of parameters; {explanation.evidence}: "
        "nothing was run",
        style="dim",
        soft_wrap=True,
    )


def _show_step(model: "ModelSpec", cluster: "ClusterSpec", plan: "Plan") -> None:
    from tutti.cli.plan_view import show_timeline
    from tutti.cli.prediction_view import standard_output
    from tutti.commands.planned import ROWS
    from tutti.cost_model.rank_tracks import timeline

    show_timeline(standard_output(), timeline(model, cluster, plan, most_tracks=ROWS))


def spread(values: tuple[int, ...]) -> str:
    """Format bytes of several ranks: one value if all are equal, else "least to most"."""
    from tutti.cli.describe import scaled

    least, most = scaled(min(values), "B") or "0 B", scaled(max(values), "B") or "0 B"
    return least if least == most else f"{least} to {most}"


def tree(explanation: "Explanation") -> "Tree":
    """Return the modules as a tree by dotted name; equal numbered siblings are shown once."""
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
    """Yield (name, module), with numbered siblings that differ in nothing else merged: layers.0-3.mlp."""
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
    nbytes = f", {spread(held)} per rank" if held else ""
    exchanged = f"  [dim]{'; '.join(module.collectives)}[/]" if module.collectives else ""
    return f"[bold]{name}[/] {module.kind}: {module.placement}{nbytes}{exchanged}"
