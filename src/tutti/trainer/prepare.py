"""Prepare: turn the user's model, optimizer and data into a Run.

Read `prepare_run` first. It builds the model (`build_model`), the state that checkpoints save (`build_state`), the loop
(`build_loop`) and the output (`open_output`).
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tutti.checkpoint import CheckpointWriter, TrainingState
from tutti.checkpoint.node_memory import HeldCheckpoint
from tutti.checkpoint.retention import retention_of
from tutti.checkpoint.uploads import open_uploads
from tutti.comm.shared_memory import make_shared_memory_communicator
from tutti.comm.traffic import CommChannel
from tutti.comm.world import World, deprioritise_gloo_threads
from tutti.config.mesh_axes import format_mesh
from tutti.config.model_fingerprint import describe_module, differences
from tutti.config.plan import Plan
from tutti.config.refusals import check_plan
from tutti.config.run_folder import RunFolder
from tutti.config.vocabulary import AxisName
from tutti.data.batches import Unpack
from tutti.data.device_copies import DeviceCopies, may_copy_ahead, to_device
from tutti.data.loading_cost import measure_loading
from tutti.data.samples import DataSource
from tutti.data.share_loader import ShareLoader, first_samples
from tutti.errors import PlanError, ScriptError
from tutti.event_record import ACTIVE, open_record
from tutti.local_sgd.modes import make_consistency
from tutti.optim.learning_rate import initial_learning_rate
from tutti.optim.optimizer_traits import check_needs_no_closure
from tutti.optim.schedules import make_schedules
from tutti.parallel.annotated_plan import with_annotations
from tutti.parallel.compilation import Compilation, Compile
from tutti.parallel.compressed.compressor import make_compressor
from tutti.parallel.compressed.factor_buckets import make_factored
from tutti.parallel.context import Sequences, sequences_of
from tutti.parallel.data.batch_state import BatchState, exchanges_state
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.data.bucket_size_tuner import BucketSizeTuner
from tutti.parallel.data.gradient_hooks import GradientHooks, refuse_lost_hooks
from tutti.parallel.data.noise_meter import NoiseMeter, unsupported_reason
from tutti.parallel.data.replicate import Replica
from tutti.parallel.expert.expert_parallel import mixtures_of
from tutti.parallel.layout import GRADIENT_AXES, Layout
from tutti.parallel.losses import default_loss, loss_of
from tutti.parallel.mesh import Mesh
from tutti.parallel.mixed_precision import loss_scaler, set_float32_precision
from tutti.parallel.model_changes import NotedModel, check_unwrapped, forward_entries
from tutti.parallel.offload.pinned_memory import move_buffers
from tutti.parallel.offload.state_on_disk import keep_state_on_disk
from tutti.parallel.parallel_model import ParallelModel
from tutti.parallel.parallelize import check_optimizers, move_state, parallelize, rebind
from tutti.parallel.part_guards import guard_model, guard_optimizers
from tutti.parallel.part_reads import PartReads
from tutti.parallel.pipeline.pipeline_runner import Pipeline, make_pipeline
from tutti.parallel.pipeline.stage_building import StagePartition, cut_stages
from tutti.parallel.script_reads import ScriptReads
from tutti.parallel.sharded_norms import bind_norms
from tutti.parallel.sharding.engine_choice import with_engine
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.parallel.spatial.apply_spatial_parallel import feed_parts
from tutti.parallel.whole_model import ModuleChanges, WholeModel
from tutti.stack_watch import watch_stacks
from tutti.trainer.capture import CapturedScript, FollowedScript, end_prepare, script_growth_nbytes
from tutti.trainer.deferred_init import Tape, materialize, set_values_aside
from tutti.trainer.guard.replicas import broadcast_from_rank_0, check_same_model, differing_values
from tutti.trainer.job_context import JobContext, stopping_of
from tutti.trainer.memory_recovery import begin_marks, recover_from_memory
from tutti.trainer.metrics import MetricsLog, ProgressDisplay
from tutti.trainer.observer import Observer, load_observer
from tutti.trainer.operation_watch import OperationWatch, note_calls_of_model
from tutti.trainer.program import OwnProgram
from tutti.trainer.rebalance import Rebalancer, check_rebalancing
from tutti.trainer.resume import memory_writer, resume_run
from tutti.trainer.run_header import open_folder
from tutti.trainer.run_start import note_batches, start_hooks, write_header, write_start_row
from tutti.trainer.run_state import Accumulation, Run, RunningStatistics, RunOutput, TrainingLoop
from tutti.trainer.step_profile import StepProfile
from tutti.trainer.update import refuse_own_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareArguments:
    """The arguments of Job.prepare, with defaults filled in.

    Attributes:
        optimizers: one or several; all of them hold parameters of the model.
        source: the training data.
        scheduler: a learning-rate scheduler, a list of them, or None.
        weights: file with the initial values of the model, unless the run is resumed.
        tape: recording of the model's constructor if job.build made the model without memory, else None.
        compile: what torch.compile does with the model.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    source: DataSource
    loss_fn: Callable[[Any, Any], Any] | None
    unpack: Unpack
    scheduler: Any
    scheduler_clock: Literal["step", "epoch"]
    weights: Path | None = None
    tape: Tape | None = None
    compile: Compile = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedModel:
    """The model divided over ranks, and how batches enter it.

    Attributes:
        parallel: this rank's part of the model.
        pipeline: runs this rank's stages; None without pipeline parallelism.
        observer: the run's observer, which has seen the model as the script built it.
        source: the data in the form that this rank's part of the model takes.
        unpack: splits a batch of `source` into arguments and a target.
    """

    parallel: ParallelModel
    pipeline: Pipeline | None
    observer: Observer
    source: DataSource
    unpack: Unpack


