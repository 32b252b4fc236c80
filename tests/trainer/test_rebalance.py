"""Shares of the batch that follow the ranks' own times: how much, when, and when not."""

from collections.abc import Sequence
from random import Random

import pytest

from tutti.config.plan import BatchPlan, Plan
from tutti.trainer.own_times import OwnTimesWindow
from tutti.trainer.rebalance import Rebalancer, whole_parts


class Machine:
    """Ranks that take some time for each sample, and some for each step.

    Args:
        plan: the plan.
        a_sample: seconds that each rank takes for a sample.
        a_step: seconds that each rank takes for a step beside them.
    """

    def __init__(self, plan: Plan, a_sample: Sequence[float], a_step: float = 0.0) -> None:
        self.plan, self.a_sample, self.a_step = plan, [*a_sample], a_step
        self.rebalancer = Rebalancer(plan)
        self.index_of = {rank: index for index, group in enumerate(self.rebalancer.groups) for rank in group}
        self.samples = plan.batch.global_batch_size // plan.batch.num_microbatches
        self.counts = self.rebalancer._counts(plan.shares, self.samples)
        self.stuck: list[int] = []
        self.noise, self.extra = 1.0, dict[int, float]()

    def times(self) -> list[float]:
        """Return the own time of each rank in a step."""
        times = [self.a_step + seconds * self.counts[self.index_of[rank]] for rank, seconds in enumerate(self.a_sample)]
        return [time * (self.noise if rank else 1.0) + self.extra.get(rank, 0.0) for rank, time in enumerate(times)]

    def window(self, kind: str = "compute", steps: int = 100) -> list[int]:
        """Let a window pass, and take the shares that it asks for; return the samples of each rank."""
        times, ranks = self.times(), range(len(self.a_sample))
        window = OwnTimesWindow(
            first=6,
            last=5 + steps,
            steps=steps,
            data_s=[0.0] * len(times),
            own_s=[steps * seconds for seconds in times],
            longest_s=max(times),
            load={},
        )
        window = self.rebalancer.at_whole_shares(window, [ranks] * len(times), 0, self.samples)
        slow = [rank for rank in ranks if window.excess_s(rank, ranks)]
        self.stuck = self.rebalancer.judge(window, [ranks] * len(times), dict.fromkeys(slow, kind), self.samples)
        change, self.rebalancer.pending = self.rebalancer.pending, None
        if change is not None:
            self.counts = self.rebalancer._counts(change.shares, self.samples)
        return self.counts


def plan(ranks: int, batch: int, microbatches: int = 1, shares: Sequence[float] = ()) -> Plan:
    return Plan(
        batch=BatchPlan(global_batch_size=batch, num_microbatches=microbatches),
        mesh={"replicate": ranks},
        shares=tuple(shares),
    )


@pytest.mark.parametrize(
    ("ranks", "batch", "factor", "samples"),
    [(2, 16, 3.0, [12, 4]), (4, 40, 4.0, [13, 3, 12, 12]), (3, 31, 2.0, [12, 7, 12]), (2, 8, 100.0, [7, 1])],
)
def test_a_rank_that_takes_k_times_as_long_gets_a_kth(
    ranks: int, batch: int, factor: float, samples: list[int]
) -> None:
    machine = Machine(plan(ranks, batch), [0.01 * (factor if rank == 1 else 1.0) for rank in range(ranks)])
    for _ in range(3):
        assert machine.window() == samples, "and it stays"
    machine.a_sample[1] = 0.01
    even = Machine(machine.plan, [0.01] * ranks).counts
    for _ in range(3):
        assert machine.window() == even, "no longer slow"


@pytest.mark.parametrize("kind", ["a pause", "waiting"])
def test_causes_that_do_not_follow_the_share_leave_it(kind: str) -> None:
    machine = Machine(plan(2, 16), [0.01, 0.05])
    assert machine.window(kind) == [8, 8]
    assert machine.window("data") == [13, 3]
    assert machine.window(kind) == [13, 3], "it is no slower now, so nothing asks"


def test_a_share_is_given_back_step_by_step_where_a_part_of_the_time_does_not_follow_it() -> None:
    machine = Machine(plan(4, 64), [0.01, 0.08, 0.01, 0.01], a_step=0.16)
    low = machine.window()[1]
    assert 1 <= low < 8
    assert machine.window()[1] <= low
    machine.a_sample[1] = 0.01
    seen = [machine.window()[1] for _ in range(12)]
    assert seen == sorted(seen)
    assert machine.counts == [16] * 4


@pytest.mark.parametrize(
    ("ranks", "a_sample", "a_step", "noise"),
    [(2, 0.002, 0.03, 0.0), (2, 0.0003, 0.03, 0.02), (4, 0.0, 0.03, 0.02), (16, 0.0003, 0.03, 0.0)],
)
def test_shares_are_given_back_where_most_of_the_time_does_not_follow_them(
    ranks: int, a_sample: float, a_step: float, noise: float
) -> None:
    machine = Machine(plan(ranks, 8 * ranks), [a_sample] * (ranks - 1) + [0.01], a_step)
    random = Random(0)
    changes = []
    for number in range(60):
        machine.noise = 1 + random.uniform(-noise, noise)
        machine.a_sample[-1] = 0.01 if number < 30 else a_sample
        changes.append(machine.counts != [*machine.window(steps=200)])
        if number == 29:
            assert machine.counts[-1] <= 3
    assert machine.counts == [8] * ranks, "no longer slow"
    assert not any(changes[45:])
    assert sum(changes) <= 8, "and it does not flap"


