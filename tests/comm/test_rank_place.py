"""Binding of a rank, its network interface, the words for its device, and what differs between hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fakegpu
from fakegpu import needs_fakegpu
from tutti.comm import rank_place
from tutti.comm.host_versions import differences, host_versions
from tutti.comm.rank_place import describe_device, pci_address, place_rank
from tutti.environment import LaunchOptions, RankEnvironment, choose_interface, read_launch_options, visible_entry
from tutti.errors import LaunchError

ADDRESS = "0000:87:00.0"


def two_nodes(root: Path) -> Path:
    """A host whose NUMA nodes are two of this machine's cores; the GPU and eth1 are on the second."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    files = {
        "devices/system/cpu/online": f"{first},{second}",
        "devices/system/node/node0/cpulist": str(first),
        "devices/system/node/node1/cpulist": str(second),
        f"bus/pci/devices/{ADDRESS}/numa_node": "1",
        "class/net/eth0/device/numa_node": "0",
        "class/net/eth1/device/numa_node": "1",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


IN_PROCESS = """
import json, os, sys, threading, time
from pathlib import Path

os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
threading.Thread(target=time.sleep, args=(9,), daemon=True).start()

import torch
from types import SimpleNamespace

import fakegpu
from tutti.comm.rank_place import place_rank
from tutti.environment import LaunchOptions, RankEnvironment

device = fakegpu.load() if sys.argv[2] == "fakegpu" else torch.device("cpu")
if device.type != "cpu":
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x87, pci_device_id=0)
    torch.fakegpu.get_device_properties = lambda device: properties
    device = torch.device("fakegpu", 0)
torch.set_num_threads(2)
options = LaunchOptions(bind_cores=sys.argv[3] == "auto")
environment = RankEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2 if device.type == "cpu" else 1)
place = place_rank(environment, device, options, Path(sys.argv[1]))
threads = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
print(json.dumps([place.cores, place.binding, place.network, place.device, place.granted, threads,
                  os.environ["GLOO_SOCKET_IFNAME"], torch.get_num_threads()]))
"""


