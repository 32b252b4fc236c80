"""Step time of split, shard and stage beside the hand-written PyTorch equivalent: same model, data, ranks and threads.

As in the DDP suite, both loops live in the same ranks and take turns in short blocks. The hand-written sides are
`parallelize_module` (tensor parallelism), FSDP2's `fully_shard`, and the 1F1B schedule of
`torch.distributed.pipelining`.
"""

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp import _block
from gpt_torch import GPT
from gpt_torch import loss_fn as next_byte_loss
from harness import run_ranks
from workloads import vectors, windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is timed: in each of `launches`, `repeats` blocks of `steps` of each loop, after `warmup` steps."""

    ranks: int = 2
    launches: int = 4
    steps: int = 3
    warmup: int = 4
    repeats: int = 6
    mechanisms: tuple[str, ...] = ("split", "shard", "stage")


QUICK = Sizes(launches=1, warmup=1, repeats=2)

BATCH, MICROBATCHES = 64, 4


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all mechanisms. Returns {"samples": {mechanism: {loop: blocks of step seconds}}, "summary":
    {mechanism: ..}}.
    """
    samples = {}
    for name in sizes.mechanisms:
        launches = [run_ranks(measure_on_rank, sizes.ranks, name, sizes, n % 2 == 0, timeout_s=600)[0]
                    for n in range(sizes.launches)]  # fmt: skip
        samples[name] = {loop: [block for entry in launches for block in entry[loop]] for loop in launches[0]}
    return {"samples": samples, "summary": {name: summary(entry, sizes) for name, entry in samples.items()}}


def summary(samples: dict[str, list[list[float]]], sizes: Sizes) -> dict[str, Any]:
    """Return medians of the blocks' medians, and the ratio block by block."""
    blocks = {loop: [statistics.median(block) for block in times] for loop, times in samples.items()}
    ratios = [ours / theirs for ours, theirs in zip(blocks["tutti"], blocks["torch"], strict=True)]
    launches = [statistics.median(ratios[i : i + sizes.repeats]) for i in range(0, len(ratios), sizes.repeats)]
    return {
        "torch_s": statistics.median(blocks["torch"]),
        "tutti_s": statistics.median(blocks["tutti"]),
        "ratio": statistics.median(ratios),
        "ratio_by_launch": launches,
    }


def measure_on_rank(name: str, sizes: Sizes, tutti_first: bool) -> dict[str, list[list[float]]]:
    """Time both loops of one mechanism."""
    from tutti.comm.world import join_world
    from tutti.host_memory import keep_freed_memory

    join_world()
    keep_freed_memory()
    makers: dict[str, Callable[[], Iterator[None]]] = {
        "tutti": lambda: tutti_loop(name, sizes.ranks),
        "torch": lambda: HAND_WRITTEN[name](sizes.ranks),
    }
    loops = {}
    for loop in sorted(makers, reverse=not tutti_first):
        loops[loop] = makers[loop]()
        next(loops[loop])
    for iterator in loops.values():
        _block(iterator, sizes.warmup)
    times: dict[str, list[list[float]]] = {loop: [] for loop in loops}
    for repeat in range(sizes.repeats):
        for loop in sorted(loops, reverse=bool(repeat % 2)):
            times[loop].append(_block(loops[loop], sizes.steps))
    return times


# The models, and the hand-written loops


class Pair(nn.Module):
    """The MLP of a transformer block, with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def pairs() -> nn.Module:
    """19 M parameters: 784 -> 4 pairs of width 784 -> 10."""
    return nn.Sequential(*(Pair(784) for _ in range(4)), nn.Linear(784, 10))


def gpt() -> nn.Module:
    return GPT(layers=8, width=256, heads=8, context=128)


def tutti_loop(name: str, ranks: int) -> Iterator[None]:
    """Run a Job under a plan with the mechanism; yields after each step."""
    import tutti
    from tutti.config import serialization
    from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan

    batch = 4 * ranks if name == "shard" else BATCH
    microbatches = MICROBATCHES if name == "stage" else 1
    plan = Plan(
        batch=BatchPlan(global_batch_size=batch, num_microbatches=microbatches),
        mesh={name: ranks},  # type: ignore[dict-item]
        layout=(LayoutRule(), LayoutRule(modules="4", placement="replicate")),
        pipeline=PipelinePlan(cuts=("2",)) if name == "stage" else PipelinePlan(),
    )
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    torch.manual_seed(0)
    model = gpt() if name == "shard" else pairs()
    job = tutti.Job(global_batch_size=batch, seed=0)
    data = windows(960) if name == "shard" else vectors(BATCH * 20)
    loss = next_byte_loss if name == "shard" else nn.functional.cross_entropy
    model, _, loader = job.prepare(model, _sgd(model), data, loss)
    for _ in job.epochs(1_000_000):
        for samples in loader:
            job.step(samples)
            yield


def split_by_hand(ranks: int) -> Iterator[None]:
    """Pairs of ColwiseParallel and RowwiseParallel, as in PyTorch's tensor-parallel tutorial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, mesh = pairs(), init_device_mesh("cpu", (ranks,))
    for index in range(4):
        parallelize_module(model[index], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    yield from _plain(model, _sgd(model), vectors(BATCH * 20), BATCH, nn.functional.cross_entropy)


def shard_by_hand(ranks: int) -> Iterator[None]:
    """`fully_shard` on every block and on the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = gpt(), init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    yield from _plain(model, _sgd(model), windows(960), 4, next_byte_loss)


def stage_by_hand(ranks: int) -> Iterator[None]:
    """Two stages, cut in the middle, with 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    rank, whole = dist.get_rank(), pairs()
    module = nn.Sequential(*list(whole)[:2]) if rank == 0 else nn.Sequential(*list(whole)[2:])
    optimizer = _sgd(module)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    loader = DataLoader(vectors(BATCH * 20), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    for _ in itertools.count():
        for inputs, target in loader:
            optimizer.zero_grad(set_to_none=True)
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target, losses=losses)
            optimizer.step()
            loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
            dist.broadcast(loss, src=ranks - 1)  # tutti also gives every rank the loss
            loss.item()
            yield


HAND_WRITTEN: dict[str, Callable[[int], Iterator[None]]] = {
    "split": split_by_hand,
    "shard": shard_by_hand,
    "stage": stage_by_hand,
}


def _plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, batch: int, loss_fn: Callable[..., Any]
) -> Iterator[None]:
    loader = DataLoader(data, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    for _ in itertools.count():
        for inputs, target in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_fn(model(inputs), target)
            loss.backward()
            optimizer.step()
            loss.item()
            yield


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: header and rows, times in milliseconds."""
    table = [
        [
            name,
            f"{1e3 * entry['torch_s']:.1f}",
            f"{1e3 * entry['tutti_s']:.1f}",
            f"{entry['ratio']:.3f}",
            f"{min(entry['ratio_by_launch']):.3f}-{max(entry['ratio_by_launch']):.3f}",
        ]
        for name, entry in result["summary"].items()
    ]
    return ["mechanism", "by hand ms", "tutti ms", "ratio", "(by launch)"], table
