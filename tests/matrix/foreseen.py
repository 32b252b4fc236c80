"""What a plan is predicted to hold: the model of a family described once, its memory predicted under every plan."""

import contextlib
from pathlib import Path
from typing import Any

import torch

import tutti
from matrix.families import families
from tutti.commands.describe import describe_captured
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.cost_model import predict
from tutti.errors import TuttiError
from tutti.trainer.capture import capturing

HOST = ClusterSpec(
    name="any host",
    devices={
        "cpu": DeviceSpec(
            name="cpu",
            kind="cpu",
            memory_nbytes=2**34,
            memory_bandwidth_bytes_per_s=1e10,
            peak_flops_per_s={"float64": 1e10, "float32": 1e10, "bfloat16": 1e10},
            cores=8,
            source="any: memory does not depend on speed",
            evidence="assumed",
        )
    },
    nodes=(NodeSpec(name="host", device="cpu", devices_per_node=8, memory_nbytes=2**37),),
    links=(LinkSpec(tier="node", latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="any", evidence="assumed"),),
)


def describe_family(name: str, path: Path) -> None:
    """Write the ModelSpec of a family, in float64."""
    torch.set_default_dtype(torch.float64)
    subject = families()[name].subject()
    job = tutti.Job(global_batch_size=subject.batch, **subject.job)
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    with capturing() as capture:
        job.prepare(model, optimizer, subject.data, subject.loss_fn, **subject.prepare)
    if capture.captured is not None:
        serialization.save(describe_captured(capture.captured, name=name), path)


def foreseen_nbytes(model: Path, batch: int, plan: dict[str, Any]) -> int | None:
    """Bytes of tensors alive at the peak of the fullest rank, as predicted; None where it is not predicted."""
    fields = {key: value for key, value in plan.items() if key != "batch"}
    with contextlib.suppress(TuttiError):
        spec = serialization.load(ModelSpec, model)
        whole = Plan(batch=BatchPlan(global_batch_size=batch, **plan["batch"]), **fields)
        memory = predict(spec, HOST, whole).memory
        return round(memory.total - memory.reserve - memory.script)
    return None
