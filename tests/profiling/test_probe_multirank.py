"""Probes by real processes: this host with ranks of its own, several hosts by all ranks of a group."""

import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness import run_ranks
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.errors import LaunchError
from tutti.profile.probe import cached_cluster_path, measure
from tutti.profile.probe.local_probe import measure_here
from tutti.profile.probe.probe_timing import Effort

TINY = Effort(
    gemm_sizes=(16, 32),
    cuda_gemm_sizes=(256, 512),
    concurrent_sizes=(16,),
    dtypes=("float32", "bfloat16"),
    threads="ends",
    repeats=2,
    gemm_budget_s=1.0,
    link_nbytes=(1024, 16384, 262144),
    link_repeats=2,
    link_budget_s=0.5,
    copy_nbytes=2**20,
    disk_nbytes=2**18,
    codes_numel=(2**12,),  # the budget leaves the first method only: the one whose arithmetic has exchanges
)


def test_this_host_by_two_ranks_of_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = measure_here(TINY, 2, folder=tmp_path, say=said.append, timeout_s=60)
    assert serialization.loads(ClusterSpec, serialization.dumps(cluster)) == cluster
    (node,) = cluster.nodes
    assert (node.name, node.count) == (socket.gethostname(), 1)
    device = cluster.devices[node.device]
    assert device.evidence == "measured"
    assert {rate.dtype for rate in device.gemm} == {"float32", "bfloat16"}
    assert all(rate.concurrent == 1 for rate in device.gemm)
    assert device.kernel_overhead_s > 0
    assert [(rate.method, rate.numel) for rate in device.compress_rates] == [("powersgd,rank=1", 2**12)]
    link = cluster.link("node")
    assert link is not None
    assert (link.fitted_to, link.ranks, link.evidence) == ("all_reduce", 2, "measured")
    assert [point.nbytes for point in link.points] == [1024, 16384, 262144]
    assert all(point.time_s > 0 for point in link.points)
    assert [link.fitted_to for link in cluster.links] == ["all_reduce", "send"]
    assert cluster.conditions is not None
    assert cluster.conditions.cores_granted >= 1
    assert any("links" in text for text in said)
    assert list(tmp_path.iterdir()) == []
    if device.kind == "cpu":
        assert {(rate.n, rate.concurrent) for rate in device.gemm_concurrent} == {(16, 2)}
        assert {rate.concurrent for rate in device.memory_rates} == {1, 2}


