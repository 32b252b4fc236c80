"""Prepare: turns the user's model, optimizer and data into a Run.

`prepare_run` reads top to bottom: the model (`build_model`), the loop (`build_loop`), the output (`open_output`).
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tutti.checkpoint import latest_checkpoint, load_checkpoint, load_weights
from tutti.comm.shared_memory import make_shared_memory_communicator
from tutti.comm.traffic import CommChannel
from tutti.comm.world import World, deprioritise_gloo_threads
from tutti.config import serialization
from tutti.config.compression import format_compression
from tutti.config.mesh_axes import format_mesh
from tutti.config.model_fingerprint import describe_module, differences
from tutti.config.plan import Plan
from tutti.config.refusals import check_plan
from tutti.config.run_folder import Recipe, RunFolder
from tutti.data.batches import to_device
from tutti.data.fingerprint import describe_data
from tutti.data.loading_cost import measure_loading
from tutti.data.samples import DataSource
from tutti.data.share_loader import ShareLoader, first_samples
from tutti.errors import PlanError, RankMismatchError, ScriptError
from tutti.local_sgd.consistency import Consistency
from tutti.local_sgd.modes import make_consistency
from tutti.optim.learning_rate import initial_learning_rate
from tutti.parallel.annotated_plan import with_annotations
from tutti.parallel.compressed.compressor import make_compressor
from tutti.parallel.compressed.factor_buckets import make_factored
from tutti.parallel.context import Sequences, sequences_of
from tutti.parallel.data.batchnorm import BatchScope, batch_norms
from tutti.parallel.data.bucket_size_tuner import BucketSizeTuner
from tutti.parallel.data.replicate import Replica
from tutti.parallel.expert.expert_parallel import mixtures_of
from tutti.parallel.layout import GRADIENT_AXES, Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.parallelize import parallelize, rebind
from tutti.parallel.pipeline.pipeline_runner import Pipeline, make_pipeline
from tutti.parallel.pipeline.stage_building import StagePartition, cut_stages
from tutti.parallel.sharded_norms import bind_norms
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.parallel.spatial.apply_spatial_parallel import feed_parts
from tutti.trainer.capture import CapturedScript, script_growth_nbytes
from tutti.trainer.deferred_init import Tape, materialize
from tutti.trainer.job_context import JobContext
from tutti.trainer.losses import default_loss
from tutti.trainer.metrics import MetricsLog, ProgressDisplay
from tutti.trainer.noise_meter import NoiseMeter, unsupported_reason
from tutti.trainer.observer import Observer, load_observer
from tutti.trainer.precision import loss_scaler, set_matmul_precision
from tutti.trainer.run_header import make_header, open_folder, this_rank
from tutti.trainer.run_state import Run, Unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareArguments:
    """The arguments of Job.prepare, with defaults filled in. `tape`: how job.build made the model without memory."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    source: DataSource
    loss_fn: Callable[[Any, Any], Any] | None
    unpack: Unpack
    scheduler: Any
    scheduler_clock: Literal["step", "epoch"]
    weights: Path | None = None
    tape: Tape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """What is trained: this rank's part of the model, the parallel layout, and how batches enter the model.

    `plan`: with the script's annotations. `stages`: None without pipeline parallelism. `mixtures`: names of the whole
    model's mixtures of experts.
    """

    plan: Plan
    observer: Observer
    layout: Layout
    scope: BatchScope
    stages: StagePartition | None
    shards: Shards
    pipeline: Pipeline | None
    sequences: Sequences
    source: DataSource
    unpack: Unpack
    mixtures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """What the step loop uses: gradient reduction, data loader, loss scaler, consistency mode and measurements."""

    replica: Replica
    initial_rates: tuple[float, ...]
    loader: ShareLoader
    scaler: torch.amp.GradScaler
    noise: NoiseMeter
    consistency: Consistency
    sizes: BucketSizeTuner


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput:
    """What the run writes: its folder, metrics and progress display."""

    folder: RunFolder
    log: MetricsLog
    screen: ProgressDisplay


