"""Every mode on 1 to 4 ranks: each replica has what the mode's equations give, after every step."""

import functools
from typing import Any

import pytest
import torch

from harness import RankFailed, run_ranks
from local_sgd.replicas import Seen, Told, train_all
from local_sgd.simulated import MODES, simulate

MOMENTUM = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}

EQUATIONS = {
    "local": Told(sync="local:3", arguments=MOMENTUM),
    "local, moments corrected": Told(
        sync="local:period=3,optimizer_state=corrected", optimizer="AdamW", rate=0.01, steps=8
    ),
    "local, delayed, moments corrected": Told(
        sync="local:period=3,delay=2,optimizer_state=corrected",
        optimizer="RMSprop",
        rate=0.01,
        model="choosy",
        batch=9,
        steps=7,
    ),
    "local, state averaged": Told(sync="local:period=2,optimizer_state=averaged", optimizer="AdamW", steps=5),
    "local, odd batches, accumulated, clipped": Told(
        sync="local:2", batch=7, microbatches=2, clip_norm=0.1, arguments=MOMENTUM
    ),
    "local, tokens, unequal": Told(sync="local:2", model="tagger", batch=10, shares=(3.0, 1.0, 2.0, 1.5)),
    "local, batch statistics": Told(sync="local:2", model="conv", batch=25, steps=5),
    "local, a layer not used by all": Told(sync="local:2", model="choosy", optimizer="AdamW", rate=0.01, batch=9),
    "local, delayed": Told(sync="local:period=3,delay=2", arguments=MOMENTUM, steps=9),
    "local, delayed by a period, batch statistics": Told(
        sync="local:period=2,delay=2", model="conv", batch=25, arguments=MOMENTUM, steps=7
    ),
    "local, delayed by one of one, unequal": Told(
        sync="local:period=1,delay=1", arguments=MOMENTUM, batch=9, shares=(3.0, 0.0, 2.0, 1.5)
    ),
    "one-shot": Told(sync="one-shot", optimizer="AdamW", rate=0.01),
    "diloco": Told(sync="diloco:period=2,outer_rate=0.7,outer_momentum=0.9", optimizer="AdamW", rate=0.01, steps=7),
    "adasum": Told(sync="adasum", arguments=MOMENTUM, batch=11),
    "adasum, sometimes": Told(sync="adasum:2", optimizer="AdamW", rate=0.01, steps=5),
    "local, a replica without samples": Told(
        sync="local:2", model="conv", batch=25, shares=(1.0, 0.0, 1.0, 1.0), steps=3
    ),
    "ring": Told(sync="ring", arguments=MOMENTUM),
    "ring, sometimes, batch statistics": Told(sync="ring:2", model="conv", batch=25, steps=5),
    "ring, sparse and clipped": Told(sync="ring", model="words", clip_norm=0.05, batch=11),
    "push": Told(sync="push", optimizer="AdamW", rate=0.01),
    "elastic": Told(sync="elastic", arguments=MOMENTUM, rate=0.02),
    "elastic, sometimes": Told(sync="elastic:period=2,pull=0.5", steps=7, shares=(1.0, 0.0, 2.0, 1.0)),
}
PAIRS = {"shift-one": Told(sync="shift-one", arguments=MOMENTUM, steps=5)}

AS_SYNCHRONOUS = {
    "momentum": Told(arguments=MOMENTUM),
    "odd batches, accumulated": Told(batch=7, microbatches=2, arguments=MOMENTUM),
    "unequal shares, one empty": Told(batch=9, shares=(3.0, 0.0, 2.0, 1.5), arguments=MOMENTUM),
    "tokens": Told(model="tagger", batch=10, microbatches=2),
}
POST = Told(sync="post-local:period=2,after=4", model="conv", batch=25, arguments=MOMENTUM, steps=7)

ALL_SIZES = (3, 1, 2, 4)


def sized(*values: object) -> Any:
    """A case whose first value is its number of ranks: 3 in every run, the others in long ones."""
    return pytest.param(*values, marks=() if values[0] == 3 else pytest.mark.long)


SIZES = pytest.mark.parametrize("size", [sized(size) for size in ALL_SIZES])