def prepare_run(context: JobContext, arguments: PrepareArguments) -> Run:
    """Build the Run, load a checkpoint, and write the run's header. Collective.

    Args:
        context: ranks, plan and settings of the Job.
        arguments: what the script passed to Job.prepare.

    Raises:
        PlanError: the plan cannot train this model.
        RankMismatchError: the model or its initial state differs between ranks.
        CheckpointError: the checkpoint or the weights do not fit.
    """
    divided = build_model(context, arguments)
    folder = open_folder(context.launch_options, context.world, context.folder)
    _record_events(context, folder, divided.parallel.model)
    keep_state_on_disk(divided.parallel, folder.path, context.screen.say)
    state = build_state(context, arguments, divided)
    loop = build_loop(context, arguments, divided, state)
    loop.stopping = stopping_of(context, folder.path, agrees=not state.consistency.asynchronous)
    output = open_output(context, folder, state)
    state.loader.timeout_s = context.launch_options.timeout_s
    run = Run(settings=context.settings, state=state, loop=loop, output=output)
    recovered = context.launch_options.recover_from is not None
    if recovered:
        recover_from_memory(run, context.launch_options)
    resumed_from = None if recovered else resume_run(run, context, arguments.weights)
    write_header(run, context, resumed_from if isinstance(resumed_from, Path) else None)
    write_start_row(run, context, from_memory=recovered or isinstance(resumed_from, HeldCheckpoint))
    start_hooks(run, context, resumed=recovered or resumed_from is not None)
    note_batches(run)
    deprioritise_gloo_threads()  # after the last process group has been created
    loop.observer.prepared(state)
    loop.program = loop.observer.program(run) or OwnProgram(run)
    refuse_own_steps(run)
    loop.watch.start()
    if context.launch_options.recover:
        begin_marks(run, context.launch_options)
    return run


