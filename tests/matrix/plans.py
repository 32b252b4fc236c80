"""The columns of the matrix: plans, by name, in groups."""

from dataclasses import dataclass, field
from typing import Any

import torch

from matrix.families import Family
from tutti.config.plan import LayoutRule, PipelinePlan, ShardingPlan
from tutti.config.vocabulary import AxisName, ScheduleName
from tutti.parallel.parallelize import IMPLEMENTED_AXES

SEES_SEQUENCES = ("GPT, tied embeddings", "BERT", "GPT-2", "Llama", "ViT", "T5")
SEES_SPACE = ("CNN, BatchNorm", "ResNet, 12 channels", "3-D U-Net", "CosmoFlow")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-2}
"""Of any loss, gradient, parameter or buffer: in float64 the largest difference of an element relative to the largest
element; in float32, the master copy of bfloat16 arithmetic here, the root mean square of the difference relative to the
tensor's, beyond what bfloat16's own rounding explains (8e-3 an operation)."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A plan without its batch. `quick`: rows of which `make test` demands that they are exact; `fields`: of Plan."""

    name: str
    group: str
    mesh: dict[AxisName, int]
    fields: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    recompute: bool = False
    quick: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        number = 1
        for degree in self.mesh.values():
            number *= degree
        return number

    @property
    def precision(self) -> str:
        return str(self.fields.get("precision", "full"))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "full" else torch.float32

    @property
    def missing(self) -> list[str]:
        """Axes of the mesh whose mechanism is not there yet."""
        return [axis for axis, degree in self.mesh.items() if degree > 1 and axis not in IMPLEMENTED_AXES]

    def divides(self, kind: str) -> int:
        """Ranks among which an equal part of parameters, gradients or optimizer state is divided."""
        sharding: ShardingPlan = self.fields.get("sharding", ShardingPlan())
        least = {"optimizer": 1, "gradients": 2, "parameters": 3}[kind]
        number = self.mesh.get("shard", 1) if sharding.level >= least else 1
        for axis in ("split", "stage", "expert", "table"):
            number *= self.mesh.get(axis, 1)
        return number

    def plan(self, family: Family) -> dict[str, Any]:
        """The plan's fields for a row, with those of its batch under "batch"."""
        fields = dict(self.fields)
        if self.recompute:
            fields["layout"] = (LayoutRule(), LayoutRule(modules=family.blocks, recompute=True))
        cuts = (family.cuts or {}).get(self.mesh.get("stage", 1))
        if cuts:
            given: PipelinePlan = fields.get("pipeline", PipelinePlan())
            fields["pipeline"] = PipelinePlan(schedule=given.schedule, stages_per_rank=given.stages_per_rank, cuts=cuts)
        return {"mesh": dict(self.mesh), "batch": {"num_microbatches": self.microbatches}, **fields}


def _shard(level: int, **more: Any) -> dict[str, Any]:
    return {"sharding": ShardingPlan(level=level, **more)}  # type: ignore[arg-type]


def _stage(schedule: ScheduleName) -> dict[str, Any]:
    return {"pipeline": PipelinePlan(schedule=schedule, stages_per_rank=2 if schedule == "interleaved" else 1)}


def _data() -> list[Column]:
    return [
        Column(name="replicate 2", group="data", mesh={"replicate": 2}, quick=("LSTM translator, attention", "DLRM")),
        Column(name="replicate 3", group="data", mesh={"replicate": 3}, quick=("3-D U-Net",)),
        Column(name="replicate 4", group="data", mesh={"replicate": 4}, quick=("CNN, BatchNorm",)),
        Column(
            name="replicate 2, 4 microbatches", group="data", mesh={"replicate": 2}, microbatches=4, quick=("BERT",)
        ),
        Column(name="replicate 2, recompute", group="data", mesh={"replicate": 2}, recompute=True, quick=("ViT",)),
        Column(
            name="replicate 2, bf16",
            group="data",
            mesh={"replicate": 2},
            fields={"precision": "bfloat16"},
            quick=("MLP",),
        ),
    ]


