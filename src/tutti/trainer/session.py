"""Session: what stands when a Job is made, before it has a model: the world, the plan, the settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.comm.clock import PhaseClock
from tutti.comm.world import World, join
from tutti.config import codec
from tutti.config.bucket_words import with_buckets
from tutti.config.mesh_words import mesh_in_words
from tutti.config.plan import BatchPlan, Plan
from tutti.config.sync_words import with_mode
from tutti.config.words import Precision
from tutti.data.seeds import derive_seed
from tutti.environment import Place, Wishes
from tutti.errors import PlanError
from tutti.trainer.capture import is_capturing
from tutti.trainer.host_memory import map_large_blocks
from tutti.trainer.screen import Screen
from tutti.trainer.state import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The surroundings of a run."""

    settings: Settings
    wishes: Wishes
    world: World
    plan: Plan
    stated_mesh: bool
    clock: PhaseClock
    screen: Screen
    name: str | None
    folder: Path | None
    resume: Path | None
    facts: Mapping[str, str]

    @property
    def model_seed(self) -> int:
        """What initial parameters are drawn from: the same on all ranks, but for members of an ensemble."""
        member = self.world.rank if self.plan.sync.mode == "ensemble" else 0
        return derive_seed(self.settings.seed, "model", *((member,) if member else ()))


def open_session(
    settings: Settings,
    wishes: Wishes,
    batch: BatchPlan,
    *,
    microbatches_stated: bool,
    precision: Precision | None,
    name: str | None,
    folder: Path | None,
    resume: Path | None,
    facts: Mapping[str, str],
) -> Session:
    """Join the world (alone while a script is only looked at) and settle the plan."""
    rule = settings.lr_rule
    if batch.ramp and rule is not None and rule.warmup_epochs is not None:
        raise PlanError(
            f"LRRule.warmup_epochs = {rule.warmup_epochs} with a batch_ramp: epochs differ in their steps; give "
            "warmup_steps"
        )
    world = join(Place() if is_capturing() else None)
    if not is_capturing():
        map_large_blocks()
    return Session(
        settings=settings,
        wishes=wishes,
        world=world,
        plan=_as_wished(
            plan_of(world, wishes, batch, microbatches_stated=microbatches_stated, precision=precision), wishes
        ),
        stated_mesh=wishes.plan is not None or wishes.mesh is not None,
        clock=PhaseClock(world.device),
        screen=Screen(world, supervised=wishes.supervised),
        name=name,
        folder=folder,
        resume=resume,
        facts=facts,
    )


def _as_wished(plan: Plan, wishes: Wishes) -> Plan:
    """The plan with sums, a mode and buckets as the launcher says."""
    return with_buckets(with_mode(plan.compressed(wishes.compress), wishes.sync), wishes.bucket_mb)


def plan_of(
    world: World, wishes: Wishes, batch: BatchPlan, *, microbatches_stated: bool, precision: Precision | None
) -> Plan:
    """The plan to run: the launcher's, checked against what the script says, or data parallel over all ranks."""
    if wishes.plan is None:
        mesh = wishes.mesh or {"replicate": world.world_size}
        if not is_capturing() and math.prod(mesh.values()) != world.world_size:
            raise PlanError(
                f"the mesh {mesh_in_words(mesh)} has {math.prod(mesh.values())} ranks, but {world.world_size} were "
                "started; make them agree"
            )
        return Plan(batch=batch, mesh=mesh, precision=precision or "full")
    plan = codec.load(Plan, wishes.plan)
    if plan.world_size != world.world_size:
        raise PlanError(
            f"{wishes.plan}: the mesh has {plan.world_size} ranks, but {world.world_size} were started; start "
            f"{plan.world_size}, or make a plan for {world.world_size}"
        )
    stated: dict[str, Any] = {"global_batch_size": batch.global_batch_size, "unit": batch.unit}
    stated |= {"last_batch": batch.last_batch, "ramp": batch.ramp}
    if microbatches_stated:
        stated["num_microbatches"] = batch.num_microbatches
    for name, value in stated.items():
        if getattr(plan.batch, name) != value:
            raise PlanError(
                f"{wishes.plan}: batch.{name} = {getattr(plan.batch, name)!r}, but the script's Job says {value!r}; "
                "make them agree: the batch is the meaning of the run"
            )
    if precision is not None and plan.precision != precision:
        raise PlanError(
            f"{wishes.plan}: precision = {plan.precision!r}, but the script's Job says {precision!r}; make them agree, "
            "or leave precision out of the script"
        )
    return plan
