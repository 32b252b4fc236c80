"""Prepare: the user's model, optimizer and data become a Run, in an order one can read."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.checkpoint import latest_checkpoint, load_checkpoint, load_weights
from tutti.comm import make_desk
from tutti.comm.network_threads import defer_network_threads
from tutti.comm.traffic import Lane
from tutti.comm.world import World
from tutti.config import codec
from tutti.config.compression import compression_in_words
from tutti.config.plan import Plan
from tutti.config.refusals import check_plan
from tutti.config.run import Recipe
from tutti.data.cost import measure_loading
from tutti.data.fingerprint import describe_data
from tutti.data.loader import ShareLoader, first_samples
from tutti.data.source import Source
from tutti.data.split import to_device
from tutti.errors import PlanError, ScriptError
from tutti.local_sgd.make import make_consistency
from tutti.optim.scaling import initial_learning_rate
from tutti.parallel.annotated import with_annotations
from tutti.parallel.compressed.compressor import make_compressor
from tutti.parallel.compressed.factored import make_factored
from tutti.parallel.context import Sequences, sequences_of
from tutti.parallel.data.batchnorm import BatchScope, batch_norms
from tutti.parallel.data.bucket_sizes import BucketSizes
from tutti.parallel.data.replicate import Replica
from tutti.parallel.expert.tallies import mixtures_of
from tutti.parallel.layout import SUMMED, Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.parallelize import parallelize, rebind
from tutti.parallel.part_norms import bind_norms
from tutti.parallel.pipeline.build import Stages, cut_stages
from tutti.parallel.pipeline.pipeline import Pipeline, make_pipeline
from tutti.parallel.sharding.shards import Shards
from tutti.parallel.spatial.feed import feed_parts
from tutti.trainer.agree import check_same_model, copy_from_first, differing_values
from tutti.trainer.capture import Captured, grown_nbytes
from tutti.trainer.deferred.model import materialise
from tutti.trainer.deferred.tape import Tape
from tutti.trainer.header import make_header, open_folder, this_rank
from tutti.trainer.made_for import other_model
from tutti.trainer.metrics import MetricsLog
from tutti.trainer.noise import NoiseMeter, why_not
from tutti.trainer.observe import Observer, load_observer
from tutti.trainer.precision import loss_scaler, set_matmul_precision
from tutti.trainer.screen import Screen
from tutti.trainer.session import Session
from tutti.trainer.state import Run, Unpack
from tutti.trainer.unpack import default_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user passed to prepare, understood."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    source: Source
    loss_fn: Callable[[Any, Any], Any] | None
    unpack: Unpack
    scheduler: Any
    scheduler_clock: Literal["step", "epoch"]
    weights: Path | None = None
    tape: Tape | None = None


def make_run(session: Session, given: Given) -> Run:
    """Build the Run: same model everywhere, taken apart as the plan says, replicas, data, folder, resume."""
    world, model = session.world, given.model
    plan = _annotated(session, model)
    set_matmul_precision(plan.precision, world.device)
    observer = load_observer(session.wishes.observer)
    _make_equal(given, world, session.screen, observer, independent=plan.sync.mode == "ensemble")
    layout = Layout.of(model, Mesh(plan.mesh, world.rank), given.optimizers)
    layout.traffic.clock = session.clock
    scope = _batch_scope(model, layout)
    originals, mixtures = dict(model.named_parameters(remove_duplicate=False)), mixtures_of(model)
    stages = cut_stages(model, plan, layout, partial(_few_samples, given, session, plan, observer))
    shards = _take_apart(given, plan, layout, scope, stages, world.device)
    _hand_over(given, originals, layout, shards, world)
    source, unpack = feed_parts(model, given.source, given.unpack)
    pipeline = make_pipeline(stages, plan, layout, world.device)
    sequences = _sequences(given, plan, layout, pipeline)
    folder = open_folder(session.wishes, world, session.folder)
    run = Run(
        settings=session.settings,
        plan=plan,
        world=world,
        layout=layout,
        model=model,
        replica=_replica(session, given, plan, layout, shards, stages),
        pipeline=pipeline,
        optimizers=given.optimizers,
        sequences=sequences,
        loss_fn=sequences.loss_fn,
        unpack=unpack,
        scheduler=given.scheduler,
        scheduler_clock=given.scheduler_clock,
        initial_rates=tuple(initial_learning_rate(optimizer) for optimizer in given.optimizers),
        loader=ShareLoader(source, plan, session.settings.seed, layout.mesh.data_index),
        scaler=loss_scaler(plan.precision, world.device),
        scope=scope,
        clock=session.clock,
        log=MetricsLog(folder, world.rank),
        screen=session.screen,
        folder=folder,
        observer=observer,
        noise=_noise_meter(session, plan),
        consistency=make_consistency(plan.sync, layout, session.settings.seed),
        sizes=BucketSizes(plan),
        mixtures=mixtures,
    )
    _write_header(run, session, _resume(run, session.resume or session.wishes.resume, given.weights))
    _start_row(run, session)
    defer_network_threads()  # all groups are made
    run.observer.prepared(run)
    return run


def _annotated(session: Session, model: nn.Module) -> Plan:
    """The plan with what the script's marks say; refused where it cannot run, and said where it was another model's."""
    plan = with_annotations(session.plan, model, stated_mesh=session.stated_mesh)
    check_plan(plan)
    session.screen.say(other_model(plan, model))
    return plan


def _replica(
    session: Session, given: Given, plan: Plan, layout: Layout, shards: Shards, stages: Stages | None
) -> Replica:
    """This rank's replica, and how its gradients are compressed. Collective."""
    seed, clip_norm = session.settings.seed, session.settings.clip_norm
    compressor = make_compressor(plan, layout, session.world, given.model, given.optimizers, seed, clip_norm, shards)
    late = stages.tied_here(given.model) if stages else ()
    return Replica(given.model, layout, plan, shards, late, compressor, make_factored(plan, layout, given.model))


