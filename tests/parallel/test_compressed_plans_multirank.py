"""Compressed sums beside every other part of a plan: nothing is lost but what is kept back; no step is half made."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from against_one import Subject, assert_agree
from harness import run_ranks
from parallel.shard_subjects import WORDS, Branching
from parallel.test_communication_multirank import images, sequences
from parallel.test_expert import top2
from trainer.several import Case, assert_refused, on_ranks, once, refusals
from trainer.training import Mlp
from tutti.compression.reducer import states_by_tensor
from tutti.config import serialization
from tutti.config.compression import Compression, bucket_sent_nbytes, parse_compression
from tutti.config.plan import BatchPlan, PipelinePlan, Plan, ShardingPlan, SyncPlan
from tutti.parallel.compressed.compressor import CompressedBucketReducer, sizes_of
from tutti.parallel.part_guards import reading_parts
from tutti.trainer.metrics import read_rows


def vectors() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=draw), torch.randint(3, (48,), generator=draw))


def halves() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def plain() -> Subject:
    return Subject(model=halves, data=vectors(), loss_fn=F.cross_entropy)


def tied() -> Subject:
    return Subject(model=Mlp, data=vectors(), loss_fn=F.cross_entropy)


def clipped() -> Subject:
    return Subject(model=halves, data=vectors(), loss_fn=F.cross_entropy, job={"clip_norm": 0.05})


def branching() -> Subject:
    """Ranks leave out different parameters, now and then all of them the same."""
    draw = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randint(WORDS, (24, 3), generator=draw), torch.randint(WORDS, (24,), generator=draw))
    return Subject(model=Branching, data=data, loss_fn=F.cross_entropy, batch=4, optimizer=torch.optim.SGD)


def attending() -> Subject:
    """With SGD: the bias of keys has no gradient but rounding, and Adam steps by that."""
    return replace(sequences(), optimizer=torch.optim.SGD)


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 5, padding=2))


def pictures() -> Subject:
    return replace(images(), model=convolutions)


EXACT = SyncPlan(bucket_nbytes=600, compress=Compression(method="float64"))

CASES: dict[str, dict[str, Case]] = {
    "2 ranks": {
        "ZeRO-1": (tied, {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)}),
        "unlike shares": (tied, {"mesh": {"replicate": 2}, "shares": (3, 1), "batch": {"num_microbatches": 2}}),
        "clipped": (clipped, {"mesh": {"replicate": 2}}),
        "left out": (branching, {"mesh": {"replicate": 2}}),
    },
    "2 ranks, other axes": {
        "context": (attending, {"mesh": {"context": 2}}),
        "space": (pictures, {"mesh": {"space": 2}}),
        "expert": (top2, {"mesh": {"expert": 2}, "batch": {"num_microbatches": 2}}),
    },
    "4 ranks": {
        "split": (plain, {"mesh": {"replicate": 2, "split": 2}}),
        "stage": (
            plain,
            {
                "mesh": {"replicate": 2, "stage": 2},
                "pipeline": PipelinePlan(cuts=("2",)),
                "batch": {"num_microbatches": 2},
            },
        ),
        "ZeRO-1 beside replicas": (tied, {"mesh": {"replicate": 2, "shard": 2}, "sharding": ShardingPlan(level=1)}),
    },
}


@pytest.mark.parametrize("several", CASES)
def test_every_plan_is_one_device_where_nothing_is_lost(several: str) -> None:
    cases = CASES[several]
    found = on_ranks({name: (make, {"sync": EXACT, **plan}) for name, (make, plan) in cases.items()}, int(several[0]))
    for name, (make, plan) in cases.items():
        one = once(make, plan.get("batch", {}).get("num_microbatches", 1))
        assert_agree(one, [rank[name] for rank in found])


class Followed:
    """A run of one rank: what its gradients' sums got, gave and keep, by parameter."""

    def __init__(self, how: Compression, name: str, optimizer: Any = torch.optim.SGD) -> None:
        subject = replace(branching(), optimizer=optimizer)
        self.world = int(os.environ["WORLD_SIZE"])
        sync = SyncPlan(bucket_nbytes=600, compress=how)
        plan = Plan(batch=BatchPlan(global_batch_size=4), mesh={"replicate": self.world}, sync=sync)
        os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{name}")
        self.job = tutti.Job(global_batch_size=4, on_nonfinite="skip")
        model = subject.model()
        self.model, _, self.loader = self.job.prepare(
            model, subject.optimizer(model.parameters(), lr=0.05), subject.data
        )
        self.run = self.job._run()
        self.names = {p: name for name, p in self.model.named_parameters()}
        self.went: dict[str, Any] = dict.fromkeys(self.names.values(), 0)
        self.came: dict[str, Any] = dict.fromkeys(self.names.values(), 0)

    def batches(self, steps: int) -> Iterator[Any]:
        while self.run.state.progress.step < steps:
            for batch in self.loader:
                yield batch
                if self.run.state.progress.step == steps:
                    break

    @reading_parts()
    def step(self, batch: Any, *, poisoned: bool) -> None:
        """One step; a poisoned one has a loss that is not finite on rank 1, and leaves no trace."""

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            value = F.cross_entropy(model(batch[0]), batch[1])
            return value * torch.nan if poisoned and self.run.parallel.world.rank == 1 else value

        before, entered = self.kept(), dict(self.went)
        self.job.forward_backward(loss, batch)
        if poisoned:
            self.went, after = entered, self.kept()
            assert all(torch.equal(after[n][w], v) for n, one in before.items() for w, v in one.items()), "it has moved"
        else:
            for p, name in self.names.items():
                self.came[name] = self.came[name] + (torch.zeros_like(p) if p.grad is None else p.grad)
        self.job.update()

    def kept(self) -> dict[str, Any]:
        found = {}
        for bucket, exchange in self.run.parallel.replica.compressor.exchanges.items():
            for p, one in zip(bucket.parameters, states_by_tensor(exchange, sizes_of(bucket)), strict=True):
                found[self.names[p]] = {what: value for what, value in one.items() if value.numel()}
        return found