def _sharded() -> list[Column]:
    columns = []
    first = {1: "T5", 2: "CosmoFlow", 3: "Llama"}
    second = {1: "MLP", 2: "GPT-2", 3: "CNN, BatchNorm"}
    for level in (1, 2, 3):
        for mesh, quick in (
            ({"shard": 2}, (first[level],)),
            ({"shard": 4}, ()),
            ({"replicate": 2, "shard": 2}, (second[level],)),
        ):
            words = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())
            columns.append(
                Column(name=f"ZeRO-{level}, {words}", group="sharded", mesh=mesh, fields=_shard(level), quick=quick)  # type: ignore[arg-type]
            )
    three = [
        ("4 microbatches", {"microbatches": 4}, _shard(3), ("GPT, tied embeddings",)),
        ("recompute", {"recompute": True}, _shard(3), ("BERT",)),
        ("bf16", {}, {**_shard(3), "precision": "bfloat16"}, ()),
        ("optimizer on host", {}, _shard(3, offload="optimizer"), ()),
        ("parameters on host", {}, _shard(3, offload="parameters"), ()),
    ]
    for words, options, fields, quick in three:
        columns.append(
            Column(
                name=f"ZeRO-3, shard 2, {words}",
                group="sharded",
                mesh={"shard": 2},
                fields=fields,
                quick=quick,
                **options,  # type: ignore[arg-type]
            )
        )
    return [*columns, *_fsdp2()]


def _fsdp2() -> list[Column]:
    """Levels 2 and 3 by torch's fully_shard."""

    def column(level: int, words: str, quick: tuple[str, ...] = (), **options: Any) -> Column:
        mesh, more = options.pop("mesh", {"shard": 2}), options.pop("fields", {})
        fields = {**_shard(level, engine="fsdp2", offload=options.pop("offload", "none")), **more}
        axes = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())
        name = ", ".join(filter(None, (f"FSDP2 level {level}", axes, words)))
        return Column(name=name, group="sharded", mesh=mesh, fields=fields, quick=quick, **options)

    both: dict[AxisName, int] = {"replicate": 2, "shard": 2}
    return [
        *(column(level, "", mesh={"shard": 3}) for level in (2, 3)),
        column(2, "", ("GPT, tied embeddings",), mesh=both),
        column(3, "", mesh=both),
        column(2, "4 microbatches", microbatches=4),
        column(3, "4 microbatches", ("LSTM translator, attention",), microbatches=4),
        column(3, "recompute", recompute=True),
        column(3, "bf16", fields={"precision": "bfloat16"}),
        column(3, "parameters on host", offload="parameters"),
    ]


def _split() -> list[Column]:
    some = {"group": "split", "mesh": {"split": 2}}
    return [
        Column(name="split 2", quick=("GPT, tied embeddings", "Llama", "LSTM translator, attention"), **some),  # type: ignore[arg-type]
        Column(name="split 4", group="split", mesh={"split": 4}, quick=("GPT-2",)),
        Column(name="split 2, 4 microbatches", microbatches=4, quick=("T5",), **some),  # type: ignore[arg-type]
        Column(name="split 2, recompute", recompute=True, quick=("BERT",), **some),  # type: ignore[arg-type]
        Column(name="split 2, bf16", fields={"precision": "bfloat16"}, quick=("MLP",), **some),  # type: ignore[arg-type]
    ]


def _stages() -> list[Column]:
    columns = []
    quick = {"gpipe": "GPT-2", "1f1b": "GPT, tied embeddings", "interleaved": "BERT", "zero-bubble": "MLP"}
    schedules: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    for degree in (2, 4):
        for schedule in schedules:
            columns.append(
                Column(
                    name=f"stage {degree}, {schedule}",
                    group="stages",
                    mesh={"stage": degree},
                    fields=_stage(schedule),
                    microbatches=4,
                    quick=(quick[schedule],) if degree == 2 else ("Llama",) if schedule == "1f1b" else (),
                )
            )
    return [
        *columns,
        Column(
            name="stage 2, recompute",
            group="stages",
            mesh={"stage": 2},
            fields=_stage("1f1b"),
            microbatches=4,
            recompute=True,
            quick=("ResNet, 12 channels",),
        ),
        Column(
            name="stage 2, bf16",
            group="stages",
            mesh={"stage": 2},
            fields={**_stage("1f1b"), "precision": "bfloat16"},
            microbatches=4,
        ),
    ]


