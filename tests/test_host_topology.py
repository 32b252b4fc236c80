"""Cores, devices and network cards of hosts with several NUMA nodes, by a folder that looks like /sys."""

from pathlib import Path

import pytest

from tutti.host_topology import choose_cores, format_cores, near_cards, network_cards, numa_nodes, parse_cores, pci_node

FIRST, SECOND, UNKNOWN = "0000:07:00.0", "0000:87:00.0", "0000:99:00.0"


def host(root: Path, *nodes: str, cards: dict[str, int] | None = None) -> Path:
    """A host with these cores in its NUMA nodes; a GPU hangs on each of the first two, and one on none."""
    files = {f"devices/system/node/node{number}/cpulist": cores for number, cores in enumerate(nodes)}
    files["devices/system/cpu/online"] = ",".join(nodes)
    gpus = {FIRST: 0, SECOND: 1, UNKNOWN: -1}
    files |= {f"bus/pci/devices/{address}/numa_node": str(node) for address, node in gpus.items()}
    files |= {
        f"class/{'infiniband' if name.startswith('mlx') else 'net'}/{name}/device/numa_node": str(node)
        for name, node in (cards or {}).items()
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    (root / "class/net/lo").mkdir(parents=True)
    return root


def test_lists_of_cores() -> None:
    assert format_cores(parse_cores("8,0-2,4-5\n")) == "0-2,4-5,8"
    assert parse_cores("") == frozenset()


def test_a_host_is_read(tmp_path: Path) -> None:
    root = host(tmp_path, "0-3,8-11", "4-7,12-15", cards={"mlx5_0": 0, "eth0": 1, "eth1": -1})
    assert {node: format_cores(cores) for node, cores in numa_nodes(root).items()} == {0: "0-3,8-11", 1: "4-7,12-15"}
    assert (pci_node(FIRST, root), pci_node(SECOND, root), pci_node(UNKNOWN, root), pci_node("", root)) == (
        *(0, 1),
        *(None, None),
    )
    assert network_cards(root) == {"mlx5_0": 0, "eth0": 1, "eth1": None}, "lo is no device"


def chosen(root: Path, ranks: int, addresses: list[str] | None, allowed: str = "0-15") -> list[str]:
    cores = parse_cores(allowed)
    return [format_cores(choose_cores(rank, ranks, cores, addresses, root).cores) for rank in range(ranks)]


def test_ranks_get_the_cores_near_their_devices(tmp_path: Path) -> None:
    root = host(tmp_path, "0-3,8-11", "4-7,12-15")
    addresses = [FIRST, SECOND, SECOND, UNKNOWN, ""]
    assert chosen(root, 5, addresses) == ["0-3,8-11", "4-7,12-15", "4-7,12-15", "", ""]
    near = choose_cores(1, 5, parse_cores("0-15"), addresses, root)
    assert (near.node, near.ranks) == (1, 2)
    unknown = choose_cores(3, 5, parse_cores("0-15"), addresses, root)
    assert unknown.reason == "the system does not tell which NUMA node its device hangs on"


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        (1, [""]),
        (2, ["0-7", "8-15"]),
        (3, ["0-7", "", "8-15"]),
        (4, ["0-7", "0-7", "8-15", "8-15"]),
        (40, ["0-7"] * 20 + ["8-15"] * 20),
    ],
)
def test_ranks_on_cpus_are_spread_over_nodes(tmp_path: Path, ranks: int, cores: list[str]) -> None:
    assert chosen(host(tmp_path, "0-7", "8-15"), ranks, None) == cores


def test_fewer_ranks_than_nodes_get_several_each(tmp_path: Path) -> None:
    assert chosen(host(tmp_path, "0-3", "4-7", "8-11", "12-15"), 2, None) == ["0-7", "8-15"]
    assert chosen(host(tmp_path / "b", "0-3", "4-15"), 4, None) == ["0-3", "4-15", "4-15", "4-15"]


def test_a_binding_by_the_launcher_stays(tmp_path: Path) -> None:
    root = host(tmp_path, "0-7", "8-15")
    assert chosen(root, 2, [FIRST, SECOND], allowed="0-7") == ["", ""]
    kept = choose_cores(1, 2, parse_cores("0-7"), [FIRST, SECOND], root)
    assert kept.reason == "the launcher or the system gave it 8 of 16 cores, which it keeps"
    assert kept.node == 1, "its network card is chosen all the same"
    assert chosen(host(tmp_path / "one", "0-15"), 2, None) == ["", ""]


def test_near_network_cards(tmp_path: Path) -> None:
    root = host(tmp_path, "0-7", "8-15", cards={"mlx5_0": 0, "eth0": 0})
    assert near_cards(0, root) == "near mlx5_0, eth0"
    assert near_cards(1, root) == "no network card is on NUMA node 1 (mlx5_0 is on 0, eth0 is on 0)"
    assert near_cards(None, root) == ""
