"""Shares of the batch that change while a run trains: the run computes what one device does, with the same samples."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Sampler

import fakegpu
import tutti
from fakegpu import needs_fakegpu
from harness import run_ranks
from trainer.training import ConvNet
from tutti.errors import LaunchError, PlanError, RankMismatchError
from tutti.trainer import own_times
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
    model: Callable[[], nn.Module] = ConvNet
    job: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)


CASES = {
    "microbatches": Told(job={"num_microbatches": 2, "clip_norm": 0.5}),
    "workers": Told(prepare={"num_workers": 1}),
    "workers that stay": Told(prepare={"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}),
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
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / name.replace(" ", "-"))
    os.environ["TUTTI_MESH"] = told.mesh.format(ranks) if ranks > 1 else "replicate=1"
    torch.set_default_dtype(torch.float64)
    job = tutti.Job(global_batch_size=told.batch, seed=5, on_slow_rank="rebalance", **told.job, **settings)
    model: Any = told.model()
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


def counted(loader: Any, batch: Any) -> list[int]:
    """The samples that this rank computes, without those that have no weight."""
    numbers = iter(batch[2].tolist())
    parts = [[next(numbers) for _ in range(part.loaded)][: part.count] for part in loader.shares.share.parts]
    return [number for part in parts for number in part]


def trained(told: Told, name: str, changes: bool = True, **settings: Any) -> Trained:
    job, _, loader = prepared(told, name, **settings)
    said: list[str] = []
    job._context.screen.say = said.append  # type: ignore[method-assign]
    result = Trained([], {}, {}, [], [], said, 0)
    for _ in job.epochs(EPOCHS):
        for batch in loader:
            result.own.append(counted(loader, batch))
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
    one = run_ranks(all_of, 1, names)[0]
    results = run_ranks(all_of, ranks, names)
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
            assert sum(" of 11 samples of a batch instead of " in said for said in runs[0].said) >= 2, name


class SlowSamples(Samples):
    """Samples that rank 1 reads slowly until they are not slow any longer."""

    slow = False

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        time.sleep(0.008 if self.slow else 0.002)
        return super().__getitem__(index)


def pretend(job: tutti.Job, samples: int) -> None:
    """Say that this rank has waited for its samples, in the next step's message."""
    phases = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.0)
    waited_s = (0.08 if SlowSamples.slow else 0.02) * samples
    job._run().loop.own_times.note({**phases, "data": waited_s}, exact=True)  # type: ignore[dict-item]


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def slow_for_a_while(steps: int, batch_size: int = 8, real: bool = True) -> tuple[Trained, list[str]]:
    """Train until the slow rank has got its share back; on one device, so many steps."""
    if real:
        own_times.WINDOW_S, own_times.LEAST_EXCESS_S = 0.3, 0.1
    SlowSamples.slow = os.environ["RANK"] == "1"
    job, _, loader = prepared(Told(data=SlowSamples if real else Samples, model=small, batch=batch_size), "slow")
    said: list[str] = []
    job._context.screen.say = said.append  # type: ignore[method-assign]
    result, lowered, back = Trained([], {}, {}, [], [], said, 0), 0, False
    while not back and (not steps or job.global_step < steps):
        for batch in loader:
            result.own.append(counted(loader, batch))
            result.order.append(loader.shares.indices.tolist())
            result.losses.append(job.step(batch))
            if not real:
                pretend(job, len(result.own[-1]))
            if loader.shares.plan.shares:
                lowered = lowered or job.global_step
                SlowSamples.slow = SlowSamples.slow and job.global_step < lowered + 40
            back = bool(lowered and not loader.shares.plan.shares) or job.global_step in (steps, 2000)
            if back:
                break
    result.state = job.state_dict()
    return result, said