def prepare_run(context: JobContext, arguments: PrepareArguments) -> Run:
    """Build the Run: the model, the run folder, the loop; then load a checkpoint and write the header. Collective."""
    trained = build_model(context, arguments)
    folder = open_folder(context.launch_options, context.world, context.folder)
    loop = build_loop(context, arguments, trained)
    output = open_output(context, folder)
    run = Run(
        settings=context.settings,
        plan=trained.plan,
        world=context.world,
        layout=trained.layout,
        model=arguments.model,
        replica=loop.replica,
        pipeline=trained.pipeline,
        optimizers=arguments.optimizers,
        sequences=trained.sequences,
        loss_fn=trained.sequences.loss_fn,
        unpack=trained.unpack,
        scheduler=arguments.scheduler,
        scheduler_clock=arguments.scheduler_clock,
        initial_rates=loop.initial_rates,
        loader=loop.loader,
        scaler=loop.scaler,
        scope=trained.scope,
        clock=context.clock,
        log=output.log,
        screen=output.screen,
        folder=output.folder,
        observer=trained.observer,
        noise=loop.noise,
        consistency=loop.consistency,
        sizes=loop.sizes,
        mixtures=trained.mixtures,
    )
    resumed_from = _resume(run, context.resume or context.launch_options.resume, arguments.weights)
    _write_header(run, context, resumed_from)
    _start_row(run, context)
    deprioritise_gloo_threads()  # after the last process group has been created
    run.observer.prepared(run)
    return run


def build_model(context: JobContext, arguments: PrepareArguments) -> TrainedModel:
    """Make the model equal on all ranks and divide it as the plan says. Collective."""
    world, model = context.world, arguments.model
    plan = _annotated(context, model)
    set_matmul_precision(plan.precision, world.device)
    observer = load_observer(context.launch_options.observer)
    _synchronize_model(arguments, world, context.screen, observer, independent=plan.sync.mode == "ensemble")
    layout = Layout.of(model, Mesh(plan.mesh, world.rank), arguments.optimizers)
    layout.traffic.clock = context.clock
    scope = _batch_scope(model, layout)
    originals, mixtures = dict(model.named_parameters(remove_duplicate=False)), mixtures_of(model)
    stages = cut_stages(model, plan, layout, partial(_sample_inputs, arguments, context, plan, observer))
    shards = _divide_model(arguments, plan, layout, scope, stages, world.device)
    _rebind_optimizers(arguments, originals, layout, shards, world)
    source, unpack = feed_parts(model, arguments.source, arguments.unpack)
    pipeline = make_pipeline(stages, plan, layout, world.device)
    return TrainedModel(
        plan=plan,
        observer=observer,
        layout=layout,
        scope=scope,
        stages=stages,
        shards=shards,
        pipeline=pipeline,
        sequences=_sequences(arguments, plan, layout, pipeline),
        source=source,
        unpack=unpack,
        mixtures=mixtures,
    )


def build_loop(context: JobContext, arguments: PrepareArguments, trained: TrainedModel) -> TrainingLoop:
    """Set up gradient reduction, the data loader and the consistency mode. Collective."""
    plan, layout, device = trained.plan, trained.layout, context.world.device
    return TrainingLoop(
        replica=_replica(context, arguments, plan, layout, trained.shards, trained.stages),
        initial_rates=tuple(initial_learning_rate(optimizer) for optimizer in arguments.optimizers),
        loader=ShareLoader(trained.source, plan, context.settings.seed, layout.mesh.data_index),
        scaler=loss_scaler(plan.precision, device),
        noise=_noise_meter(context, plan),
        consistency=make_consistency(plan.sync, layout, context.settings.seed),
        sizes=BucketSizeTuner(plan),
    )


def open_output(context: JobContext, folder: RunFolder) -> RunOutput:
    """Open the metrics files in the run folder."""
    return RunOutput(folder=folder, log=MetricsLog(folder, context.world.rank), screen=context.screen)


def _annotated(context: JobContext, model: nn.Module) -> Plan:
    """The plan with what the script's marks say; refused where it cannot run, and said where it was another model's."""
    plan = with_annotations(context.plan, model, stated_mesh=context.stated_mesh)
    check_plan(plan)
    context.screen.say(model_mismatch_warning(plan, model))
    return plan


