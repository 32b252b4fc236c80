"""Sums that are exact inside hosts and compressed between them, on hosts told apart by a name given here."""

import os
import tempfile
from typing import Any

import pytest
import torch

from against_one import Trained, assert_agree
from harness import run_ranks
from parallel.test_compressed_multirank import LOSSY, case, in_turn, plain, tied
from parallel.test_compressed_plans_multirank import followed
from parallel.test_momentum_compression_multirank import FREEZE, exactly, made
from parallel.test_momentum_compression_multirank import STEPS as MANY
from trainer.several import Case, once, train_cases
from tutti.comm import shared_segment
from tutti.compression.reducer import CountedCollectives
from tutti.config.compression import all_reduce_sent_nbytes, flags_sent_nbytes, parse_compression
from tutti.parallel.compressed.compressor import BetweenHostsReducer

Hosts = tuple[int, ...]


def name_hosts(hosts: Hosts) -> None:
    """This rank's host, where hosts have so many ranks."""
    names = [host for host, ranks in enumerate(hosts) for _ in range(ranks)]
    shared_segment.host_identity = lambda: f"host {names[int(os.environ['RANK'])]}"


def seen(run: Any) -> dict[str, Any]:
    exchanges = run.parallel.replica.compressor.exchanges
    return {
        "ways": run.parallel.replica.transports,
        "between": [isinstance(one, BetweenHostsReducer) for one in exchanges.values()],
        "state": {name: value.clone() for name, value in run.parallel.model.state_dict().items()},
    }


def trained(hosts: Hosts, cases: dict[str, Case]) -> dict[str, Trained]:
    name_hosts(hosts)
    return train_cases(cases, 4, seen)