def _record_events(context: JobContext, folder: RunFolder, model: nn.Module) -> None:
    """Record this rank's flight where its launcher has not begun to, and know the names of modules."""
    if not context.launch_options.supervised:
        own = folder.rank(context.world.rank)
        with contextlib.suppress(OSError):
            own.mkdir(parents=True, exist_ok=True)
        context.screen.say(open_record(own, context.world.rank, context.world.world_size))
        watch_stacks(own)
    named = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
    ACTIVE.module_name = lambda module: named.get(module, "")


def build_model(context: JobContext, arguments: PrepareArguments) -> DividedModel:
    """Make the model equal on all ranks, divide it as the plan says, and set up gradient reduction. Collective."""
    world, model = context.world, arguments.model
    _check_shapes_known(model)
    plan = _annotated_plan(context, model)
    compilation = Compilation(model, plan, arguments.compile, world.device)
    context.screen.say(compilation.before_division())
    _check_optimizers_fit(arguments.optimizers, plan)
    context.screen.say(set_float32_precision(plan.precision, world.device))
    observer = load_observer(context.launch_options.observer)
    _synchronize_model(
        arguments,
        world,
        context.screen,
        observer,
        independent=plan.sync.mode == "ensemble",
        parameters_on_host=plan.sharding.offload != "none" and plan.world_size == 1,
        all_on_host=stays_on_host(model, plan, world.device),
    )
    layout = Layout.of(model, Mesh(plan.mesh, world.rank), arguments.optimizers)
    layout.traffic.clock = context.clock
    scope = _batch_scope(model, layout)
    originals, mixtures = dict(model.named_parameters(remove_duplicate=False)), mixtures_of(model)
    own_forwards = forward_entries(model)
    sample = partial(_sample_inputs, arguments, context, plan, observer)
    stages = cut_stages(model, plan, layout, sample, world.device)
    division = ModuleChanges(model)
    shards = _divide_model(arguments, plan, layout, scope, stages, world.device)
    _rebind_optimizers(arguments, originals, layout, shards, world)
    source, unpack = feed_parts(model, arguments.source, arguments.unpack)
    pipeline = make_pipeline(model, stages, plan, layout, world.device)
    context.screen.say(compilation.after_division(stages))
    sequences = _sequences(arguments, plan, layout, pipeline)
    replica = _replica(context, arguments, plan, layout, shards, stages)
    guard_model(model, layout, division)
    guard_optimizers(arguments.optimizers, layout)
    reads = PartReads(model, layout, shards, originals)
    script_reads = ScriptReads(model, arguments.optimizers, layout, reads, originals)
    script_reads.show_absent(model, division)
    parallel = ParallelModel(
        plan=plan,
        world=world,
        model=model,
        optimizers=arguments.optimizers,
        layout=layout,
        replica=replica,
        scope=scope,
        sequences=sequences,
        seed=context.settings.seed,
        whole=WholeModel(division, layout, world),
        reads=reads,
        script_reads=script_reads,
        mixtures=mixtures,
        gradient_hooks=GradientHooks(model, layout),
        noted=NotedModel(model, plan, shards, own_forwards),
    )
    return DividedModel(parallel=parallel, pipeline=pipeline, observer=observer, source=source, unpack=unpack)


def build_state(context: JobContext, arguments: PrepareArguments, divided: DividedModel) -> TrainingState:
    """Build everything that checkpoints save, as it is before the first step. Collective."""
    parallel, seed = divided.parallel, context.settings.seed
    plan = parallel.plan
    consistency = make_consistency(plan.sync, parallel.layout, seed)
    if context.settings.on_nonfinite == "rollback" and plan.sync.mode != "synchronous":
        raise PlanError(
            f"on_nonfinite = 'rollback' needs replicas that are equal, and sync.mode = \"{plan.sync.mode}\" lets them "
            "differ; use 'skip' or 'stop'"
        )
    schedules = make_schedules(arguments.scheduler, arguments.optimizers, arguments.scheduler_clock)
    if consistency.asynchronous and schedules.follows_metric:
        raise PlanError(
            f'{schedules.names} with sync.mode = "{plan.sync.mode}": each rank has a loss of its own, so their '
            "learning rates would differ; use a schedule without a metric, or a mode in which ranks wait for each other"
        )
    return TrainingState(
        parallel=parallel,
        consistency=consistency,
        loader=_share_loader(divided.source, plan, seed, parallel.mesh.data_index, context.world.device),
        schedules=schedules,
        scaler=loss_scaler(plan.precision, context.world.device),
        noise=_noise_meter(context, plan),
        callbacks=context.hooks.callbacks,
    )


