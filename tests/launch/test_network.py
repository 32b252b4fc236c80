"""Addresses, ports and interfaces: what is wrong is said, what is right passes."""

import socket

import pytest

from tutti import network_interfaces
from tutti.errors import LaunchError
from tutti.launch import network


@pytest.mark.parametrize(
    ("address", "expected"),
    [("node0:29500", ("node0", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:65535", ("::1", 65535))],
)
def test_an_address_is_split(address: str, expected: tuple[str, int]) -> None:
    assert network.split_address(address) == expected


@pytest.mark.parametrize("address", ["node0", "node0:", ":29500", "node0:x", "node0:0", "node0:65536", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(LaunchError, match="HOST:PORT"):
        network.split_address(address)


def test_an_unknown_host_is_refused_by_name() -> None:
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid is not known"):
        network_interfaces.resolve("no-such-host.invalid")


def test_a_free_port_passes_and_a_used_one_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .*this very process"):
            network.check_port_free(port)
        network.check_port_free(port, "127.0.0.2")  # rank 0 would listen on another interface
    network.check_port_free(port)


def test_a_port_whose_past_connections_linger_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first, so it waits
        client.close()
    network.check_port_free(port)


def test_this_host_is_here_and_another_is_not() -> None:
    network.check_host_is_here("127.0.0.1")
    network.check_host_is_here("localhost")
    with pytest.raises(LaunchError, match=r"203\.0\.113\.7.*not an address"):
        network.check_host_is_here("203.0.113.7")


def test_the_interface_of_loopback_is_loopback() -> None:
    assert network.interface_towards("127.0.0.1:29500") == network_interfaces.loopback()
    outside = [ip for ip in network_interfaces.local_addresses() if ":" not in ip and not ip.startswith("127.")]
    for ip in outside:
        assert network.interface_towards(f"{ip}:29500") == network_interfaces.local_addresses()[ip]


def test_waiting_ends_when_the_port_opens_and_in_time_when_it_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        network.wait_for_port("127.0.0.1", port, 5)
    with pytest.raises(LaunchError, match="nothing listened on port"):
        network.wait_for_port("127.0.0.1", port, 0.2)
