"""Plans of 0/1 Adam: one rank's run where nothing is lost and ranks always agree, accounted for with one bit."""

import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tutti
from against_one import Subject, Trained, assert_agree
from harness import preload, run_ranks
from optim.test_zero_one import equations
from parallel.test_compressed_multirank import case, in_turn, look, tied
from parallel.test_compressed_plans_multirank import clipped
from parallel.test_momentum_compression_multirank import late
from trainer.digits import Reached, reach
from trainer.several import Case, assert_refused, refusals, train_cases
from tutti.compression.dense_reducers import AllGatherReducer, TwoPhaseReducer
from tutti.compression.reducer import GradientReducer
from tutti.config.compression import (
    Compression,
    all_reduce_sent_nbytes,
    bucket_sent_nbytes,
    flags_sent_nbytes,
    parse_compression,
)
from tutti.config.partitioning import cut
from tutti.config.plan import ShardingPlan
from tutti.config.zero_one_schedule import local_updates
from tutti.local_sgd import delayed_reduction
from tutti.parallel.compressed import compressor

preload("sklearn.datasets")

STEPS, FREEZE = 18, 7

WORDS = f"zero-one-adam,freeze_step={FREEZE},kappa=2,local_steps=2,longest=4"


def made(words: str = WORDS, make: Any = tied, **plan: Any) -> Case:
    return case(words, make, **plan)


def exactly(cases: dict[str, Case], look: Any = None) -> dict[str, Trained]:
    """Trainings whose sums lose nothing: float64 in the code's place."""
    code = compressor.make_reducer

    def lossless(how: Compression, *rest: Any, **more: Any) -> Any:
        return code(Compression(method="float64"), *rest, **more)

    compressor.make_reducer = delayed_reduction.make_reducer = lossless
    try:
        return train_cases(cases, STEPS, look)
    finally:
        compressor.make_reducer = delayed_reduction.make_reducer = code


def without_gradients(trained: Trained) -> Trained:
    """Once ranks step alone, gradients are each rank's own."""
    return replace(trained, gradients=trained.gradients[:FREEZE])


def test_where_nothing_is_lost_and_ranks_always_agree_it_is_the_run_of_one_rank() -> None:
    words = f"zero-one-adam,freeze_step={FREEZE},kappa=2,longest=1"
    one = run_ranks(exactly, 1, {"run": made(words, mesh={"replicate": 1})})[0]["run"]
    adam = run_ranks(train_cases, 1, {"run": case(None)}, STEPS, None)[0]["run"]
    assert not torch.equal(one.state["second.weight"], adam.state["second.weight"])
    three = run_ranks(exactly, 3, {"run": made(words, mesh={"replicate": 3})})
    assert_agree(without_gradients(one), [without_gradients(rank["run"]) for rank in three])


def batches() -> tuple[torch.Tensor, list[Any]]:
    """Parameters in the beginning, one tensor behind the other, and whole batches in order."""
    torch.set_default_dtype(torch.float64)
    subject = clipped()
    job = tutti.Job(global_batch_size=subject.batch)
    model = subject.model()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    model, _, loader = job.prepare(model, torch.optim.AdamW(model.parameters()), subject.data, subject.loss_fn)
    found: list[Any] = []
    while len(found) < STEPS:
        for batch in loader:
            found.append(batch)
            job.step(batch)
    return start, found[:STEPS]


