"""`tutti plan`: the best plan for a script, or a described model, on a cluster, and why the others lost."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from tutti.cli.options import (
    SCRIPT_CONTEXT,
    ScriptCommand,
    capture_script,
    cluster_for,
    compress_option,
    console,
    emit,
    json_option,
    relax_option,
    run_command,
)
from tutti.cli.plan_options import PlanOptions, searching, showing
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.config.vocabulary import Precision, Unit
from tutti.errors import PlanError, ScriptError

if TYPE_CHECKING:
    from rich.tree import Tree

    from tutti.cli.prediction_view import Planned
    from tutti.config.prediction import Explanation, ModulePlacement
    from tutti.planner import Choice, PlanRequest
    from tutti.trainer.capture import CapturedScript


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
@json_option
@click.argument(
    "target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]... | NAME [SIZES]... | FILE.json"
)
def command(**given: Any) -> None:
    """Choose how to train SCRIPT: mesh, microbatches, recompute and precision, by predicted time and memory.

    Instead of a script, name an architecture with its sizes: `tutti plan llama --layers 80 --global-batch-size 512`.
    With --cluster no hardware is needed. Options that tutti does not know, and all after --, are the script's.
    """
    options = _with_file(PlanOptions(**given))
    from tutti.cli.named_inputs import named_model
    from tutti.cli.plan_view import document, show_choice, show_difference

    if options.diff is not None:
        show_difference(*options.diff, as_json=options.as_json)
        return
    described = options.model is not None or named_model(options.target) is not None
    given_mesh = options.mesh is not None and options.relax == "exact"
    stated = (given_mesh and not described) or (options.explain and (options.nproc is not None or options.as_json))
    if options.plan is not None or (stated and not described):
        explain_script(options)
        return
    from tutti.cli.planning import search, write_spec
    from tutti.cli.prediction_view import chosen_plan
    from tutti.planner import stamp, what_if

    if options.explain and options.mesh is None and options.nproc is None:
        options = replace(options, scaling=True)  # it is part of the explanation
    model, request = asked(options)
    cluster = cluster_for(options.cluster)
    changed = [what_if(cluster, text) for text in options.what_if]  # before the search, so that errors come at once
    with console.status("searching plans"):
        choice = search(model, cluster, request, options.seconds)
    planned = _planned(model, cluster, choice, options, changed)
    if options.output is not None:
        write_spec(replace(chosen_plan(choice, planned.trials), made_for=stamp(model)), options.output)
    if options.as_json:
        emit(document(planned))
    else:
        show_choice(planned, options)
        if options.explain and not described:
            show_layout(options, chosen_plan(choice, planned.trials))


def _with_file(options: PlanOptions) -> PlanOptions:
    """Treat a ModelSpec file in the place of a script as if it were given with --model."""
    named = [Path(word) for word in options.target]
    if options.model is None and len(named) == 1 and named[0].suffix == ".json":
        return replace(options, model=named[0], target=())
    return options


def _planned(
    model: ModelSpec,
    cluster: ClusterSpec,
    choice: "Choice",
    options: PlanOptions,
    changed: list[tuple[ClusterSpec, str]],
) -> "Planned":
    """Return the choice with everything else that the command line asks for, and write the HTML page.

    Args:
        model: what is trained.
        cluster: the machines.
        choice: the result of the search.
        options: the command line.
        changed: other clusters to plan for (--what-if), each with a description.
    """
    from tutti.cli import prediction_view

    trials = curve = None
    if options.tries is not None:
        from tutti.cli.plan_trials import try_plans

        trials = try_plans(model, cluster, choice, options)
    if options.scaling:
        with console.status("searching plans for fewer devices"):
            curve = prediction_view.with_measured(
                prediction_view.curve_of(model, cluster, choice.request, options.seconds), trials
            )
    scenarios = []
    for other, words in changed:
        with console.status(f"searching plans for {words}"):
            scenarios.append(prediction_view.scenario(model, other, words, choice.request, options.seconds))
    planned = prediction_view.Planned(
        choice=choice,
        timeline=prediction_view.step_of(model, cluster, choice),
        scaling=curve,
        trials=trials,
        scenarios=tuple(scenarios),
    )
    if options.html is not None:
        run = run_command(options.output, options.target) if options.output is not None else ""
        prediction_view.write_page(prediction_view.page_of_choice(planned, options.top, run), options.html)
        console.print(f"page written to {options.html}", soft_wrap=True, markup=False)
    return planned


def asked(options: PlanOptions) -> tuple[ModelSpec, "PlanRequest"]:
    """Return the model and the request of the command line; a script is run up to its `prepare`.

    Raises:
        ScriptError: neither a script nor a model is named, or both are.
    """
    from tutti.cli.named_inputs import named_model
    from tutti.cli.planning import barred, costed, demanded, model_spec_of

    if bool(options.model) == bool(options.target):
        raise ScriptError("name one thing to plan for: a script (tutti plan train.py), or a model with --model FILE")
    model = serialization.load(ModelSpec, options.model) if options.model is not None else named_model(options.target)
    if model is not None:
        free = replace(options, precision=options.precision or "auto")  # a ModelSpec has no precision to keep
        return costed(model), _request(free, Plan(batch=_batch(options)), model)
    path = Path(options.target[0])
    with console.status("tracing the model on shapes"):
        captured: CapturedScript = capture_script(path, options.target[1:])
        model = costed(model_spec_of(captured, name=path.stem))
    request = _request(options, captured.plan, model)
    return model, replace(request, demanded=demanded(captured), samples={**request.samples, **barred(captured)})


def _request(options: PlanOptions, script: Plan, model: ModelSpec) -> "PlanRequest":
    from tutti.config.mesh_axes import parse_mesh
    from tutti.planner import PlanRequest

    return PlanRequest(
        script=script.compressed(options.compress),
        max_devices=options.max_devices,
        degree=options.nproc,
        precision=options.precision or "script",
        allow_microbatches=options.allow_microbatches,
        scope="data" if options.data_parallel else "all",
        mesh=parse_mesh(options.mesh) if options.mesh is not None else None,
        objective=options.objective,
        train_samples=_train_samples(options, script, model),
        noise=_noise(options, script.batch.unit),
        memory_nbytes=options.memory,
        budget=options.budget,
        deadline_s=options.deadline,
        relax=options.relax,
        samples=_samples_of_strategies(options),
    )


def _train_samples(options: PlanOptions, script: Plan, model: ModelSpec) -> float | None:
    if options.epochs is None:
        return options.samples
    if options.samples is not None:
        raise PlanError("--epochs and --samples both set the length of training; give only one")
    if model.dataset_samples is None:
        raise PlanError(f"--epochs {options.epochs:g}: the size of the data set is unknown; give --samples instead")
    tokens = model.tokens_per_sample if script.batch.unit == "tokens" else 1
    return options.epochs * model.dataset_samples * tokens


def _noise(options: PlanOptions, unit: Unit) -> Any:
    from tutti.planner import NoiseScale

    if options.noise_from is not None:
        return _measured_noise(options, options.noise_from, unit)
    if options.target_quality is not None and not options.samples_from:
        raise PlanError("--target-quality needs the run that reached the quality; name it with --noise-from RUN")
    if options.critical_batch is None and options.least_samples is None:
        return None
    if options.critical_batch is None or options.least_samples is None:
        raise PlanError("--critical-batch and --least-samples belong together; give both")
    return NoiseScale(critical_batch=options.critical_batch, least_samples=options.least_samples)


def _measured_noise(options: PlanOptions, run: Path, unit: Unit) -> Any:
    from tutti.planner import NoiseScale
    from tutti.reporting.quality_metrics import parse_target, samples_at_small_batches
    from tutti.reporting.run_records import read_records

    if options.critical_batch is not None or options.least_samples is not None:
        raise PlanError(
            "--noise-from already sets the critical batch and the least samples; leave --critical-batch and "
            "--least-samples out"
        )
    target = None if options.target_quality is None else parse_target(options.target_quality)
    records = read_records(run)
    counted = records.header.recipe.unit
    if counted != unit:
        raise PlanError(
            f"--noise-from {run}: its batch counts {counted}, but the plan's counts {unit}; name another run"
        )
    critical, least = samples_at_small_batches(records, target)
    return NoiseScale(critical_batch=critical, least_samples=least, evidence="measured")


def _samples_of_strategies(options: PlanOptions) -> dict[str, float | None]:
    """Return the samples that the runs of --samples-from needed to reach the quality, by strategy of communication."""
    if not options.samples_from:
        return {}
    from tutti.reporting.quality_metrics import parse_target, samples_by_strategy
    from tutti.reporting.run_records import read_records

    if options.relax == "exact":
        raise PlanError(
            "--samples-from compares strategies that send less, and --relax exact allows none; add --relax reduced or "
            "relaxed, or leave --samples-from out"
        )
    if options.target_quality is None:
        raise PlanError("--samples-from compares runs at a quality; add --target-quality, such as test.accuracy=0.9")
    return samples_by_strategy(
        [read_records(run) for run in options.samples_from], parse_target(options.target_quality)
    )


def _batch(options: PlanOptions) -> BatchPlan:
    if options.global_batch_size is None:
        raise PlanError("a ModelSpec has no batch; add --global-batch-size N (and --unit tokens if it counts tokens)")
    return BatchPlan(global_batch_size=options.global_batch_size, unit=options.unit)


def explain_script(options: "PlanOptions") -> None:
    """Explain the plan that the command line gives, or the best one, for its script."""
    from tutti.cli.describe import describe_captured
    from tutti.cli.planning import costed, warn_if_changed, write_spec

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
    with console.status("reading the model"):
        captured = capture_script(path, options.target[1:])
    captured = replace(captured, plan=captured.plan.compressed(options.compress))
    with suppress(Exception):  # an error is told where samples are needed
        captured.samples(2)
    plan = _plan(options, captured, path.stem).compressed(options.compress)
    model = describe_captured(captured, name=path.stem)
    warn_if_changed(plan, model)
    explanation = _explain(captured, plan, _tensors(model))
    if options.html is not None or (options.cluster is not None and not options.as_json):
        costed(model)  # a layout needs no costs, but the timeline of a step does
    if options.output is not None:
        write_spec(plan, options.output)
    if options.html is not None:
        from tutti.cli.predict import write_plan_page

        write_plan_page(model, cluster_for(options.cluster), plan, options.html)
    if options.as_json:
        emit(explanation)
        return
    _show(explanation)
    if options.cluster is not None:  # without it, this machine would have to be measured first
        _show_step(model, cluster_for(options.cluster), plan)
    if options.output is not None:
        words = f"plan written to {options.output}: {run_command(options.output, options.target)}"
        console.print(words, markup=False, soft_wrap=True)


def show_layout(options: "PlanOptions", plan: "Plan") -> None:
    """Show where the chosen plan places the modules of the command line's script."""
    from tutti.cli.describe import describe_captured

    path = Path(options.target[0])
    with console.status("reading the model"):
        captured = capture_script(path, options.target[1:])
    _show(_explain(captured, plan, _tensors(describe_captured(captured, name=path.stem))))