@pytest.mark.parametrize(("ranks", "real"), [(3, False), pytest.param(2, True, marks=pytest.mark.long)])
def test_a_slow_rank_has_fewer_samples_until_it_is_slow_no_longer(ranks: int, real: bool) -> None:
    results = run_ranks(slow_for_a_while, ranks, 0, 4 * ranks, real)
    steps = len(results[0][0].losses)
    (one, _), said = run_ranks(slow_for_a_while, 1, steps, 4 * ranks, real)[0], results[0][1]
    for got, _ in results:
        assert got.losses == pytest.approx(one.losses, rel=1e-12)
        for name, value in one.state.items():
            torch.testing.assert_close(got.state[name], value, rtol=1e-12, atol=1e-12, msg=name)
    for step in range(steps):
        assert [sample for got, _ in results for sample in got.own[step]] == one.own[step]
    whole = [len(own) for own, batch in zip(results[1][0].own, one.own, strict=True) if len(batch) == 4 * ranks]
    assert whole[0] == 4
    assert min(whole) < 4
    assert said[-1].endswith("no longer slow"), "\n".join(said)
    assert any("rank 1 takes " in sentence and sentence.endswith(": data") for sentence in said), said
    assert said[-1].endswith("; no longer slow"), said
    assert any("is no slower than the others" in sentence for sentence in said), said
    if not real:
        assert said[1].startswith(
            "rank 1 gets 1 of 12 samples of a batch instead of 4 from step 38 on; rank 1 takes 4."
        )
        assert said[2].startswith("with the shares of the batch since step 38, a step takes ")


def resumed_elsewhere(resume: str | None, folder: str) -> Trained:
    """Shares change before and after the checkpoint; a resumed run begins with equal ones."""
    job, _, loader = prepared(Told(prepare={"num_workers": 1}), folder, resume=resume)
    result = Trained([], {}, {}, [], [], [], 0)
    assert not loader.shares.plan.shares
    for _ in job.epochs(EPOCHS):
        for batch in loader:
            result.losses.append(job.step(batch))
            result.own.append(counted(loader, batch))
            if job.world_size > 1 and job.global_step in (1, 4, 7):
                change(job, (1.0, 3.0, 5.0))
            if resume is None and job.world_size > 1 and job.global_step == 3:
                result.said.append(str(job.save()))
                return result
    result.evaluation, result.state = job.evaluate(Samples()), job.state_dict()
    return result


def test_checkpoints_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    one = run_ranks(resumed_elsewhere, 1, None, str(tmp_path / "one"))[0]
    first = run_ranks(resumed_elsewhere, 2, None, str(tmp_path / "first"))
    then = run_ranks(resumed_elsewhere, 3, first[0].said[0], str(tmp_path / "then"))
    assert one.losses == pytest.approx(first[0].losses + then[0].losses, rel=1e-12)
    steps = [parts for runs in (first, then) for parts in zip(*(run.own for run in runs), strict=True)]
    assert [[number for part in parts for number in part] for parts in steps] == one.own
    for name, value in one.state.items():
        torch.testing.assert_close(then[2].state[name], value, rtol=1e-12, atol=1e-12, msg=name)


def with_other_shares() -> str:
    job, _, loader = prepared(Told(), "other")
    try:
        for batch in loader:
            job.step(batch)
            change(job, (1.0, 3.0) if job.rank else (3.0, 1.0))
    except RankMismatchError as error:
        return str(error)
    return ""