@pytest.mark.long
def test_what_enters_the_optimizer_is_clipped_as_by_the_equations_in_one_process() -> None:
    """The sum's norm while ranks sum, a rank's own where it steps alone; shares of 2, 3 and 3 samples."""
    three = run_ranks(exactly, 3, {"run": made(make=clipped, mesh={"replicate": 3})}, look)
    start, whole = run_ranks(batches, 1)[0]
    model, bound = clipped().model().double(), clipped().job["clip_norm"]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    norms, bounds = list[float](), cut(8, 3)

    def gradients(step: int, own: list[torch.Tensor]) -> torch.Tensor:
        found = []
        for rank, w in enumerate(own):
            x, y = (part[bounds[rank] : bounds[rank + 1]] for part in whole[step])
            flat = w.clone().requires_grad_()
            parts = zip(shapes.items(), flat.split(sizes), strict=True)
            output = torch.func.functional_call(model, {name: part.view(shape) for (name, shape), part in parts}, x)
            found.append(torch.autograd.grad(F.cross_entropy(output, y, reduction="sum") * 3 / 8, flat)[0])
        norms.extend(float(one.norm()) for one in found)
        return torch.stack(found)

    expected = equations(start, gradients, STEPS, decay=0.01, decoupled=True, lr=0.01, sizes=sizes, clip_norm=bound)
    assert min(norms) > bound
    assert not torch.equal(expected[0], expected[1])
    for rank, one in zip(three, expected, strict=True):
        got = torch.cat([rank["run"].facts["state"][name].flatten() for name in shapes])
        torch.testing.assert_close(got, one, rtol=1e-12, atol=1e-13)


def kept_in(exchange: GradientReducer) -> torch.Tensor:
    """What a rank keeps back, as worker and, where sums are written anew, as server."""
    kept = exchange.states["worker"].old["residual"].clone()
    for begin, end in exchange.spans.get("server", ()):
        kept[begin:end] += exchange.states["server"].old["residual"][: end - begin]
    return kept


def followed(world_size: int) -> dict[str, Any]:
    """A run with one bit: what went into sums of ways, came out and is kept, and parameters of all ranks then."""
    kind: type[GradientReducer] = AllGatherReducer if world_size == 2 else TwoPhaseReducer
    rounds, seen = kind.rounds, []

    def follow(self: GradientReducer, flat: torch.Tensor) -> Any:
        before = flat.clone()
        yield from rounds(self, flat)
        seen.append((self, before, flat.clone()))

    def keep(run: Any) -> dict[str, Any]:
        exchange = run.state.consistency._compressed_sum.reducers[0]
        own = [one for one in seen if one[0] is exchange]
        facts = {**look(run), "went": [one[1] for one in own], "came": [one[2] for one in own]}
        groups = [[tuple(p.shape) for p in bucket] for bucket in found]
        before = {id(one[0]): one[0] for one in seen if one[0] is not exchange}
        gradients = []
        for key, one in before.items():
            went, came = (sum(some[what] for some in seen if id(some[0]) == key) for what in (1, 2))
            gradients.append((went, came, kept_in(one)))
        return {**facts, "kept": kept_in(exchange), "shapes": groups, "gradients": gradients}

    found: list[Any] = []
    start = compressor.Compressor.rebuild

    def rebuild(self: Any, buckets: Any) -> None:
        start(self, buckets)
        if self.exchanges:
            found[:] = [bucket.parameters for bucket in self.exchanges]

    kind.rounds = follow  # type: ignore[method-assign]
    compressor.Compressor.rebuild = rebuild  # type: ignore[method-assign]
    try:
        trained = train_cases({"run": made(mesh={"replicate": world_size})}, STEPS, keep)["run"]
    finally:
        kind.rounds = rounds  # type: ignore[method-assign]
        compressor.Compressor.rebuild = start  # type: ignore[method-assign]
    return trained.facts


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ways_that_came_out_and_are_kept_are_those_that_went_in(world_size: int) -> None:
    """All ranks have the same bits once they agree, and bytes are the formula's."""
    found = run_ranks(followed, world_size, world_size)
    times = len(found[0]["went"])
    went = sum(sum(rank["went"]) for rank in found)
    kept = sum(rank["kept"] for rank in found)
    came = sum(found[0]["came"])
    assert bool(kept.any())
    assert float((came + kept - went).abs().max()) <= 1e-12 * max(float(went.abs().max()), 1.0)
    for bucket, (_, came, _) in enumerate(found[0]["gradients"]):  # between exact sums, which leave it alone
        went, kept = (sum(rank["gradients"][bucket][what] for rank in found) for what in (0, 2))
        gap = (came + kept - went)[went != 0]
        assert not gap.numel() or float(gap.abs().max()) <= 1e-12 * max(float(went.abs().max()), 1.0)
    for rank in found:
        assert all(torch.equal(a, b) for a, b in zip(rank["came"], found[0]["came"], strict=True))
        assert all(value.isfinite().all() for value in rank["state"].values())
    how, expected, since, agreed = parse_compression(WORDS), [], 0, 0
    for step in range(STEPS):
        if step < FREEZE:
            some, code = found[0]["shapes"], how.at(step)
            wants_statistics = sum(flags_sent_nbytes(len(one), world_size, 8) for one in some) if code is None else 0
            expected.append(wants_statistics + sum(bucket_sent_nbytes(code, one, world_size, 8) for one in some))
            continue
        since += 1
        due = since == local_updates(agreed, 2, 4)
        ways = all_reduce_sent_nbytes(how, [(found[0]["went"][0].numel(),)], world_size, 8) if due else 0
        expected.append(ways)
        since, agreed = (0, agreed + 1) if due else (since, agreed)
    sent = [row["sent_nbytes"] for row in found[0]["steps"][-STEPS:]]
    assert times == agreed
    assert min(expected[:FREEZE]) < max(expected[:FREEZE])
    buffers = [got - want for got, want in zip(sent, expected, strict=True)]
    assert buffers == [0] * STEPS, (sent, expected)