def follow(words: str, steps: int, poison: int | None = None) -> dict[str, Any]:
    """Sums of what went in, came out and is kept, by parameter; bytes; the parameters at the end."""
    torch.set_default_dtype(torch.float64)
    how = parse_compression(words)
    this = Followed(how, f"{words}-{poison}")
    begin = CompressedBucketReducer.start

    def start(self: CompressedBucketReducer, bucket: Any) -> Any:
        for p, view in zip(bucket.parameters, bucket.views, strict=True):
            this.went[this.names[p]] = this.went[this.names[p]] + view
        return begin(self, bucket)

    CompressedBucketReducer.start = start  # type: ignore[method-assign]
    for batch in this.batches(steps):
        this.step(batch, poisoned=this.run.state.progress.step == poison)
    CompressedBucketReducer.start = begin  # type: ignore[method-assign]
    exchanges = this.run.parallel.replica.compressor.exchanges
    shapes = [[tuple(p.shape) for p in bucket.parameters] for bucket in exchanges]
    rows = read_rows(this.run.output.folder.metrics) if this.run.parallel.world.is_main else []
    return {
        "went": this.went,
        "came": this.came,
        "kept": {name: one.get("residual") for name, one in this.kept().items()},
        "state": {name: value.clone() for name, value in this.model.state_dict().items()},
        "wires": [exchange.collectives.sent_nbytes for exchange in exchanges.values()],
        "formula": [bucket_sent_nbytes(how, some, this.world, 8) for some in shapes],
        "flags": [2 * (this.world - 1) * len(some) * 8 // this.world for some in shapes],
        "sent": [row["sent_nbytes"] for row in rows if row["kind"] == "step"],
    }


def followed(calls: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [follow(*call) for call in calls]


KEEPING = ("bfloat16,feedback=true", "one-bit", "top-k,density=0.1", "top16-q4", "powersgd", "bytegrad,feedback=true")


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_what_came_out_and_what_is_kept_is_what_went_in(world_size: int) -> None:
    """Over a change of buckets after the first step, and parameters that some ranks, or all, leave out; a step that one
    rank's loss spoils is as if it had not been.
    """
    calls = [(words, 20, 7 if place % 2 else None) for place, words in enumerate(KEEPING)]
    found = run_ranks(followed, world_size, calls)
    for place, words in enumerate(KEEPING):
        first = found[0][place]
        for name, came in first["came"].items():
            went = sum(rank[place]["went"][name] for rank in found)
            kept = sum(rank[place]["kept"][name] for rank in found).view_as(came)
            scale = max(float(went.abs().max()), 1.0)
            assert float((came + kept - went).abs().max()) <= 1e-12 * scale, (words, name)
            assert all(torch.equal(rank[place]["state"][name], first["state"][name]) for rank in found), (words, name)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_bytes_in_the_row_are_the_formula_and_those_of_the_wire(world_size: int) -> None:
    words = ("bfloat16", "bytegrad", "qsgd", "terngrad", "one-bit", "top-k", "dgc", "top16-q4", "powersgd")
    for rank, found in enumerate(run_ranks(followed, world_size, [(one, 4) for one in words])):
        for one, got in zip(words, found, strict=True):
            rest = [formula - flags for formula, flags in zip(got["formula"], got["flags"], strict=True)]
            for collectives, nbytes in zip(
                got["wires"], rest, strict=True
            ):  # some buckets are new after the first step
                assert collectives in (3 * nbytes, 4 * nbytes), one
            if rank == 0:
                assert got["sent"][-1] == sum(got["formula"]), one


def look_at_sums(run: Any) -> dict[str, Any]:
    rows = read_rows(run.output.folder.metrics) if run.parallel.world.is_main else []
    exchanges = run.parallel.replica.compressor.exchanges
    shapes = [[tuple(p.shape) for p in bucket.parameters] for bucket in exchanges]
    return {
        "sent": [row["sent_nbytes"] for row in rows if row["kind"] == "step"],
        "shapes": shapes,
        "dense": [getattr(exchange, "switched", None) for exchange in exchanges.values()],
        "wires": sum(exchange.collectives.sent_nbytes for exchange in exchanges.values()),
    }


def descending() -> Subject:
    return replace(plain(), optimizer=torch.optim.SGD)


@pytest.mark.long
def test_dgc_sends_fewer_and_fewer_in_its_warmup() -> None:
    """Of one bucket, which stays; its kept values are those of the density that was in force."""
    how = parse_compression("dgc,density=0.01,warmup_steps=4")
    sync = SyncPlan(compress=how)
    found = on_ranks({"dgc": (descending, {"mesh": {"replicate": 3}, "sync": sync})}, 3, steps=7, look=look_at_sums)
    facts = found[0]["dgc"].facts
    expected = [sum(bucket_sent_nbytes(how.at(step), some, 3, 8) for some in facts["shapes"]) for step in range(7)]
    assert facts["sent"] == expected
    assert [*sorted(set(expected), reverse=True)] == [*dict.fromkeys(expected)], "it never grows"
    assert len(set(expected)) == 4, "25 %, 6.25 %, 1.56 %, then 1 %"


@pytest.mark.long
def test_sparse_sums_in_a_run_become_dense_where_that_is_shorter() -> None:
    """The same values as gathering gives; bytes in the row are those of the wire."""
    words = {"few": "top-k,density=0.02", "many": "top-k,density=0.6"}
    cases: dict[str, Case] = {}
    for name, one in words.items():
        for more in ("", ",sparse=true"):
            cases[name + more] = (
                descending,
                {"mesh": {"replicate": 3}, "sync": SyncPlan(compress=parse_compression(one + more))},
            )
    found = on_ranks(cases, 3, steps=3, look=look_at_sums)
    for name in words:
        for rank in found:
            sparse, gathered = rank[f"{name},sparse=true"], rank[name]
            assert_agree(gathered, [sparse], 1e-6)  # what is on the way is float32
            assert set(sparse.facts["dense"]) == {name == "many"}
            assert all(
                torch.equal(found[0][f"{name},sparse=true"].state[n], value) for n, value in sparse.state.items()
            )
        facts = found[0][f"{name},sparse=true"].facts
        flags = [2 * 2 * len(some) * 8 // 3 for some in facts["shapes"]]
        sums = [sum(facts["sent"][first:]) - (3 - first) * sum(flags) for first in (0, 1)]
        assert facts["wires"] in sums  # exchanges may be new after the first step
    assert found[0]["many,sparse=true"].facts["sent"][-1] < found[0]["many"].facts["sent"][-1]


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)


def sparse() -> Subject:
    data = TensorDataset(torch.arange(16) % 9, torch.arange(16) % 3)
    return Subject(model=Rows, data=data, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD)


def moving() -> Subject:
    return Subject(model=halves, data=vectors(), loss_fn=F.cross_entropy)


def slow() -> Subject:
    return replace(clipped(), optimizer=torch.optim.SGD)


def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    cases: list[Case] = [
        (sparse, {"mesh": {"replicate": 2}, "sync": SyncPlan(compress=Compression(method="one-bit"))}),
        (moving, {"mesh": {"replicate": 2}, "sync": SyncPlan(compress=Compression(method="dgc"))}),
        (slow, {"mesh": {"replicate": 2}, "sync": SyncPlan(compress=Compression(method="dgc"))}),
        (plain, {"mesh": {"shard": 2}, "sync": SyncPlan(compress=Compression(method="one-bit", between="hosts"))}),
    ]
    said = ("embed is sparse", "AdamW would apply it", "clip_norm = 0.05: it sends", "sharding.level = 3")
    assert_refused(run_ranks(refusals, 2, cases), said)


def leaves(words: str) -> str:
    """Rank 1 fails in its second step; what the others hear of it."""
    torch.set_default_dtype(torch.float64)
    this = Followed(parse_compression(words), words)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if this.run.state.progress.step == 1 and this.run.parallel.world.rank == 1:
            raise ZeroDivisionError("rank 1 has failed")
        return F.cross_entropy(model(batch[0]), batch[1])

    try:
        for batch in this.batches(3):
            this.job.forward_backward(loss, batch)
            this.job.update()
    except (ZeroDivisionError, RuntimeError) as error:
        return type(error).__name__
    return "trained"


def test_a_rank_that_fails_ends_the_others_sums() -> None:
    """Whoever waits for the courier hears of it at once."""
    said = run_ranks(leaves, 3, "one-bit", timeout_s=50)
    assert said[1] == "ZeroDivisionError"
    assert {said[0], said[2]} == {"RuntimeError"}