def _share_loader(source: DataSource, plan: Plan, seed: int, rank: int, device: torch.device) -> ShareLoader:
    """Return the loader; for an accelerator one that pins batches and copies them there ahead."""
    if not may_copy_ahead(device):
        return ShareLoader(source, plan, seed, rank)
    loader = ShareLoader(replace(source, options={"pin_memory": True, **source.options}), plan, seed, rank)
    loader.copies = DeviceCopies(device)
    return loader


def build_loop(
    context: JobContext, arguments: PrepareArguments, divided: DividedModel, state: TrainingState
) -> TrainingLoop:
    """Build the parts that steps use, apart from the training state."""
    parallel, loader = divided.parallel, state.loader
    watch = OperationWatch(
        context.world, lambda: (loader.epoch, loader.position), waits=not state.consistency.asynchronous
    )
    if parallel.mesh.degree("shard", "split", "stage", "expert", "table", "space") > 1:
        note_calls_of_model(parallel.model, watch)
    parallel.whole.division.done()
    parallel.script_reads.together = watch.during
    sharded = parallel.replica.shards.parts().keys()
    return TrainingLoop(
        pipeline=divided.pipeline,
        loss_fn=parallel.sequences.loss_fn,
        unpack=divided.unpack,
        accumulation=Accumulation(),
        initial_rates=tuple(initial_learning_rate(optimizer) for optimizer in parallel.optimizers),
        observer=divided.observer,
        clock=context.clock,
        bucket_tuner=BucketSizeTuner(parallel),
        statistics=RunningStatistics(parallel.model),
        watch=watch,
        batch_state=BatchState(
            parallel.model, parallel.scope, lambda name: parallel.layout.first_name(name) in sharded
        ),
        device_decides=context.world.device.type != "cpu",
        rebalancer=_rebalancer(context, divided),
    )


def _rebalancer(context: JobContext, divided: DividedModel) -> Rebalancer | None:
    if context.settings.on_slow_rank == "warn":
        return None
    plan = divided.parallel.plan
    try:
        check_rebalancing(plan, divided.source)
    except PlanError as error:
        if not context.launch_options.shrunk:
            raise
        why = str(error).partition(";")[0]
        context.screen.say(f"shares of the batch stay as they are, as fewer ranks go on: {why}")
        return None
    return Rebalancer(plan, stream=divided.source.is_stream) if context.launch_options.recording is None else None


def open_output(context: JobContext, folder: RunFolder, state: TrainingState) -> RunOutput:
    """Open the metrics files in the run folder, and set up checkpoints and their store."""
    log, settings = MetricsLog(folder, context.world.rank), context.settings

    def write_row(fields: dict[str, Any], kind: str = "checkpoint") -> None:
        log.row(kind, context.clock.elapsed_s(), **fields)

    every, keep, recording = settings.checkpoint_every, settings.keep_checkpoints, context.launch_options.recording
    if recording is not None and recording.save_at is not None:
        every, keep = recording.save_at, recording.steps
    steps, world, say, uploads = context.launch_options.profile, context.world, context.screen.say, None
    if recording is None:  # a comparison stores nothing
        uploads = open_uploads(
            world,
            folder,
            settings.checkpoint_store,
            context.resumed,
            patient=context.launch_options.restarted,
            keep_local=settings.keep_local,
            write_row=partial(write_row, kind="upload"),
            say=say,
        )
    stored = None if uploads is None else uploads.evaluations
    retention = retention_of(world, folder.path, keep=keep, best=settings.keep_best, stored=stored)
    checkpoints = CheckpointWriter(
        state, folder, every=every, retention=retention, write_row=write_row, say=say, uploads=uploads
    )
    memory = memory_writer(state, folder, context.launch_options, partial(write_row, kind="memory_checkpoint"), say)
    profile = None if steps is None else StepProfile(steps, folder.profile, world.rank, world.device)
    return RunOutput(
        folder=folder, log=log, screen=context.screen, checkpoints=checkpoints, memory=memory, profile=profile
    )


