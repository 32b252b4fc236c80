"""Shares of the batch that change while a run trains: the run computes what one device does, with the same samples."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Sampler

import tutti
from harness import run_ranks
from trainer.training import ConvNet
from tutti.trainer.rebalance import ShareChange

COUNT, BATCH, EPOCHS = 50, 11, 2
"""Samples, of which neither the batch nor the epoch is a multiple; an epoch has 5 batches, the last one of 6."""

CHANGES = {2: (1.0, 4.0, 2.0, 3.0), 4: (3.0, 1.0, 1.0, 5.0), 8: ()}
"""After so many steps: other shares of the ranks. Twice within the first epoch; at last all of them again."""


class Samples(Dataset[Any]):
    """Images with noise that is drawn when they are read; their numbers come with them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        x = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x + torch.rand(1, 1, 1, dtype=torch.float64), index % 3, index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Samples()
        return (samples[(7 * index) % COUNT] for index in range(COUNT))


class Reversed(Sampler[int]):
    """An order of the script's own, which draws."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).flip(0).tolist())


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a run is told."""

    mesh: str = "replicate={}"
    batch: int = BATCH
    data: Callable[[], Any] = Samples
    job: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)


CASES = {
    "microbatches": Told(job={"num_microbatches": 2, "clip_norm": 0.5}),
    "workers": Told(prepare={"num_workers": 2}),
    "workers that stay": Told(prepare={"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}),
    "sampler": Told(prepare={"sampler": Reversed(), "num_workers": 1}),
    "stream": Told(data=Stream),
    "sharded parameters": Told(mesh="shard={}"),
    "fewer samples than ranks": Told(batch=3),
    "stages": Told(mesh="stage=2,replicate=2", job={"num_microbatches": 2}),
    "split": Told(mesh="split=2,shard=2"),
}


@dataclass
class Trained:
    """What must not depend on the shares, and the samples of this rank in each step."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    evaluation: dict[str, float]
    order: list[list[int]]
    own: list[list[int]]
    said: list[str]
    counted: int


def three(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (batch[0],), {}, batch[1]


def prepared(told: Told, name: str, **settings: Any) -> tuple[tutti.Job, nn.Module, Any]:
    ranks = int(os.environ["WORLD_SIZE"])
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{name}".replace(" ", "-"))
    os.environ["TUTTI_MESH"] = told.mesh.format(ranks) if ranks > 1 else "replicate=1"
    torch.set_default_dtype(torch.float64)
    job = tutti.Job(global_batch_size=told.batch, seed=5, on_slow_rank="rebalance", **told.job, **settings)
    model: Any = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, _, loader = job.prepare(
        model, optimizer, told.data(), nn.functional.cross_entropy, unpack=three, **told.prepare
    )
    return job, model, loader


def change(job: tutti.Job, shares: Sequence[float]) -> None:
    """Ask for other shares, as a window of slow steps does."""
    rebalancer = job._run().loop.rebalancer
    assert rebalancer is not None
    now = tuple(shares)[: len(rebalancer.groups)]
    rebalancer.pending = ShareChange(shares=now, raised=frozenset({0}), times={}, kinds={}, step_s=0.1)


def trained(told: Told, name: str, changes: bool = True, **settings: Any) -> Trained:
    job, _, loader = prepared(told, name, **settings)
    said: list[str] = []
    job._context.screen.say = said.append  # type: ignore[method-assign]
    result = Trained([], {}, {}, [], [], said, 0)
    for _ in job.epochs(EPOCHS):
        for batch in loader:
            share = loader.shares.share
            counts = [part.count for part in share.parts]
            ids = iter(batch[2].tolist())
            own = [[next(ids) for _ in range(part.loaded)][: part.count] for part in share.parts]
            assert sum(counts) == sum(map(len, own))
            result.own.append([number for part in own for number in part])
            result.order.append(loader.shares.indices.tolist())
            result.losses.append(job.step(batch))
            if changes and job.global_step in CHANGES:
                change(job, CHANGES[job.global_step])
    result.evaluation = job.evaluate(Samples(), {}, name="all")
    result.state = job.state_dict()
    result.counted = job._run().state.progress.samples_seen
    return result


def all_of(names: Sequence[str]) -> dict[str, Trained]:
    return {name: trained(CASES[name], name) for name in names}


def same(got: Trained, expected: Trained, words: str) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=1e-12), words
    assert got.evaluation == pytest.approx(expected.evaluation, rel=1e-12), words
    assert got.counted == expected.counted == EPOCHS * COUNT
    for name, value in expected.state.items():
        torch.testing.assert_close(got.state[name], value, rtol=1e-12, atol=1e-12, msg=f"{words}: {name}")


QUICK = ("microbatches", "workers")

GROUPS = ("stages", "split")
"""Meshes of 4 ranks, of which two compute the same samples."""

OTHERS = tuple(name for name in CASES if name not in (*QUICK, *GROUPS))


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (3, QUICK),
        *[
            pytest.param(*given, marks=pytest.mark.long)
            for given in ((2, OTHERS), (3, OTHERS), (4, QUICK), (4, GROUPS))
        ],
    ],
)
def test_a_run_whose_shares_change_is_that_of_one_device(ranks: int, names: tuple[str, ...]) -> None:
    one = run_ranks(all_of, 1, names, timeout_s=120)[0]
    results = run_ranks(all_of, ranks, names, timeout_s=240)
    for name in names:
        runs, sizes = [result[name] for result in results], []
        for run in runs:
            same(run, one[name], name)
        if name in GROUPS:
            assert [run.own for run in runs[2:]] == [run.own for run in runs[:2]]
            del runs[2:]
        for step, everyone in enumerate(zip(*(run.own for run in runs), strict=True)):
            together, whole = [sample for own in everyone for sample in own], one[name].own[step]
            if "num_microbatches" in CASES[name].job:
                together, whole = sorted(together), sorted(whole)
            assert together == whole, f"{name}, step {step}: samples are lost, doubled or in another order"
            sizes.append([len(own) for own in everyone])
        if CASES[name].batch == BATCH:
            assert sizes[1] != sizes[2] != sizes[8], name
            assert sizes[4][-1] < BATCH
            assert sizes[0] == sizes[8], f"{name}: in the end it is as in the beginning"
            assert len([said for said in runs[0].said if " of 11 samples of a batch instead of " in said]) == len(
                CHANGES
            ), name
