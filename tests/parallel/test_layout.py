"""The layout: parts of tensors, the mesh's groups, and what is made of both."""

import pytest
import torch

from tutti.errors import PlanError
from tutti.parallel.layout import TensorShard
from tutti.parallel.mesh import coordinates_of, group_ranks


def test_a_part_is_taken_and_put_back() -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    held = TensorShard(shape=(6, 10)).cut(0, (1, 3), (4, 6)).cut(1, (2, 7))
    part = held.take(whole)
    assert part.shape == held.local_shape == (4, 5)
    assert torch.equal(part, whole[[1, 2, 4, 5]][:, 2:7])
    back = torch.zeros_like(whole)
    held.put(back, part)
    assert torch.equal(held.take(back), part)
    assert back.sum() == part.sum()


def test_a_cut_of_a_cut_counts_from_the_first() -> None:
    held = TensorShard(shape=(12,)).cut(0, (0, 2), (6, 10)).cut(0, (1, 4))
    assert held.cuts[0].ranges == ((1, 2), (6, 8))
    assert TensorShard(shape=(12,)).cut(0, (3, 5)).cut(0, (2, 2)).local_shape == (0,)


def test_every_rank_has_its_place_in_the_grid() -> None:
    degrees = {"replicate": 2, "split": 3, "stage": 2}
    for rank in range(12):
        place = coordinates_of(degrees, rank)
        assert (place["replicate"] * 3 + place["split"]) * 2 + place["stage"] == rank
        assert rank in group_ranks(degrees, ("split",), place)
        assert len(group_ranks(degrees, ("replicate", "stage"), place)) == 4
    assert group_ranks(degrees, ("split",), coordinates_of(degrees, 7)) == [7, 9, 11]


def test_a_rank_outside_the_mesh_is_refused() -> None:
    from tutti.parallel.mesh import Mesh

    with pytest.raises(PlanError, match="outside the mesh"):
        Mesh({}, 1)
