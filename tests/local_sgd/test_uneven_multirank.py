"""Ranks that do not wait for each other when one of them stalls, makes fewer steps, leaves early or ends badly."""

import pytest
import torch

from harness import run_ranks
from local_sgd.asynchronous_ranks import (
    averaged_pairs,
    ending_badly,
    ending_unheard,
    leaving,
    on_two_hosts,
    one_memory,
    stalled_server,
    uneven,
)

ANY = ["stale:1", "asynchronous", "ad-psgd", "hogwild", "ensemble"]


@pytest.mark.parametrize(("size", "bound"), [(2, 2), *(pytest.param(3, b, marks=pytest.mark.long) for b in (0, 3))])
def test_the_bound_holds_a_fast_rank_back_while_the_slow_one_sleeps(size: int, bound: int) -> None:
    ranks = run_ranks(stalled_server, size, f"stale:{bound}", bound + 6)
    for seen in ranks:
        assert max(seen["stale"]) <= bound
        if seen["rank"] != 1:
            assert seen["stale"][:bound] == list(range(1, bound + 1)), "it goes ahead as far as it may"
        assert torch.equal(seen["values"], ranks[0]["values"])
    made = ranks[1]["made"]
    assert all(made[worker] == bound + 1 for worker in range(size) if worker != 1), "and no further"
    assert made[1] == 0
    assert all(ranks[1]["held"][worker] >= 1 for worker in range(size) if worker != 1)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_without_a_bound_nobody_waits_for_a_rank_that_sleeps(size: int) -> None:
    ranks = run_ranks(stalled_server, size, "asynchronous", 8)
    assert all(ranks[1]["made"][worker] == 8 for worker in range(size) if worker != 1)
    assert ranks[1]["stale"][0] == 8 * (size - 1), "its first update is as old as it is"
    assert all(torch.equal(seen["values"], ranks[0]["values"]) for seen in ranks)


@pytest.mark.long
@pytest.mark.parametrize("size", [3, 4])
def test_averages_of_pairs_keep_the_mean_while_one_of_them_sleeps(size: int) -> None:
    ranks = run_ranks(averaged_pairs, size, 10)
    changed = torch.stack([seen["changed"] for seen in ranks]).mean(0)
    for seen in ranks:
        torch.testing.assert_close(seen["end"], ranks[0]["start"] + changed, rtol=1e-12, atol=1e-13)
        assert torch.equal(seen["end"], ranks[0]["end"])
    assert ranks[0]["measured"] >= 9, "every step after the first found its pair averaged"
    assert ranks[1]["exchanges"] >= 3
    assert sum(seen["exchanges"] for seen in ranks[::2]) == sum(seen["exchanges"] for seen in ranks[1::2])


@pytest.mark.long
def test_hogwild_is_one_memory_with_one_optimizer_state() -> None:
    first, second = run_ranks(one_memory, 2, 6)
    assert second["moved"], "what another rank writes is seen while this one sleeps"
    assert second["stale"] == 5
    assert torch.equal(first["values"], second["values"])
    assert torch.equal(first["momentum"], second["momentum"])


@pytest.mark.long
def test_uneven_numbers_of_steps_end_in_an_evaluation() -> None:
    first, second = run_ranks(uneven, 2, ANY)
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("sync", ANY[:3])
def test_a_script_that_ends_early_on_one_rank_leaves_the_others_alone(sync: str) -> None:
    assert run_ranks(leaving, 3, sync) == [2, 7, 12]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sync", "dies"),
    [("stale:0", 0), ("stale:2", 1), ("asynchronous", 2), ("ad-psgd", 1), ("ad-psgd", 0), ("hogwild", 0)],
)
def test_a_rank_that_is_killed_is_named_by_all_others(sync: str, dies: int) -> None:
    said = run_ranks(ending_badly, 3, sync, dies)
    assert said[dies] == "ended 9"
    told = [words for rank, words in enumerate(said) if rank != dies]
    alone = sync == "ad-psgd" and dies == 0  # the other active rank is told by nobody: it has lost no partner
    assert sum(f"TrainingError, RuntimeError: rank {dies} has ended" in words for words in told) >= (1 if alone else 2)


@pytest.mark.parametrize(
    ("sync", "dies"),
    [("asynchronous", 2), *(pytest.param(*one, marks=pytest.mark.long) for one in [("stale:2", 1), ("ad-psgd", 1)])],
)
def test_a_killed_rank_is_named_also_where_waiting_for_sends_has_no_end(sync: str, dies: int) -> None:
    said = run_ranks(ending_unheard, 3, sync, dies, timeout_s=30)
    assert said[dies] == "ended 9"
    assert all(f"rank {dies} has ended" in words for rank, words in enumerate(said) if rank != dies)


@pytest.mark.long
def test_hogwild_needs_one_host() -> None:
    for words in run_ranks(on_two_hosts, 2):
        assert words.startswith("PlanError: "), words
        assert "on several hosts" in words
