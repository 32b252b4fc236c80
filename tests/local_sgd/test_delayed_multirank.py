"""Averages that travel in parts, one after another: the values of one part, as many bytes, spread over the updates."""

import functools

import pytest
import torch

from harness import run_ranks
from local_sgd.replicas import Seen, Told, train, train_twice
from local_sgd.simulated import assert_follow
from tutti.local_sgd import delayed_reduction
from tutti.local_sgd.delayed_reduction import CHUNK_MULTIPLE, MIN_CHUNK_NUMEL, split_into_chunks

MOMENTUM = {"momentum": 0.9}
SPREAD = {
    "as they are": Told(sync="local:period=4,delay=4", arguments=MOMENTUM, steps=10),
    "in a code": Told(sync="local:period=4,delay=4", compress="float64", arguments=MOMENTUM, steps=10),
    "sooner": Told(sync="local:period=4,delay=2", compress="float64", optimizer="AdamW", rate=0.01, steps=10),
    "sooner, batch statistics": Told(sync="local:period=4,delay=3", model="conv", batch=25, steps=10),
}
RESUMED = {
    "drawn levels": Told(sync="local:period=4,delay=4", compress="qsgd,bits=4", save_at=6, steps=10),
    "scales of all": Told(sync="local:period=4,delay=4", compress="terngrad", rate=0.01, save_at=7, steps=10),
    "kept back": Told(sync="local:period=4,delay=4", compress="one-bit", rate=0.01, save_at=4, steps=9),
    "as they are": Told(sync="local:period=4,delay=3", optimizer="AdamW", rate=0.01, save_at=5, steps=9),
}
SIZES = pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)


def train_in_parts(size: int) -> tuple[dict[str, Seen], dict[str, tuple[Seen, Seen]], Seen]:
    """The last one has one part, as models of a test's size have."""
    whole = train(SPREAD["as they are"], size)
    delayed_reduction.MIN_CHUNK_NUMEL, delayed_reduction.CHUNK_MULTIPLE = 8, 2
    return {name: train(told, size) for name, told in SPREAD.items()}, train_twice(RESUMED, size), whole


@functools.cache
def trained(size: int) -> list[tuple[dict[str, Seen], dict[str, tuple[Seen, Seen]], Seen]]:
    return run_ranks(train_in_parts, size, size)


@SIZES
@pytest.mark.parametrize("name", SPREAD)
def test_parts_follow_the_same_equations(size: int, name: str) -> None:
    ranks = [seen[name] for seen, _, _ in trained(size)]
    assert_follow(SPREAD[name], ranks, size)


@SIZES
def test_as_many_bytes_between_any_two_updates(size: int) -> None:
    """But the last, in which the last part arrives. Of averages that begin after updates 4 and 8, the second of which
    training ends before."""
    seen, _, whole = trained(size)[0]
    parts, once = sent(seen["as they are"]), sent(whole)
    assert once[4] > 0
    assert once[5:8] == [0, 0, 0]
    assert sum(parts[4:8]) == pytest.approx(once[4], abs=8)  # a ring's share of each part, in whole bytes
    assert all(nbytes > 0.2 * once[4] for nbytes in parts[4:7])
    assert [*parts[:4], parts[7]] == [0] * 5


def sent(seen: Seen) -> list[int]:
    return [
        sum(channel["nbytes"] for channel in row["communication"] if channel["carried"] == "parameters")
        for row in seen.rows
    ]


@SIZES
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumed_between_parts_goes_on_bit_for_bit(size: int, name: str) -> None:
    for _, resumed, _ in trained(size):
        whole, rest = resumed[name]
        assert rest.losses == whole.losses[RESUMED[name].save_at :]
        assert all(torch.equal(rest.after[key], value) for key, value in whole.after.items())
        for step, expected in enumerate(whole.states[RESUMED[name].save_at :]):
            assert all(torch.equal(rest.states[step][key], value) for key, value in expected.items())


@pytest.mark.parametrize("numel", [0, 1, MIN_CHUNK_NUMEL - 1, 3 * MIN_CHUNK_NUMEL, 10_018_795])
@pytest.mark.parametrize("most", [1, 7, 8])
def test_parts_are_whole_and_about_equal(numel: int, most: int) -> None:
    parts = split_into_chunks(numel, most)
    assert [index for part in parts for index in (part.start, part.stop)] == sorted(
        index for part in parts for index in (part.start, part.stop)
    )
    assert sum(part.stop - part.start for part in parts) == numel
    assert len(parts) <= most
    lengths = [part.stop - part.start for part in parts]
    assert all(length % CHUNK_MULTIPLE == 0 for length in lengths[:-1])
    if numel >= 2 * MIN_CHUNK_NUMEL and most > 1:
        assert len(parts) > 1
        assert max(lengths) < 1.2 * numel / min(most, numel // MIN_CHUNK_NUMEL)
