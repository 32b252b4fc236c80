"""Plans between which checkpoints travel, and what a rank does with them: train, save, resume, compare."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tutti
from against_one import close
from harness import RankFailed, run_ranks
from matrix.families import Family
from matrix.language import FAMILIES as LANGUAGE
from matrix.mixtures import FAMILIES as MIXTURES
from matrix.recommend import FAMILIES as TABLES
from matrix.vision import FAMILIES as VISION
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.errors import TuttiError
from tutti.parallel.layout import gather_whole, local_tensors, to_local
from tutti.parallel.parallelize import IMPLEMENTED_AXES

SAVED_AT, STEPS = 4, 6
"""In the second epoch of three steps each."""

FAMILIES = {family.name: family for family in (*LANGUAGE, *MIXTURES, *TABLES, *VISION)}
GPT, MIXTURE, CNN = "GPT, tied embeddings", "Mixture of experts", "CNN, BatchNorm"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A plan for a family of models; checkpoints go from every way of a family to every other."""

    family: str
    mesh: dict[str, int]
    fields: dict[str, Any] = field(default_factory=dict)
    words: str = ""

    @property
    def name(self) -> str:
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in self.mesh.items())
        return f"{self.family}: {mesh}" + (f", {self.words}" if self.words else "")

    @property
    def plan(self) -> Plan:
        return Plan(batch=BatchPlan(global_batch_size=8, num_microbatches=2), mesh=self.mesh, **self.fields)

    @property
    def missing(self) -> list[str]:
        """Axes whose mechanism is not there yet."""
        return [axis for axis, degree in self.mesh.items() if degree > 1 and axis not in IMPLEMENTED_AXES]


def zero(level: int, **more: Any) -> dict[str, Any]:
    return {"sharding": ShardingPlan(level=level, **more)}  # type: ignore[arg-type]


WIDE = {"layout": (LayoutRule(modules="classify.*", placement="split"),)}

PLANS = (
    Way(family=GPT, mesh={"replicate": 1}),
    Way(family=GPT, mesh={"replicate": 3}),
    Way(family=GPT, mesh={"shard": 2}, fields=zero(1), words="ZeRO-1"),
    Way(family=GPT, mesh={"shard": 3}, fields=zero(2), words="ZeRO-2"),
    Way(family=GPT, mesh={"shard": 2}, fields=zero(3), words="ZeRO-3"),
    Way(family=GPT, mesh={"replicate": 2, "shard": 2}, fields=zero(3, offload="optimizer"), words="ZeRO-3, offload"),
    Way(family=GPT, mesh={"shard": 3}, fields=zero(3, engine="fsdp2"), words="FSDP2 level 3"),
    Way(family=GPT, mesh={"replicate": 2, "shard": 2}, fields=zero(2, engine="fsdp2"), words="FSDP2 level 2"),
    Way(family=GPT, mesh={"split": 2}),
    Way(family=GPT, mesh={"split": 2}, fields={"split_shares": (1.0, 3.0)}, words="unequal parts"),
    Way(family=GPT, mesh={"stage": 2}, fields={"pipeline": PipelinePlan(schedule="1f1b")}),
    Way(
        family=GPT,
        mesh={"stage": 2},
        fields={"pipeline": PipelinePlan(schedule="interleaved", stages_per_rank=2)},
        words="interleaved",
    ),
    Way(family=GPT, mesh={"context": 2}),
    Way(family=GPT, mesh={"split": 2, "stage": 2}),
    Way(family=GPT, mesh={"shard": 2, "split": 2}, fields=zero(3), words="ZeRO-3"),
    Way(family=MIXTURE, mesh={"replicate": 1}),
    Way(family=MIXTURE, mesh={"expert": 2}),
    Way(family=MIXTURE, mesh={"replicate": 3}),
    Way(family="DLRM", mesh={"replicate": 1}),
    Way(family="DLRM", mesh={"table": 2}),
    Way(family="DLRM", mesh={"table": 3}),
    Way(family=CNN, mesh={"replicate": 1}),
    Way(family=CNN, mesh={"space": 2}),
    Way(family=CNN, mesh={"replicate": 2}),
    Way(family=CNN, mesh={"shard": 2}, fields=zero(3), words="ZeRO-3"),
    Way(family=CNN, mesh={"shard": 2}, fields=zero(3, engine="fsdp2"), words="FSDP2 level 3"),
    Way(family=CNN, mesh={"table": 2}, fields=WIDE, words="classifier divided"),
    Way(family=CNN, mesh={"table": 3}, fields=WIDE, words="classifier divided"),
)
"""Add a line here for a plan between which and all others of its family checkpoints are to travel."""