def _replica(
    context: JobContext,
    arguments: PrepareArguments,
    plan: Plan,
    layout: Layout,
    shards: Shards,
    stages: StagePartition | None,
) -> Replica:
    """This rank's replica, and how its gradients are compressed. Collective."""
    seed, clip_norm = context.settings.seed, context.settings.clip_norm
    compressor = make_compressor(
        plan, layout, context.world, arguments.model, arguments.optimizers, seed, clip_norm, shards
    )
    late = stages.tied_here(arguments.model) if stages else ()
    return Replica(
        arguments.model, layout, plan, shards, late, compressor, make_factored(plan, layout, arguments.model)
    )


def _divide_model(
    arguments: PrepareArguments,
    plan: Plan,
    layout: Layout,
    scope: BatchScope,
    stages: StagePartition | None,
    device: torch.device,
) -> Shards:
    """Parallelize; a model without memory then gets this rank's part of it."""
    with arguments.tape or nullcontext():
        shards = parallelize(arguments.model, plan, layout, scope, stages)
    if arguments.tape is not None:
        materialize(arguments.model, arguments.tape, device, shards)
    return shards


def _rebind_optimizers(
    arguments: PrepareArguments, originals: dict[str, nn.Parameter], layout: Layout, shards: Shards, world: World
) -> None:
    """Optimizers get the parameters as they are now, and ranks agree who counts which part. Collective."""
    rebind(arguments.optimizers, originals, arguments.model, layout)
    shards.bind(arguments.optimizers)
    layout.assign_owners(arguments.model, world, arguments.optimizers)
    bind_norms(arguments.optimizers, arguments.model, layout, world)


def _sample_inputs(arguments: PrepareArguments, context: JobContext, plan: Plan, observer: Observer) -> tuple[Any, Any]:
    """The model's arguments for the first samples of the data, on the device: as many as one rank computes at once, at
    most 4."""
    count = plan.batch.global_batch_size // (plan.batch.num_microbatches * plan.data_parallel_degree)
    batch = first_samples(arguments.source, context.settings.seed, max(1, min(count, 4)))
    return arguments.unpack(observer.sampled(to_device(batch, context.world.device)))[:2]


def build_optimizers(model: nn.Module, optimizer: Any) -> tuple[Optimizer, ...]:
    """The optimizers, made from the model's parameters where callables were given.

    Raises ScriptError when an optimizer holds a parameter that is not the model's.
    """
    arguments = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    made = tuple(one if isinstance(one, Optimizer) else one(model.parameters()) for one in arguments)
    own = {id(p) for p in model.parameters()}
    for one in made:
        if not isinstance(one, Optimizer):
            raise ScriptError(
                f"prepare got {type(one).__name__} as optimizer; give a torch optimizer, or a callable that takes "
                "parameters and returns one"
            )
        if any(id(p) not in own for group in one.param_groups for p in group["params"]):
            raise ScriptError(
                f"{type(one).__name__} holds a parameter that is not in the model; make it from model.parameters() of "
                "the model that prepare gets (compose several models into one module)"
            )
    return made


def _synchronize_model(
    arguments: PrepareArguments, world: World, screen: ProgressDisplay, observer: Observer, *, independent: bool
) -> None:
    """The same model on every rank, on its device; one without memory will get the same values anyway. `independent`:
    values are each rank's own.
    """
    model = arguments.model
    if arguments.tape is not None:
        check_same_model(model, world)
        arguments.tape.check_same(world.gather(arguments.tape.digest))
        return
    model.to(world.device)
    observer.built(model, world)
    check_same_model(model, world)
    different = None if independent else differing_values(model, world)
    if different is not None:
        rank, name = different
        screen.say(
            f"parameters differ between ranks before the first step: {name!r} on rank {rank} is not rank 0's. Rank 0's "
            "values are used everywhere; seed the model's initialisation the same on every rank (Job(seed=...) does, "
            "when the model is built after it)"
        )
        broadcast_from_rank_0(model, world)


