"""Plans that sum momenta in place of gradients: one rank's run where nothing is lost, accounted for with one bit."""

import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from against_one import Subject, Trained, assert_agree, train
from harness import run_ranks
from parallel.test_compressed_multirank import case, data, in_turn, look, tied
from parallel.test_compressed_plans_multirank import Followed, branching, clipped, plain
from trainer.several import Case, assert_refused, refusals, train_cases
from tutti.compression.dense_reducers import AllGatherReducer, TwoPhaseReducer
from tutti.compression.reducer import GradientReducer, states_by_tensor
from tutti.config.compression import Compression, bucket_sent_nbytes, flags_sent_nbytes, parse_compression
from tutti.config.plan import PipelinePlan, ShardingPlan
from tutti.optim.large_batch import LAMB
from tutti.parallel.compressed import compressor
from tutti.parallel.compressed.compressor import sizes_of

STEPS, FREEZE = 12, 4

METHODS = ("one-bit-adam", "byte-adam", "one-bit-lamb")


def lamb() -> Subject:
    return replace(tied(), optimizer=LAMB)


def adam() -> Subject:
    return replace(tied(), optimizer=torch.optim.Adam)


def made(method: str, make: Any = None, freeze_step: int = FREEZE, **plan: Any) -> Case:
    return case(f"{method},freeze_step={freeze_step}", make or (lamb if method == "one-bit-lamb" else tied), **plan)


def exactly(cases: dict[str, Case]) -> dict[str, Trained]:
    """Trainings whose sums lose nothing: float64 in the code's place."""
    code = compressor.make_reducer
    compressor.make_reducer = lambda how, *rest, **more: code(Compression(method="float64"), *rest, **more)
    try:
        return train_cases(cases, STEPS, None)
    finally:
        compressor.make_reducer = code


ONE = {"replicate": 1}


def cases(mesh: dict[str, int], **plan: Any) -> dict[str, Case]:
    return {method: made(method, mesh=mesh, **plan) for method in METHODS}


def test_where_nothing_is_lost_it_is_the_run_of_one_rank() -> None:
    one = run_ranks(exactly, 1, cases(ONE))
    never = run_ranks(train_cases, 1, {"one": case(None)}, STEPS, None)
    assert not torch.equal(one[0]["one-bit-adam"].state["second.weight"], never[0]["one"].state["second.weight"])
    three = run_ranks(exactly, 3, cases({"replicate": 3}))
    for method in METHODS:
        assert_agree(one[0][method], [rank[method] for rank in three])


def clipped_and_decayed() -> Subject:
    """Adam whose decay is in the gradient, and so in the momentum."""
    return replace(tied(), optimizer=decayed, job={"clip_norm": 0.3})


def decayed(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, weight_decay=0.1)


def test_where_the_optimizers_state_is_divided_it_is_that_too() -> None:
    """Elements of Adam's among ranks, parameters of LAMB's; what is clipped is the gradient that the sum stands for."""
    subjects = {"one-bit-adam": tied, "byte-adam": clipped_and_decayed, "one-bit-lamb": lamb}
    one = run_ranks(exactly, 1, {method: made(method, make, mesh=ONE) for method, make in subjects.items()})
    level = {"sharding": ShardingPlan(level=1)}
    three = {method: made(method, make, mesh={"shard": 3}, **level) for method, make in subjects.items()}
    found = run_ranks(exactly, 3, three)
    for method in subjects:
        assert_agree(one[0][method], [rank[method] for rank in found])


def by_turns() -> Subject:
    """Blocks that batches leave out by turns, and rows of an embedding that come late."""
    return replace(branching(), optimizer=torch.optim.AdamW)


