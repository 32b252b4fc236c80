"""Addresses of hosts, and the network interfaces of this machine."""

import socket

import psutil

from tutti.errors import LaunchError


def addresses_of(host: str) -> tuple[str, ...]:
    """Return the IP addresses of a host name.

    Raises:
        OSError: the name has no address now.
    """
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def resolve(host: str) -> tuple[str, ...]:
    """Return the IP addresses of a host name.

    Raises:
        LaunchError: the name has no address.
    """
    try:
        return addresses_of(host)
    except OSError as error:
        raise LaunchError(
            f"host {host} is not known on {socket.gethostname()} ({error.strerror or error}); "
            "correct the name of the rendezvous, add it to /etc/hosts, or use its IP address"
        ) from None


def local_addresses() -> dict[str, str]:
    """Return the interface of each IP address of this machine."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def outside_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine under which other hosts may reach it."""
    return [ip for ip in local_addresses() if ":" not in ip and not ip.startswith("127.")]


def loopback() -> str | None:
    """Return the interface that has 127.0.0.1 ("lo" on Linux), or None if there is none."""
    return local_addresses().get("127.0.0.1")