def _take_apart(
    given: Given, plan: Plan, layout: Layout, scope: BatchScope, stages: Stages | None, device: torch.device
) -> Shards:
    """Parallelize; a model without memory then gets this rank's part of it."""
    with given.tape or nullcontext():
        shards = parallelize(given.model, plan, layout, scope, stages)
    if given.tape is not None:
        materialise(given.model, given.tape, device, shards)
    return shards


def _hand_over(given: Given, originals: dict[str, nn.Parameter], layout: Layout, shards: Shards, world: World) -> None:
    """Optimizers get the parameters as they are now, and ranks agree who counts which part. Collective."""
    rebind(given.optimizers, originals, given.model, layout)
    shards.bind(given.optimizers)
    layout.settle(given.model, world, given.optimizers)
    bind_norms(given.optimizers, given.model, layout, world)


def _few_samples(given: Given, session: Session, plan: Plan, observer: Observer) -> tuple[Any, Any]:
    """The model's arguments for the first samples of the data, on the device: as many as one rank computes at once, at
    most 4."""
    count = plan.batch.global_batch_size // (plan.batch.num_microbatches * plan.data_parallel_degree)
    batch = first_samples(given.source, session.settings.seed, max(1, min(count, 4)))
    return given.unpack(observer.sampled(to_device(batch, session.world.device)))[:2]


def model_optimizers(model: nn.Module, optimizer: Any) -> tuple[Optimizer, ...]:
    """The optimizers, made from the model's parameters where callables were given.

    Raises ScriptError when an optimizer holds a parameter that is not the model's.
    """
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    made = tuple(one if isinstance(one, Optimizer) else one(model.parameters()) for one in given)
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


def _make_equal(given: Given, world: World, screen: Screen, observer: Observer, *, independent: bool) -> None:
    """The same model on every rank, on its device; one without memory will get the same values anyway. `independent`:
    values are each rank's own.
    """
    model = given.model
    if given.tape is not None:
        check_same_model(model, world)
        given.tape.check_same(world.gather(given.tape.digest))
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
        copy_from_first(model, world)