def _plan(options: "PlanOptions", captured: "CapturedScript", name: str) -> "Plan":
    from tutti.cli.planning import plan_for
    from tutti.config.mesh_axes import parse_mesh
    from tutti.parallel.annotated_plan import with_annotations

    if options.plan is not None:
        return with_annotations(serialization.load(Plan, options.plan), captured.model, stated_mesh=True)
    if options.mesh is not None:
        plan = captured.plan.on(parse_mesh(options.mesh))
        return with_annotations(plan, captured.model, stated_mesh=True)
    if options.nproc is not None:
        plan = replace(captured.plan, mesh={"replicate": options.nproc})
        return with_annotations(plan, captured.model, stated_mesh=False)
    cluster = cluster_for(options.cluster)
    limit = options.max_devices
    return plan_for(captured, cluster, name=name, max_devices=limit, scope="all", relax=options.relax).best


def _tensors(model: object) -> float:
    """Return how many tensors of a parameter's size the optimizer keeps for each parameter, on average."""

    assert isinstance(model, ModelSpec)
    gradients = sum(module.gradient_nbytes for module in model.modules)
    return sum(module.optimizer_nbytes for module in model.modules) / gradients if gradients else 0.0


def _explain(captured: "CapturedScript", plan: "Plan", tensors: float) -> "Explanation":
    from tutti.cli.describe import samples_of
    from tutti.parallel.preview import explain_layout

    def sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return samples_of(captured, 2, "the script")[:2]

    return explain_layout(captured.model, plan, sample=sample, optimizer_tensors=tensors)


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
    out.print(f"[bold]Layout[/] over {mesh}; ranks shown: {ranks}", soft_wrap=True)
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
    from tutti.cli.prediction_view import ROWS, standard_output
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
