"""DeviceMesh: what docs/decisions/device-mesh.md says it cannot do, beside what tutti's mesh does."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_parts.limits import attempt, still_limited
from tutti.parallel.mesh import Mesh

RECORD = "device-mesh"
DEGREES = {"stage": 8, "replicate": 8, "shard": 8, "split": 4}


@pytest.fixture
def large_world() -> Iterator[int]:
    """2,048 ranks of torch's fake backend, of which this process is rank 0."""
    dist.init_process_group("fake", rank=0, world_size=2048, store=FakeStore())
    yield 2048
    dist.destroy_process_group()


def count_groups(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Ranks of every group that is opened from now on."""
    opened: list[list[int]] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: object) -> object:
        opened.append(ranks)
        return new_group(ranks, **options)

    monkeypatch.setattr(device_mesh, "new_group", counted)
    monkeypatch.setattr(dist, "new_group", counted)
    return opened


def test_device_mesh_opens_every_group_of_every_axis(large_world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = count_groups(monkeypatch)
    mesh = init_device_mesh("cpu", tuple(DEGREES.values()), mesh_dim_names=tuple(DEGREES))
    still_limited(len(opened) == 1280, RECORD, "opens groups when they are asked for")
    mesh["replicate", "shard"]._flatten("data")
    still_limited(len(opened) == 1280 + 32, RECORD, "opens a joint group by its members alone")
    still_limited(not hasattr(DeviceMesh, "flatten"), RECORD, "has joint groups in its public interface")


def test_device_mesh_without_groups_can_neither_be_sliced_nor_asked_for_one(large_world: int) -> None:
    ranks = torch.arange(large_world).reshape(tuple(DEGREES.values()))
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(DEGREES), _init_backend=False)
    for function in (lambda: mesh.get_group("split"), lambda: mesh["replicate", "shard"]):
        still_limited("Error" in str(attempt(function)), RECORD, "opens the groups of a mesh later")


def test_tuttis_mesh_opens_one_group_for_each_set_of_axes_asked_for(
    large_world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = count_groups(monkeypatch)
    mesh = Mesh(DEGREES, 0)  # type: ignore[arg-type]
    assert opened == []
    group = mesh.group("split")
    assert mesh.group("split") is group
    joint = mesh.group("shard", "replicate")
    assert mesh.group("replicate", "shard") is joint
    assert dist.get_world_size(joint) == 64
    assert opened == [[0, 1, 2, 3], mesh.ranks("replicate", "shard")]
    assert mesh.new_group("split") is not group
    assert mesh.opened == [("split",), ("replicate", "shard"), ("split",)]
    assert mesh.group("stage", "replicate", "shard", "split") is None
