"""Addresses, ports and interfaces of the rendezvous, checked before any rank starts."""

import errno
import os
import socket
import time
from collections.abc import Callable

import psutil

from tutti.errors import LaunchError


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" (or "[::1]:29500") into its two parts.

    Raises:
        LaunchError: the text is not an address.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"--rendezvous {address} is not an address; write HOST:PORT, for example node0:29500")
    return host.strip("[]"), int(port)


def resolve(host: str) -> tuple[str, ...]:
    """Return the IP addresses of a host name.

    Raises:
        LaunchError: the name has no address.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"host {host} is not known on {socket.gethostname()} ({error.strerror or error}); "
            "correct the name in --rendezvous, add it to /etc/hosts, or use its IP address"
        ) from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def local_addresses() -> dict[str, str]:
    """Return the interface of each IP address of this machine."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def loopback() -> str | None:
    """Return the interface that has 127.0.0.1 ("lo" on Linux), or None if there is none."""
    return local_addresses().get("127.0.0.1")


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
        outside = [name for ip, name in interfaces.items() if ":" not in ip and not ip.startswith("127.")]
        return outside[0] if outside else loopback()
    if source.startswith("127."):
        return loopback()
    return interfaces.get(source)


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
    addresses = resolve(host)
    interfaces = local_addresses()
    if not any(ip in interfaces or ip.startswith("127.") or ip == "::1" for ip in addresses):
        raise LaunchError(
            f"--rendezvous names {host} ({addresses[0]}), which is not an address of {socket.gethostname()}, "
            f"where node rank 0 was started; name this machine ({_own_address(interfaces)}), or run node rank 0 on "
            f"{host}"
        )


def _own_address(mine: dict[str, str]) -> str:
    return next((ip for ip in mine if ":" not in ip and not ip.startswith("127.")), "127.0.0.1")


def check_port_free(port: int) -> None:
    """Check that a process can listen on this machine's `port`.

    Raises:
        LaunchError: it cannot; the message names the process that holds the port, if it is known.
    """
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                # The store sets this option too: lingering connections of a past run do not block the port.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((everywhere, port))
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
        pause_s = min(1.0, pause_s * 1.5)


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
