"""Exchanges over ranks: the same bits everywhere, nothing lost, bytes as counted, and steps that do not count."""

import pytest

from compression import ranks, transport
from harness import run_ranks


@pytest.mark.parametrize("world_size", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4, 5, 8))])
def test_nothing_is_lost_at_any_size(world_size: int) -> None:
    p = world_size
    small = (1, 7, 8 * p - 1, 8 * p + 1)
    few, many = (4, 20) if p == 3 else (10, 60)  # the quick suite takes fewer steps
    cases = (ranks.telescoping, small, few), (ranks.telescoping, (211,), many)
    run_ranks(ranks.at_once, world_size, *cases)


def test_one_rank_is_not_special() -> None:
    run_ranks(ranks.telescoping, 1, (1, 211), 60)


@pytest.mark.long
def test_skipped_steps_several_under_way_and_checkpoints() -> None:
    three = (ranks.not_finite, 211), (ranks.several_at_once, 211), (ranks.checkpointed, 211)
    run_ranks(ranks.at_once, 3, *three, (ranks.terngrad_sums, 2000))


@pytest.mark.skipif(not transport.AVAILABLE, reason="counts bytes with Linux's TCP_INFO")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_bytes_on_the_sockets_are_the_formulas(world_size: int) -> None:
    for found in run_ranks(ranks.bytes_sent, world_size, 400_000):
        for name, (formula, counted, sent) in found.items():
            assert counted == formula, name
            assert sent == pytest.approx(formula, rel=0.01, abs=15_000), name


@pytest.mark.parametrize("world_size", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4, 5, 8))])
def test_sparse_sums_are_exact_and_switch_where_pairs_are_longer(world_size: int) -> None:
    found = run_ranks(ranks.sparse_sums, world_size, 1000)
    assert all(other == found[0] for other in found)
    for algorithm, _, nnz, switched in found[0]:
        assert switched == (nnz > 500), (algorithm, nnz)
    assert {switched for *_, switched in found[0]} == {True, False}


@pytest.mark.parametrize("world_size", [2, 3])
def test_powersgd_of_many_is_that_of_one_with_the_sum(world_size: int) -> None:
    """torch's hook subtracts the sum's approximation, and its local errors grow like the root of the steps."""
    calls = (ranks.power, 10), (ranks.power, 100), (ranks.power_not_finite,), (ranks.precision_of_casts, 50)
    for short, long, *_ in run_ranks(ranks.at_once, world_size, *calls):
        assert short["beside one"] < 1e-12
        assert max(short["lost"], long["lost"]) < 1e-11
        assert long["error"] < 2 * short["error"]


@pytest.mark.parametrize("world_size", [3])
def test_sufficient_factors_give_the_dense_gradient(world_size: int) -> None:
    """By factors where they are fewer bytes, else, and where a rank has more than factors, by an exact sum."""
    calls = [(ranks.factor_sums, 50, 40, False), (ranks.factor_sums, 5, 4, False), (ranks.factor_sums, 50, 40, True)]
    for found in run_ranks(ranks.at_once, world_size, *calls):
        assert [one["dense"] for one in found] == [False, True, True]
        for one in found:
            assert one["error"] < 1e-12
            assert one["formula"] == one["counted"]
            assert one["used"] == world_size