def _annotated_plan(context: JobContext, model: nn.Module) -> Plan:
    """Add the script's annotations to the plan. Refuse a plan that cannot run; warn if it is another model's."""
    plan = with_annotations(context.plan, model, stated_mesh=context.stated_mesh)
    check_plan(plan)
    plan = with_engine(plan, model, context.world)
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
    """Build this rank's replica, with the compression of its gradients. Collective."""
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
    """Divide the model by the plan. A model without memory on the device then gets this rank's part of it there."""
    tape, replaced = arguments.tape, None
    if tape is None and stays_on_host(arguments.model, plan, device):
        tape, replaced = set_values_aside(arguments.model)
    with tape or nullcontext():
        shards = parallelize(arguments.model, plan, layout, scope, stages, device)
    if tape is not None:
        materialize(arguments.model, tape, device, shards, replaced)
    return shards


_PART_AXES: tuple[AxisName, ...] = ("shard", "split", "stage", "expert", "table")
"""Axes along which a rank holds a part of the model."""


def stays_on_host(model: nn.Module, plan: Plan, device: torch.device) -> bool:
    """Whether a model waits in host memory until it is divided, because the device may not have room for all of it."""
    axes = [axis for axis in _PART_AXES if plan.degree(axis) > 1 and (axis != "shard" or plan.sharding.level > 1)]
    if device.type == "cpu" or not axes:
        return False
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(tensor) in (nn.Parameter, torch.Tensor) and not tensor.is_sparse for tensor in tensors)
    return plain and all(tensor.device.type == "cpu" and tensor.grad is None for tensor in tensors)


def _rebind_optimizers(
    arguments: PrepareArguments, originals: dict[str, nn.Parameter], layout: Layout, shards: Shards, world: World
) -> None:
    """Give optimizers the divided parameters, and agree on the rank that counts each shard. Collective."""
    refuse_lost_hooks(originals, arguments.model)
    rebind(arguments.optimizers, originals, arguments.model, layout)
    shards.bind(arguments.optimizers)
    check_optimizers(arguments.optimizers, layout, world)
    layout.assign_owners(arguments.model, world, arguments.optimizers)
    bind_norms(arguments.optimizers, arguments.model, layout, world)


def _sample_inputs(arguments: PrepareArguments, context: JobContext, plan: Plan, observer: Observer) -> tuple[Any, Any]:
    """Return the model's arguments, on the device, for as many samples as a rank computes at once, but at most 4."""
    count = plan.batch.global_batch_size // (plan.batch.num_microbatches * plan.data_parallel_degree)
    batch = first_samples(arguments.source, context.settings.seed, max(1, min(count, 4)))
    return arguments.unpack(observer.sampled(to_device(batch, context.world.device)))[:2]


