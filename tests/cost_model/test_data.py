"""Data loading as a phase of the step: worked out by hand, and its laws."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, gpu, link, mlp, plan
from cost_model.examples_mesh import machines, meshed, transformer
from cost_model.test_laws import NAMES, clusters, model_of, plans, predicted
from tutti.config.cluster import ClusterSpec, NodeSpec
from tutti.config.model import Loading, ModelSpec
from tutti.config.plan import Plan
from tutti.cost_model import predict
from tutti.cost_model.loading_time import BatchLoad
from tutti.cost_model.rank_tracks import timeline
from tutti.cost_model.step_time import load_of
from tutti.planner.scenarios import with_storage

MEGA = 1e6


def fed(model: ModelSpec | None = None, samples: int | None = None, **costs: Any) -> ModelSpec:
    return dataclasses.replace(model or mlp(64, 2), loading=Loading(**costs), dataset_samples=samples)


def data_s(model: ModelSpec, where: ClusterSpec, how: Plan) -> float:
    prediction = predict(model, where, how)
    assert sum(prediction.phases.values()) == pytest.approx(prediction.step_time_s.value)
    return prediction.phases["data"]


def cards(hosts: int = 1, **node: Any) -> ClusterSpec:
    """Return hosts of two devices."""
    return cluster(gpu(), devices_per_node=2, count=hosts, **node)


PICTURES = {"core_s": 1e-3, "wait_s": 0.5e-3, "stored_nbytes": MEGA}
"""A sample takes 1.5 ms of a rank and, from a disk of 1 GB/s, 1 ms of storage."""


def test_ranks_that_load_themselves_wait_for_all_of_it() -> None:
    here = cards(disk_read_bytes_per_s=1e9)
    # 64 samples of 1 + 0.5 + 1 ms, one after another
    assert data_s(fed(**PICTURES), here, plan(64)) == pytest.approx(64 * 2.5e-3)
    # two ranks: 32 each; the disk needs 64 ms for both, less than a rank's own 80 ms
    assert data_s(fed(**PICTURES), here, plan(64, 2)) == pytest.approx(32 * 2.5e-3)
    # with 4 MB per sample, the disk needs 64 x 4 ms, a rank 32 x 5.5 ms
    large = PICTURES | {"stored_nbytes": 4 * MEGA}
    assert data_s(fed(**large), here, plan(64, 2)) == pytest.approx(64 * 4e-3)
    # two hosts have two disks, and a share that is no whole number counts as the largest one
    assert data_s(fed(**large), cards(2, disk_read_bytes_per_s=1e9), plan(66, 4)) == pytest.approx(2 * 17 * 4e-3)


def test_what_is_not_known_costs_nothing_and_is_said() -> None:
    assert data_s(mlp(64, 2), cards(), plan(64)) == 0
    notes = predict(mlp(64, 2), cards(), plan(64)).notes
    assert any("the cost of loading samples is unknown" in note for note in notes)
    # a disk of unknown rate
    model = fed(**PICTURES)
    assert data_s(model, cards(), plan(64)) == pytest.approx(64 * 1.5e-3)
    prediction = predict(model, cards(), plan(64))
    assert (
        "data: a sample takes 1 ms of a core, 500 us of waiting, 976.6 KiB of storage (assumed); ranks load between "
        "steps, a batch every 96 ms, for which a step waits 96 ms; the read rate of storage is unknown and not "
        "counted; the script's own work between steps is not predicted"
    ) in prediction.notes
    assert "limited by data loading" in prediction.notes[0]


def test_workers_load_ahead_and_only_what_is_longer_than_the_rest_is_waited_for() -> None:
    here = cards(disk_read_bytes_per_s=1e9)
    rest_s = predict(mlp(64, 2), here, plan(64)).step_time_s.value
    prediction = predict(fed(**PICTURES, workers=4), here, plan(64))
    # the disk limits: four workers are faster
    assert prediction.step_time_s.value == pytest.approx(max(64 * 2.5e-3 / 4, 64e-3))
    assert prediction.phases["data"] == pytest.approx(64e-3 - rest_s)
    prediction = predict(fed(core_s=4e-3, workers=2), here, plan(64))
    assert prediction.step_time_s.value == pytest.approx(64 * 4e-3 / 2)
    # hidden behind the rest
    prediction = predict(fed(core_s=1e-9, workers=2), here, plan(64))
    assert prediction.phases["data"] == 0
    assert prediction.step_time_s.value == pytest.approx(rest_s)
    assert any("behind the rest of the step" in note for note in prediction.notes)


def test_workers_take_cores() -> None:
    # 4 cores, 2 ranks with 2 threads each: no core is free, so workers' seconds come on top: 2 x 32 x 1 ms on 4 cores
    busy = cluster(cpu())
    idle_s = predict(mlp(), busy, plan(64, 2)).phases["exposed_communication"]
    waits_s = data_s(fed(mlp(), core_s=1e-3, workers=8), busy, plan(64, 2))
    # while ranks wait for each other, workers have the cores
    assert waits_s == pytest.approx(2 * 32 * 1e-3 / 4 - idle_s)
    # waiting takes no core
    assert data_s(fed(mlp(), wait_s=1e-6, workers=8), busy, plan(64, 2)) == 0
    # a host of GPUs with 4 cores, 2 of which run the ranks' own threads: 2 x 32 x 10 ms on 4 cores beside these
    rest_s = predict(mlp(), cards(cores=4), plan(64, 2)).step_time_s.value
    idle_s = predict(mlp(), cards(cores=4), plan(64, 2)).phases["exposed_communication"]
    prediction = predict(fed(mlp(), core_s=10e-3, workers=64), cards(cores=4), plan(64, 2))
    assert prediction.step_time_s.value == pytest.approx(2 * 32 * 10e-3 / 4 + (rest_s - idle_s) / 2)
    # where the number of cores is unknown, each worker has one
    assert predict(fed(mlp(), core_s=10e-3, workers=64), cards(), plan(64, 2)).step_time_s.value == pytest.approx(5e-3)
    # 8 ranks that load their samples themselves, on 4 cores
    load = load_of(fed(mlp(), core_s=1e-3), busy, plan(64, 8))
    assert load.exposed_s(1.0, 0.0) == pytest.approx(8 * 2 * 1e-3)


def test_ranks_of_one_sample_read_it_once_and_decode_it_each() -> None:
    disk = machines(1, 8)
    disk = dataclasses.replace(disk, nodes=tuple(dataclasses.replace(n, disk_read_bytes_per_s=1e9) for n in disk.nodes))
    model = fed(transformer(), core_s=1e-6, stored_nbytes=MEGA)
    for mesh in ({"split": 2, "replicate": 4}, {"replicate": 4, "split": 2}, {"stage": 2, "replicate": 4}):
        load = load_of(model, disk, meshed(64, 8, mesh))
        assert load.storage_s == pytest.approx(64e-3)  # 4 shares of 16 samples
        assert load.loaders_s == pytest.approx(16 * (1e-6 + 1e-3))
    assert load_of(model, disk, meshed(64, 8, {"split": 4})).loaders_s == pytest.approx(64 * (1e-6 + 1e-3))
    # with more microbatches than samples of a rank, it loads one for each, with weight 0
    assert load_of(fed(core_s=1.0), cards(4), plan(8, 8, 4)).loaders_s == pytest.approx(4.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_rank_that_ends_last_with_its_data_counts(workers: int) -> None:
    """One host has a fast device and slow storage, the other a slow device."""
    quick, slow = gpu(), gpu(memory_bandwidth_bytes_per_s=1e10)
    hosts = tuple(
        NodeSpec(name=name, device=name, memory_nbytes=2**34, disk_read_bytes_per_s=rate)
        for name, rate in (("quick", 1e9), ("slow", 1e12))
    )
    links = (link("network"),)
    here = ClusterSpec(name="two", devices={"quick": quick, "slow": slow}, nodes=hosts, links=links)
    prediction = predict(fed(stored_nbytes=MEGA, workers=workers), here, plan(64, 2))
    two_quick = dataclasses.replace(cards(2, disk_read_bytes_per_s=1e9), links=links)
    two_quick = dataclasses.replace(two_quick, nodes=(dataclasses.replace(two_quick.nodes[0], devices_per_node=1),))
    alike = predict(fed(stored_nbytes=MEGA, workers=workers), two_quick, plan(64, 2))
    assert prediction.phases["data"] == pytest.approx(alike.phases["data"])
    assert prediction.step_time_s.value == pytest.approx(alike.step_time_s.value)


def test_a_stream_is_read_whole_by_every_rank() -> None:
    here = cards(2, disk_read_bytes_per_s=1e9)
    load = load_of(fed(**PICTURES, stream=True), here, plan(64, 4))
    assert load.loaders_s == pytest.approx(64 * 2.5e-3)
    assert load.storage_s == pytest.approx(64e-3)


def test_parts_of_volumes_are_read_by_ranks_along_space() -> None:
    here = cards(disk_read_bytes_per_s=1e9)
    model = dataclasses.replace(model_of("unet"), dataset_samples=None)
    for parts, loaders, storage in ((True, 8 * 2.5e-3 / 2, 8e-3), (False, 8 * 2.5e-3, 8e-3)):
        load = load_of(fed(model, **PICTURES, parts=parts), here, meshed(8, 1, {"space": 2}, precision="full"))
        assert load.loaders_s == pytest.approx(loaders)
        assert load.storage_s == pytest.approx(storage)


def test_storage_that_hosts_share() -> None:
    separate = cards(4, disk_read_bytes_per_s=1e9)
    shared = dataclasses.replace(separate, shared_read_bytes_per_s=2e9)  # the data is on the shared storage
    model = fed(stored_nbytes=MEGA)
    assert load_of(model, separate, plan(64, 8)).storage_s == pytest.approx(16e-3)
    assert load_of(model, shared, plan(64, 8)).storage_s == pytest.approx(32e-3)
    # hosts whose ranks need the whole batch each read all of it
    whole = load_of(fed(transformer(), stored_nbytes=MEGA), shared, meshed(64, 8, {"stage": 4}))
    assert whole.storage_s == pytest.approx(2 * 64 * 0.5e-3)  # four stages on two hosts


def test_data_that_fits_in_memory_is_read_from_storage_only_once() -> None:
    here = cards(disk_read_bytes_per_s=1e9, memory_nbytes=10**9)
    few, many = fed(**PICTURES, samples=500), fed(**PICTURES, samples=501)
    assert data_s(few, here, plan(64)) == pytest.approx(64 * 1.5e-3)
    assert data_s(many, here, plan(64)) == pytest.approx(64 * 2.5e-3)
    assert any("stay in memory after the first epoch" in note for note in predict(few, here, plan(64)).notes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mesh", [{"replicate": 4}, {"replicate": 2, "stage": 4}, {"split": 4}], ids=str)
def test_the_wait_is_drawn_at_the_beginning_of_the_step(workers: int, mesh: Any) -> None:
    model, here, how = fed(transformer(), core_s=1e-2, workers=workers), machines(1, 8), meshed(64, 8, mesh)
    drawing, prediction = timeline(model, here, how), predict(model, here, how)
    for track in drawing.tracks:
        assert track.bars[0].doing == "data"
        assert track.bars[0].start_s == 0
        assert track.bars[-1].end_s == pytest.approx(prediction.step_time_s.value)
        assert all(
            bar.end_s == pytest.approx(following.start_s)
            for bar, following in zip(track.bars, track.bars[1:], strict=False)
        )
        assert sum(lasts for doing, lasts in track.seconds.items() if doing != "hidden") == pytest.approx(
            prediction.step_time_s.value
        )
    assert min(track.seconds["data"] for track in drawing.tracks) <= prediction.phases["data"] * (1 + 1e-9)


seconds = st.floats(0, 1e-2)
loadings = st.builds(
    Loading,
    core_s=seconds,
    wait_s=seconds,
    stored_nbytes=st.floats(0, 1e8),
    workers=st.integers(0, 8),
    stream=st.booleans(),
)


@settings(deadline=None, max_examples=30)
@given(data=st.data(), machines=clusters(), loading=loadings, more=st.integers(2, 30))
def test_laws_of_loading(data: st.DataObject, machines: ClusterSpec, loading: Loading, more: int) -> None:
    name = data.draw(st.sampled_from(NAMES))
    how, model = data.draw(plans(name)), model_of(name)
    without = predicted(name, machines, how)
    cores, disk, whole = data.draw(
        st.tuples(st.integers(0, 64), st.floats(1e6, 1e11), st.none() | st.integers(1, 10**6))
    )
    nodes = tuple(dataclasses.replace(node, cores=cores, disk_read_bytes_per_s=disk) for node in machines.nodes)
    shared = data.draw(st.none() | st.floats(1e6, 1e11))
    machines = dataclasses.replace(machines, nodes=nodes, shared_read_bytes_per_s=shared)
    free, model = predict(model, machines, how), dataclasses.replace(model, dataset_samples=whole)
    assert free.step_time_s == without.step_time_s
    assert free.phases["data"] == 0

    def step_s(now: Loading, where: ClusterSpec = machines) -> float:
        prediction = predict(dataclasses.replace(model, loading=now), where, how)
        assert sum(prediction.phases.values()) == pytest.approx(prediction.step_time_s.value)
        assert all(seconds >= 0 for seconds in prediction.phases.values())
        return prediction.step_time_s.value

    took = step_s(loading) * (1 + 1e-9)
    assert step_s(Loading(workers=loading.workers)) == pytest.approx(free.step_time_s.value)
    assert took >= free.step_time_s.value
    assert step_s(dataclasses.replace(loading, workers=loading.workers + more)) <= took
    for cheaper in ("core_s", "wait_s", "stored_nbytes"):
        assert step_s(dataclasses.replace(loading, **{cheaper: getattr(loading, cheaper) / more})) <= took
    assert step_s(loading, with_storage(machines, (shared or disk) * more)) <= took
    larger = tuple(
        dataclasses.replace(node, cores=more * cores, memory_nbytes=more * node.memory_nbytes) for node in nodes
    )
    assert step_s(loading, dataclasses.replace(machines, nodes=larger)) <= took
    assert step_s(loading, listed_singly(machines)) == pytest.approx(took, rel=1e-8)


def listed_singly(machines: ClusterSpec) -> ClusterSpec:
    """Return the same hosts, each with a name of its own."""
    nodes = [
        dataclasses.replace(node, name=f"{node.name}-{at}", count=1)
        for node in machines.nodes
        for at in range(node.count)
    ]
    return dataclasses.replace(machines, nodes=tuple(nodes))


def test_of_hosts_that_read_unequally_many_samples_the_fullest_counts() -> None:
    """Replicas of three stages run on hosts of two devices. The host in the middle reads for both replicas."""
    how = meshed(32, mesh={"replicate": 2, "stage": 3})
    for where in (cards(3, disk_read_bytes_per_s=1e8), listed_singly(cards(3, disk_read_bytes_per_s=1e8))):
        assert data_s(fed(mlp(64, 3), stored_nbytes=MEGA), where, how) == pytest.approx(2 * 16 * MEGA / 1e8)
        together = dataclasses.replace(where, shared_read_bytes_per_s=1e7)
        assert data_s(fed(mlp(64, 3), stored_nbytes=MEGA), together, how) == pytest.approx(4 * 16 * MEGA / 1e7)


def test_a_batch_is_there_when_its_slowest_station_is_through() -> None:
    uncontended = BatchLoad(loaders_s=3.0, storage_s=5.0)
    assert uncontended.exposed_s(10.0, 0.0) == 5.0
    ahead = BatchLoad(loaders_s=3.0, storage_s=5.0, cores_s=1.0, held=0.5, ahead=True)
    assert ahead.exposed_s(10.0, 0.0) == 0.0  # ranks take 5 s of the cores, which leaves time for the workers
    assert ahead.exposed_s(4.0, 0.0) == 1.0
    # ranks take all cores, so the workers' second comes on top
    assert dataclasses.replace(ahead, held=1.0).exposed_s(10.0, 0.0) == 1.0
    assert dataclasses.replace(ahead, held=1.0).exposed_s(10.0, 0.4) == pytest.approx(0.6)
