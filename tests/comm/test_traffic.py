"""Lanes count and time exchanges on a clock that the test moves by hand; waiting leaves the phase it was in."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tutti.comm.clock import PhaseClock
from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommChannel, Traffic, exchanged_nbytes, sent_nbytes


class HandClock(PhaseClock):
    """Says the time that it was told: the clock asks `device_time` on a GPU, and the host's clock elsewhere."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"), sample_every=1)
        self.at = 0.0
        self._since = self._row_since = 0.0

    def device_time(self) -> float:
        return self.at

    def stream_time(self) -> float:
        return self.at


@dataclass
class Work:
    """An exchange that ends when it is waited for, which takes `seconds`; `done`: it ends by itself."""

    clock: HandClock
    seconds: float = 0.0
    done: bool = False
    waits: list[float] = field(default_factory=list)

    def wait(self) -> None:
        self.waits.append(self.clock.at)
        self.clock.at += self.seconds

    def is_completed(self) -> bool:
        return self.done


def lane_on(clock: HandClock, carried: Any = "halos") -> CommChannel:
    return Traffic(clock).channel(carried, ["space"])


def total(channel: CommChannel) -> tuple[int, int, float | None, dict[str, float]]:
    taken = channel.take()
    return taken.count, taken.nbytes, taken.in_progress_s, taken.exposed_s


def test_exchanges_that_overlap_are_under_way_once_and_exposed_while_waited_for() -> None:
    clock = HandClock()
    channel = lane_on(clock)
    clock.enter("forward")
    first = channel.start([Work(clock, 1.0)], 10)
    clock.at = 1.0
    second = channel.start([Work(clock, 2.0)], 20)
    clock.at = 3.0
    first.wait()
    second.wait()
    assert clock.at == 6.0
    assert total(channel) == (2, 30, 6.0, {"forward": 3.0})
    assert total(channel) == (0, 0, 0.0, {})


def test_waiting_leaves_its_phase_and_phases_still_add_up() -> None:
    clock = HandClock()
    channel = lane_on(clock)
    for phase in ("forward", "backward", "exposed_communication", "optimizer", "other"):
        clock.enter(phase)
        clock.at += 1.0
        with channel.waiting(8):
            clock.at += 0.5
    wall, phases = clock.take_row()
    assert wall == sum(phases.values()) == 7.5
    assert {name: seconds for name, seconds in phases.items() if seconds} == {
        "forward": 1.0,
        "backward": 1.0,
        "exposed_communication": 1.5 + 3 * 0.5,
        "optimizer": 1.0,
        "other": 1.5,  # what happens between steps is not the step's communication
    }
    assert total(channel) == (5, 40, 2.5, dict.fromkeys(lane_phases(), 0.5))


def lane_phases() -> tuple[str, ...]:
    return ("forward", "backward", "exposed_communication", "optimizer", "other")


def test_each_work_is_waited_for_once() -> None:
    clock = HandClock()
    work = Work(clock, 1.0)
    handle = lane_on(clock).start([work])
    handle.wait()
    handle.wait()
    assert work.waits == [0.0]


def test_an_end_is_noticed_when_the_next_exchange_starts() -> None:
    clock = HandClock()
    channel = lane_on(clock, "gradients")
    work = Work(clock)
    first = channel.start([work])
    clock.at, work.done = 1.0, True
    second = channel.start([Work(clock, 1.0)])
    clock.at = 5.0
    first.wait()
    second.wait()
    assert work.waits == [1.0]  # asked once more, at once, in case it has failed
    assert total(channel) == (2, 0, 6.0, {"other": 1.0})  # 1 s, and 5 s of the second
    third = channel.start([Work(clock, done=True)])
    clock.at = 8.0
    fourth = channel.start([Work(clock, 1.0)])
    clock.at = 8.5
    fourth.wait()
    assert third.is_completed()
    assert total(channel)[2] == pytest.approx(2.0 + 1.5)


class ElapsingClock(HandClock):
    """Each look at it takes a second."""

    def stream_time(self) -> float:
        self.at += 1.0
        return self.at


def test_work_for_an_exchange_is_exposed_until_it_ends_and_no_longer() -> None:
    clock = ElapsingClock()
    channel = lane_on(clock, "gradients")
    work = Work(clock)
    handle = channel.start([work])  # 1
    assert not handle.poll()  # 2 to 3
    work.done = True
    assert handle.poll()  # 4 to 5
    assert total(channel) == (1, 0, 4.0, {"other": 2.0})


class Failed(Work):
    def wait(self) -> None:
        raise RuntimeError("a peer has gone")


def test_a_failure_is_raised_where_its_end_is_noticed() -> None:
    clock = HandClock()
    channel = lane_on(clock, "gradients")
    channel.start([Failed(clock, done=True)])
    with pytest.raises(RuntimeError, match="a peer has gone"):
        channel.start([Work(clock)])


def test_what_is_under_way_when_a_row_is_taken_goes_on_in_the_next() -> None:
    clock = HandClock()
    channel = lane_on(clock)
    handle = channel.start([Work(clock, 1.0)], 4)
    clock.at = 2.0
    assert total(channel) == (1, 4, 2.0, {})
    clock.at = 3.0
    handle.wait()
    assert total(channel) == (0, 0, 2.0, {"other": 1.0})


def test_messages_between_stages_have_no_time_under_way() -> None:
    clock = HandClock()
    channel = lane_on(clock, "messages")
    handle = channel.start([Work(clock, 1.0)], 4)
    handle.wait()
    assert total(channel) == (1, 4, None, {"other": 1.0})


def test_traffic_has_one_lane_a_kind_and_axes_and_says_what_was_exchanged() -> None:
    traffic = Traffic(HandClock())
    assert traffic.channel("halos", ["space"]) is traffic.channel("halos", ["space"])
    for carried, axes in (("halos", ["space"]), ("gradients", ["replicate", "space"]), ("tokens", ["expert"])):
        with traffic.channel(carried, axes).waiting(100):  # type: ignore[arg-type]
            pass
    totals = traffic.take()
    assert [(one.axes, one.carried, one.nbytes) for one in totals] == [
        ("space", "halos", 100),
        ("replicate+space", "gradients", 100),
        ("expert", "tokens", 100),
    ]
    assert exchanged_nbytes(totals) == 200
    assert sent_nbytes(totals) == 100
    assert traffic.take() == []


def test_ring_nbytes() -> None:
    assert ring_all_reduce_nbytes(torch.zeros(6, dtype=torch.float64), 3) == 2 * 2 * 48 // 3