def check_arguments(model: object, loss_fn: object) -> None:
    """Refuse arguments of prepare that are of another kind.

    Raises:
        ScriptError: naming the argument.
    """
    if not isinstance(model, nn.Module):
        raise ScriptError(
            f"prepare got a {type(model).__name__} as the model; write prepare(model, optimizer, dataset)"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ScriptError(f"loss_fn = {loss_fn!r} is no function; pass one such as torch.nn.functional.mse_loss")


def without_wrappers(model: nn.Module, *, compiled: bool) -> nn.Module:
    """Return the module inside torch.compile's wrapper, with the wrappers of its submodules removed in place.

    A wrapper adds "_orig_mod" to every name. The modules inside run their compiled forward all the same, as after
    nn.Module.compile.

    Args:
        model: the user's model.
        compiled: whether modules still run compiled; False where only shapes are traced.
    """
    inner = _unwrapped(model, compiled)
    for module in [*inner.modules()]:
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _unwrapped(child, compiled)
    return inner


def _unwrapped(module: nn.Module, compiled: bool) -> nn.Module:
    while "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx"):
        inner = module._modules["_orig_mod"]
        assert inner is not None
        if compiled:
            inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
        module = inner
    return module


def _check_shapes_known(model: nn.Module) -> None:
    """Check that no parameter or buffer waits for the model's first call.

    Raises:
        ScriptError: naming the module.
    """
    for name, module in model.named_modules():
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
            raise ScriptError(
                f"module {name or 'the model'!r} ({type(module).__name__}) has no shape before its first call; "
                "call the model once on a batch before job.prepare"
            )