def test_a_lower_share_that_has_no_effect_is_undone() -> None:
    """The rank takes longer for each step, whatever its samples."""
    machine, seen = Machine(plan(2, 16), [0.0003, 0.0003], a_step=0.01), []
    for _ in range(30):
        machine.extra = {1: 0.05}
        before = machine.counts
        if machine.window() != before:
            seen.append(machine.counts[1])
    assert len(seen) == 2
    assert seen[0] < 8 == seen[1]


def test_a_share_is_given_back_on_trial_where_nothing_tells_what_follows_it() -> None:
    """Batches of tokens have other samples in each window."""
    machine = Machine(plan(2, 16), [0.0003, 0.02], a_step=0.03)
    for number in range(200):
        machine.samples = 16 + number % 2
        machine.counts = machine.rebalancer._counts(machine.rebalancer._shares, machine.samples)
        if number == 4:
            machine.a_sample[1] = 0.0003
        machine.window()
    assert machine.rebalancer._shares == ()


def test_a_stream_of_which_each_rank_reads_all_lowers_no_share_for_its_data() -> None:
    machine = Machine(plan(2, 16), [0.01, 0.05])
    machine.rebalancer = Rebalancer(machine.plan, stream=True)
    assert machine.window("data") == [8, 8]
    assert machine.window("compute") == [13, 3]


def test_shares_do_not_flap() -> None:
    """The rank is slow in every other window: each time it waits longer until it gets its share again."""
    machine, changes, before = Machine(plan(2, 16), [0.01, 0.05]), 0, [8, 8]
    for number in range(200):
        machine.a_sample[1] = 0.01 if machine.counts != [8, 8] else 0.05
        now = [*machine.window()]
        changes, before = changes + (now != before), now
        assert number < 190 or now == before
    assert 4 <= changes <= 20
    steady = Machine(plan(2, 16), [0.01, 0.013])
    assert [steady.window() for _ in range(5)] == [[8, 8]] * 5, "a bit slower is not slow"


def test_a_change_that_makes_no_step_faster_is_not_made() -> None:
    machine = Machine(plan(4, 5), [0.1, 0.1, 0.1, 0.1])
    assert machine.counts == [1, 1, 1, 2], "one rank has a sample more, and takes twice as long"
    assert machine.window() == [1, 1, 1, 2]
    two = Machine(plan(2, 2), [0.01, 0.1])
    assert two.window() == [1, 1], "no rank can have less than one sample"
    assert two.stuck == [1], "and that is said"
    two.noise = 1.01
    assert two.window() == [1, 1]
    assert two.stuck == [], "but not again"
    assert Machine(plan(4, 3), [0.01, 0.1, 0.1, 0.1]).window() == [0, 1, 1, 1]


@pytest.mark.parametrize("samples", [0, 1])
def test_microbatches_with_fewer_samples_than_ranks_change_no_share(samples: int) -> None:
    """Batches of tokens, and those of a ramp, may be so small: also after shares were lowered."""
    machine = Machine(plan(2, 16), [0.01, 0.05])
    assert machine.window() == [13, 3]
    machine.samples = samples
    assert machine.rebalancer.parts(samples) == [1.0, 1.0]
    assert machine.window() == [13, 3]


def test_shares_of_the_plan_are_where_they_begin_and_end() -> None:
    machine = Machine(plan(3, 24, shares=(2.0, 1.0, 1.0)), [0.01, 0.02, 0.02])
    assert machine.window() == [12, 6, 6]
    machine.a_sample[0] = 0.04
    assert machine.window() == [5, 10, 9]
    machine.a_sample[0] = 0.01
    assert machine.window() == [12, 6, 6]
    assert machine.rebalancer.parts(24) == [1.0, 1.0, 1.0]


def test_a_rank_without_a_share_stays_so() -> None:
    machine = Machine(plan(3, 12, shares=(1.0, 0.0, 1.0)), [0.01, 0.0, 0.04], a_step=0.01)
    samples = machine.window()
    assert samples[1] == 0
    assert samples[2] < 4


def test_the_ranks_of_a_stage_change_together() -> None:
    two_stages = Plan(batch=BatchPlan(global_batch_size=16), mesh={"stage": 2, "replicate": 2})
    machine = Machine(two_stages, [0.01, 0.01, 0.01, 0.03])
    assert machine.rebalancer.groups == [[0, 2], [1, 3]]
    assert machine.window() == [12, 4]
    assert machine.rebalancer.parts(16) == [1.0, 4 / 12]


def test_times_of_accelerators_are_those_of_the_steps_that_are_exact() -> None:
    """Waits for data are known in all steps, computation in 5 of 100: the slow rank takes twice as long."""
    window = OwnTimesWindow(
        first=6, last=105, steps=100, data_s=(1.0, 1.0), own_s=(0.5, 1.05), longest_s=0.2, load={}, computed=5
    )
    assert window.relative_time(1, [0, 1]) == pytest.approx(2.0)


def test_whole_parts_are_close_to_the_weights() -> None:
    for total in (3, 17, 100):
        for weights in ([1.0, 1.0, 0.3], [5.0, 0.01, 2.0], [1.0, 0.0, 1.0]):
            parts = whole_parts(weights, total)
            assert sum(parts) == total
            for part, weight in zip(parts, weights, strict=True):
                exact = total * weight / sum(weights)
                assert (part == 0) == (weight == 0)
                assert part == 1 or abs(part - exact) < 2
