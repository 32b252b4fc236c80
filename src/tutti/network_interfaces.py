"""Addresses of hosts, and the network interfaces of this machine."""

import socket

import psutil

from tutti.errors import LaunchError

EVERYWHERE = "0.0.0.0"
"""The address of all interfaces: only where this host's name does not tell which one is meant."""


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


def here_address(host: str, *, spans_hosts: bool) -> str:
    """Return the IP address that a rendezvous means: where rank 0 listens, and where ranks of its host reach it.

    A node's own name may resolve to its loopback address, as Debian writes it in /etc/hosts, where other nodes cannot
    reach it. Then its address outside is meant; if it has several, rank 0 listens on all.

    Args:
        host: the host of the rendezvous.
        spans_hosts: whether ranks are on several hosts.

    Raises:
        OSError: the host has no address now.
    """
    found = addresses_of(host)[0]
    named = host == "localhost" or host.startswith("127.") or host == "::1"
    if named or not spans_hosts or not found.startswith("127."):
        return found
    outside = outside_addresses()
    return outside[0] if len(outside) == 1 else EVERYWHERE if outside else found


def loopback() -> str | None:
    """Return the interface that has 127.0.0.1 ("lo" on Linux), or None if there is none."""
    return local_addresses().get("127.0.0.1")