def _batch_scope(model: nn.Module, layout: Layout) -> BatchScope:
    """A group of their own for batch statistics, so that their exchanges never mix with gradients'."""
    mesh = layout.mesh
    degree = mesh.degree(*SUMMED)
    group = mesh.new_group(*SUMMED) if degree > 1 and batch_norms(model) else None
    desk = None if group is None else make_desk(group)
    return BatchScope(world_size=degree, group=group, lane=layout.lane("statistics", *SUMMED), desk=desk)


def _noise_meter(session: Session, plan: Plan) -> NoiseMeter:
    """What measures the gradient noise scale, if the Job asks for it and the plan allows it."""
    rule = session.settings.lr_rule
    adascale = rule is not None and rule.scale == "adascale"
    every = session.settings.noise_every or (1 if adascale else None)
    reason = None if every is None else why_not(plan)
    if reason is not None and adascale:
        raise PlanError(f"LRRule.scale = 'adascale' needs the gradient noise scale: {reason}")
    if reason is not None:
        session.screen.say(f"the gradient noise scale is not measured: {reason}")
    return NoiseMeter(None if reason else every, session.world.device)


def _sequences(given: Given, plan: Plan, layout: Layout, pipeline: Pipeline | None) -> Sequences:
    """What is done with sequences, by the context axis. Collective."""
    lane = _attention_lane(plan, layout)
    staged = None if pipeline is None else partial(pipeline.forward, given.model)
    return sequences_of(given.model, plan, layout.mesh, given.unpack, given.loss_fn, lane, staged)


def _attention_lane(plan: Plan, layout: Layout) -> Lane:
    return layout.lane("keys" if plan.context == "ring" else "heads", "context")


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


def _write_header(run: Run, session: Session, resumed: Path | None) -> None:
    ranks = run.world.gather(this_rank(run.world, run.replica.ways))
    if not run.world.is_main:
        return
    data = describe_data(run.loader.source.dataset, run.settings.seed, "train")
    header = make_header(
        run.world,
        ranks,
        name=session.name,
        model=run.model,
        parameters=run.layout.parameters,
        mesh=run.plan.mesh,
        recipe=_recipe(run),
        data=data,
        resumed_from=resumed,
        resumed_at_step=run.progress.step,
        facts=session.facts,
    )
    codec.save(run.plan, run.folder.plan)
    codec.save(header, run.folder.header)


def _recipe(run: Run) -> Recipe:
    rule, compressor, sync = run.settings.lr_rule, run.replica.compressor, run.plan.sync
    how = sync.compress if sync.mode != "synchronous" else None if compressor is None else compressor.how
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
        compress=None if how is None else compression_in_words(how),
    )


def _start_row(run: Run, session: Session) -> None:
    wall, phases = run.clock.take_row()
    run.log.row(
        "start",
        run.clock.elapsed_s(),
        resumed_at_step=run.progress.step,
        startup_s={"rendezvous": run.world.rendezvous_s, "prepare": wall},
        wall_s=wall,
        phases=phases,
    )


def captured(session: Session, given: Given) -> Captured:
    """What a capturing process gets instead of a Run."""
    seed, source = session.settings.seed, given.source

    def samples(count: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        return given.unpack(first_samples(source, seed, count))

    tokens = source.tokens
    if isinstance(tokens, Sequence):
        tokens = round(sum(tokens) / max(len(tokens), 1))
    return Captured(
        model=given.model,
        optimizers=given.optimizers,
        loss=given.loss_fn or default_loss,
        samples=samples,
        dataset=source.dataset,
        dataset_samples=source.samples,
        tokens_per_sample=tokens or 0,
        loading=partial(measure_loading, source, seed),
        script_nbytes=grown_nbytes(),
        plan=with_annotations(session.plan, given.model, stated_mesh=session.stated_mesh),
    )
