"""Replicas that differ in a run: bytes counted, drift measured, steps left out, parameters frozen, plans refused."""

import functools
import math
import os
from pathlib import Path

import pytest
import torch

import tutti
from harness import run_ranks
from local_sgd.replicas import MODELS, Seen, Told, train, train_all
from local_sgd.simulated import doubles, simulate
from tutti.config import serialization
from tutti.config.consistency_modes import CONSISTENCY_MODES
from tutti.config.plan import BatchPlan, Plan
from tutti.config.sync_notation import parse_sync

STEPS = 6
RUNS = {
    "synchronous": Told(steps=STEPS),
    "local": Told(sync="local:2", steps=STEPS),
    "post-local": Told(sync="post-local:2,after=2", steps=STEPS),
    "one-shot": Told(sync="one-shot", steps=STEPS),
    "diloco": Told(sync="diloco:3", steps=STEPS),
    "adasum": Told(sync="adasum", steps=STEPS),
    "ring": Told(sync="ring", steps=STEPS),
    "shift-one": Told(sync="shift-one", steps=STEPS),
    "push": Told(sync="push", steps=STEPS),
    "elastic": Told(sync="elastic:2", steps=STEPS),
}
FROZEN = {
    mode: Told(sync=sync, freeze=(3, "first.bias"), optimizer="AdamW", rate=0.01)
    for mode, sync in {"local": "local:4", "ring": "ring", "diloco": "diloco:2", "elastic": "elastic"}.items()
}
SKIPPED = Told(
    sync="one-shot", model="bad", steps=5, batch=10, job={"on_nonfinite": "skip"}, arguments={"momentum": 0.9}
)


@functools.cache
def trained(size: int) -> list[dict[str, Seen]]:
    runs = {name: told for name, told in RUNS.items() if size % 2 == 0 or name != "shift-one"}
    frozen = {f"frozen {name}": told for name, told in FROZEN.items()} if size == 4 else {}
    return run_ranks(train_all, size, {**runs, **frozen, "skipped": SKIPPED}, size)


def model_nbytes() -> int:
    with doubles():
        return sum(p.numel() for p in MODELS["mlp"][0]().parameters()) * 8


def expected_nbytes(mode: str, size: int) -> float:
    """Parameters that rank 0 sends in all steps, by the formula of the mode."""
    n, ring = model_nbytes(), 2 * (size - 1) * model_nbytes() // size
    rounds = int(math.log2(size)) + (size & (size - 1) > 0)
    each: dict[str, float] = {
        "synchronous": 0,
        "local": 3 * ring,
        "post-local": 2 * ring,
        "one-shot": 0,
        "diloco": 2 * ring,
        "adasum": 6 * rounds * n,
        "ring": 6 * (2 if size > 2 else 1) * n,
        "shift-one": 6 * n,
        "push": 6 * (n + 8),
        "elastic": 3 * ring,
    }
    return each[mode]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("mode", RUNS)
def test_bytes_are_those_of_the_formula(size: int, mode: str) -> None:
    if mode not in trained(size)[0]:
        pytest.skip("replicas exchange in pairs")
    channels = [channel for row in trained(size)[0][mode].rows for channel in row["communication"]]
    sent = sum(channel["nbytes"] for channel in channels if channel["carried"] == "parameters")
    assert sent == expected_nbytes(mode, size)
    gradients = sum(channel["nbytes"] for channel in channels if channel["carried"] == "gradients")
    assert (gradients > 0) == (mode in ("synchronous", "post-local"))
    assert sum(row["sent_nbytes"] for row in trained(size)[0][mode].rows) == sent + gradients


def test_every_mode_runs_here() -> None:
    asynchronous = {mode.name for mode in CONSISTENCY_MODES.values() if mode.asynchronous}
    assert {*RUNS, *asynchronous} == set(CONSISTENCY_MODES)


def test_drift_and_staleness_are_in_the_rows() -> None:
    rows = {mode: trained(4)[0][mode].rows for mode in RUNS}
    assert all("replicas" not in row for row in rows["synchronous"])
    local = [row["replicas"] for row in rows["local"]]
    assert [one["staleness"] for one in local] == [1, 0, 1, 0, 1, 0]
    before = [trained(4)[rank]["one-shot"].states[1] for rank in range(4)]
    names = [name for name in before[0] if name in dict(MODELS["mlp"][0]().named_parameters())]
    vectors = torch.stack([torch.cat([state[name].reshape(-1) for name in names]) for state in before])
    mean = vectors.mean(0)
    apart = (vectors - mean).norm(dim=1) / mean.norm()
    assert local[1]["disagreement"]["max"] == pytest.approx(float(apart.max()), rel=1e-9)
    assert local[1]["disagreement"]["mean"] == pytest.approx(float(apart.mean()), rel=1e-9)
    assert "replicas" not in rows["post-local"][0]
    assert rows["one-shot"][-1]["replicas"]["staleness"] == STEPS
    for mode in ("ring", "shift-one", "push", "elastic", "adasum"):
        assert any(row["replicas"]["disagreement"] for row in rows[mode]), mode


