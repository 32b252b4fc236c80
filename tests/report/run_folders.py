"""Write run folders row by row as a run writes them, so that every number of their report is known beforehand."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, Conditions, DeviceSpec, LinkSpec, NodeSpec
from tutti.config.model import ModelSpec, ModuleSpec, OpCost
from tutti.config.plan import BatchPlan, Plan
from tutti.config.prediction import Estimate, Prediction, RankMemory
from tutti.config.run_folder import DatasetInfo, RankInfo, Recipe, RunFolder, RunHeader

PHASES = {"data": 0.001, "forward": 0.003, "backward": 0.004, "exposed_communication": 0.001, "optimizer": 0.001}
STEP_S = 0.0105  # the phases above and 0.0005 s of "other"


@dataclass(frozen=True, kw_only=True)
class Story:
    """What a written run did: `epochs` of `steps_per_epoch` steps, evaluated after each one."""

    name: str = "digits"
    world_size: int = 2
    hosts: int = 1
    device: str = "cpu"
    device_model: str = "Example CPU 2.1 GHz"
    epochs: int = 5
    steps_per_epoch: int = 20
    batch: int = 64
    slower: float = 1.0  # factor on every step's time
    quality: tuple[float, ...] = (0.80, 0.90, 0.93, 0.95, 0.96)
    evaluation: str = "test"
    test_sha256: str = "b" * 64
    overlap: int | None = 0
    status: str | None = "completed"  # None: killed, no end row
    precision: str = "full"
    threads: int = 1
    seed: int = 0
    evaluation_s: float = 0.05
    lost_s: float = 0.0  # wall time in no row
    stolen: float = 0.0  # part of the core time that other machines had
    extra: dict[str, str] = field(default_factory=dict)
    kind: str = "ImageFolder"
    sums: tuple[str, ...] = ("shared memory",)  # of ranks in turn


def header(story: Story) -> RunHeader:
    ranks = tuple(
        RankInfo(rank=r, local_rank=r, host=f"node{r % story.hosts}", device=story.device,
                 device_model=story.device_model, pid=100 + r, threads=story.threads,
                 sums=story.sums[r % len(story.sums)])
        for r in range(story.world_size)
    )  # fmt: skip
    return RunHeader(
        name=story.name,
        script="digits_tutti.py",
        arguments=(),
        command=f"tutti run digits_tutti.py --nproc {story.world_size}",
        started_utc="2025-11-21T11:40:02+00:00",
        world_size=story.world_size,
        backend="gloo",
        ranks=ranks,
        versions={"python": "3.11.2", "torch": "2.13.0", "tutti": "0.1.0"},
        platform="Linux-6.1-x86_64",
        git_commit="caa88de0" * 5,
        git_dirty=False,
        environment_sha256="e" * 64,
        model="DigitsCNN",
        parameters=9098,
        recipe=Recipe(
            optimizer="SGD(momentum 0.9)",
            learning_rate=0.1,
            global_batch_size=story.batch,
            unit="samples",
            num_microbatches=1,
            last_batch="keep",
            precision=story.precision,
            seed=story.seed,
            learning_rate_rule={"base_lr": 0.1, "base_batch_size": 64, "rule": "linear"},
        ),
        data=DatasetInfo(
            name="digits-train",
            kind=story.kind,
            samples=story.batch * story.steps_per_epoch,
            sha256="a" * 64,
            hash_covers="all samples",
            input_shapes=((1, 8, 8),),
        ),
        extra=story.extra,
    )


def rows(story: Story) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl: step times from PHASES, the first one ten times as slow."""
    out: list[dict[str, Any]] = [
        {"kind": "start", "time_s": 0.0, "resumed_at_step": 0, "startup_s": {"import": 1.5, "rendezvous": 0.1}}
    ]
    clock, step, total = 0.0, 0, story.epochs * story.steps_per_epoch
    for epoch in range(story.epochs):
        for _ in range(story.steps_per_epoch):
            step += 1
            slow = story.slower * (10.0 if step == 1 else 1.0)
            clock += STEP_S * slow
            out.append(step_row(story, step, epoch, clock, slow, total))
        clock += story.evaluation_s
        out.append(evaluate_row(story, step, epoch, clock))
        out.append({"kind": "epoch", "epoch": epoch, "step": step, "time_s": clock})
    clock += 0.02
    out.append({"kind": "checkpoint", "step": step, "time_s": clock, "wall_s": 0.02, "path": "x", "nbytes": 1000})
    out.append(
        {"kind": "memory", "time_s": clock, "step": step, "rank": 0, "peak_nbytes": 200_000_000, "device": "cpu"}
    )
    if story.status is not None:
        clock += story.lost_s
        out.append({"kind": "end", "status": story.status, "time_s": clock, "unaccounted_s": story.lost_s})
    return out


