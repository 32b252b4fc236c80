"""Compressed sums of which each rank gets its part (sharding levels 2 and 3): one device's run where nothing is lost,
accounted for where something is, and what is kept back goes on in other runs.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from against_one import Subject, assert_agree, train
from harness import run_ranks
from parallel.test_compressed_plans_multirank import attending, branching, clipped, pictures, plain, tied
from parallel.test_expert import top2
from trainer.several import Case, assert_refused, on_ranks, once, refusals
from tutti.checkpoint.rank_state import _buckets
from tutti.compression.dense_reducers import ReduceScatterReducer
from tutti.compression.reducer import split_by_tensor
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.parallel.layout import to_local
from tutti.parallel.part_guards import reading_parts


def divided(words: str, level: int, batch: dict[str, int] | None = None, **mesh: int) -> dict[str, Any]:
    sync = SyncPlan(bucket_nbytes=600, compress=parse_compression(words))
    return {"mesh": mesh, "sharding": ShardingPlan(level=level), "sync": sync, "batch": batch or {}}


CASES: dict[str, dict[str, Case]] = {
    "2 ranks": {
        "ZeRO-2": (tied, divided("float64", 2, shard=2)),
        "left out": (branching, divided("float64", 3, shard=2)),
        "whole matrices": (branching, divided("powersgd,rank=50", 2, shard=2)),
    },
    "2 ranks, other cases": {
        "accumulated": (tied, divided("float64", 2, {"num_microbatches": 2}, shard=2)),
        "unlike shares": (tied, {**divided("float64", 3, shard=2), "shares": (3, 1)}),
        "clipped": (clipped, divided("float64", 2, shard=2)),
        "whole matrices": (tied, divided("powersgd,rank=50", 3, shard=2)),
    },
    "3 ranks": {
        "ZeRO-2": (tied, divided("float64", 2, shard=3)),
        "ZeRO-3": (plain, divided("float64", 3, shard=3)),
        "whole matrices": (tied, divided("powersgd,rank=50", 2, shard=3)),
    },
    "4 ranks": {
        "beside replicas": (tied, divided("float64", 2, replicate=2, shard=2)),
        "whole matrices": (tied, divided("powersgd,rank=50", 2, replicate=2, shard=2)),
        "split": (plain, divided("float64", 2, split=2, shard=2)),
        "context": (attending, divided("float64", 2, context=2, shard=2)),
        "experts": (top2, divided("float64", 2, {"num_microbatches": 2}, expert=2, shard=2)),
        "space": (pictures, divided("float64", 3, space=2, shard=2)),
    },
}


@pytest.mark.parametrize("several", ["2 ranks", *(pytest.param(name, marks=pytest.mark.long) for name in [*CASES][1:])])
def test_what_loses_nothing_is_the_run_of_one_device(several: str) -> None:
    cases = CASES[several]
    found = on_ranks(cases, int(several[0]))
    for name, (make, plan) in cases.items():
        one = once(make, plan["batch"].get("num_microbatches", 1))
        assert_agree(one, [rank[name] for rank in found])


def descending() -> Subject:
    return replace(plain(), optimizer=torch.optim.SGD)


LOSSY = ["bfloat16,feedback=true", "float16", "bytegrad", "qsgd", "terngrad", "one-bit", "top-k,density=0.1", "dgc"]
LOSSY += ["top16-q4", "powersgd", "top-k,density=0.1,sparse=true"]


def accounted(words: list[str], world_size: int) -> list[dict[str, Any]]:
    """By method: what went into the sums over `shard` and came out, what is kept, bytes, and the parameters."""
    found = []
    write, send = ReduceScatterReducer.write, ReduceScatterReducer.send
    for one in words:
        went: dict[int, Any] = {}
        came: dict[int, Any] = {}

        def follow(self: ReduceScatterReducer, flat: torch.Tensor, went: dict[int, Any] = went) -> None:
            went[id(self)] = went.get(id(self), 0) + flat
            write(self, flat)

        def arrive(self: ReduceScatterReducer, part: torch.Tensor, came: dict[int, Any] = came) -> Any:
            yield from send(self, part)
            came[id(self)] = came.get(id(self), 0) + part

        def look(run: Any, went: dict[int, Any] = went, came: dict[int, Any] = came) -> dict[str, Any]:
            sums, sent = [], []
            for part in run.parallel.replica.compressor.parts:
                there = part.there
                sent.append((part._counted, part.sent_nbytes, len(part.pack.parameters) + 1))
                if isinstance(there, ReduceScatterReducer):
                    kept = there.states["worker"].old.get("residual")
                    sums.append((went[id(there)], came[id(there)], kept, there.local_span))
            return {"sums": sums, "sent": sent}

        ReduceScatterReducer.write, ReduceScatterReducer.send = follow, arrive  # type: ignore[method-assign]
        try:
            mesh = {"shard": world_size} if world_size < 4 else {"replicate": 2, "shard": 2}
            torch.manual_seed(0)
            case: Case = (descending, divided(one, 2, **mesh))
            trained = train(*case, 6, torch.float64, look)
        finally:
            ReduceScatterReducer.write, ReduceScatterReducer.send = write, send  # type: ignore[method-assign]
        found.append({**trained.facts, "state": trained.state})
    return found


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.long)])
def test_what_came_out_and_is_kept_is_what_went_in(world_size: int) -> None:
    """And bytes on the wire are the formula's, the bits of all ranks the same."""
    found = run_ranks(accounted, world_size, LOSSY, world_size)
    for place, words in enumerate(LOSSY):
        ranks = [rank[place] for rank in found]
        for rank in ranks:
            for name, value in ranks[0]["state"].items():
                assert torch.equal(rank["state"][name], value), (words, name)
            for counted, formula, flags in rank["sent"]:
                if "sparse=true" not in words or world_size < 4:
                    assert counted == 6 * (formula - 2 * (world_size - 1) * flags * 8 // world_size), words
        if world_size == 4 or not parse_compression(words).keeps or words == "dgc":
            continue
        for number in range(len(ranks[0]["sums"])):
            for rank in ranks:
                _, came, _, (begin, end) = rank["sums"][number]
                went = sum(other["sums"][number][0][begin:end] for other in ranks)
                kept = sum(other["sums"][number][2][begin:end] for other in ranks)
                assert bool(kept.any())
                torch.testing.assert_close(came + kept, went, rtol=0, atol=1e-12 * max(float(went.abs().max()), 1))


def kept_by_name(run: Any) -> dict[str, torch.Tensor]:
    """What this rank keeps of every parameter, whole."""
    wholes: dict[str, torch.Tensor] = {}
    for one in _buckets(run.state, run.parallel.replica.compressor):
        sizes = [torch.Size(row.shape).numel() for row in one.rows]
        kept = split_by_tensor(one.exchange.tensors(), one.exchange.spans, one.exchange.shared_spans, sizes)
        for row, values in zip(one.rows, kept, strict=True):
            whole = wholes.setdefault(row.name, torch.zeros(row.held.shape))
            if "residual" in values:
                row.held.put(part := torch.zeros_like(whole), values["residual"].as_strided(row.shape, row.strides))
                whole += part
    return wholes


@reading_parts()
def going_on(words: str, steps: int, resume: str | None, folder: str, plan: dict[str, Any]) -> Any:
    """Parameters after `steps` steps in all, and what the rank keeps; a checkpoint is left in `folder`."""
    torch.set_default_dtype(torch.float64)
    subject = replace(tied(), optimizer=torch.optim.SGD)
    sync = SyncPlan(bucket_nbytes=600, compress=parse_compression(words))
    whole = Plan(batch=BatchPlan(global_batch_size=12), sync=sync, **plan)
    os.environ["TUTTI_PLAN"] = str(serialization.save(whole, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = folder
    job = tutti.Job(global_batch_size=12, resume=resume)
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=0.05)
    model, _, loader = job.prepare(model, optimizer, subject.data, subject.loss_fn)
    run = job._run()
    while run.state.progress.step < steps:
        for batch in loader:
            job.step(batch)
            if run.state.progress.step == steps:
                break
    kept = kept_by_name(run)
    job.save()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: to_local(value).detach().clone() for name, value in tensors}, kept


def all_going_on(calls: list[tuple[Any, ...]]) -> list[Any]:
    return [going_on(*call) for call in calls]


THREE = {"mesh": {"shard": 3}, "sharding": ShardingPlan(level=2)}


@pytest.mark.long
def test_runs_go_on_bit_for_bit_and_others_with_all_that_was_kept() -> None:
    methods = ("one-bit", "powersgd", "qsgd")
    with tempfile.TemporaryDirectory() as folder:
        calls: list[tuple[Any, ...]] = []
        for words in methods:
            calls += [
                (words, 8, None, f"{folder}/{words}-whole", THREE),
                (words, 5, None, f"{folder}/{words}-a", THREE),
                (words, 8, f"{folder}/{words}-a", f"{folder}/{words}-b", THREE),
            ]
        found = run_ranks(all_going_on, 3, calls)
        for rank in found:
            for place, words in enumerate(methods):
                whole, again = rank[3 * place], rank[3 * place + 2]
                for first, second in zip(whole, again, strict=True):
                    assert all(torch.equal(second[name], value) for name, value in first.items()), words
        for plan in ({"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)}, {"mesh": {"replicate": 2}}):
            call = ("one-bit", 5, f"{folder}/one-bit-a", f"{folder}/c", plan)
            after = run_ranks(all_going_on, 2, [call])
            for name in after[0][0][1]:
                was, now = sum(rank[1][1][name] for rank in found), sum(rank[0][1][name] for rank in after)
                torch.testing.assert_close(now, was, rtol=1e-12, atol=1e-15, msg=name)


def test_what_does_not_go_together_is_refused() -> None:
    cases: list[Case] = [
        (plain, divided("one-bit-adam,freeze_step=4", 2, shard=2)),
        (plain, divided("one-bit,between=hosts", 3, shard=2)),
    ]
    said = ("every rank needs the whole momentum", "compressed between all ranks")
    assert_refused(run_ranks(refusals, 2, cases), said)