def _others() -> list[Column]:
    return [
        Column(name="context 2, ring", group="others", mesh={"context": 2}, quick=("GPT, tied embeddings",)),
        Column(
            name="context 2, all-to-all",
            group="others",
            mesh={"context": 2},
            fields={"context": "all-to-all"},
            quick=("Llama",),
        ),
        Column(name="expert 2", group="others", mesh={"expert": 2}, quick=("Mixture of experts",)),
        Column(name="space 2", group="others", mesh={"space": 2}, quick=("3-D U-Net", "ResNet, 12 channels")),
        Column(
            name="space 2 x 2", group="others", mesh={"space": 4}, fields={"space_grid": (2, 2)}, quick=("CosmoFlow",)
        ),
        Column(name="table 2", group="others", mesh={"table": 2}, quick=("DLRM",)),
        Column(
            name="table 2, linear layers",
            group="others",
            mesh={"table": 2},
            fields={"layout": (LayoutRule(placement="split"),)},
            quick=("CNN, BatchNorm",),
        ),
    ]


def _two(one: AxisName, other: AxisName, quick: tuple[str, ...] = (), level: int = 3) -> Column:
    sharded = "shard" in (one, other)
    return Column(
        name=f"{f'ZeRO-{level}, ' if sharded else ''}{one} 2 x {other} 2",
        group="two axes",
        mesh={one: 2, other: 2},
        fields=_shard(level) if sharded else {},
        microbatches=4 if "stage" in (one, other) else 1,
        quick=quick,
    )


def _pairs() -> list[Column]:
    return [
        _two("replicate", "split", ("GPT, tied embeddings",)),
        _two("replicate", "stage", ("BERT",)),
        _two("replicate", "context", ("GPT-2",)),
        _two("replicate", "expert", ("Mixture of experts",)),
        _two("replicate", "space", ("CNN, BatchNorm",)),
        _two("replicate", "table", ("DLRM",)),
        _two("shard", "split", ("Llama",)),
        _two("shard", "split", level=1),
        _two("shard", "stage"),
        _two("shard", "stage", ("GPT-2",), level=1),
        _two("shard", "context"),
        _two("shard", "expert"),
        _two("shard", "space"),
        _two("shard", "table", ("DLRM",)),
        _two("expert", "split"),
        _two("expert", "stage"),
        _two("split", "stage", ("T5",)),
        _two("split", "context"),
        _two("split", "space"),
        _two("stage", "context"),
        _two("stage", "space"),
    ]


def _triples() -> list[Column]:
    meshes: tuple[dict[AxisName, int], ...] = (
        {"replicate": 2, "split": 2, "stage": 2},
        {"shard": 2, "split": 2, "stage": 2},
        {"replicate": 2, "shard": 2, "split": 2},
        {"replicate": 2, "shard": 2, "stage": 2},
        {"replicate": 2, "split": 2, "context": 2},
        {"replicate": 2, "expert": 2, "split": 2},
    )
    return [
        Column(
            name=("ZeRO-1, " if "shard" in mesh else "") + " x ".join(f"{axis} {n}" for axis, n in mesh.items()),
            group="three axes",
            mesh=mesh,
            fields=_shard(1) if "shard" in mesh else {},
            microbatches=4 if "stage" in mesh else 1,
        )
        for mesh in meshes
    ]


def columns() -> dict[str, Column]:
    """Every column by its name, in the order of the page."""
    every = [*_data(), *_sharded(), *_split(), *_stages(), *_others(), *_pairs(), *_triples()]
    return {column.name: column for column in every}


GROUPS = {
    "data": "Replicas",
    "sharded": "Sharded (ZeRO)",
    "split": "Split (tensor parallel)",
    "stages": "Stages (pipeline)",
    "others": "Context, experts, space, tables",
    "two axes": "Two axes",
    "three axes": "Three axes",
}
"""Headings of the groups of columns."""
