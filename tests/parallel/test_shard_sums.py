"""When sums of gradients go on over other axes: in which order a rank lands what it has begun."""

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.comm.hierarchical import HierarchicalCommunicator
from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import untracked_channel
from tutti.parallel.sharding.shard_collectives import ShardExchange, ShardGroup
from tutti.parallel.sharding.sharded_gradients import Sums, _PendingSum


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (SharedMemoryCommunicator, "start 0, land 0, start 1, land 1, start 2, land 2, start 3"),
        (HierarchicalCommunicator, "start 0, start 1, land 0, start 2, land 1, start 3"),
        (None, "start 0, start 1, land 0, start 2, land 1, start 3"),
    ],
)
def test_in_memory_of_all_ranks_a_sum_goes_on_before_the_next_begins(
    kind: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a network has two on their way."""
    said: list[str] = []

    def start(sums: Sums, pack: Any) -> _PendingSum:
        said.append(f"start {pack.number}")
        return _PendingSum(pack, [], [], ShardExchange(None))

    def land(sums: Sums, handle: _PendingSum) -> None:
        said.append(f"land {handle.pack.number}")  # type: ignore[attr-defined]
        handle.landed = True

    monkeypatch.setattr(Sums, "_start", start)
    monkeypatch.setattr(Sums, "_land", land)
    trained = SimpleNamespace(shard=SimpleNamespace(requires_grad=True))
    units: list[Any] = [
        SimpleNamespace(packs=[SimpleNamespace(number=number, parameters=[trained], leaves=False)])
        for number in range(4)
    ]
    communicator = None if kind is None else object.__new__(kind)
    sums = Sums(units, {("shard",): ShardGroup(None, untracked_channel(), communicator)})
    sums.open()
    sums.send()
    assert ", ".join(said) == expected