def _batch_scope(model: nn.Module, layout: Layout) -> BatchScope:
    """A group of their own for batch statistics, so that their exchanges never mix with gradients'."""
    mesh = layout.mesh
    degree = mesh.degree(*GRADIENT_AXES)
    group = mesh.new_group(*GRADIENT_AXES) if degree > 1 and batch_norms(model) else None
    communicator = None if group is None else make_shared_memory_communicator(group)
    return BatchScope(
        world_size=degree, group=group, channel=layout.channel("statistics", *GRADIENT_AXES), communicator=communicator
    )


def _noise_meter(context: JobContext, plan: Plan) -> NoiseMeter:
    """What measures the gradient noise scale, if the Job asks for it and the plan allows it."""
    rule = context.settings.lr_rule
    adascale = rule is not None and rule.scale == "adascale"
    every = context.settings.noise_every or (1 if adascale else None)
    reason = None if every is None else unsupported_reason(plan)
    if reason is not None and adascale:
        raise PlanError(f"LRRule.scale = 'adascale' needs the gradient noise scale: {reason}")
    if reason is not None:
        context.screen.say(f"the gradient noise scale is not measured: {reason}")
    return NoiseMeter(None if reason else every, context.world.device)


def _sequences(arguments: PrepareArguments, plan: Plan, layout: Layout, pipeline: Pipeline | None) -> Sequences:
    """What is done with sequences, by the context axis. Collective."""
    channel = _attention_channel(plan, layout)
    staged = None if pipeline is None else partial(pipeline.forward, arguments.model)
    return sequences_of(arguments.model, plan, layout.mesh, arguments.unpack, arguments.loss_fn, channel, staged)


def _attention_channel(plan: Plan, layout: Layout) -> CommChannel:
    return layout.channel("keys" if plan.context == "ring" else "heads", "context")


def _resume(run: Run, path: Path | None, weights: Path | None) -> Path | None:
    """Go on from a checkpoint, which is returned; without one begin with the `weights`, if there are any."""
    if path is None:
        if weights is not None:
            load_weights(run, weights)
        run.consistency.begin(run)
        return None
    checkpoint = latest_checkpoint(path) if run.world.is_main else None
    checkpoint = run.world.broadcast(checkpoint) or path
    load_checkpoint(run, checkpoint)
    run.screen.say(f"resumed from {checkpoint} at step {run.progress.step}")
    return checkpoint


def _write_header(run: Run, context: JobContext, resumed: Path | None) -> None:
    ranks = run.world.gather(this_rank(run.world, run.replica.transports))
    if not run.world.is_main:
        return
    data = describe_data(run.loader.source.dataset, run.settings.seed, "train")
    header = make_header(
        run.world,
        ranks,
        name=context.name,
        model=run.model,
        parameters=run.layout.parameters,
        mesh=run.plan.mesh,
        recipe=_recipe(run),
        data=data,
        resumed_from=resumed,
        resumed_at_step=run.progress.step,
        facts=context.facts,
    )
    serialization.save(run.plan, run.folder.plan)
    serialization.save(header, run.folder.header)


def _recipe(run: Run) -> Recipe:
    rule, compressor, sync = run.settings.lr_rule, run.replica.compressor, run.plan.sync
    compression = (
        sync.compress if sync.mode != "synchronous" else None if compressor is None else compressor.compression
    )
    return Recipe(
        optimizer=" + ".join(type(optimizer).__name__ for optimizer in run.optimizers),
        learning_rate=run.initial_rates[0],
        global_batch_size=run.plan.batch.global_batch_size,
        unit=run.plan.batch.unit,
        num_microbatches=run.plan.batch.num_microbatches,
        last_batch=run.plan.batch.last_batch,
        precision=run.plan.precision,
        seed=run.settings.seed,
        clip_norm=run.settings.clip_norm,
        learning_rate_rule=None if rule is None else asdict(rule),
        scheduler=None if run.scheduler is None else type(run.scheduler).__name__,
        batch_ramp=run.plan.batch.ramp,
        compress=None if compression is None else format_compression(compression),
    )


