"""The mesh of a smaller generation: replicas go first, then shards, and nothing that would change the run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.config.sync_notation import parse_sync
from tutti.config.vocabulary import AxisName
from tutti.errors import LaunchError
from tutti.launch.regroup import shrink_mesh, shrink_plan

AXES: tuple[AxisName, ...] = ("replicate", "shard", "split", "stage")


def plan(mesh: dict[AxisName, int], **fields: object) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=8), mesh=mesh, **fields)  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 5), min_size=1), st.integers(1, 64), st.integers(1, 8))
def test_a_smaller_mesh_keeps_every_other_axis_and_is_the_largest(
    mesh: dict[AxisName, int], most: int, least: int
) -> None:
    fixed = math.prod(degree for axis, degree in mesh.items() if axis not in ("replicate", "shard"))
    try:
        shrunk = shrink_mesh(mesh, most, least)
    except LaunchError:
        shards = mesh.get("shard", 1)
        # Replicas go first: shards are cut only where not even one replica fits.
        fits = most // fixed if fixed * shards > most else most // (fixed * shards) * shards
        possible = min(fits * fixed, math.prod(mesh.values()))
        assert fixed > most or possible < least
        return
    assert least <= math.prod(shrunk.values()) <= most
    for axis in ("split", "stage"):
        assert shrunk.get(axis, 1) == mesh.get(axis, 1)
    for axis in ("replicate", "shard"):
        assert shrunk.get(axis, 1) <= mesh.get(axis, 1)
    if shrunk.get("shard", 1) < mesh.get("shard", 1):
        assert shrunk.get("replicate", 1) == 1
        assert fixed * (shrunk.get("shard", 1) + 1) > most
    elif shrunk.get("replicate", 1) < mesh.get("replicate", 1):
        assert fixed * shrunk.get("shard", 1) * (shrunk.get("replicate", 1) + 1) > most
    assert list(shrunk) in ([axis for axis in mesh if axis in shrunk], ["replicate"]), "the order of the axes stays"


def test_what_a_run_means_stays() -> None:
    before = plan({"replicate": 2, "shard": 4}, sharding=ShardingPlan(level=2, offload="optimizer"))
    assert shrink_plan(before, 7).batch == before.batch
    assert shrink_plan(before, 7).mesh == {"shard": 4}
    assert shrink_plan(before, 7).sharding == before.sharding
    assert shrink_plan(before, 3).mesh == {"shard": 3}
    alone = shrink_plan(before, 1)
    assert (alone.mesh, alone.sharding) == ({"replicate": 1}, ShardingPlan(offload="optimizer"))


@pytest.mark.parametrize(
    ("before", "most", "least", "words"),
    [
        (plan({"split": 2, "stage": 2}), 3, 1, "only replicate and shard can shrink"),
        (plan({"replicate": 2, "split": 2}), 3, 3, "leaves 2 of 3 ranks in use, and 3 or more are asked for"),
        (plan({"replicate": 3}, sync=parse_sync("local:8")), 2, 1, "trains otherwise on fewer ranks"),
        (plan({"replicate": 2}, shares=(3.0, 1.0)), 1, 1, "states a load for each rank"),
    ],
)
def test_what_cannot_shrink_is_refused(before: Plan, most: int, least: int, words: str) -> None:
    assert before.sync != SyncPlan() or "otherwise" not in words
    with pytest.raises(LaunchError, match=words):
        shrink_plan(before, most, least)