def _check_optimizers_fit(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuse float16 for a parameter of several optimizers.

    Raises:
        PlanError: naming the optimizers.
    """
    owner: dict[nn.Parameter, Optimizer] = {}
    for optimizer in optimizers if plan.precision == "float16" else ():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owner.setdefault(parameter, optimizer)
            if other is not optimizer:
                raise PlanError(
                    f"a parameter of shape {tuple(parameter.shape)} is in {type(other).__name__} and in "
                    f"{type(optimizer).__name__}, and with precision = float16 each would undo the loss scale of its "
                    "gradient; use bfloat16, or give every parameter to one optimizer"
                )


def build_optimizers(model: nn.Module, optimizer: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers. A callable among them is called with the model's parameters.

    Args:
        model: the user's model.
        optimizer: a torch optimizer, a callable that takes parameters and returns one, or a list of either.

    Raises:
        ScriptError: something else was given, an optimizer holds a parameter that is not the model's, or the model is
            in a wrapper such as DistributedDataParallel.
    """
    check_unwrapped(model)
    arguments = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = tuple(
        argument if isinstance(argument, Optimizer) else argument(model.parameters()) for argument in arguments
    )
    model_ids = {id(p) for p in model.parameters()}
    for candidate in optimizers:
        if not isinstance(candidate, Optimizer):
            raise ScriptError(
                f"prepare got {type(candidate).__name__} as optimizer; pass a torch optimizer, or a callable that "
                "takes parameters and returns one"
            )
        others = [p for group in candidate.param_groups for p in group["params"] if id(p) not in model_ids]
        if others:
            raise ScriptError(
                f"{type(candidate).__name__} holds a parameter of shape {tuple(others[0].shape)} that is not in the "
                "model; create it from model.parameters() of the model that is passed to prepare, and make what the "
                "loss trains part of that model (compose several models into one module)"
            )
        check_needs_no_closure(candidate)
    return optimizers


def _synchronize_model(
    arguments: PrepareArguments,
    world: World,
    screen: ProgressDisplay,
    observer: Observer,
    *,
    independent: bool,
    parameters_on_host: bool,
    all_on_host: bool,
) -> None:
    """Put the model on its device, with rank 0's values on every rank. Collective.

    A model without memory stays without; here it is only checked that its initial values will be equal. With
    `independent`, each rank keeps its own initial values. With `parameters_on_host`, those stay in host memory; with
    `all_on_host`, so does the whole model, until it is divided.
    """
    model = arguments.model
    if arguments.tape is not None:
        check_same_model(model, world)
        arguments.tape.check_same(world.gather(arguments.tape.digest))
        return
    if parameters_on_host:
        move_buffers(model, world.device)
    elif not all_on_host:
        model.to(world.device)
    move_state(arguments.optimizers)
    if isinstance(arguments.loss_fn, nn.Module):  # it may hold weights of classes
        arguments.loss_fn.to(world.device)
    observer.built(model, world)
    check_same_model(model, world)
    different = None if independent else differing_values(model, world)
    if different is not None:
        rank, name = different
        screen.say(
            f"parameters differ between ranks before the first step: {name!r} on rank {rank} differs from rank 0's. "
            "Rank 0's values are used on all ranks; seed the model's initialisation the same on every rank "
            "(Job(seed=...) does, when the model is built after it)"
        )
        broadcast_from_rank_0(model, world)


def _batch_scope(model: nn.Module, layout: Layout) -> BatchScope:
    """Give batch statistics their own process group, so that their collectives never mix with gradients'."""
    mesh = layout.mesh
    degree = mesh.degree(*GRADIENT_AXES)
    group = mesh.new_group(*GRADIENT_AXES) if degree > 1 and any(map(exchanges_state, model.modules())) else None
    communicator = None if group is None else make_shared_memory_communicator(group)
    return BatchScope(
        world_size=degree, group=group, channel=layout.channel("statistics", *GRADIENT_AXES), communicator=communicator
    )


def _noise_meter(context: JobContext, plan: Plan) -> NoiseMeter:
    """Build the meter of the gradient noise scale. It is off unless the Job asks for it and the plan allows it."""
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
    """Set up how sequences are divided along the context axis. Collective."""
    channel = _attention_channel(plan, layout)
    staged = None if pipeline is None else partial(pipeline.forward, arguments.model)
    return sequences_of(arguments.model, plan, layout.mesh, arguments.unpack, arguments.loss_fn, channel, staged)


def _attention_channel(plan: Plan, layout: Layout) -> CommChannel:
    return layout.channel("keys" if plan.context == "ring" else "heads", "context")


def follow_script(context: JobContext, arguments: PrepareArguments) -> FollowedScript:
    """Collect what a capturing process needs from the script instead of a Run, and return what follows the script.

    Raises:
        CaptureDone: the script is not followed.
    """
    seed, source = context.settings.seed, arguments.source
    loss = arguments.loss_fn or default_loss

    @cache  # a trace may change what the script's own code needs for them
    def samples(count: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        return arguments.unpack(first_samples(source, seed, count))

    tokens = source.tokens
    if isinstance(tokens, Sequence):
        tokens = round(sum(tokens) / max(len(tokens), 1))
    captured = CapturedScript(
        model=arguments.model,
        optimizers=arguments.optimizers,
        loss=loss,
        samples=samples,
        dataset=source.dataset,
        dataset_samples=source.samples,
        tokens_per_sample=tokens or 0,
        loading=partial(measure_loading, source, seed),
        script_nbytes=script_growth_nbytes(),
        plan=with_annotations(context.plan, arguments.model, stated_mesh=context.stated_mesh),
    )
    return end_prepare(captured, source, seed, loss_of(arguments.unpack, loss))


def model_mismatch_warning(plan: Plan, model: nn.Module) -> str:
    """Describe how `model` differs from the model that the plan was made for: modules that are new, missing or changed.

    Modules that share parameters are not compared, because the module that ran first counts the parameter.

    Returns:
        One sentence, or an empty string if nothing differs.
    """
    holders: dict[int, set[str]] = {}
    current: dict[str, str] = {}
    for name, module in model.named_modules():
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in parameters:
            holders.setdefault(id(parameter), set()).add(name or "(model)")
        count = sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))
        if count:
            current[name or "(model)"] = describe_module(type(module).__name__, count)
    shared = frozenset(name for names in holders.values() if len(names) > 1 for name in names)
    difference = differences(plan.made_for, current, shared)
    if not difference:
        return ""
    mesh = format_mesh(plan.mesh)
    return f"warning: this plan ({mesh}) was made for another model: {difference}; plan again with tutti plan"