def followed_between(hosts: Hosts, calls: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    name_hosts(hosts)
    return followed(calls)


def momenta(hosts: Hosts, cases: dict[str, Case]) -> dict[str, Trained]:
    name_hosts(hosts)
    return exactly(cases)


@pytest.mark.long
@pytest.mark.parametrize("hosts", [(2, 2), (1, 2, 1)])
def test_where_nothing_is_lost_it_is_one_device(hosts: Hosts) -> None:
    """By default where hosts have several ranks; `between` states it otherwise."""
    ranks = sum(hosts)
    words = ("float64", "powersgd,rank=50", "float64,between=ranks", "float64,between=hosts")
    found = run_ranks(trained, ranks, hosts, {one: case(one, mesh={"replicate": ranks}) for one in words})
    for one in words:
        assert_agree(once(tied, 1), [rank[one] for rank in found])
        for rank in found:
            facts = rank[one].facts
            assert set(facts["between"]) == {not one.endswith("between=ranks")}
            assert facts["ways"] == (("process group",) if one.endswith("between=ranks") else BOTH)


BOTH = ("shared memory inside hosts, process group between them",)


@pytest.mark.long
def test_on_one_host_there_is_nothing_between_hosts() -> None:
    words = ("one-bit,between=hosts", "one-bit")
    found = run_ranks(trained, 2, (2,), {one: case(one, mesh={"replicate": 2}) for one in words})
    assert_agree(once(tied, 1), [rank["one-bit,between=hosts"] for rank in found])
    for rank in found:
        assert rank["one-bit,between=hosts"].facts["between"] == []
        assert rank["one-bit"].facts["between"] != []


KEEPING = ("one-bit", "top-k,density=0.1", "top16-q4", "powersgd")


@pytest.mark.parametrize("hosts", [(2, 2), pytest.param((3, 1), marks=pytest.mark.long)])
def test_what_came_out_and_what_hosts_keep_is_what_went_in(hosts: Hosts) -> None:
    """Over a change of buckets, in which parts of tensors go to other ranks, and a step that one rank's loss spoils."""
    methods = KEEPING if hosts != (2, 2) else KEEPING[::3]
    calls = [(words, 12, 7 if place % 2 else None) for place, words in enumerate(methods)]
    found = run_ranks(followed_between, sum(hosts), hosts, calls)
    for place, words in enumerate(methods):
        first = found[0][place]
        for name, came in first["came"].items():
            went = sum(rank[place]["went"][name] for rank in found)
            kept = sum(rank[place]["kept"][name] for rank in found if rank[place]["kept"][name] is not None)
            kept = torch.as_tensor(kept, dtype=came.dtype).expand(came.numel()).view_as(came)
            scale = max(float(went.abs().max()), 1.0)
            assert float((came + kept - went).abs().max()) <= 1e-12 * scale, (words, name)
            assert all(torch.equal(rank[place]["state"][name], first["state"][name]) for rank in found), (words, name)


def counted(hosts: Hosts, words: str) -> tuple[list[int], list[list[int]]]:
    """Bytes that the wires of this rank counted in its last step, and the formula's, by bucket."""
    name_hosts(hosts)
    nbytes: list[tuple[int, int]] = []

    def look(run: Any) -> dict[str, Any]:
        for bucket, exchange in run.parallel.replica.compressor.exchanges.items():
            numel = exchange.inner.numel if exchange.inner is not None else 0
            formula = all_reduce_sent_nbytes(parse_compression(words), [(numel,)], len(hosts), 8) if numel else 0
            flags = flags_sent_nbytes(len(bucket.parameters), sum(hosts), 8)
            assert bucket.sent_nbytes == formula + flags
            assert exchange.collectives.sent_nbytes in (3 * formula, 4 * formula)  # some are new after the first step
            nbytes.append((formula, exchange.collectives.sent_nbytes))
        return {}

    train_cases({"run": case(words, mesh={"replicate": sum(hosts)})}, 4, look)
    return [one for one, _ in nbytes], [list(one) for one in nbytes]


@pytest.mark.long
def test_only_codes_of_a_hosts_sum_travel_between_hosts() -> None:
    found = run_ranks(counted, 4, (2, 2), "one-bit")
    assert sum(found[0][0]) > 0
    assert CountedCollectives(lone=True).size == 1


def resumed(hosts: Hosts, calls: list[tuple[Any, ...]]) -> list[Any]:
    name_hosts(hosts)
    return in_turn(calls)


@pytest.mark.long
def test_what_hosts_kept_is_taken_up_by_other_hosts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        four, two = {"mesh": {"replicate": 4}}, {"mesh": {"replicate": 2}}
        first = [("one-bit", 4, 4, None, f"{folder}/a", four), ("one-bit", 4, 6, None, f"{folder}/whole", four)]
        first += [("one-bit", 4, 6, f"{folder}/a", f"{folder}/b", four)]
        before = run_ranks(resumed, 4, (2, 2), first)
        for rank in before:
            assert all(torch.equal(rank[2][0][name], value) for name, value in rank[1][0].items())
        after = run_ranks(resumed, 2, (2,), [("one-bit", 2, 4, f"{folder}/a", f"{folder}/c", two)])
        again = run_ranks(resumed, 4, (3, 1), [("one-bit", 4, 4, f"{folder}/c", f"{folder}/d", four)])
        for name in before[0][0][1]:
            was, now, then = (
                sum(rank[0][1][name].get("residual", torch.zeros(())) for rank in some)
                for some in (before, after, again)
            )
            torch.testing.assert_close(now, was, rtol=1e-12, atol=1e-15, msg=name)
            torch.testing.assert_close(then, was, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.long
def test_every_method_takes_its_turns_where_a_rank_has_no_part() -> None:
    cases = {words: case(words, plain if words == "dgc" else tied, mesh={"replicate": 3}) for words in LOSSY}
    first, *others = run_ranks(trained, 3, (2, 1), cases)
    for words in LOSSY:
        state = first[words].facts["state"]
        assert all(
            torch.equal(other[words].facts["state"][name], value) for other in others for name, value in state.items()
        )


@pytest.mark.long
def test_momenta_are_summed_between_hosts_too() -> None:
    assert FREEZE < MANY
    one = run_ranks(exactly, 1, {"one": made("one-bit-adam", mesh={"replicate": 1})})[0]["one"]
    found = run_ranks(momenta, 4, (2, 2), {"many": made("one-bit-adam", mesh={"replicate": 4})})
    assert_agree(one, [rank["many"] for rank in found])