def test_losses_are_the_same_on_all_ranks_and_data_follow_the_same_order() -> None:
    for mode in RUNS:
        for seen in trained(4):
            assert seen[mode].losses == trained(4)[0][mode].losses
            assert seen[mode].batches == trained(4)[0]["synchronous"].batches


@pytest.mark.parametrize("mode", RUNS)
def test_what_is_evaluated_is_what_training_ends_with(mode: str) -> None:
    ranks = [one[mode] for one in trained(4)]
    with doubles():
        build, data, loss_fn = MODELS["mlp"]
        model = build()
        model.load_state_dict({**ranks[0].after, "back.weight": ranks[0].after["first.weight"]})
        x, y = data().tensors
        expected = float(loss_fn(model(x), y).detach())
    for seen in ranks:
        assert seen.evaluation["loss"] == pytest.approx(expected, rel=1e-12)
        assert all(torch.equal(value, ranks[0].after[name]) for name, value in seen.after.items())


@pytest.mark.parametrize("mode", ["ring", "shift-one", "push", "adasum", "elastic"])
def test_four_replicas_follow_the_equations(mode: str) -> None:
    ranks = [one[mode] for one in trained(4)]
    states, ending = simulate(RUNS[mode], ranks[0].batches, 4)
    for rank, seen in enumerate(ranks):
        for step, expected in enumerate(states):
            for name, value in expected[rank].items():
                torch.testing.assert_close(seen.states[step][name], value, rtol=1e-12, atol=1e-13)
        for name, value in ending.items():
            torch.testing.assert_close(seen.after[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", FROZEN)
def test_freezing_a_parameter_brings_replicas_together(mode: str) -> None:
    ranks = [one[f"frozen {mode}"] for one in trained(4)]
    for seen in ranks:
        assert all(torch.equal(value, ranks[0].states[3][name]) for name, value in seen.states[3].items())
        assert torch.equal(seen.states[-1]["first.bias"], seen.states[3]["first.bias"])
        assert all(torch.equal(value, ranks[0].after[name]) for name, value in seen.after.items())
    assert not torch.equal(ranks[0].states[4]["first.weight"], ranks[1].states[4]["first.weight"])


def test_a_loss_that_is_not_finite_stops_no_replica_alone() -> None:
    ranks = [one["skipped"] for one in trained(4)]
    bad = next(step for step, batch in enumerate(ranks[0].batches) if 17 in batch)
    assert 0 < bad < 5, "the test's data come in another order now; choose another sample"
    for seen in ranks:
        assert math.isnan(seen.losses[bad])
        assert all(torch.equal(value, seen.states[bad - 1][name]) for name, value in seen.states[bad].items())
        assert sum(not math.isnan(loss) for loss in seen.losses) == 4


@pytest.mark.parametrize("sync", ["ring", "elastic"])
def test_a_script_that_leaves_early_ends(sync: str) -> None:
    told = Told(sync=sync, leaves=True, steps=3, wish=True)
    states, _ = simulate(told, trained(4)[0][sync].batches[:3], 2)
    for rank, seen in enumerate(run_ranks(train, 2, told, 2)):
        for name, value in states[-1][rank].items():
            torch.testing.assert_close(seen.states[-1][name], value, rtol=1e-12, atol=1e-13)


def refused(size: int, told: list[tuple[str, dict[str, int]]]) -> list[str]:
    """What each plan says on this rank instead of training."""
    said = []
    for sync, mesh in told:
        plan = Plan(batch=BatchPlan(global_batch_size=12), mesh=mesh, sync=parse_sync(sync))  # type: ignore[arg-type]
        os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"refused-{os.getpid()}.json"))
        try:
            job = tutti.Job(global_batch_size=12)
            build, data, loss_fn = MODELS["mlp"]
            model = build()
            job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), loss_fn)
            said.append("trained")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_does_not_compose_is_refused_on_all_ranks() -> None:
    cases = [
        ("local:2", {"shard": 2}),
        ("ring", {"split": 2}),
        ("diloco:5", {"stage": 2}),
        ("push", {"context": 2}),
    ]
    for said in run_ranks(refused, 2, 2, cases):
        for (sync, mesh), words in zip(cases, said, strict=True):
            assert words.startswith("PlanError"), words
            assert sync.partition(":")[0] in words
            assert next(iter(mesh)) in words