def frozen_early(trained: Trained, start: dict[str, torch.Tensor], freeze_step: int) -> dict[str, torch.Tensor]:
    """Where the gradients of a run lead, by AdamW's equations with a second moment that stands: of one that a step has
    no gradient of, nothing moves; before it stands `floor` is not there.
    """
    rate, decay, b1, b2 = 0.01, 0.01, 0.9, 0.999
    w, m, v, count, learned = dict(start), {}, {}, {}, {}
    for gradients in trained.gradients:
        frozen = bool(learned)
        for name, g in gradients.items():
            m[name] = b1 * m.get(name, 0) + (1 - b1) * g
            count[name] = count.get(name, 0) + 1
            if not frozen:
                v[name] = b2 * v.get(name, 0) + (1 - b2) * g * g
            root = (v[name] / (1 - b2 ** learned.get(name, count[name]))).sqrt()
            if frozen:
                root = root.clamp(min=0.1 * float(root.square().mean().sqrt()))
            w[name] = w[name] * (1 - rate * decay) - rate * m[name] / (1 - b1 ** count[name]) / (root + 1e-8)
        if not frozen and max(count.values()) == freeze_step:
            learned = dict(count)
    return w


@pytest.mark.long
def test_parameters_left_out_by_turns_are_one_devices_after_two_steps_too() -> None:
    """v of rows not seen yet is 0 then, and their first steps are long ones, on one device as well."""
    one = run_ranks(exactly, 1, {"run": made("byte-adam", by_turns, 2, mesh=ONE)})[0]["run"]
    start = run_ranks(begun, 1)[0]
    for name, value in frozen_early(one, start, 2).items():
        torch.testing.assert_close(one.state[name], value, rtol=1e-12, atol=1e-13)
    left_out = [set(start) - set(gradients) for gradients in one.gradients]
    assert any(one - another for one, another in zip(left_out[2:], left_out[1:], strict=False))
    three = run_ranks(exactly, 3, {"run": made("byte-adam", by_turns, 2, mesh={"replicate": 3})})
    assert_agree(one, [rank["run"] for rank in three])


def begun() -> dict[str, torch.Tensor]:
    return train(by_turns, {}, 0, torch.float64).state


@pytest.mark.long
def test_beside_other_parts_of_a_plan_it_is_that_too() -> None:
    """Accumulation, unlike shares, clipping, divided states beside replicas, tensors that are split, and stages."""
    alone = {"byte-adam": made("byte-adam", mesh=ONE), "plain": made("one-bit-adam", plain, mesh=ONE)}
    alone["clipped"] = made("byte-adam", clipped_and_decayed, mesh=ONE)
    one = run_ranks(exactly, 1, alone)
    mesh, clipped_too = {"replicate": 2, "shard": 2}, {"replicate": 2, "split": 2}
    beside = {
        "byte-adam": made("byte-adam", mesh=mesh, sharding=ShardingPlan(level=1)),
        "clipped": made("byte-adam", clipped_and_decayed, mesh=clipped_too),
    }
    four = run_ranks(exactly, 4, beside)
    for name in beside:
        assert_agree(one[0][name], [rank[name] for rank in four])
    batch = {"num_microbatches": 2}
    shares = {"shares": made("byte-adam", mesh={"replicate": 2}, shares=(3, 1), batch=batch)}
    assert_agree(one[0]["byte-adam"], [rank["shares"] for rank in run_ranks(exactly, 2, shares)])
    inside = {
        "split": made("one-bit-adam", plain, mesh={"replicate": 2, "split": 2}),
        "stage": made(
            "one-bit-adam", plain, mesh={"replicate": 2, "stage": 2}, pipeline=PipelinePlan(cuts=("2",)), batch=batch
        ),
    }
    for rank in run_ranks(exactly, 4, inside):
        assert_agree(one[0]["plain"], [rank["split"], rank["stage"]])


