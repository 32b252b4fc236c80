"""Every collective of torch.distributed is noted with what tells it apart, also those that a script calls itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from tutti.comm.noted_collectives import note_collectives
from tutti.comm.shared_memory import make_shared_memory_communicator
from tutti.comm.traffic import Traffic
from tutti.comm.world import join_world
from tutti.event_record import ACTIVE, FILE_NAME, RankEvent, open_record, read_record


def _events() -> list[RankEvent]:
    world = join_world()
    note_collectives()
    note_collectives()
    folder = Path(f"record-{world.rank}")
    folder.mkdir()
    pair, other = dist.new_group([0, 1]), dist.new_group([1, 2])
    assert open_record(folder, world.rank, world.world_size) == ""
    dist.all_reduce(torch.ones(2, 3))
    dist.all_reduce(tensor=torch.ones(1, dtype=torch.float64), group=dist.group.WORLD)
    if world.rank < 2:
        dist.broadcast(torch.ones(5), 0, pair)
    if world.rank > 0:
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=other)
    with Traffic().channel("scalars", ("replicate",)).waiting():
        dist.barrier()
    work: Any = dist.all_reduce(torch.ones(6), async_op=True)
    handle = Traffic().channel("gradients", ("replicate",)).start([work])
    del work
    handle.wait()
    if world.rank == 0:
        dist.send(torch.ones(7), 2)
        dist.send(torch.ones(7), group_dst=1, group=pair)
        assert other == dist.GroupMember.NON_GROUP_MEMBER
        dist.all_reduce(torch.ones(9), group=other)  # torch only warns
    elif world.rank == 2:
        dist.recv(torch.ones(7), 0)
    else:
        dist.recv(torch.ones(7), group=pair)
    dist.barrier()
    communicator = make_shared_memory_communicator()
    assert communicator is not None
    communicator.reduce(torch.ones(8))
    with pytest.raises(TypeError):
        dist.all_reduce("no tensor")  # type: ignore[arg-type]
    ACTIVE.recorder = None
    return list(read_record(folder / FILE_NAME).events)


def test_collectives_are_noted() -> None:
    everyone = run_ranks(_events, 3)
    named = [[(e.name, e.group.partition("#")[0], e.sequence, e.dtype, e.shape) for e in events] for events in everyone]
    world = "0,1,2"
    for rank, events in enumerate(named):
        assert events[:2] == [
            ("all_reduce", world, 1, "float32", (2, 3)),
            ("all_reduce", world, 2, "float64", (1,)),
        ]
        assert (("broadcast", "0,1", 1, "float32", (5,)) in events) == (rank < 2)
        assert (("all_gather", "1,2", 1, "float32", (4,)) in events) == (rank > 0)
        assert ("barrier", world, 3, "", ()) in events
        assert ("all_reduce", world, 4, "float32", (6,)) in events
        assert ("barrier", world, 5, "", ()) in events
        assert not any(shape == (9,) for *_, shape in events)
        (shared,) = [event for event in events if event[0] == "shared-memory exchange"]
        assert shared[1].startswith("pid ")
        assert shared[2:] == (1, "float32", (8,))
    assert ("send", "0>2", 1, "float32", (7,)) in named[0]
    assert ("recv", "0>2", 1, "float32", (7,)) in named[2]
    assert ("send", "0>1", 1, "float32", (7,)) in named[0]
    assert ("recv", "-1>1", 1, "float32", (7,)) in named[1]
    for events in everyone:
        assert all(event.ended_s is not None for event in events)
        assert [event.about for event in events if event.shape == (6,)] == ["gradients over replicate"]
        failed = [(number, event.name) for number, event in enumerate(events) if event.failed]
        assert failed == [(len(events) - 1, "all_reduce")], failed
        blocking = {event.name: event.blocking for event in events if event.shape != (6,)}
        assert blocking["barrier"]
        assert not blocking["shared-memory exchange"]
    groups = {event.group for events in everyone for event in events if event.name == "broadcast"}
    assert len(groups) == 1  # the same text on all ranks


def _roots() -> list[str]:
    world = join_world()
    note_collectives()
    folder = Path(f"record-{world.rank}")
    folder.mkdir()
    pair = dist.new_group([1, 2])
    assert open_record(folder, world.rank, world.world_size) == ""
    tensor = torch.ones(2)
    if world.rank == 1:
        dist.broadcast(tensor, 1, pair)
        dist.reduce(tensor, group=pair, group_dst=1)
    elif world.rank == 2:
        dist.broadcast(tensor, group=pair, group_src=0)
        dist.reduce(tensor, 2, dist.ReduceOp.SUM, pair)
    if world.rank == 0:
        dist.gather(tensor, [torch.ones(2) for _ in range(3)])
    else:
        dist.gather(tensor, dst=0)
    ACTIVE.recorder = None
    return [event.about for event in read_record(folder / FILE_NAME).events if event.of_script]


def test_one_root_has_one_name_however_the_script_states_it() -> None:
    first, *others = run_ranks(_roots, 3)
    assert first == ["to rank 0"]
    assert others == [["from rank 1", "to rank 2", "to rank 0"]] * 2
