"""The doctor, the probe and plans for hosts over ssh, with real sshd's."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusters.command_rig import tutti
from clusters.ssh_rig import SshHosts, missing_for_ssh
from launch.launch_rig import SCRIPTS, wait_until
from tutti.clusters.cluster_job import JobRequest
from tutti.clusters.ssh import Ssh, _failover
from tutti.commands.cluster_plans import NodeOffer, offers
from tutti.commands.plan_options import PlanOptions
from tutti.config import serialization
from tutti.config.cluster import Conditions
from tutti.profile.catalog import cluster_from_parts
from tutti.profile.probe import cached_cluster_path

pytestmark = pytest.mark.skipif(missing_for_ssh() is not None, reason=str(missing_for_ssh()))


@pytest.fixture
def project(tmp_path: Path, hosts: SshHosts, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tutti.toml").write_text(
        f'[ssh]\nhosts = "alpha,beta"\nconfig = "{hosts.config}"\n[hardware]\nprices = {{ A10 = 0.5 }}\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def home_cache(hosts: SshHosts, name: str) -> Path:
    return hosts.base / f"home-{name}/.cache/tutti"


def offer(**options: Any) -> NodeOffer:
    (found,) = offers(PlanOptions(on="ssh", **options))
    return found


def test_hosts_that_measured_themselves_are_planned_for(
    project: Path, hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offer().reason.startswith("how fast its cores are is not known; measure them: `tutti probe --on ssh")
    own = cluster_from_parts("own", "A10", devices_per_node=2, node_link="PCIe4-x16")
    device = own.devices[own.nodes[0].device]
    slower = replace(device, peak_flops_per_s={name: 0.5 * rate for name, rate in device.peak_flops_per_s.items()})
    files = {}
    for name, kind in (("alpha", device), ("beta", slower)):
        files[name] = home_cache(hosts, name) / cached_cluster_path().name
        serialization.save(replace(own, devices={device.name: kind}), files[name])
    try:
        assert "what joins them is not known; measure it: `tutti probe --on ssh`" in offer().reason
        found = offer(links="ethernet-10g")
        assert found.machines is not None, found.reason
        (node,) = found.machines.nodes
        assert (node.count, node.devices_per_node) == (2, 2)
        assert found.machines.devices[device.name].peak_flops_per_s == slower.peak_flops_per_s, "the slowest counts"
        assert [link.bandwidth_bytes_per_s for link in found.machines.links] == [1.25e9]
        assert node.links[0].tier == "node"
        assert found.notes == ("measured by each of alpha, beta; what joins them is as told",)
        one = offer(nnodes=1)
        assert one.machines is not None, "one host needs no link"
        assert one.machines.device_count == 2
        conditions = Conditions(
            measured_utc="", cores_granted=2, load_at_start=0, load_at_end=0, versions={"torch": "1.0"}
        )
        serialization.save(replace(own, conditions=conditions), files["beta"])
        assert "the probe of beta counts no more (torch was 1.0 and is" in offer(links="ethernet-10g").reason
        files["beta"].write_text("{")
        assert "measure it again: `tutti probe --on ssh`" in offer(links="ethernet-10g").reason
    finally:
        for file in files.values():
            file.unlink()


def test_what_hosts_have_is_asked_of_each(project: Path, hosts: SshHosts) -> None:
    (pool,) = Ssh().pools({"hosts": "alpha,beta", "config": str(hosts.config)})
    assert [node.name for node in pool.nodes] == ["alpha", "beta"]
    assert {node.cores for node in pool.nodes} == {len(os.sched_getaffinity(0))}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert {node.memory_nbytes for node in pool.nodes} == {memory}
    code, _, err = tutti(project, {}, "plan", "gpt2", "--global-batch-size", "8", "--hosts", "alpha,no-such-host")
    assert (code, err) == (
        2,
        "tutti: no-such-host: its name is not known here; correct it in --hosts, or in ssh's config\n",
    )
    code, _, err = tutti(project, {}, "probe", "--hosts", "alpha,beta", "--device", "A10")
    assert (code, "leave one out" in err) == (2, True)


@pytest.mark.long
def test_the_doctor_and_the_probe_run_on_hosts(project: Path, hosts: SshHosts) -> None:
    cluster = {"XDG_CACHE_HOME": str(project / "cache"), "XDG_STATE_HOME": str(project / "state")}
    (project / "train.py").write_text((SCRIPTS / "train.py").read_text())
    request = ("--request", f"directory={hosts.disk}/doctor")
    code, out, err = tutti(project, cluster, "doctor", "--on", "ssh", "--nproc", "1", *request, "train.py")
    assert code == 0, out + err
    for name in ("alpha", "beta"):
        assert f"{name}: nothing would stop a launch here" in out
        assert (hosts.on(name) / "doctor/train.py").exists(), "the script is looked at where it would run"
    assert "alpha: ok       links: " in out
    assert "alpha: warning  shared folder" in out
    words = ("--nproc", "1", "--quick", "--no-plot", "--output", "two hosts.json")
    code, out, err = tutti(project, cluster, "probe", "--on", "ssh", *words)
    assert code == 0, err
    assert "tutti-sends" not in out
    document = json.loads((project / "two hosts.json").read_text())
    assert document["conditions"]["hosts"] == ["alpha", "beta"]
    found = offer()
    assert found.machines is not None, found.reason
    assert found.notes[0].startswith("measured on alpha, beta at ")
    left = [path for name in ("alpha", "beta") for path in home_cache(hosts, name).glob("probe-*")]
    assert not left, "nothing stays on the hosts"
    assert wait_until(lambda: not hosts.processes(), 10)


@pytest.mark.parametrize(
    ("fields", "ranks", "failover", "least"),
    [
        ({}, [2, 2], True, None),
        ({"least_nodes": 1}, [2, 2, 2], True, 1),
        ({"least_ranks": 1}, [2, 2, 2], True, 1),
        ({"least_ranks": 3}, [2, 2, 2], True, 2),
        ({"least_ranks": 1}, [2, 1], False, None),
        ({"least_ranks": 1}, [None, None], False, None),
    ],
)
def test_when_another_host_may_be_node_0(
    fields: dict[str, Any], ranks: list[int | None], failover: bool, least: int | None
) -> None:
    request = JobRequest(name="a", folder=Path("/a"), directory=Path("/"), words=(), nodes=len(ranks), **fields)
    found = _failover(request, ranks, restarts=True)
    assert found["failover"] == failover
    assert found["least_nodes"] == least or not failover
    assert not _failover(request, ranks, restarts=False)["failover"]