def followed(words: str, world_size: int) -> dict[str, Any]:
    """A run whose sums of momenta are added up: what went in, came out and is kept, by bucket."""
    went: dict[int, Any] = {}
    came: dict[int, Any] = {}
    kind: type[GradientReducer] = AllGatherReducer if world_size == 2 else TwoPhaseReducer
    rounds = kind.rounds

    def follow(self: GradientReducer, flat: torch.Tensor) -> Any:
        went[id(self)] = went.get(id(self), 0) + flat
        yield from rounds(self, flat)
        came[id(self)] = came.get(id(self), 0) + flat

    def keep(run: Any) -> dict[str, Any]:
        kept = {}
        for bucket, exchange in run.parallel.replica.compressor.exchanges.items():
            values = [one["residual"] for one in states_by_tensor(exchange, sizes_of(bucket))]
            kept[id(exchange)] = torch.cat(values)
        order = [id(one) for one in run.parallel.replica.compressor.exchanges.values()]
        shapes = [[tuple(p.shape) for p in bucket.parameters] for bucket in run.parallel.replica.compressor.exchanges]
        sums = [(went[one], came[one], kept[one]) for one in order]
        return {**look(run), "sums": sums, "shapes": shapes}

    kind.rounds = follow  # type: ignore[method-assign]
    method = words.partition(",")[0]
    make = {"byte-adam": adam, "one-bit-lamb": lamb}.get(method, tied)
    try:
        trained = train_cases({"run": case(words, make, mesh={"replicate": world_size})}, STEPS, keep)
    finally:
        kind.rounds = rounds  # type: ignore[method-assign]
    return {**trained["run"].facts, "losses": trained["run"].losses}


def all_followed(words: list[str], world_size: int) -> list[dict[str, Any]]:
    return [followed(one, world_size) for one in words]


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_momenta_that_came_out_and_are_kept_are_those_that_went_in(world_size: int) -> None:
    """And bytes are the formula's before and after the switch, the bits of all ranks the same."""
    words = [f"{method},freeze_step={FREEZE}" for method in METHODS]
    found = run_ranks(all_followed, world_size, words, world_size)
    for place, one in enumerate(words):
        first = found[0][place]
        for bucket, (_, came, _) in enumerate(first["sums"]):
            went = sum(rank[place]["sums"][bucket][0] for rank in found)
            kept = sum(rank[place]["sums"][bucket][2] for rank in found)
            scale = max(float(went.abs().max()), 1.0)
            assert bool(kept.any()) == bool(went.any())
            # what the parameter that no loss uses would have had is not sent
            gap = (came + kept - went)[went != 0]
            assert not gap.numel() or float(gap.abs().max()) <= 1e-12 * scale, one
        for rank in found:
            assert all(torch.equal(rank[place]["state"][name], value) for name, value in first["state"].items()), one
        how = parse_compression(one)
        sent = [row["sent_nbytes"] for row in first["steps"][-STEPS:]]
        exact, coded = (
            sum(bucket_sent_nbytes(how.at(step), some, world_size, 8) for some in first["shapes"])
            for step in (0, FREEZE)
        )
        exact += sum(flags_sent_nbytes(len(some), world_size, 8) for some in first["shapes"])  # how far parts cancel
        assert sent == [exact] * FREEZE + [coded] * (STEPS - FREEZE), one
        assert coded < exact


@pytest.mark.long
@pytest.mark.parametrize(("stop", "divided"), [(3, False), (6, False), (6, True)])
def test_resuming_before_and_after_the_switch_changes_no_bit(stop: int, divided: bool) -> None:
    words = ["one-bit-adam,freeze_step=4"] + (["one-bit-lamb,freeze_step=4"] if stop == 6 else [])
    mesh: dict[str, Any] = {"mesh": {"replicate": 3}}
    if divided:
        mesh = {"mesh": {"shard": 3}, "sharding": ShardingPlan(level=1)}
    with tempfile.TemporaryDirectory() as folder:
        calls: list[tuple[Any, ...]] = []
        for one in words:
            calls += [
                (one, 3, 8, None, f"{folder}/{one}-whole", mesh),
                (one, 3, stop, None, f"{folder}/{one}-a", mesh),
                (one, 3, 8, f"{folder}/{one}-a", f"{folder}/{one}-b", mesh),
            ]
        for rank in run_ranks(in_turn, 3, calls):
            for one, whole, again in zip(words, rank[::3], rank[2::3], strict=True):
                for name, value in whole[0].items():
                    assert torch.equal(again[0][name], value), (one, name)
                for name, kept in whole[1].items():
                    assert all(torch.equal(again[1][name][what], value) for what, value in kept.items()), (one, name)