def placed(root: Path, kind: str, asked: str) -> list[object]:
    paths = os.pathsep.join([str(Path(fakegpu.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    interfaces = {"TUTTI_INTERFACES": "eth0,eth1", "GLOO_SOCKET_IFNAME": "eth0"}
    run = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, str(root), kind, asked],
        env={**os.environ, **interfaces, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@needs_two_cores
@pytest.mark.parametrize("kind", ["cpu", pytest.param("fakegpu", marks=needs_fakegpu)])
def test_a_rank_is_bound_with_all_its_threads(tmp_path: Path, kind: str) -> None:
    second = sorted(os.sched_getaffinity(0))[1]
    cores, binding, network, device, granted, threads, interface, count = placed(two_nodes(tmp_path), kind, "auto")
    assert cores == str(second)
    assert len(threads) > 1  # type: ignore[arg-type]
    assert all(own == [second] for own in threads)  # type: ignore[attr-defined]
    assert granted == 2, "the report counts what the process was given"
    assert interface == "eth1"
    assert network == "near eth1, Gloo uses eth1"
    if kind == "cpu":
        assert (binding, device) == ("bound: NUMA node 1, its share of 2", "")
    else:
        assert (binding, count) == ("bound: NUMA node 1, on which its device hangs", 1)
        assert device == f"fakegpu:0, PCI {ADDRESS}"


@needs_two_cores
@needs_fakegpu
def test_nothing_is_bound_unless_it_is_asked_for(tmp_path: Path) -> None:
    cores, binding, *_, threads, _, count = placed(two_nodes(tmp_path), "fakegpu", "none")
    assert binding == ""
    assert "," in str(cores) or "-" in str(cores)
    assert count == 2
    assert all(len(own) == 2 for own in threads)  # type: ignore[attr-defined]


def test_the_users_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("TUTTI_INTERFACES", raising=False)  # as the launcher leaves it where the user set the interface
    assert choose_interface({"eth0": 0, "eth1": 1}, 1) == ""
    monkeypatch.setenv("TUTTI_INTERFACES", "eth0,eth1,eth2")
    assert choose_interface({"eth0": 0, "eth1": 0, "eth2": None}, 1) == ""
    assert choose_interface({"eth0": 1, "eth1": 1, "eth2": None}, 1) == ""
    assert choose_interface({"eth0": 0, "eth1": 1}, None) == ""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="5d5b", pci_bus_id=0x87, pci_domain_id=1, pci_device_id=2)
    module = SimpleNamespace(get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    device = torch.device("cuda", 1)
    assert pci_address(device) == "0001:87:02.0"
    said = describe_device(device)
    assert said == "cuda:1, entry 1 of CUDA_VISIBLE_DEVICES=3,1, UUID 5d5b, PCI 0001:87:02.0"
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert describe_device(torch.device("mps", 0)) == "mps:0"
    assert rank_place.pci_address(torch.device("mps", 0)) == ""


@pytest.mark.parametrize(
    ("environ", "rocm", "said"),
    [
        ({}, False, ""),
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-a"}, False, "entry GPU-a of CUDA_VISIBLE_DEVICES=2,GPU-a"),
        ({"CUDA_VISIBLE_DEVICES": "2,5"}, True, "entry 5 of CUDA_VISIBLE_DEVICES=2,5"),
        (
            {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1,0", "ROCR_VISIBLE_DEVICES": "6,7"},
            True,
            "entry 0 of HIP_VISIBLE_DEVICES=1,0, entry 6 of ROCR_VISIBLE_DEVICES=6,7",
        ),
    ],
)
def test_the_entry_of_a_visible_device(environ: dict[str, str], rocm: bool, said: str) -> None:
    assert visible_entry("cuda", 1, rocm=rocm, environ=environ) == said


def test_the_option_has_two_values() -> None:
    assert read_launch_options({"TUTTI_BIND_CORES": "auto"}).bind_cores
    assert not read_launch_options({}).bind_cores
    with pytest.raises(LaunchError, match="neither auto nor none"):
        read_launch_options({"TUTTI_BIND_CORES": "yes"})


def test_this_machine_is_left_as_it_is_unless_asked() -> None:
    before = os.sched_getaffinity(0)
    place = place_rank(RankEnvironment(), torch.device("cpu"), LaunchOptions())
    assert (place.binding, place.granted) == ("", len(before))
    assert os.sched_getaffinity(0) == before


A = {"tutti": "1", "python": "3.12.1", "torch": "2.13.0", "NCCL": "2.28.9", "GPU driver": "580.1", "device": "H100"}


def test_versions_that_differ_between_hosts_are_named() -> None:
    assert differences([("a", A), ("a", A), ("b", A)]) == {}
    b = {**A, "torch": "2.12.1", "NCCL": "2.27.3", "device": "A100"}
    told = differences([("a", A), ("a", A), ("b", b), ("c", A)])
    assert list(told) == ["torch", "NCCL", "device"]
    assert told["torch"].startswith("torch differs between hosts: 2.13.0 on a, c, 2.12.1 on b; install one version")
    assert "LD_LIBRARY_PATH" in told["NCCL"].rpartition("; ")[2]
    without = {key: value for key, value in A.items() if key != "GPU driver"}
    assert "580.1 on a, none on b" in differences([("a", A), ("b", without)])["GPU driver"]


def test_two_models_in_one_host_are_no_difference_between_hosts() -> None:
    mixed = [("a", A), ("a", {**A, "device": "A100"}), ("b", {**A, "device": "A100"}), ("b", A)]
    assert differences(mixed) == {}
    assert "A100 and H100 on a, H100 on c" in differences([*mixed[:2], ("c", A)])["device"]


def test_versions_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "amdgpu").mkdir()
    (tmp_path / "amdgpu/version").write_text("6.12.12\n")
    versions = host_versions(torch.device("cpu"), tmp_path)
    assert (versions["torch"], versions["GPU driver"]) == (str(torch.__version__), "6.12.12")
    assert "GPU driver" not in host_versions(torch.device("cpu"), tmp_path / "none")
