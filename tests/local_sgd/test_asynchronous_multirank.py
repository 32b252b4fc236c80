"""Modes in which ranks do not wait for each other: what holds of them however their steps interleave."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from local_sgd.replicas import MODELS, Seen, Told, train, train_all, train_on, train_twice
from local_sgd.simulated import doubles
from tutti.checkpoint import to_state_dict
from tutti.config.consistency_modes import CONSISTENCY_MODES

MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
SYNC = {"ad-psgd": "ad-psgd", "asynchronous": "asynchronous", "ensemble": "ensemble", "hogwild": "hogwild"}
SYNC["stale"] = "stale:2"

RUNS = {mode: Told(sync=sync, arguments=MOMENTUM, batch=11) for mode, sync in SYNC.items()}
TOGETHER = {
    "momentum": Told(arguments=MOMENTUM),
    "odd batches, accumulated": Told(batch=7, microbatches=2, arguments=MOMENTUM),
    "unequal shares, one empty": Told(batch=9, shares=(3.0, 0.0, 2.0, 1.5), arguments=MOMENTUM),
    "a layer not used by all": Told(model="choosy", batch=9),
    "sparse": Told(model="words", batch=11),
}
FROZEN = {
    f"frozen {mode}": Told(sync=SYNC[mode], freeze=(3, "first.bias"), optimizer="AdamW", rate=0.01)
    for mode in SYNC
    if mode != "ensemble"
}
SIZES = pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4))])


@functools.cache
def trained(size: int) -> list[dict[str, Seen]]:
    """The trainings that are quick on `size` ranks, in one launch."""
    return run_ranks(train_all, size, {**RUNS, **twice("momentum")}, size)


@functools.cache
def trained_more(size: int) -> list[dict[str, Seen]]:
    """The others."""
    told = {key: one for name in TOGETHER for key, one in twice(name).items()}
    told["bn"] = Told(sync="asynchronous", model="conv", batch=25, steps=4)
    return run_ranks(train_all, size, {**told, **FROZEN}, size)


def twice(name: str) -> dict[str, Told]:
    """A training with sums in every step, and with servers that wait for all."""
    told = TOGETHER[name]
    return {f"{name}: synchronous": told, f"{name}: stale": Told(**{**vars(told), "sync": "stale:0"})}


def test_all_are_here() -> None:
    assert set(RUNS) == {mode.name for mode in CONSISTENCY_MODES.values() if mode.asynchronous}


@SIZES
def test_a_bound_of_0_is_synchronous(size: int) -> None:
    check_synchronous(trained(size), "momentum")


@pytest.mark.long
@pytest.mark.parametrize("name", TOGETHER)
def test_a_bound_of_0_is_synchronous_in_every_case(name: str) -> None:
    check_synchronous(trained_more(4), name)


def check_synchronous(ranks: list[dict[str, Seen]], name: str) -> None:
    for seen in ranks:
        sync, stale = seen[f"{name}: synchronous"], seen[f"{name}: stale"]
        assert stale.batches == sync.batches
        for step, expected in enumerate(sync.states):
            for key, value in expected.items():
                torch.testing.assert_close(stale.states[step][key], value, rtol=1e-12, atol=1e-13, msg=f"{step} {key}")
        assert stale.evaluation == pytest.approx(sync.evaluation, rel=1e-12)
        first = ranks[0][f"{name}: stale"].states
        assert all(torch.equal(v, first[s][k]) for s, one in enumerate(stale.states) for k, v in one.items())


@SIZES
def test_bytes_are_those_of_the_formula(size: int) -> None:
    ranks = trained(size)
    with doubles():
        n = sum(p.numel() * 8 for p in MODELS["mlp"][0]().parameters())
    steps, served = len(ranks[0]["stale"].losses), n // 8 // size * 8  # rank 0's part, rounded down
    a_step = (n - served) + (size - 1) * served  # its own change, and its answers
    assert a_step == pytest.approx(2 * (size - 1) / size * n, rel=0.01)
    assert parameters_sent(ranks[0]["momentum: stale"]) == steps * a_step
    for mode in ("stale", "asynchronous"):
        assert 0 < parameters_sent(ranks[0][mode]) <= steps * a_step
    assert parameters_sent(ranks[0]["ad-psgd"]) in [count * n for count in range(steps + 1)]
    assert parameters_sent(ranks[0]["ensemble"]) == 0
    assert parameters_sent(ranks[0]["hogwild"], first=1) == 0, "but for the optimizers' state, once"


def parameters_sent(seen: Seen, first: int = 0) -> int:
    channels = [channel for row in seen.rows[first:] for channel in row["communication"]]
    assert not any(channel["carried"] == "gradients" for channel in channels)
    return sum(channel["nbytes"] for channel in channels if channel["carried"] == "parameters")


@SIZES
@pytest.mark.parametrize("mode", RUNS)
def test_all_end_with_one_model_which_is_what_was_evaluated(size: int, mode: str) -> None:
    ranks = [one[mode] for one in trained(size)]
    with doubles():
        build, data, loss_fn = MODELS["mlp"]
        x, y = data().tensors
        outputs = []
        for seen in ranks:
            model = build()
            model.load_state_dict({**seen.after, "back.weight": seen.after["first.weight"]})
            outputs.append(model(x).detach())
        members = [float(loss_fn(output, y)) for output in outputs]
        expected = float(loss_fn(torch.stack(outputs).mean(0), y))
    for seen in ranks:
        assert seen.batches == ranks[0].batches
        assert seen.evaluation["loss"] == pytest.approx(expected, rel=1e-12)
        if mode != "ensemble":
            assert all(torch.equal(value, ranks[0].after[name]) for name, value in seen.after.items())
    if mode == "ensemble":
        assert expected <= sum(members) / len(members)
        assert size == 1 or expected < min(members) or len(set(members)) == size, "members that are independent"


@functools.cache
def on_one_rank() -> dict[str, Seen]:
    plain = Told(**{**vars(RUNS["stale"]), "sync": "synchronous"})
    return run_ranks(train_all, 1, {**RUNS, "plain": plain}, 1)[0]


@pytest.mark.parametrize("mode", RUNS)
def test_one_rank_is_plain_training(mode: str) -> None:
    seen = on_one_rank()
    assert seen[mode].losses == seen["plain"].losses
    for one, other in zip(seen[mode].states, seen["plain"].states, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert seen[mode].evaluation == seen["plain"].evaluation
    assert all(row["replicas"]["staleness"] == 0 for row in seen[mode].rows)


@SIZES
def test_staleness_and_disagreement_are_in_the_rows(size: int) -> None:
    for mode in RUNS:
        rows = trained(size)[0][mode].rows
        assert len(rows) == RUNS[mode].steps
        assert all(row["replicas"]["staleness"] >= 0 for row in rows)
        if mode == "stale":
            assert all(row["replicas"]["staleness"] <= 2 for row in rows)
        if mode in ("stale", "asynchronous"):
            assert all(0 <= row["replicas"]["disagreement"]["max"] < 1 for row in rows)
        assert all(row["loss"] > 0 for row in rows)
    rows = trained(size)[0]["momentum: stale"].rows
    assert all(0 < row["replicas"]["disagreement"]["mean"] < 1 for row in rows[1:])
    assert all(row["replicas"]["staleness"] == 0 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("name", FROZEN)
def test_freezing_brings_replicas_together(name: str) -> None:
    ranks = [one[name] for one in trained_more(4)]
    for seen in ranks:
        assert torch.equal(seen.states[-1]["first.bias"], seen.states[3]["first.bias"])
        assert torch.equal(seen.states[3]["first.bias"], ranks[0].states[3]["first.bias"])
        assert all(torch.equal(value, ranks[0].after[key]) for key, value in seen.after.items())
        assert not torch.equal(seen.states[-1]["first.weight"], seen.states[3]["first.weight"])
    if "hogwild" not in name:  # its parameters are one memory: others may have gone on before they were copied
        assert all(torch.equal(seen.states[3][k], v) for seen in ranks for k, v in ranks[0].states[3].items())


@pytest.mark.long
def test_running_statistics_are_averaged_where_replicas_meet() -> None:
    ranks = [one["bn"] for one in trained_more(4)]
    for seen in ranks:
        assert all(torch.equal(value, ranks[0].after[name]) for name, value in seen.after.items())
    for name, value in ranks[0].after.items():
        if name.endswith("running_mean"):
            mean = torch.stack([seen.states[-1][name] for seen in ranks]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)


SAVED = {
    "stale": Told(sync="stale:0", optimizer="AdamW", rate=0.01, save_at=3),
    "ensemble": Told(sync="ensemble", optimizer="AdamW", rate=0.01, save_at=3, model="conv", batch=25),
}


@functools.cache
def resumed() -> list[dict[str, tuple[Seen, Seen]]]:
    return run_ranks(train_twice, 2, SAVED, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_run_goes_on_bit_for_bit_where_nothing_depends_on_time(name: str) -> None:
    for one in resumed():
        whole, rest = one[name]
        assert rest.losses == whole.losses[3:]
        for step, expected in enumerate(whole.states[3:]):
            assert all(torch.equal(rest.states[step][key], value) for key, value in expected.items())
        assert rest.evaluation == whole.evaluation


def save_members(told: Told) -> tuple[Seen, dict[str, Any]]:
    """A training of an ensemble, and what its checkpoint has for one device."""
    seen = train(told, 2)
    return seen, to_state_dict(Path(seen.saved))


@pytest.mark.long
def test_a_checkpoint_of_an_ensemble_has_its_first_member_for_others(tmp_path: Path) -> None:
    told = Told(**{**vars(SAVED["ensemble"]), "folder": str(tmp_path / "run")})
    (first, plain), (second, _) = run_ranks(save_members, 2, told)
    for name, value in first.states[2].items():
        assert torch.equal(plain["model"][name], value), name
    assert not torch.equal(second.states[2]["out.weight"], first.states[2]["out.weight"])
    alone = Told(**{**vars(SAVED["ensemble"]), "sync": "synchronous", "steps": 4})
    (one,) = run_ranks(train_on, 1, alone, first.saved, 1)
    assert len(one.losses) == 1
