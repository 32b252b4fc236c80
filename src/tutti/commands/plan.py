"""`tutti.plan`: the best plan for a script, or a described model, on a cluster, and why the others lost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tutti.commands.capture import SCRIPT_TIMEOUT_S, capture_script, process_restored
from tutti.commands.cluster_plans import best_of_pools, checked_plan_on, offers
from tutti.commands.inputs import cluster_for, named_model, write_spec
from tutti.commands.messages import messages, status
from tutti.commands.plan_options import PlanOptions, options_of
from tutti.commands.planned import Planned, curve_of, scenario, step_of, with_measured
from tutti.commands.planning import barred, costed, demanded, model_spec_of, search
from tutti.commands.values import (
    StrPath,
    path_of,
)
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.compression import Compression
from tutti.config.mesh_axes import parse_mesh
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.config.vocabulary import Relaxation, Unit
from tutti.errors import PlanError, ScriptError
from tutti.planner import NoiseScale, Objective, PlanRequest, PrecisionPolicy, stamp, what_if
from tutti.planner.shared_devices import as_shared, with_shared_devices


def plan(
    script: StrPath | None = None,
    arguments: Sequence[object] = (),
    *,
    model: StrPath | ModelSpec | None = None,
    cluster: StrPath | ClusterSpec | None = None,
    nproc: int | None = None,
    max_devices: int | None = None,
    mesh: str | Mapping[str, int] | None = None,
    global_batch_size: int | None = None,
    unit: Unit = "samples",
    precision: PrecisionPolicy | None = None,
    allow_microbatches: bool = False,
    data_parallel: bool = False,
    objective: Objective = "throughput",
    compress: str | Compression | None = None,
    relax: Relaxation = "exact",
    epochs: float | None = None,
    samples: float | None = None,
    memory: str | float | None = None,
    budget: float | None = None,
    deadline: str | float | None = None,
    critical_batch: float | None = None,
    least_samples: float | None = None,
    noise_from: StrPath | None = None,
    target_quality: str | None = None,
    samples_from: Sequence[StrPath] = (),
    what_if: Sequence[str] = (),
    scaling: bool = False,
    tries: int | None = None,
    try_steps: int = 8,
    seconds: float | None = None,
    share_device: bool = False,
    on: str | None = None,
    nnodes: int | None = None,
    hosts: str | None = None,
    settings: Mapping[str, Any] | None = None,
    links: str | None = None,
    prices: Mapping[str, float] | None = None,
    output: StrPath | None = None,
    timeout: float = SCRIPT_TIMEOUT_S,
    verbose: bool = False,
) -> Planned:
    """Choose how to train a script: mesh, microbatches, recompute and precision, by predicted time and memory.

    Args:
        script: the script, or a model by name, such as "llama3-70b"; it runs up to `job.prepare` in this process.
        arguments: the script's own arguments, or the named model's sizes, such as ["--layers", "80"].
        model: a ModelSpec, or a file of one, instead of a script.
        cluster: a ClusterSpec, a file of one, or one line such as "4x8:a100-80gb,nvlink3,8*ib-hdr"; this machine,
            measured, if None.
        nproc: use exactly this many ranks.
        max_devices: use at most this many ranks.
        mesh: exactly this mesh, such as {"replicate": 2, "split": 2} or "dp=2,tp=2".
        global_batch_size: without a script: the batch of a step.
        unit: without a script: what the batch counts.
        precision: "script" keeps the script's, "auto" chooses, or exactly this one.
        allow_microbatches: the number of microbatches may change even where that changes results.
        data_parallel: consider only data parallelism.
        objective: what the best plan minimises.
        compress: codec of gradient reductions, such as "top-k,density=0.01".
        relax: how far training may deviate in order to send less.
        epochs: length of training in epochs.
        samples: length of training in the unit of the batch.
        memory: limit on the memory of a rank, in bytes or such as "60gb".
        budget: limit on the cost of training.
        deadline: limit on the time of training, in seconds or such as "12h".
        critical_batch: for time-to-quality: the batch at which twice the least samples are needed.
        least_samples: for time-to-quality: samples needed with very small batches.
        noise_from: for time-to-quality: a run that measured both.
        target_quality: with `noise_from` or `samples_from`: the quality to reach, such as "test.accuracy=0.9".
        samples_from: for `relax`: runs whose samples to `target_quality` count.
        what_if: changes of the cluster to plan for too, such as "link=10gbit".
        scaling: also find the best plan's speed against the number of devices.
        tries: run this many of the best plans for a few steps, and choose by the measurements.
        try_steps: steps of each plan that is tried.
        seconds: time limit of the search.
        share_device: ranks may share GPUs: `nproc` or `mesh` may have more ranks than the cluster has devices.
        on: plan for what this cluster has: "slurm", "ssh" or "kubernetes"; `pools` of the result has each partition.
        nnodes: with `on`: plan for so many nodes.
        hosts: with on="ssh": the hosts, such as "node0:8,node1:8", or a file of them.
        settings: with `on`: of the cluster's job, such as {"partition": "gpu"}; tutti.toml has those of the project.
        links: with `on`: what joins devices and nodes, such as "nvlink3,8*ib-hdr".
        prices: with `on`: of a device and hour, by partition or kind of GPU.
        output: also write the plan to this file.
        timeout: seconds that the script may take to get as far as `job.prepare`.
        verbose: show on standard error what is being done, and what the script prints.

    Raises:
        TuttiError: what `tutti plan` would refuse, with the same sentence.

    Examples:
        >>> planned = plan("gpt2", cluster="1x8:a100-80gb,nvlink3", global_batch_size=64, data_parallel=True)
        >>> planned.plan.mesh
        {'replicate': 8}
    """
    options = options_of(locals())
    with messages(shown=verbose), process_restored(path_of("script", script)):
        return planned(options)


def planned(options: PlanOptions) -> Planned:
    """Search for the best plan, and for everything else that is asked for; write the plan if a file is named."""
    options = with_file(options)
    options = checked_plan_on(options)
    found = None if options.on is None else offers(options)
    model, request = asked(options)
    if found is None:
        result = _planned_on(options, model, request, cluster_for(options.cluster))
    else:
        result = best_of_pools(found, options.nnodes, partial(_planned_on, options, model, request))
    if options.output is not None:
        write_spec(replace(result.plan, made_for=stamp(model)), options.output)
    return result


def _planned_on(options: PlanOptions, model: ModelSpec, request: PlanRequest, machines: ClusterSpec) -> Planned:
    """Search for the best plan for machines, and for everything else that is asked for."""
    cluster = machines
    if options.scaling and machines.fixed_ranks is not None:
        raise PlanError("--scaling varies the number of ranks, and the nodes of the job fix it; leave it out")
    if options.share_device:
        cluster = with_shared_devices(machines, request)
    changed = [what_if(cluster, text) for text in options.what_if]  # before the search, so that errors come at once
    with status("searching plans"):
        choice = search(model, cluster, request, options.seconds)
    if cluster is not machines:
        choice = as_shared(choice, machines)
    trials = curve = None
    if options.tries is not None:
        from tutti.commands.plan_trials import try_plans

        trials = try_plans(model, cluster, choice, options)
    if options.scaling:
        with status("searching plans for fewer devices"):
            curve = with_measured(curve_of(model, cluster, choice.request, options.seconds), trials)
    scenarios = []
    for other, words in changed:
        with status(f"searching plans for {words}"):
            scenarios.append(scenario(model, other, words, choice.request, options.seconds))
    return Planned(
        choice=choice,
        timeline=step_of(model, cluster, choice),
        scaling=curve,
        trials=trials,
        scenarios=tuple(scenarios),
    )


def with_file(options: PlanOptions) -> PlanOptions:
    """Treat a ModelSpec file in the place of a script as if it were given as `model`."""
    named = [Path(word) for word in options.target]
    if options.model is None and len(named) == 1 and named[0].suffix == ".json":
        return replace(options, model=named[0], target=())
    return options


def asked(options: PlanOptions) -> tuple[ModelSpec, "PlanRequest"]:
    """Return the model and the request of the command line; a script is run up to its `prepare`.

    Raises:
        ScriptError: neither a script nor a model is named, or both are.
    """
    if bool(options.model) == bool(options.target):
        raise ScriptError("name one thing to plan for: a script (tutti plan train.py), or a model with --model FILE")
    model = _named(options)
    if model is not None:
        free = replace(options, precision=options.precision or "auto")  # a ModelSpec has no precision to keep
        return costed(model), _request(free, Plan(batch=_batch(options)), model)
    path = Path(options.target[0])
    with status("tracing the model on shapes"):
        captured = capture_script(path, options.target[1:], timeout_s=options.timeout_s)
        model = costed(model_spec_of(captured, name=path.stem))
    request = _request(options, captured.plan, model)
    return model, replace(request, demanded=demanded(captured), samples={**request.samples, **barred(captured)})


def _named(options: PlanOptions) -> ModelSpec | None:
    """Return the model that is named or described; None if it is a script's."""
    if options.model is None:
        return named_model(options.target)
    return options.model if isinstance(options.model, ModelSpec) else serialization.load(ModelSpec, options.model)


def _request(options: PlanOptions, script: Plan, model: ModelSpec) -> "PlanRequest":
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