@pytest.mark.long
def test_another_number_of_ranks_goes_on_with_all_that_was_kept() -> None:
    words = "byte-adam,freeze_step=4"
    with tempfile.TemporaryDirectory() as folder:
        before = run_ranks(in_turn, 3, [(words, 3, 6, None, f"{folder}/a", {"mesh": {"replicate": 3}})])
        call = (words, 2, 6, f"{folder}/a", f"{folder}/b", {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)})
        after = run_ranks(in_turn, 2, [call])
        for name, kept in before[0][0][1].items():
            for what in kept:
                was, now = (sum(rank[0][1][name][what] for rank in some) for some in (before, after))
                torch.testing.assert_close(now, was, rtol=1e-12, atol=1e-15, msg=f"{name} {what}")


def poisoned(words: str) -> dict[str, torch.Tensor]:
    """Parameters that ranks leave out by turns, and a loss that is not finite on one rank once momenta are summed."""
    torch.set_default_dtype(torch.float64)
    this = Followed(parse_compression(words), words, torch.optim.AdamW)
    for batch in this.batches(16):
        spoilt = this.run.state.progress.step == 13
        before = {p: state["exp_avg"].clone() for p, state in this.run.parallel.optimizers[0].state.items()}
        weights = {p: p.detach().clone() for p in before}
        this.step(batch, poisoned=spoilt)
        if spoilt:
            assert all(
                torch.equal(this.run.parallel.optimizers[0].state[p]["exp_avg"], value) for p, value in before.items()
            )
            assert all(torch.equal(p, value) for p, value in weights.items())
    assert this.run.parallel.replica.compressor.momentum_compression.compresses_next
    return {name: value.clone() for name, value in this.model.state_dict().items()}


@pytest.mark.long
def test_a_step_that_is_not_finite_leaves_no_trace() -> None:
    first, *others = run_ranks(poisoned, 3, "one-bit-adam,freeze_step=10")
    assert all(value.isfinite().all() for value in first.values())
    assert all(torch.equal(other[name], value) for other in others for name, value in first.items())


class Late(nn.Module):
    """Half of it is used from the sixth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.calls = nn.Linear(6, 3), nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(x) + self.late(x) if self.calls > 6 else self.first(x)


def late() -> Subject:
    return Subject(model=Late, data=data(), loss_fn=F.cross_entropy)


def descent() -> Subject:
    return replace(plain(), optimizer=torch.optim.SGD)


@pytest.mark.long
def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    two = {"replicate": 2}
    given = [
        made("one-bit-adam", clipped, mesh=two),
        made("one-bit-adam", descent, mesh=two),
        made("one-bit-adam", plain, mesh={"shard": 2}, sharding=ShardingPlan(level=2)),
        made("one-bit-lamb", plain_lamb, mesh={"split": 2}),
        made("one-bit-adam", late, mesh=two),
    ]
    words = ("clip_norm = 0.05", "SGD is not Adam's", "sharding.level = 2", "LAMB's ratios need whole tensors")
    ranks = run_ranks(refusals, 2, given, STEPS)
    assert_refused([rank[:-1] for rank in ranks], words)
    for rank in ranks:
        assert rank[-1].startswith("TrainingError: late.bias has its first gradient after freeze_step = 4"), rank[-1]


def plain_lamb() -> Subject:
    return replace(plain(), optimizer=LAMB)
