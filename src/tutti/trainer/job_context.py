"""The context of a Job, which exists before the Job has a model: ranks, plan, settings and launch options."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tutti.comm.clock import PhaseClock
from tutti.comm.world import World, join_world
from tutti.config import serialization
from tutti.config.mesh_axes import format_mesh
from tutti.config.option_syntax import with_bucket_size
from tutti.config.plan import BatchPlan, Plan
from tutti.config.shard_engine import with_sharding
from tutti.config.sync_notation import with_mode
from tutti.config.vocabulary import Precision
from tutti.data.seeds import derive_seed, seed_everything
from tutti.environment import LaunchOptions, RankEnvironment
from tutti.errors import PlanError
from tutti.host_memory import map_large_blocks
from tutti.machine import EnergyMeter
from tutti.trainer.callbacks import JobCallbacks
from tutti.trainer.capture import is_capturing
from tutti.trainer.loggers import Logger
from tutti.trainer.metrics import ProgressDisplay
from tutti.trainer.run_state import JobSettings
from tutti.trainer.stopping import Stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHooks:
    """What the script adds to the run: its callbacks and loggers, and whether it wants a progress bar."""

    callbacks: JobCallbacks = field(default_factory=JobCallbacks)
    loggers: tuple[Logger, ...] = ()
    progress: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """Everything that exists before the Job has a model.

    Attributes:
        plan: the plan with the launcher's options; the script's annotations are not in it yet.
        stated_mesh: whether the launcher gave a plan or a mesh; otherwise all ranks are replicas.
        clock: measures the phases of the run.
        screen: messages and progress for the user.
        name: name of the run; None: the script's.
        folder: run folder that the script asks for.
        resume: run folder or checkpoint that the script resumes from.
        facts: statements of the user about the run, for the report.
        hooks: callbacks, loggers and display that the script asks for.
    """

    settings: JobSettings
    launch_options: LaunchOptions
    world: World
    plan: Plan
    stated_mesh: bool
    clock: PhaseClock
    screen: ProgressDisplay
    name: str | None
    folder: Path | None
    resume: Path | str | None
    facts: Mapping[str, str]
    hooks: JobHooks

    @property
    def resumed(self) -> Path | str | None:
        """Run folder, checkpoint or store to resume from.

        The script's own word counts unless the ranks were started again.
        """
        stated = self.launch_options.resume
        return stated if self.launch_options.restarted else self.resume or stated

    @property
    def model_seed(self) -> int:
        """Seed of the initial parameters: the same on all ranks, except for members of an ensemble."""
        member = self.world.rank if self.plan.sync.mode == "ensemble" else 0
        return derive_seed(self.settings.seed, "model", *((member,) if member else ()))

    def seed_generators(self) -> None:
        """Seed all generators for building the model.

        Python's and NumPy's draws may decide control flow, so they are the same on all ranks. torch's differ between
        members of an ensemble.
        """
        seed_everything(derive_seed(self.settings.seed, "model"))
        torch.manual_seed(self.model_seed)


def open_job_context(
    settings: JobSettings,
    launch_options: LaunchOptions,
    batch: BatchPlan,
    *,
    microbatches_stated: bool,
    precision: Precision | None,
    name: str | None,
    folder: Path | None,
    resume: Path | str | None,
    facts: Mapping[str, str],
    hooks: JobHooks,
) -> JobContext:
    """Join the other ranks (none while capturing), determine the plan, and seed generators for building the model.

    Args:
        settings: the Job's settings.
        launch_options: the launcher's options.
        batch: the Job's batch.
        microbatches_stated: whether the script gave the number of microbatches.
        precision: the script's precision; None leaves it to the plan.
        name: name of the run.
        folder: run folder.
        resume: run folder or checkpoint to resume from.
        facts: what the report should say about the run.
        hooks: callbacks, loggers and display.

    Raises:
        PlanError: settings contradict each other, or the plan does not fit the script or the ranks.
    """
    rule = settings.lr_rule
    if batch.ramp and rule is not None and rule.warmup_epochs is not None:
        raise PlanError(
            f"LRRule.warmup_epochs = {rule.warmup_epochs} with a batch_ramp: epochs differ in their number of steps; "
            "give warmup_steps"
        )
    world = join_world(RankEnvironment() if is_capturing() else None)
    if not is_capturing():
        map_large_blocks()
    context = JobContext(
        settings=settings,
        launch_options=launch_options,
        world=world,
        plan=replace(
            _with_launch_options(
                resolve_plan(
                    world, launch_options, batch, microbatches_stated=microbatches_stated, precision=precision
                ),
                launch_options,
            ),
            share_device=world.shares_device,
        ),
        stated_mesh=launch_options.plan is not None or launch_options.mesh is not None,
        clock=PhaseClock(world.device, energy=EnergyMeter(host=world.local_rank == 0, gpu=_gpu_uuid(world.device))),
        screen=ProgressDisplay(world, supervised=launch_options.supervised, wanted=hooks.progress),
        name=name,
        folder=folder,
        resume=resume,
        facts=facts,
        hooks=hooks,
    )
    context.seed_generators()
    return context


def stopping_of(context: JobContext, folder: Path, *, agrees: bool) -> Stopping:
    """Return what stops the run: the launcher's and the Job's limits of time, and signals unless the launcher observes.

    Args:
        context: the Job's context.
        folder: the run folder.
        agrees: whether ranks take steps together, in which they agree to stop; signals are left alone otherwise.
    """
    options, limit = context.launch_options, context.settings.time_limit
    if limit is not None and not agrees:
        raise PlanError(
            f"time_limit = {limit:g} with replicas that step asynchronously, which have no step to agree in; leave it "
            "out, or give tutti run --time-limit, which ends them without a checkpoint"
        )
    limits = [options.stop_at_s] if options.stop_at_s is not None else []
    limits += [time.time() - context.clock.elapsed_s() + limit] if limit is not None else []
    signals = agrees and options.stop_signals and options.observer is None and options.recording is None
    return Stopping(folder, stop_at_s=min(limits, default=None), signals=signals, supervised=options.supervised)


def _gpu_uuid(device: torch.device) -> str | None:
    # NVML measures the energy of NVIDIA's GPUs alone; torch calls AMD's "cuda", too.
    of_nvidia = device.type == "cuda" and torch.version.hip is None
    return str(torch.cuda.get_device_properties(device).uuid) if of_nvidia else None


def _with_launch_options(plan: Plan, launch_options: LaunchOptions) -> Plan:
    """Return the plan with the launcher's compression, consistency mode, bucket size and sharding."""
    plan = with_mode(plan.compressed(launch_options.compress), launch_options.sync)
    return with_sharding(with_bucket_size(plan, launch_options.bucket_mb), launch_options.shard)


