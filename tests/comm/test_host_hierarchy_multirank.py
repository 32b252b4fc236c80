"""Sums in two tiers: ranks of several hosts (told apart by a name given here), against sums made on one rank."""

import pytest
import torch
from torch import nn

from harness import run_ranks
from tutti.comm import shared_segment
from tutti.comm.hierarchical import CommThread, HierarchicalAllReduce
from tutti.comm.local_group import LocalGroup
from tutti.comm.rendezvous import HostHierarchy, make_local_group, make_local_group_or_hierarchy
from tutti.comm.world import join_world

SIZES = (0, 1, 5, 1000, 70_001)


def _sizes(hosts: tuple[int, ...], rank: int) -> str:
    """The host of a rank, where hosts have so many ranks."""
    return f"host {[host for host, ranks in enumerate(hosts) for _ in range(ranks)][rank]}"


def whole(rank: int, size: int) -> torch.Tensor:
    """Whole numbers, whose sums no order of adding changes."""
    return torch.randint(-50, 50, (size,), generator=torch.Generator().manual_seed(rank)).double()


def hierarchy(hosts: tuple[int, ...]) -> tuple[bool, bool, list[torch.Tensor]]:
    """Sums of several sizes, under way together."""
    world = join_world()
    shared_segment.host_identity = lambda: _sizes(hosts, world.rank)
    alone = make_local_group() is None
    found = make_local_group_or_hierarchy()
    assert alone is not isinstance(found, LocalGroup)
    if not isinstance(found, HostHierarchy):
        return alone, False, []
    comm_thread, handles, tensors = CommThread(), [], []
    for size in SIZES:
        segment = found.local_group.new_segment(8 * size)[1]
        tensors.append(segment.tensor(torch.float64, size))
        tensors[-1].copy_(whole(world.rank, size))
    for turn in range(2):
        handles = [HierarchicalAllReduce(found, comm_thread, number, tensor) for number, tensor in enumerate(tensors)]
        for handle in handles:
            handle.wait()
        if turn == 0:
            for tensor in tensors:
                tensor.div_(2)
    comm_thread.end()
    return alone, True, [tensor.clone() for tensor in tensors]


MANY = [pytest.param(hosts, marks=pytest.mark.long) for hosts in ((4, 4), (2, 3, 3), (1, 1, 3))]


@pytest.mark.parametrize("hosts", [(2, 2), (3, 1), (1, 2, 2), *MANY])
def test_sums_over_hosts(hosts: tuple[int, ...]) -> None:
    ranks = sum(hosts)
    results = run_ranks(hierarchy, ranks, hosts)
    for position, size in enumerate(SIZES):
        expected = ranks * torch.stack([whole(rank, size) for rank in range(ranks)]).sum(0) / 2
        assert all(torch.equal(found[position], expected) for _, _, found in results)


def test_hosts_of_one_rank_each_have_no_tiers_and_one_host_has_a_team() -> None:
    assert run_ranks(hierarchy, 2, (1, 1)) == [(True, False, [])] * 2
    assert run_ranks(hierarchy, 2, (2,)) == [(False, False, [])] * 2


def train(hosts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Some steps of a small model with unequal parts of the batch and an unused parameter."""
    import tutti

    world = join_world()
    shared_segment.host_identity = lambda: _sizes(hosts, world.rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 3)).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(4, dtype=torch.float64)))
    data = torch.utils.data.TensorDataset(torch.randn(44, 9).double(), torch.randint(3, (44,)))
    job = tutti.Job(global_batch_size=11, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    for _ in job.epochs(2):
        for batch in loader:
            job.step(batch)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_training_over_hosts_is_training_on_one_device() -> None:
    expected = run_ranks(train, 1, (1,))[0]
    for found in run_ranks(train, 4, (2, 2)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)