@dataclass
class Result:
    """What training must not depend on. `state`: whole; `losses`: of the steps made."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def train(way: Way, folder: Path, steps: int, *, resume: Path | None = None, save_at: int = 0) -> Result:
    """Train by a way up to `steps` steps, from the start or a checkpoint; save after `save_at`."""
    torch.set_default_dtype(torch.float64)
    family: Family = FAMILIES[way.family]
    subject = family.subject()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    plan = Path.cwd() / f"plan-{os.environ['RANK']}.json"
    os.environ["TUTTI_PLAN"] = str(serialization.save(way.plan, plan))
    options = {name: value for name, value in subject.job.items() if name != "num_microbatches"}
    job = tutti.Job(**{**options, "global_batch_size": 8, "resume": resume, "keep_checkpoints": 0})
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, loader = job.prepare(
        model, optimizer, subject.data, subject.loss_fn, scheduler=scheduler, **subject.prepare
    )
    run, losses = job._run(), []
    while run.state.progress.step < steps:
        for batch in loader:
            losses.append(job.step(batch))
            if run.state.progress.step == save_at:
                job.save()
            if run.state.progress.step == steps:
                break
    parts = {name: to_local(tensor) for name, tensor in local_tensors(model)}
    return Result(losses, gather_whole(run.parallel.layout, run.parallel.world, parts))


def save_all(ways: list[Way], folder: Path) -> dict[str, str]:
    """On a rank: train and save by each way; what failed, by name, in words. One device also goes on to the end."""
    failures = {}
    for way in ways:
        alone = way.plan.world_size == 1
        try:
            result = train(way, folder / way.name, STEPS if alone else SAVED_AT, save_at=SAVED_AT)
        except TuttiError as error:
            failures[way.name] = f"{type(error).__name__}: {error}"
            continue
        if alone:
            torch.save({"losses": result.losses, "state": result.state}, folder / f"{way.family}.pt")
    return failures


def save_everywhere(ways: list[Way], folder: Path) -> dict[str, str]:
    """Checkpoints of every way under `folder`; what failed, by name. Ways of one number of ranks share a launch."""
    failures: dict[str, str] = {}
    for size in sorted({way.plan.world_size for way in ways}):
        some = [way for way in ways if way.plan.world_size == size]
        try:
            failures.update(run_ranks(save_all, size, some, folder)[0])
        except RankFailed:  # which of them, in launches of their own
            for way in some:
                try:
                    failures.update(run_ranks(save_all, size, [way], folder)[0])
                except RankFailed as error:
                    failures[way.name] = str(error)
    return failures


def resume_all(way: Way, sources: list[str], folder: Path, tolerance: float) -> list[str]:
    """On a rank: resume by `way` from each source's checkpoint; how it differs from one device, in words."""
    expected = torch.load(folder / f"{way.family}.pt", weights_only=True)
    found = []
    for number, source in enumerate(sources):
        checkpoint = folder / source / "checkpoints" / f"step-{SAVED_AT:08d}"
        try:
            result = train(way, folder / f"to {way.name}" / str(number), STEPS, resume=checkpoint)
            losses = torch.tensor(expected["losses"][SAVED_AT:])
            close(torch.tensor(result.losses), losses, tolerance, "losses")
            assert result.state.keys() == expected["state"].keys(), "names differ"
            for name, value in expected["state"].items():
                close(result.state[name], value, tolerance, name)
        except (AssertionError, TuttiError) as error:
            found.append(f"{source} -> {way.name}: {error}")
    return found
