"""Addresses, ports and interfaces of the rendezvous, checked before any rank starts."""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable

import psutil

from tutti.config.vocabulary import RENDEZVOUS_PORTS
from tutti.errors import LaunchError
from tutti.network_interfaces import local_addresses, loopback, outside_addresses, resolve


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" (or "[::1]:29500") into its two parts.

    Raises:
        LaunchError: the text is not an address.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"--rendezvous {address} is not an address; write HOST:PORT, for example node0:29500")
    return host.strip("[]"), int(port)


def interface_towards(address: str) -> str | None:
    """Return the interface over which this machine reaches "host:port", or None if the system does not tell.

    A node's own name may resolve to its loopback address, as Debian writes it in /etc/hosts. Other nodes would reach
    only themselves under that address. So a loopback address counts only if the host was given as localhost or 127.x.
    """
    host, port = split_address(address)
    interfaces = local_addresses()
    source = _source_address(resolve(host)[0], port)
    if source is None:
        return None
    if source.startswith("127.") and host != "localhost" and not host.startswith("127."):
        outside = outside_addresses()
        return interfaces[outside[0]] if outside else loopback()
    if source.startswith("127."):
        return loopback()
    return interfaces.get(source)


def interfaces_beside(interface: str) -> tuple[str, ...]:
    """Return the interfaces that are up and in the same network as `interface` by IPv4, itself first."""
    networks: dict[str, set[ipaddress.IPv4Network]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask:
                network = ipaddress.IPv4Network((entry.address, entry.netmask), strict=False)
                networks.setdefault(name, set()).add(network)
    stats = psutil.net_if_stats()
    own = networks.get(interface, set())
    others = [name for name in networks if name != interface and name in stats and stats[name].isup]
    return (interface, *(name for name in sorted(others) if networks[name] & own))


def _source_address(ip: str, port: int) -> str | None:
    """Return the address that this machine would send from; a UDP connect sends no packet."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def check_host_is_here(host: str) -> None:
    """Check that the host of the rendezvous is this machine, which is node 0.

    Raises:
        LaunchError: the host has no address of this machine.
    """
    if not is_here(host):
        addresses = resolve(host)
        raise LaunchError(
            f"--rendezvous names {host} ({addresses[0]}), which is not an address of {socket.gethostname()}, "
            f"where node rank 0 was started; name this machine ({next(iter(outside_addresses()), '127.0.0.1')}), or "
            f"run node rank 0 on {host}"
        )


def is_here(host: str) -> bool:
    """Return whether a host name has an address of this machine.

    Raises:
        LaunchError: the name is not known.
    """
    interfaces = local_addresses()
    return any(ip in interfaces or ip.startswith("127.") or ip == "::1" for ip in resolve(host))


def is_port_free(port: int, host: str) -> bool:
    """Return whether a process can listen on `port` of this machine's addresses of a host name."""
    try:
        check_port_free(port, host)
    except LaunchError:
        return False
    return True


def check_port_free(port: int, host: str = "localhost") -> None:
    """Check that a process can listen on `port` of this machine's addresses of a host name.

    Raises:
        LaunchError: it cannot; the message names the process that holds the port, if it is known.
    """
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                # Rank 0 sets this option too: lingering connections of a past run do not block the port.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen()
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue
            raise LaunchError(_refusal(port, error)) from None


def _refusal(port: int, error: OSError) -> str:
    host = socket.gethostname()
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use{_holder(port)}; choose another with --rendezvous HOST:PORT"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be opened by this user; choose a port above 1023"
    reason = error.strerror or str(error)
    return f"port {port} on {host} cannot be opened ({reason}); choose another with --rendezvous HOST:PORT"


def _holder(port: int) -> str:
    """Return " by NAME (process N)", or nothing if the system does not tell this user."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return ""
                whose = "this very process" if connection.pid == os.getpid() else f"process {connection.pid}"
                return f" by {psutil.Process(connection.pid).name()} ({whose})"
    except psutil.Error:
        pass
    return ""


_LONGEST_PAUSE_S = 0.2


def free_port() -> int:
    """Return a port that is free on all of this host's addresses, and that no system gives to outgoing connections.

    Raises:
        LaunchError: none of many is free.
    """
    for port in secrets.SystemRandom().sample(RENDEZVOUS_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise LaunchError(f"no port of {socket.gethostname()} is free for ranks to meet; end processes that hold them")


def wait_for_port(host: str, port: int, timeout_s: float, stopped: Callable[[], bool] | None = None) -> None:
    """Wait until something listens at host:port.

    Args:
        host: a host name or an IP address.
        port: the port.
        timeout_s: seconds to wait.
        stopped: return early, without an error, as soon as this is true.

    Raises:
        LaunchError: nothing listened in time; the message says why.
    """
    resolve(host)
    deadline = time.monotonic() + timeout_s
    pause_s = 0.05
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, timeout_s))):
                return
        except OSError as error:
            if stopped is not None and stopped():
                return
            if time.monotonic() + pause_s > deadline:
                raise LaunchError(_unreachable(host, port, timeout_s, error)) from None
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _unreachable(host: str, port: int, timeout_s: float, error: OSError) -> str:
    here = socket.gethostname()
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{here} reached {host}, but nothing listened on port {port} for {timeout_s:g} s; start node "
            "rank 0 there with the same --rendezvous (or wait longer: --timeout)"
        )
    return (
        f"{here} could not reach {host}:{port} within {timeout_s:g} s ({error.strerror or error}); check the "
        "address, that the network lets this port through, and that node rank 0 was started there"
    )