def followed(size: int) -> dict[str, Told]:
    """The modes of `size` replicas: an odd number does not meet in pairs."""
    return EQUATIONS | (PAIRS if size % 2 == 0 else {})


@functools.cache
def trained(size: int) -> list[dict[str, Seen]]:
    """All trainings on `size` ranks, in one launch."""
    told = followed(size)
    for name, one in AS_SYNCHRONOUS.items():
        told[f"{name}: synchronous"] = one
        told[f"{name}: local"] = Told(**{**_fields(one), "sync": "local:1"})
    told["post"] = POST
    told["post: synchronous"] = Told(**{**_fields(POST), "sync": "synchronous"})
    told["inner"] = Told(sync="local:2", arguments=MOMENTUM)
    told["outer of nothing"] = Told(sync="diloco:period=2,outer_rate=1,outer_momentum=0", arguments=MOMENTUM)
    return run_ranks(train_all, size, told, size)


def _fields(told: Told) -> dict[str, object]:
    return {name: getattr(told, name) for name in told.__dataclass_fields__}


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], words: str) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name],
            value,
            rtol=1e-12,
            atol=1e-13,
            msg=lambda m, name=name: f"{words}, {name}: {m}",
            check_dtype=False,
        )


@pytest.mark.parametrize(("size", "name"), [sized(size, name) for size in ALL_SIZES for name in followed(size)])
def test_every_replica_follows_the_equations(size: int, name: str) -> None:
    told = followed(size)[name]
    ranks = [one[name] for one in trained(size)]
    states, ending = simulate(told, ranks[0].batches, size)
    for rank, seen in enumerate(ranks):
        assert seen.batches == ranks[0].batches
        assert seen.losses == ranks[0].losses
        for step, expected in enumerate(states):
            assert_close(seen.states[step], expected[rank], f"rank {rank}, step {step}")
        assert_close(seen.after, ending, f"rank {rank}, at the end")
        assert all(torch.equal(value, ranks[0].after[key]) for key, value in seen.after.items())


@SIZES
@pytest.mark.parametrize("name", AS_SYNCHRONOUS)
def test_averaging_after_every_update_is_synchronous(size: int, name: str) -> None:
    for seen in trained(size):
        sync, local = seen[f"{name}: synchronous"], seen[f"{name}: local"]
        assert local.batches == sync.batches
        torch.testing.assert_close(torch.tensor(local.losses), torch.tensor(sync.losses), rtol=1e-12, atol=0)
        for step, expected in enumerate(sync.states):
            assert_close(local.states[step], expected, f"step {step}")
        assert local.evaluation == pytest.approx(sync.evaluation, rel=1e-12)


@SIZES
def test_before_its_switch_post_local_is_synchronous(size: int) -> None:
    for seen in trained(size):
        post, sync = seen["post"], seen["post: synchronous"]
        for step in range(4):
            assert all(torch.equal(post.states[step][name], value) for name, value in sync.states[step].items())
        if size > 1:
            assert not torch.equal(post.states[4]["out.weight"], sync.states[4]["out.weight"])
    if size > 1:
        first, last = trained(size)[0]["post"], trained(size)[-1]["post"]
        assert not torch.equal(first.states[4]["out.weight"], last.states[4]["out.weight"])
        assert torch.equal(first.states[5]["out.weight"], last.states[5]["out.weight"])


@SIZES
def test_an_outer_update_of_rate_1_without_momentum_is_local(size: int) -> None:
    for seen in trained(size):
        for step, expected in enumerate(seen["inner"].states):
            assert_close(seen["outer of nothing"].states[step], expected, f"step {step}")


def test_every_mode_has_its_equations() -> None:
    assert {told.sync.partition(":")[0] for told in {**EQUATIONS, **PAIRS}.values()} == set(MODES)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "words"),
    [
        ("SGD", {}, "does not support SGD, because it does not divide"),
        ("AdamW", {"amsgrad": True}, "does not support AdamW with amsgrad=True, "),
    ],
)
def test_moments_are_corrected_only_where_there_are_such(optimizer: str, arguments: dict[str, Any], words: str) -> None:
    told = Told(sync="post-local:2,after=3,optimizer_state=corrected", optimizer=optimizer, arguments=arguments)
    with pytest.raises(RankFailed, match=words):
        run_ranks(train_all, 2, {"refused": told}, 2)