def step_row(story: Story, step: int, epoch: int, clock: float, slow: float, total: int) -> dict[str, Any]:
    phases = {name: seconds * slow for name, seconds in {**PHASES, "other": 0.0005}.items()}
    ring = 2 * (story.world_size - 1) / story.world_size
    return {
        "kind": "step", "step": step, "epoch": epoch, "wall_s": STEP_S * slow,
        "loss": 2.3 * math.exp(-3.0 * step / total) + 0.02 * math.sin(1.7 * step), "learning_rate": 0.1,
        "samples": story.batch, "tokens": None, "samples_seen": step * story.batch, "grad_norm": None,
        "skipped": False, "sent_nbytes": int(ring * 9098 * 4), "loss_scale": None, "total_steps": total,
        "phases": phases, "time_s": clock,
    }  # fmt: skip


def evaluate_row(story: Story, step: int, epoch: int, clock: float) -> dict[str, Any]:
    quality = story.quality[min(epoch, len(story.quality) - 1)]
    data = DatasetInfo(
        name="digits-test", kind=story.kind, samples=360, sha256=story.test_sha256, hash_covers="all samples"
    )
    return {
        "kind": "evaluate", "name": story.evaluation, "step": step, "epoch": epoch, "wall_s": story.evaluation_s,
        "samples": 360, "values": {"loss": 2.2 * (1 - quality) + 0.1, "accuracy": quality},
        "data": serialization.to_data(data), "overlap_with_training": story.overlap, "time_s": clock,
    }  # fmt: skip


def cluster(cores: int = 4) -> ClusterSpec:
    device = DeviceSpec(
        name="cpu", kind="cpu", memory_nbytes=8 * 10**9, memory_bandwidth_bytes_per_s=2e10,
        peak_flops_per_s={"float32": 1e11}, cores=cores, source="probe of this machine", evidence="measured",
    )  # fmt: skip
    link = LinkSpec(tier="node", latency_s=4e-5, bandwidth_bytes_per_s=2e9, source="probe of this machine",
                    evidence="measured")  # fmt: skip
    node = NodeSpec(name="here", device="cpu", memory_nbytes=8 * 10**9)
    conditions = Conditions(measured_utc="2025-11-21T11:00:00+00:00", cores_granted=cores, load_at_start=0.1,
                            load_at_end=0.3, versions={})  # fmt: skip
    return ClusterSpec(name="here", devices={"cpu": device}, nodes=(node,), links=(link,), conditions=conditions)


def model(batch_statistics: bool = False) -> ModelSpec:
    op = OpCost(kind="gemm", flops_forward=1e6, flops_backward=2e6, nbytes_forward=1e4, nbytes_backward=2e4)
    module = ModuleSpec(name="", kind="DigitsCNN", parameters=9098, ops=(op,), batch_statistics=batch_statistics)
    return ModelSpec(name="DigitsCNN", modules=(module,))


def prediction(plan: Plan) -> Prediction:
    memory = RankMemory(parameters=36_392, gradients=36_392, optimizer=36_392, activations=20_000_000,
                        communication=36_392, buffers=0, reserve=160_000_000)  # fmt: skip
    return Prediction(
        plan_digest=serialization.digest(plan),
        step_time_s=Estimate(value=0.0095, low=0.008, high=0.012),
        phases={"data": 0.0008, "forward": 0.0027, "backward": 0.0042, "exposed_communication": 0.0010,
                "optimizer": 0.0008},
        memory_nbytes=Estimate(value=memory.total, low=0.8 * memory.total, high=1.3 * memory.total),
        memory=memory,
        fits=True,
        sent_nbytes_per_rank=36_392.0,
        throughput_per_s=64 / 0.0095,
        model_flops_per_s=3e6 * 64 / 0.0095,
        devices=2,
        notes=("The step is limited by the backward pass.",),
    )  # fmt: skip


def write_run(
    path: Path, story: Story | None = None, *, complete: bool = True, metrics: list[dict[str, Any]] | None = None
) -> Path:
    """Write a run folder; `complete` adds plan, cluster, model and prediction. Returns `path`."""
    story = story or Story()
    folder = RunFolder(path)
    serialization.save(header(story), folder.header)
    write_lines(folder.metrics, rows(story) if metrics is None else metrics)
    for rank in range(story.world_size):
        write_lines(folder.rank(rank) / "metrics.jsonl", rank_rows(story, rank))
    if complete:
        plan = Plan(batch=BatchPlan(global_batch_size=story.batch), mesh={"replicate": story.world_size})
        serialization.save(plan, folder.plan)
        serialization.save(cluster(), folder.cluster)
        serialization.save(model(), folder.model)
        serialization.save(prediction(plan), folder.prediction)
    return path


def rank_rows(story: Story, rank: int) -> list[dict[str, Any]]:
    lead = 0.0004 * rank  # higher ranks compute faster and wait for the others
    steps = [
        {
            **{key: row[key] for key in ("kind", "step", "wall_s")},
            "phases": {
                **row["phases"],
                "backward": row["phases"]["backward"] - lead,
                "exposed_communication": row["phases"]["exposed_communication"] + lead,
            },
        }
        for row in rows(story)
        if row["kind"] == "step"
    ]
    last = steps[-1]["step"] if steps else 0
    return [*steps, {"kind": "memory", "step": last, "rank": rank, "peak_nbytes": 200_000_000 - 5_000_000 * rank,
                     "device": "cpu"}, {"kind": "machine", "step": last, "stolen": story.stolen}]  # fmt: skip


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def vary(story: Story, **changes: Any) -> Story:
    return replace(story, **changes)