def _start_row(run: Run, context: JobContext) -> None:
    wall, phases = run.clock.take_row()
    run.log.row(
        "start",
        run.clock.elapsed_s(),
        resumed_at_step=run.progress.step,
        startup_s={"rendezvous": run.world.rendezvous_s, "prepare": wall},
        wall_s=wall,
        phases=phases,
    )


def captured_script(context: JobContext, arguments: PrepareArguments) -> CapturedScript:
    """What a capturing process gets instead of a Run."""
    seed, source = context.settings.seed, arguments.source

    def samples(count: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        return arguments.unpack(first_samples(source, seed, count))

    tokens = source.tokens
    if isinstance(tokens, Sequence):
        tokens = round(sum(tokens) / max(len(tokens), 1))
    return CapturedScript(
        model=arguments.model,
        optimizers=arguments.optimizers,
        loss=arguments.loss_fn or default_loss,
        samples=samples,
        dataset=source.dataset,
        dataset_samples=source.samples,
        tokens_per_sample=tokens or 0,
        loading=partial(measure_loading, source, seed),
        script_nbytes=script_growth_nbytes(),
        plan=with_annotations(context.plan, arguments.model, stated_mesh=context.stated_mesh),
    )


TensorEntry = tuple[str, tuple[int, ...], str, bool]


def check_same_model(model: nn.Module, world: World) -> None:
    """Raise RankMismatchError, on every rank, naming the first parameter or buffer that differs in form."""
    entries: list[TensorEntry] = [
        (n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()
    ]
    entries += [(n, tuple(b.shape), str(b.dtype), False) for n, b in model.named_buffers()]
    everyone = world.gather(entries)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RankMismatchError(_describe_difference(everyone[0], theirs, rank))


def _describe_difference(first: Sequence[TensorEntry], other: Sequence[TensorEntry], rank: int) -> str:
    remedy = "build the same model on every rank, from the Job's seed and not from the rank"
    for expected, actual in zip(first, other, strict=False):
        if expected != actual:
            there, here = _describe_entry(expected), _describe_entry(actual)
            return f"models differ: rank 0 has {there}, rank {rank} has {here} in its place; {remedy}"
    longer, extra = (0, first[len(other)]) if len(first) > len(other) else (rank, other[len(first)])
    return f"models differ: only rank {longer} has {_describe_entry(extra)}; {remedy}"


def _describe_entry(entry: TensorEntry) -> str:
    name, shape, dtype, trainable = entry
    return f"{name!r} of shape {shape}, {dtype.removeprefix('torch.')}{'' if trainable else ', without gradient'}"


def differing_values(model: nn.Module, world: World) -> tuple[int, str] | None:
    """The first (rank, parameter or buffer) whose values differ from rank 0's, or None."""
    digests = [(name, tensor_digest(tensor)) for name, tensor in _parameters_and_buffers(model)]
    everyone = world.gather(digests)
    for rank, theirs in enumerate(everyone):
        for (name, one), (_, two) in zip(everyone[0], theirs, strict=True):
            if one != two:
                return rank, name
    return None


def broadcast_from_rank_0(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's parameters and buffers."""
    if world.world_size > 1:
        for _, tensor in _parameters_and_buffers(model):
            dist.broadcast(tensor.detach(), src=0)


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data if data.numel() else b"").hexdigest()


def _parameters_and_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def model_mismatch_warning(plan: Plan, model: nn.Module) -> str:
    """One sentence that names what is new, gone or other in `model` since the plan was made; empty where nothing is.

    Modules that share parameters are not compared: which of them counts a parameter depends on which ran first.
    """
    holders: dict[int, set[str]] = {}
    now: dict[str, str] = {}
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in own:
            holders.setdefault(id(parameter), set()).add(name or "(model)")
        count = sum(parameter.numel() for parameter in own if not is_lazy(parameter))
        if count:
            now[name or "(model)"] = describe_module(type(module).__name__, count)
    shared = frozenset(name for names in holders.values() if len(names) > 1 for name in names)
    found = differences(plan.made_for, now, shared)
    if not found:
        return ""
    mesh = format_mesh(plan.mesh)
    return f"warning: this plan ({mesh}) was made for another model: {found}; plan again with tutti plan"
