"""Peak memory of a rank beyond a tiny model's, beside the prediction of `tutti plan`.

Memory does not depend on load, so this suite may run beside others. The reserve is the peak of the same script with
a tiny model: interpreter, libraries and connections. Each case is measured twice: after the first updates, when
every large block still has its own mapping (`tutti.host_memory`), and at the end, when one heap holds them. The
difference is the overhead of the heap.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from gpt_torch import GPT
from gpt_torch import loss_fn as next_byte_loss
from harness import run_ranks
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.config.vocabulary import AxisName
from unet3d_torch import UNet3d, datasets


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Number of steps of each case, and the cases that are run."""

    steps: int = 6
    cases: tuple[str, ...] = (
        "mlp-1", "mlp-2", "gpt-1", "gpt-2", "zero1-2", "zero1-4", "zero2-2", "zero2-4", "zero3-2", "zero3-4",
        "split-2", "unet-1", "space-2", "mlp-2-frugal", "unet-1-frugal", "space-2-frugal",
    )  # fmt: skip


QUICK = Sizes(steps=3, cases=("mlp-1", "split-2", "zero3-2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model in its size or a tiny one (`model(tiny)`), with `data(samples, tiny)`, `loss(output, target)`,
    optimizer and batch.
    """

    model: Callable[[bool], nn.Module]
    data: Callable[[int, bool], Dataset[Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: int


def _mlp(tiny: bool) -> nn.Module:
    width = 16 if tiny else 200_000
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def _vectors(samples: int, tiny: bool) -> Dataset[Any]:
    return TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,)))


def _gpt(tiny: bool) -> nn.Module:
    return GPT(layers=1, width=16, heads=2, context=16) if tiny else GPT(layers=6, width=512, heads=8, context=64)


def _tokens(samples: int, tiny: bool) -> Dataset[Any]:
    tokens = torch.randint(256, (samples, 17 if tiny else 65))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _unet(tiny: bool) -> nn.Module:
    return UNet3d(2 if tiny else 16, 2)


def _volumes(samples: int, tiny: bool) -> Dataset[Any]:
    balls = datasets(samples + samples // 2, 8 if tiny else 32)[0]
    return TensorDataset(*balls[:samples])


WORKLOADS = {
    "mlp": Workload(model=_mlp, data=_vectors, loss=F.cross_entropy, optimizer=torch.optim.AdamW, batch=32),
    "gpt": Workload(model=_gpt, data=_tokens, loss=next_byte_loss, optimizer=torch.optim.AdamW, batch=8),
    "unet": Workload(model=_unet, data=_volumes, loss=F.cross_entropy, optimizer=torch.optim.SGD, batch=4),
}
LEVELS: dict[str, Literal[1, 2, 3]] = {"zero1": 1, "zero2": 2, "zero3": 3}
AXES: dict[str, AxisName] = {"split": "split", "space": "space", **dict.fromkeys(LEVELS, "shard")}


FRUGAL = "-frugal"
"""Cases with this suffix return freed memory, as `tutti run --frugal` does."""


def workload_of(case: str) -> str:
    """Return the workload of a case: an MLP for "mlp-2", a GPT for "zero3-4"."""
    kind = case.removesuffix(FRUGAL).rpartition("-")[0]
    return {"space": "unet"}.get(kind, kind if kind in WORKLOADS else "gpt")


def plan_of(case: str) -> Plan:
    """Return the plan of a case: sharding level 3 on 4 ranks for "zero3-4"; replicas for a workload's name."""
    kind, _, ranks = case.removesuffix(FRUGAL).rpartition("-")
    sharding = ShardingPlan(level=LEVELS[kind]) if kind in LEVELS else ShardingPlan()
    batch = BatchPlan(global_batch_size=WORKLOADS[workload_of(case)].batch)
    return Plan(batch=batch, mesh={AXES.get(kind, "replicate"): int(ranks)}, sharding=sharding)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all cases. Returns {"reserve_nbytes": {workload: ..}, "summary": {case: bytes beyond the reserve, and
    predicted}}.
    """
    names = sorted({workload_of(case) for case in sizes.cases})
    described = {name: run_ranks(describe, 1, name, timeout_s=300)[0] for name in names}
    tiny = {name: run_ranks(train, 2, f"{name}-2", sizes.steps, True, timeout_s=600) for name in names}
    reserve = {name: max(last for _, last in peaks) for name, peaks in tiny.items()}
    summary = {}
    for case in sizes.cases:
        name = workload_of(case)
        peaks = run_ranks(train, plan_of(case).world_size, case, sizes.steps, False, timeout_s=900)
        first, beyond = ([peak - reserve[name] for peak in figures] for figures in zip(*peaks, strict=True))
        summary[case] = compared(first, beyond, arithmetic(described[name], case))
    return {"reserve_nbytes": reserve, "summary": summary}


def compared(first: list[int], beyond: list[int], expected: dict[str, float]) -> dict[str, Any]:
    """Return the bytes of each rank beyond the reserve, in the first updates and in all steps; ratios are those of
    the fullest rank.
    """
    return {
        "first_nbytes": first,
        "beyond_nbytes": beyond,
        "arithmetic": expected,
        "first_ratio": max(first) / expected["total"],
        "ratio": max(beyond) / expected["total"],
    }


def arithmetic(model: Any, case: str) -> dict[str, float]:
    """Return the predicted bytes of the fullest rank by kind, without the reserve."""
    import dataclasses

    from matrix.foreseen import HOST
    from tutti.cost_model import predict

    memory = predict(model, HOST, plan_of(case)).memory
    parts = {key: value for key, value in dataclasses.asdict(memory).items() if key != "reserve"}
    return {**parts, "total": memory.total - memory.reserve}


def describe(name: str) -> Any:
    """Return the workload's ModelSpec; runs in its own process."""
    import tutti
    from tutti.commands.describe import describe_captured
    from tutti.trainer.capture import capturing

    work = WORKLOADS[name]
    job = tutti.Job(global_batch_size=work.batch)
    model = work.model(False)
    with capturing() as capture:
        job.prepare(model, work.optimizer(model.parameters(), lr=1e-3), work.data(work.batch, False), work.loss)
    return describe_captured(capture.captured, name=name)


def train(case: str, steps: int, tiny: bool) -> tuple[int, int]:
    """Make some steps on one rank; returns this process's peak in bytes after the first updates, and at the end."""
    import tutti
    from tutti.config import serialization
    from tutti.host_memory import WARMUP_UPDATES
    from tutti.trainer.run_end import peak_memory_nbytes

    work = WORKLOADS[workload_of(case)]
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan_of(case), Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_FRUGAL"] = str(int(case.endswith(FRUGAL)))
    job = tutti.Job(global_batch_size=work.batch)
    model = work.model(tiny)
    optimizer = work.optimizer(model.parameters(), lr=1e-3)
    model, _, loader = job.prepare(model, optimizer, work.data(work.batch * steps, tiny), work.loss)
    peaks = []
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
            peaks.append(peak_memory_nbytes(job.device))
    return peaks[min(WARMUP_UPDATES, len(peaks)) - 1], peak_memory_nbytes(job.device)


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    parts = ["states MB", "activations MB", "communication MB", "predicted MB"]
    header = ["case", *parts, "measured MB by rank", "ratio after first updates", "ratio"]
    table = []
    for case, entry in result["summary"].items():
        megabytes = {key: value / 1e6 for key, value in entry["arithmetic"].items()}
        states = megabytes["parameters"] + megabytes["gradients"] + megabytes["optimizer"] + megabytes["buffers"]
        peaks = " ".join(f"{nbytes / 1e6:.0f}" for nbytes in entry["beyond_nbytes"])
        numbers = [states, megabytes["activations"], megabytes["communication"], megabytes["total"]]
        table.append(
            [
                case,
                *(f"{number:.0f}" for number in numbers),
                peaks,
                f"{entry['first_ratio']:.2f}",
                f"{entry['ratio']:.2f}",
            ]
        )
    return header, table