def resolve_plan(
    world: World,
    launch_options: LaunchOptions,
    batch: BatchPlan,
    *,
    microbatches_stated: bool,
    precision: Precision | None,
) -> Plan:
    """Return the launcher's plan, checked against the script, or data parallelism over all ranks.

    Args:
        world: the ranks that were started.
        launch_options: holds the plan file or the mesh, if there is one.
        batch: the Job's batch, which the plan must repeat.
        microbatches_stated: whether the plan must have the script's number of microbatches.
        precision: the script's precision; None leaves it to the plan.

    Raises:
        PlanError: the plan or the mesh contradicts the script or the number of ranks.
    """
    if launch_options.plan is None:
        mesh = launch_options.mesh or {"replicate": world.world_size}
        if not is_capturing() and math.prod(mesh.values()) != world.world_size:
            raise PlanError(
                f"the mesh {format_mesh(mesh)} has {math.prod(mesh.values())} ranks, but {world.world_size} were "
                "started; make them agree"
            )
        return Plan(batch=batch, precision=precision or "full").on(mesh)
    plan = serialization.load(Plan, launch_options.plan)
    if plan.world_size != world.world_size:
        raise PlanError(
            f"{launch_options.plan}: the mesh has {plan.world_size} ranks, but {world.world_size} were started; start "
            f"{plan.world_size}, or make a plan for {world.world_size}"
        )
    stated: dict[str, Any] = {"global_batch_size": batch.global_batch_size, "unit": batch.unit}
    stated |= {"last_batch": batch.last_batch, "ramp": batch.ramp}
    if microbatches_stated:
        stated["num_microbatches"] = batch.num_microbatches
    for name, value in stated.items():
        if getattr(plan.batch, name) != value:
            raise PlanError(
                f"{launch_options.plan}: batch.{name} = {getattr(plan.batch, name)!r}, but the script's Job says "
                f"{value!r}; make them agree: the batch defines what the run trains"
            )
    if precision is not None and plan.precision != precision:
        raise PlanError(
            f"{launch_options.plan}: precision = {plan.precision!r}, but the script's Job says {precision!r}; make "
            "them agree, or leave precision out of the script"
        )
    return plan
