"""What pipeline stages send each other: according to the runtime's placement of a real forward, and as predicted."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from against_one import Subject
from matrix.described import described
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, PipelinePlan, Plan
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.stage_cuts import stages_of
from tutti.cost_model.worker_speed import Array
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.stage_building import cut_stages
from tutti.parallel.pipeline.stage_placement import Placement, place
from tutti.parallel.preview import _fake_world

BATCH = 8


def plan_of(ranks: int, chunks: int = 1, cuts: tuple[str, ...] = ()) -> Plan:
    pipeline = PipelinePlan(schedule="interleaved" if chunks > 1 else "1f1b", stages_per_rank=chunks, cuts=cuts)
    return Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"stage": ranks}, pipeline=pipeline)


def spec_of(subject: Subject) -> ModelSpec:
    """Describe a subject in batches of BATCH."""
    return described(subject.model(), subject.data, subject.loss_fn, batch=BATCH, name="subject")


def inputs_of(subject: Subject) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model for one batch."""
    rows = default_collate([subject.data[row] for row in range(BATCH)])
    inputs = rows if isinstance(rows, dict) else rows[0]
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


def placed(model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placement:
    """Return where the runtime computes each part of a forward."""
    with _fake_world(0, plan.degree("stage")):
        cuts = cut_stages(model, plan, Layout.of(model, Mesh(plan.mesh, 0)), lambda: (args, kwargs))
    assert cuts is not None
    return place(cuts.tracer.trace(lambda: model(*args, **kwargs)), cuts.starts, cuts.holders)


def travelled(placement: Placement) -> Array:
    """Return the bytes that the runtime sends from each stage to each later one, (2, stages, stages).

    The first matrix counts all bytes, the second only those whose gradients are sent back.
    """
    outlines = placement.program.outlines
    nbytes_sent = np.zeros((2, len(placement.parts), len(placement.parts)))
    for source, part in enumerate(placement.parts):
        for target, keys in part.sends.items():
            for key in keys:
                nbytes = torch.Size(outlines[key].shape).numel() * outlines[key].dtype.itemsize
                nbytes_sent[:, source, target] += nbytes, nbytes * outlines[key].requires_grad
    return nbytes_sent


def foreseen(spec: ModelSpec, plan: Plan, samples: int = BATCH) -> Array:
    """Return the same for `samples` samples, from the description alone."""
    stages = stages_of(spec, plan)
    per_sample, fixed = model_table(spec).flow.crossings(stages.stage, stages.count)
    return np.asarray(per_sample * samples + fixed)


def unlike(spec: ModelSpec, plan: Plan, placement: Placement) -> list[tuple[str, int, int]]:
    """Return units whose stage differs in runtime and description: (name, runtime's stage, described stage)."""
    stages = stages_of(spec, plan)
    stage = {module.name: int(at) for module, at in zip(spec.modules, stages.stage, strict=True)}
    differing, seen = [], set()
    for node, at in zip(placement.program.nodes, placement.stages, strict=True):
        if node.unit and node.unit not in seen and stage[node.unit] != at:
            differing.append((node.unit, at, stage[node.unit]))
        seen.add(node.unit)
    return differing