def test_a_failing_rank_ends_the_probe_with_its_reason(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(LaunchError, match=r"rank \d of the probe failed:\n(.|\n)*RuntimeError"):
        measure_here(replace(TINY, gemm_sizes=(-1,)), 2, folder=tmp_path, say=lambda text: None, timeout_s=60)
    assert set(multiprocessing.active_children()) <= before


def test_a_probe_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(LaunchError, match=r"too long|in time"):
        measure_here(TINY, 2, folder=tmp_path, say=lambda text: None, timeout_s=0.05)
    assert set(multiprocessing.active_children()) <= before


def _on_pretended_hosts(hosts: tuple[str, ...], folder: str, slow: str = "") -> ClusterSpec:
    """A rank of a cluster in which rank r runs on `hosts[r]`; the host `slow` multiplies at a quarter of its pace."""
    import torch.distributed as dist

    from tutti.comm.world import join_world, leave_world
    from tutti.profile.probe import compute_rates, host_facts
    from tutti.profile.probe.rank_probe import measure_ranks

    world = join_world()
    real = host_facts.facts()
    machine = "" if slow else real.machine  # hosts of one machine, if too many for its cores, take turns
    pretended = replace(real, name=hosts[dist.get_rank()], machine=machine)
    again = compute_rates.remeasure_doubtful

    def slowly(*words: Any) -> Any:
        if not slow:
            return again(*words)
        # Rates of its own choosing: what four ranks on two cores measure of one another differs by their turns.
        flops_per_s = 1e10 if pretended.name == slow else 4e10
        return tuple(replace(rate, flops_per_s=flops_per_s) for rate in again(*words))

    try:
        with (
            mock.patch.object(compute_rates, "remeasure_doubtful", slowly),
            mock.patch.object(host_facts, "facts", return_value=pretended),
            mock.patch.object(host_facts, "cache_nbytes", return_value=0),
        ):
            return measure_ranks(world.device, TINY, folder=Path(folder), say=lambda text: None)
    finally:
        leave_world()


def test_two_hosts_have_both_tiers_and_every_rank_the_same_spec(tmp_path: Path) -> None:
    specs = run_ranks(_on_pretended_hosts, 4, ("a", "b", "a", "b"), str(tmp_path))
    # Every rank knows everything; only the moment it was put together may differ.
    same = {serialization.dumps(replace(spec, conditions=None)) for spec in specs}
    assert len(same) == 1
    cluster = specs[0]
    assert [(link.tier, link.fitted_to, link.ranks) for link in cluster.links] == [
        ("node", "all_reduce", 2),
        ("node", "send", 2),
        ("network", "all_reduce", 2),
        ("network", "send", 2),
    ]
    (node,) = cluster.nodes
    assert (cluster.name, node.name, node.count) == ("a and 1 more", "a", 2)
    (device,) = cluster.devices.values()
    assert [rate.method for rate in device.compress_rates] == ["powersgd,rank=1"]


def test_a_far_slower_host_has_a_device_of_its_own_and_every_rank_says_so(tmp_path: Path) -> None:
    """Ranks of one name on both hosts: only what they measure tells them apart."""
    hosts = ("a", "b", "b", "c")
    specs = run_ranks(_on_pretended_hosts, 4, hosts, str(tmp_path), "b")
    assert len({serialization.dumps(replace(spec, conditions=None)) for spec in specs}) == 1
    cluster = specs[0]
    quick, slow = cluster.devices
    assert slow == f"{quick}, slower"
    nodes = [(node.name, node.device, node.count) for node in cluster.nodes]
    assert nodes == [("a", quick, 1), ("b", slow, 1), ("c", quick, 1)], "in the order of their ranks"
    float32 = {name: device.peak_flops_per_s["float32"] for name, device in cluster.devices.items()}
    assert float32[slow] < 0.7 * float32[quick]


def _threads_and_dtypes(folder: str) -> tuple[set[int], set[tuple[str, ...]]]:
    """Threads while this rank's links were measured, of two ranks on eight cores, and dtypes whose weights were, where
    the last rank emulates bfloat16."""
    import torch.distributed as dist

    from tutti.comm.world import join_world, leave_world
    from tutti.profile.probe import compute_rates, host_facts, link_rates
    from tutti.profile.probe.rank_probe import measure_ranks

    world = join_world()
    here = replace(host_facts.facts(), cores=8)
    threads, dtypes = set(), set()

    def of_links(*_: Any) -> tuple[()]:
        threads.add(torch.get_num_threads())
        return ()

    def of_weights(*_: Any, **said: Any) -> tuple[()]:
        dtypes.add(said["dtypes"])
        return ()

    emulated = ("bfloat16",) if dist.get_rank() == 1 else ()
    effort = replace(TINY, dtypes=("float32", "bfloat16"))
    try:
        with (
            mock.patch.object(host_facts, "facts", return_value=here),
            mock.patch.object(link_rates, "measure", of_links),
            mock.patch.object(compute_rates, "measure_weight_rates", of_weights),
            mock.patch.object(compute_rates, "emulated", return_value=emulated),
        ):
            measure_ranks(world.device, effort, folder=Path(folder), say=lambda text: None)
    finally:
        leave_world()
    return threads, dtypes


def test_ranks_of_a_host_have_their_share_of_cores_and_measure_the_same(tmp_path: Path) -> None:
    """With all cores each, sums in shared memory took 30 times as long as in a training; and a rank that measures in
    step what another leaves out would wait for ever."""
    first, second = run_ranks(_threads_and_dtypes, 2, str(tmp_path))
    assert first[0] == second[0] == {4}
    assert second[1] == {("float32",)}
    assert first[1] == {("float32", "bfloat16"), ("float32",)}  # alone, and with the other


def _samples_beside_others() -> list[tuple[float, float]]:
    """From when to when each sample of this rank went on, which comes to it later than the others."""
    import time

    import torch
    import torch.distributed as dist

    from tutti.comm.world import join_world, leave_world
    from tutti.profile.probe import compute_rates, memory_rates
    from tutti.profile.probe.rank_probe import _make_barrier

    taken: list[tuple[float, float]] = []

    def once(call: object, device: torch.device) -> float:
        began = time.monotonic()
        time.sleep(0.005 * (1 + dist.get_rank()))
        taken.append((began, time.monotonic()))
        return 0.02

    join_world()
    try:
        barrier = _make_barrier([[0, 2], [1]])
        assert (barrier is None) == (dist.get_rank() == 1)
        time.sleep(0.3 * dist.get_rank())
        effort = replace(TINY, weight_size=16, dtypes=("float32",))
        with mock.patch.object(memory_rates.probe_timing, "once", once):
            memory_rates.measure(torch.device("cpu"), effort, threads=(1, 2), memory_nbytes=2**24, barrier=barrier)
            compute_rates.measure_weight_rates(
                torch.device("cpu"), effort, threads=(1,), dtypes=("float32",), barrier=barrier
            )
        return taken
    finally:
        leave_world()


def test_who_shares_memory_measures_it_at_the_same_time() -> None:
    first, exclusive, other = run_ranks(_samples_beside_others, 3)
    assert len(first) == len(other) == (2 + 2 * 18) * (1 + 9)  # each begins with one that does not count
    for one, beside in ((first, other), (other, first)):
        # nobody is ahead: a sample begins when the one before has ended everywhere, however long it took there
        assert all(one[at][0] >= beside[at - 1][1] for at in range(len(one)) if at % 10)
    assert exclusive[0][1] < first[1][0]


def _sample_s(machine_cores: int) -> list[float]:
    """What samples last at least where two hosts of a core each are on a machine of so many, and the rates found."""
    import torch
    import torch.distributed as dist

    from tutti.comm.world import join_world, leave_world
    from tutti.config.cluster import GemmRate
    from tutti.profile.probe import probe_timing, rank_probe
    from tutti.profile.probe.cluster_assembly import DeviceRates

    lasting: list[float] = []

    def rates(*_: object) -> DeviceRates:
        lasting.append(probe_timing._LEAST_S.get())
        found = GemmRate(dtype="float32", n=1, flops_per_s=5.0 - dist.get_rank())
        return DeviceRates(gemm=(found,), memory=(), kernel_overhead_s=1e-6, notes=())

    join_world()
    try:
        own = rank_probe._facts(torch.device("cpu"))
        changed = {"machine": "m", "machine_cores": machine_cores, "cores": 1}
        facts = [replace(own, host=replace(own.host, name=name, **changed)) for name in "ab"]
        with mock.patch.object(rank_probe, "_measure_device", rates):
            exclusive = rank_probe._measure_exclusive(dist.group.WORLD, facts, torch.device("cpu"), TINY, print)[0]  # type: ignore
        return [*lasting, probe_timing._LEAST_S.get(), *(one.gemm[0].flops_per_s for one in exclusive.values())]
    finally:
        leave_world()


@pytest.mark.parametrize(("machine_cores", "least_s"), [(1, 12e-3), (2, 1e-3)])
def test_hosts_measure_at_once_and_in_turns_where_their_machine_has_fewer_cores(
    machine_cores: int, least_s: float
) -> None:
    """Every rank has the slower one's products."""
    assert run_ranks(_sample_s, 2, machine_cores) == [[least_s, 1e-3, 4.0]] * 2


def _codes_beside_others() -> int:
    """How many methods are timed by a rank of a group whose exchanges fail."""
    import torch
    import torch.distributed as dist

    from tutti.comm.world import join_world, leave_world
    from tutti.profile.probe import codec_rates

    join_world()
    try:
        with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("exchanged")):
            return len(codec_rates.measure(torch.device("cpu"), TINY))
    finally:
        leave_world()


def test_methods_are_timed_without_the_other_ranks() -> None:
    assert run_ranks(_codes_beside_others, 2) == [1, 1]


def test_one_rank_has_no_links(tmp_path: Path) -> None:
    cluster = measure_here(TINY, 1, folder=tmp_path, say=lambda text: None, timeout_s=60)
    assert cluster.links == ()
    (device,) = cluster.devices.values()
    assert device.gemm_concurrent == ()


def test_where_the_spec_of_this_host_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_cluster_path() == tmp_path / "tutti" / f"cluster-{socket.gethostname()}.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cached_cluster_path().parent == Path.home() / ".cache" / "tutti"


def test_quick_and_full_are_what_measure_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tutti.profile import probe
    from tutti.profile.probe import local_probe

    asked: list[Effort] = []
    monkeypatch.setattr(local_probe, "measure_here", lambda effort, ranks, **more: asked.append(effort))
    measure(quick=True)
    measure(quick=False)
    assert asked == [probe.QUICK, probe.FULL]