def refused() -> list[str]:
    said = [with_other_shares()]
    for variables, told in (
        ({}, Told(data=Stream, prepare={"num_workers": 1})),
        ({"TUTTI_SYNC": "local:4"}, Told()),
        ({"TUTTI_COMPRESS": "top-k,density=0.1"}, Told()),
        ({}, Told(mesh="split=2")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(PlanError) as raised:
                prepared(told, "refused")
        said.append(str(raised.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUTTI_SHRUNK", "1")
        job, _, loader = prepared(Told(mesh="split=2"), "shrunk")
        assert job._run().loop.rebalancer is None
        job.step(next(iter(loader)))
    try:
        tutti.Job(global_batch_size=4, on_slow_rank="faster")  # type: ignore[arg-type]
    except PlanError as error:
        said.append(str(error))
    os.environ["TUTTI_ON_SLOW_RANK"] = "faster"
    try:
        tutti.Job(global_batch_size=4)
    except LaunchError as error:
        said.append(str(error))
    return said


def test_refusals() -> None:
    for mismatch, stream, local, lossy, mesh, job, variable in run_ranks(refused, 2):
        assert mismatch.endswith(
            "ranks divide the batch by different shares: rank 0 by 3:1, rank 1 by 1:3; give all ranks one plan"
        )
        assert "with an IterableDataset and num_workers=1: the worker has already divided" in stream
        assert "replicas that differ depend on their shares of the batch" in local
        assert "what the codec loses depends on the samples of each rank" in lossy
        assert "with the mesh split=2: its ranks compute the same samples" in mesh, "unless fewer ranks go on"
        assert job == "on_slow_rank = 'faster'; use 'warn' or 'rebalance'"
        assert variable.startswith("TUTTI_ON_SLOW_RANK='faster' is neither warn nor rebalance")


class Greedy(nn.Linear):
    """Has no memory for more than 6 samples at once on one of several ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 6 and os.environ["WORLD_SIZE"] != "1":
            raise MemoryError
        return super().forward(x.flatten(1))


def greedy() -> nn.Module:
    return Greedy(64, 3)


def more_than_memory() -> Trained:
    result = trained(Told(model=greedy), "greedy")
    assert not json.loads(Path("greedy/plan.json").read_text())["shares"], "a run that begins again has equal shares"
    return result


def test_a_rank_that_runs_out_of_memory_with_more_samples_has_them_in_several_microbatches() -> None:
    one, results = run_ranks(more_than_memory, 1)[0], run_ranks(more_than_memory, 2)
    for got in results:
        same(got, one, "greedy")
        assert any("ran out of memory at step 3 with num_microbatches = 1" in said for said in got.said), got.said
    for step, (first, second) in enumerate(zip(*(got.own for got in results), strict=True)):
        assert sorted(first + second) == sorted(one.own[step])


def on_a_device(slow: bool) -> tuple[Trained, list[str]]:
    """On ranks that share an accelerator, whose host reads results a step later."""
    fakegpu.load()
    os.environ["TUTTI_SHARE_DEVICE"] = "1"
    return slow_for_a_while(0) if slow else (trained(CASES["workers"], "device"), [])


@needs_fakegpu
@pytest.mark.long
def test_shares_change_on_accelerators() -> None:
    fakegpu.build()
    one, results = run_ranks(all_of, 1, ("workers",))[0]["workers"], run_ranks(on_a_device, 2, False)
    for got, _ in results:
        same(got, one, "device")
    for step, (first, second) in enumerate(zip(*(got.own for got, _ in results), strict=True)):
        assert first + second == one.own[step]


@needs_fakegpu
@pytest.mark.long
def test_a_slow_rank_has_fewer_samples_on_accelerators() -> None:
    fakegpu.build()
    results = run_ranks(on_a_device, 2, True)
    steps = len(results[0][0].losses)
    one, said = run_ranks(slow_for_a_while, 1, steps)[0][0], results[0][1]
    for got, _ in results:
        assert [float(loss) for loss in got.losses] == pytest.approx(one.losses, rel=1e-12)
    for step in range(steps):
        assert results[0][0].own[step] + results[1][0].own[step] == one.own[step]
    assert min(len(own) for own in results[1][0].own if own) < 4
    given_back = [words for words in said if words.startswith("rank 1 gets ")]  # the load of others may move rank 0's
    assert any(words.endswith(("; no longer slow", "; less slow than before")) for words in given_back), said
