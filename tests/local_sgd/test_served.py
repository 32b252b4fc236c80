"""What one server does with updates: who may go on, what counts how much, and what is said when nobody can."""

import threading

import pytest
import torch

from tutti.async_sgd.parameter_servers import ParameterShard

SOON = 60.0


def served(workers: int, bound: int | None, timeout_s: float = SOON) -> ParameterShard:
    one = ParameterShard(workers, bound, timeout_s)
    one.restart([torch.zeros(3, dtype=torch.float64)])
    return one


def ones(value: float) -> list[torch.Tensor]:
    return [torch.full((3,), value, dtype=torch.float64)]


def waits(one: ParameterShard, worker: int) -> bool:
    """Whether the worker could not go on at this moment; asks nothing of the server."""
    return worker in one._waiting


def test_an_update_counts_the_less_the_staler_it_is() -> None:
    one = served(4, None)
    for worker in (0, 1, 2):
        one.push(worker, ones(1.0), 0.0)
        assert one.answer(worker).staleness == worker
    before = one.values[0].clone()
    one.push(3, ones(0.7), 0.0)
    assert one.answer(3).staleness == 3
    assert torch.equal(one.values[0], before + torch.full((3,), 0.7, dtype=torch.float64) / 3)
    one.push(3, ones(0.7), 0.0)
    answer = one.answer(3)
    assert answer.staleness == 0, "it has just read"
    assert torch.equal(answer.values[0], before + torch.full((3,), 0.7, dtype=torch.float64) / 3 + 0.7)


def test_the_first_updates_count_whole_and_the_next_by_their_age() -> None:
    one = served(2, None)
    one.push(0, ones(1.0), 0.0)
    one.push(1, ones(1.0), 0.0)  # one update old: still whole
    assert one.values[0].tolist() == [2.0] * 3
    one.answer(0), one.answer(1)
    one.push(0, ones(1.0), 0.0)  # read before the other's
    one.answer(0)
    one.push(0, ones(1.0), 0.0)
    one.answer(0)
    one.push(1, ones(1.0), 0.0)  # two have come since
    assert one.values[0].tolist() == [4.5] * 3


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_nobody_goes_on_further_ahead_than_the_bound(bound: int) -> None:
    one = served(2, bound)
    for made in range(1, bound + 1):
        one.push(0, ones(1.0), 0.0)
        assert one.answer(0).staleness == made
    one.push(0, ones(1.0), 0.0)
    assert waits(one, 0)
    assert one.held_back == [1, 0]
    one.push(1, ones(1.0), 0.0)
    answer = one.answer(0)
    assert answer.staleness == bound
    assert answer.values[0].tolist() == [bound + 2.0] * 3
    assert not waits(one, 1)


def test_without_a_bound_nobody_waits() -> None:
    one = served(2, None)
    for _ in range(50):
        one.push(0, ones(1.0), 0.0)
        one.answer(0)
    assert one.held_back == [0, 0]


def test_with_a_bound_of_0_all_read_the_same_sum_in_the_order_of_ranks() -> None:
    big, small = 1e16, 1.0
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        one = served(3, 0)
        changes = [ones(big), ones(small), ones(-big)]
        for worker in order[:2]:
            one.push(worker, changes[worker], 0.0)
            assert waits(one, worker)
            assert one.values[0].tolist() == [0.0] * 3, "updates of a round are added together"
        one.push(order[2], changes[order[2]], 0.0)
        fast = order[0]
        one.answer(fast)
        one.push(fast, ones(5.0), 0.0)  # a fast one's next update is in nobody's answer to the last
        answers = [one.answer(worker).values[0].tolist() for worker in order[1:]]
        expected = (torch.tensor(big, dtype=torch.float64) + small - big).item()
        assert answers == [[expected] * 3] * 2


def test_who_is_away_holds_nobody_back() -> None:
    one = served(3, 0)
    one.push(0, ones(1.0), 0.0)
    one.push(1, ones(1.0), 0.0)
    assert waits(one, 0)
    one.leave(2)
    assert one.answer(0).values[0].tolist() == one.answer(1).values[0].tolist() == [2.0] * 3
    one.push(0, ones(1.0), 0.0)
    one.leave(1)
    assert one.answer(0).values[0].tolist() == [3.0] * 3


def test_after_a_meeting_the_bound_counts_anew() -> None:
    one = served(2, 1)
    one.push(0, ones(1.0), 0.0)
    one.answer(0)
    one.leave(0), one.leave(1)
    one.restart()
    one.push(0, ones(1.0), 0.0)
    assert one.answer(0).staleness == 1
    assert one.values[0].tolist() == [2.0] * 3


def test_uneven_numbers_of_updates_end_in_no_deadlock() -> None:
    one = served(2, 0)
    one.leave(1)
    for _ in range(3):
        one.push(0, ones(1.0), 0.0)
        one.answer(0)
    for _ in range(3):  # comes back without a meeting, and is behind
        one.push(1, ones(1.0), 0.0)
        if one.clocks[1] <= one.clocks[0] and 1 in one._answers:
            one.answer(1)
            continue
        one.push(0, ones(1.0), 0.0)
        one.answer(1)
    assert one.clocks[1] == 3


def test_a_rank_that_has_ended_is_named_at_once_and_one_that_is_late_in_time() -> None:
    one = served(3, 0)
    one.push(0, ones(1.0), 0.0)
    said: list[int | None] = []
    thread = threading.Thread(target=lambda: said.append(one.answer(0).ended))
    thread.start()
    one.end(2)
    thread.join(SOON)
    assert said == [2]
    late = served(3, 0, timeout_s=0.01)
    late.push(0, ones(1.0), 0.0)
    late.push(2, ones(1.0), 0.0)
    assert late.answer(0).late == 1


def test_drift_is_everybodys_last() -> None:
    one = served(2, None)
    one.push(0, ones(1.0), 0.5)
    one.push(1, ones(1.0), 0.1)
    answer = one.answer(1)
    assert (answer.drift, answer.mean_drift) == (0.5, 0.3)
