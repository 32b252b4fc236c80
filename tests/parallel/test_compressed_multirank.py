"""Plans that compress sums of gradients, on real ranks: what loses nothing is one device's run, what loses is accounted
for, and all ranks end with the same bits.
"""

import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import tutti
from against_one import Subject, Trained, assert_agree
from harness import run_ranks
from trainer.several import Case, on_ranks
from trainer.training import Mlp
from tutti.compression.reducer import states_by_tensor
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.optim.large_batch import LAMB
from tutti.parallel.compressed.compressor import sizes_of
from tutti.trainer.metrics import read_rows

STEPS = 20


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(50, 6, generator=draw), torch.randint(3, (50,), generator=draw))


def tied() -> Subject:
    """A tied weight, and a parameter that no loss uses."""
    return Subject(model=Mlp, data=data(), loss_fn=F.cross_entropy, batch=8)


def look(run: Any) -> dict[str, Any]:
    steps = (
        [row for row in read_rows(run.output.folder.metrics) if row["kind"] == "step"]
        if run.parallel.world.is_main
        else []
    )
    compressor = run.parallel.replica.compressor
    wires = [] if compressor is None else [one.collectives.sent_nbytes for one in compressor.exchanges.values()]
    state = {name: tensor.clone() for name, tensor in run.parallel.model.state_dict().items()}
    return {"steps": steps, "wires": wires, "state": state}


def case(words: str | None, make: Any = tied, bucket_nbytes: int = 400, **plan: Any) -> Case:
    compress = None if words is None else parse_compression(words)
    return make, {"sync": SyncPlan(bucket_nbytes=bucket_nbytes, compress=compress), **plan}


@functools.cache
def alone() -> Trained:
    return on_ranks({"one": case(None)}, 1, steps=STEPS)[0]["one"]


LOSSLESS = ("float64", "powersgd,rank=50")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_loses_nothing_is_the_run_of_one_device(world_size: int) -> None:
    cases = {words: case(words, mesh={"replicate": world_size}) for words in LOSSLESS}
    found = on_ranks(cases, world_size, steps=STEPS)
    for words in LOSSLESS:
        assert_agree(alone(), [rank[words] for rank in found])


LOSSY = ["bfloat16,feedback=true", "float16", "bytegrad", "qsgd", "terngrad", "one-bit", "top-k", "dgc", "top16-q4"]
LOSSY += ["powersgd", "top-k,density=0.05,gain=0.6,window=2"]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_method_ends_with_the_same_bits_on_all_ranks(world_size: int) -> None:
    def made(words: str) -> Case:
        return case(words, plain if words == "dgc" else tied, mesh={"replicate": world_size})

    found = on_ranks({words: made(words) for words in LOSSY}, world_size, steps=6, look=look)
    for words in LOSSY:
        first, *others = [rank[words].facts["state"] for rank in found]
        for other in others:
            for name, value in first.items():
                assert torch.equal(value, other[name]), (words, name)


def plain() -> Subject:
    return Subject(model=Mlp, data=data(), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD, rate=0.1)


KEEPING = ("one-bit", "dgc,density=0.2", "top16-q4", "powersgd", "qsgd", "top-k,density=0.05,gain=0.6,window=2")


def trained(
    words: str, world_size: int, steps: int, resume: str | None, folder: str, **plan: Any
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Parameters after `steps` steps in all, and what the rank keeps by tensor; a checkpoint is left in `folder`."""
    torch.set_default_dtype(torch.float64)
    subject = plain() if words.startswith("dgc") else tied()
    if words.startswith("one-bit-lamb"):
        subject = replace(subject, optimizer=LAMB)
    sync = SyncPlan(bucket_nbytes=400, compress=parse_compression(words))
    whole = Plan(batch=BatchPlan(global_batch_size=12, **plan.pop("batch", {})), sync=sync, **plan)
    os.environ["TUTTI_PLAN"] = str(serialization.save(whole, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = folder
    job = tutti.Job(global_batch_size=12, resume=resume, **subject.job)
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    model, _, loader = job.prepare(model, optimizer, subject.data, subject.loss_fn)
    run = job._run()
    batches = iter(loader)
    while run.state.progress.step < steps:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        job.step(batch)
    kept = {}
    names = {p: name for name, p in model.named_parameters()}
    for bucket, exchange in run.parallel.replica.compressor.exchanges.items():
        for p, one in zip(bucket.parameters, states_by_tensor(exchange, sizes_of(bucket)), strict=True):
            kept[names[p]] = one
    job.save()
    return {name: value.clone() for name, value in model.state_dict().items()}, kept


def in_turn(calls: list[tuple[Any, ...]]) -> list[Any]:
    return [trained(*positional, **plan) for *positional, plan in calls]


@pytest.mark.parametrize(("stop", "methods"), [(1, KEEPING[:2]), (3, KEEPING[2:])])
def test_resuming_in_the_middle_changes_no_bit(stop: int, methods: tuple[str, ...]) -> None:
    """Also after the first step, before buckets are put into the order in which gradients arrive."""
    mesh = {"mesh": {"replicate": 3}}
    with tempfile.TemporaryDirectory() as folder:
        calls = []
        for words in methods:
            calls += [
                (words, 3, 5, None, f"{folder}/{words}-whole", mesh),
                (words, 3, stop, None, f"{folder}/{words}-a", mesh),
            ]
            calls += [(words, 3, 5, f"{folder}/{words}-a", f"{folder}/{words}-b", mesh)]
        for rank in run_ranks(in_turn, 3, calls):
            for words, whole, again in zip(methods, rank[::3], rank[2::3], strict=True):
                for name, value in whole[0].items():
                    assert torch.equal(again[0][name], value), (words, name)
                for name, kept in whole[1].items():
                    assert all(torch.equal(again[1][name][what], value) for what, value in kept.items()), (words, name)


def test_another_number_of_ranks_takes_up_all_that_was_kept() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plans = {words: ({"mesh": {"replicate": 3}}, {"mesh": {"replicate": 2}}) for words in KEEPING}
        first = [(words, 3, 4, None, f"{folder}/{words}", one) for words, (one, _) in plans.items()]
        then = [(words, 2, 4, f"{folder}/{words}", f"{folder}/{words}-2", other) for words, (_, other) in plans.items()]
        before, after = run_ranks(in_turn, 3, first), run_ranks(in_turn, 2, then)
        for place, words in enumerate(KEEPING):
            total = 0.0
            for name, kept in before[0][place][1].items():
                for what in kept:
                    if what.startswith("shared."):
                        continue
                    was = sum(rank[place][1][name][what] for rank in before)
                    now = sum(rank[place][1][name][what] for rank in after)
                    torch.testing.assert_close(now, was, rtol=1e-12, atol=1e-15, msg=f"{words} {name} {what}")
                    total += float(was.abs().sum())
            assert total > 0 or words == "qsgd", words
