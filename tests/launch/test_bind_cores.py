"""`tutti run --bind-cores`: the option reaches the ranks, and the run's header says what was done."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from launch_rig import SCRIPTS, tutti_run

from tutti.config import serialization
from tutti.config.run_folder import RunFolder, RunHeader
from tutti.host_topology import format_cores, numa_nodes, online_cores
from tutti.launch import doctor_checks, launch_environment, network
from tutti.launch.launcher import LaunchSpec


@pytest.mark.parametrize("asked", ["auto", "none"])
def test_the_header_says_which_cores_each_rank_uses(tmp_path: Path, asked: str) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", "--bind-cores", asked, str(SCRIPTS / "train.py"), "1", "0")
    assert done.code == 0, done.err
    header = serialization.load(RunHeader, RunFolder(done.folder).header)
    granted = launch_environment.granted_cores()
    assert int(header.extra["cores"]) >= granted, "what the ranks were started with, not what they are bound to"
    assert "hosts_differ" not in header.extra
    for info in header.ranks:
        assert info.place == "", "it computes on a CPU"
        if asked == "none":
            assert info.binding == ""
        elif len(numa_nodes()) < 2:
            assert info.binding == "not bound: the host has one NUMA node"
            assert info.cores == format_cores(online_cores())
        else:
            assert info.binding.startswith(("bound: NUMA node", "not bound: the launcher or the system gave"))


def test_another_value_is_refused(tmp_path: Path) -> None:
    done = tutti_run(tmp_path, "--nproc", "2", "--bind-cores", "near", str(SCRIPTS / "train.py"))
    assert done.code == 2
    assert "'near' is not one of 'auto', 'none'" in done.err


def interfaces(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str], down: str = "") -> None:
    """The host has these interfaces; each address is in a network of 256."""
    entries = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address, netmask="255.255.255.0")]
        for name, address in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != down) for name in entries})


HOST = {"lo": "127.0.0.1", "eth0": "10.0.0.4", "eth1": "10.0.0.5", "eth2": "10.0.0.6", "eth3": "10.0.1.4"}


def test_ranks_may_choose_among_interfaces_of_the_jobs_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, HOST, down="eth2")
    assert network.interfaces_beside("eth1") == ("eth1", "eth0")
    assert network.interfaces_beside("eth3") == ("eth3",)
    monkeypatch.setattr(launch_environment, "interface_towards", lambda address: "eth1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    spec = LaunchSpec(target="t.py", folder=tmp_path, ranks_per_node=(2, 2), rendezvous="10.0.0.9:29500")
    variables = launch_environment.of_node(spec, tmp_path)
    assert (variables["GLOO_SOCKET_IFNAME"], variables["TUTTI_INTERFACES"]) == ("eth1", "eth1,eth0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert not {"GLOO_SOCKET_IFNAME", "TUTTI_INTERFACES"} & set(launch_environment.of_node(spec, tmp_path))


def test_the_doctor_tells_what_ranks_found() -> None:
    near, far = ["cores 0-7", "bound: NUMA node 0", "near mlx5_0"], ["cores 8-15", "bound: NUMA node 1", ""]
    told = {"places": [near, near, far], "hosts": ["a", "b"], "differences": {}}
    assert doctor_checks.places(told).found == (
        "rank 0, 1: cores 0-7, bound: NUMA node 0, near mlx5_0; rank 2: cores 8-15, bound: NUMA node 1"
    )
    assert doctor_checks.hosts(told).found == "the same versions and devices on a, b"
    assert doctor_checks.hosts({}).ok


def test_the_doctor_names_differences_between_hosts() -> None:
    differing = {"torch": "torch differs between hosts: 2 on a, 1 on b; install one version"}
    finding = doctor_checks.hosts({"places": [], "hosts": ["a", "b"], "differences": differing})
    assert (finding.ok, finding.fix) == (False, "install one version")
    assert finding.found == "torch differs between hosts: 2 on a, 1 on b"
    devices = {"device": "device differs between hosts: H100 on a, A100 on b; leave b out"}
    slower = doctor_checks.hosts({"places": [], "hosts": ["a", "b"], "differences": devices})
    assert slower.ok, "unequal devices stop no launch"
    assert slower.fix == "leave b out"