@pytest.mark.long
@pytest.mark.parametrize("stop", [5, 7, 11, 12])
def test_resuming_changes_no_bit(stop: int) -> None:
    """While gradients travel, when ranks part, between two moments in which they agree, and at one."""
    mesh = {"mesh": {"replicate": 3}}
    with tempfile.TemporaryDirectory() as folder:
        calls: list[tuple[Any, ...]] = [
            (WORDS, 3, 16, None, f"{folder}/whole", mesh),
            (WORDS, 3, stop, None, f"{folder}/a", mesh),
            (WORDS, 3, 16, f"{folder}/a", f"{folder}/b", mesh),
        ]
        for whole, _, again in run_ranks(in_turn, 3, calls):
            for name, value in whole[0].items():
                assert torch.equal(again[0][name], value), name


def elsewhere(calls: list[tuple[Any, ...]]) -> list[dict[str, torch.Tensor]]:
    return [parameters for parameters, _ in in_turn(calls)]


@pytest.mark.long
def test_another_number_of_ranks_goes_on_alike() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(elsewhere, 3, [(WORDS, 3, 11, None, f"{folder}/a", {"mesh": {"replicate": 3}})])
        call = (WORDS, 2, 12, f"{folder}/a", f"{folder}/b", {"mesh": {"replicate": 2}})
        for rank in run_ranks(elsewhere, 2, [call]):
            assert all(value.isfinite().all() for value in rank[0].values())


def stochastic() -> Subject:
    return replace(tied(), optimizer=torch.optim.SGD)


@pytest.mark.long
def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    two = {"replicate": 2}
    given = [
        made(make=stochastic, mesh=two),
        made(mesh={"shard": 2}, sharding=ShardingPlan(level=1)),
        made(mesh={"split": 2}),
        made("zero-one-adam,freeze_step=20,kappa=2", late, mesh=two),
    ]
    words = ("SGD is not Adam's", "mesh.shard = 2", "mesh.split = 2")
    ranks = run_ranks(refusals, 2, given, STEPS)
    assert_refused([rank[:-1] for rank in ranks], words)
    for rank in ranks:
        assert rank[-1].startswith("TrainingError: late."), rank[-1]
        assert "kappa = 2" in rank[-1], rank[-1]


def digits() -> Reached:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.003)

    return reach("zero-one", optimizer=adam, TUTTI_COMPRESS="zero-one-adam,freeze_step=66")


@pytest.mark.timeout(600)
@pytest.mark.long
def test_digits_are_learnt_whose_pixels_are_always_zero() -> None:
    """Three of them are in all training samples: the published form goes to NaN there."""
    for one in run_ranks(digits, 4, timeout_s=590):
        assert one.accuracy >= 0.97, one
        assert one.last <= 0.02, one
