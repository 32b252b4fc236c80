"""The ranks meet: they prove the job's secret, agree on a key of this run, and get the store in which groups form."""

import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from tutti.comm.admission import Applicant, Gate, apply_for_admission
from tutti.comm.authenticated_store import AuthenticatedStore
from tutti.environment import (
    AgentStore,
    RankEnvironment,
    agent_store,
    state_interface,
)
from tutti.errors import LaunchError
from tutti.job_secret import find_secret, mac, set_session_key
from tutti.network_interfaces import EVERYWHERE, here_address, local_addresses, loopback, resolve
from tutti.surviving_rank import SURVIVING_RANK

_LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True)
class JobStore:
    """What ranks have once they have met.

    Attributes:
        store: torch's store.
        key: the key of this run's ranks.
    """

    store: Any
    key: bytes

    @property
    def authenticated(self) -> AuthenticatedStore:
        """The store for Gloo and for our own values. Its code is Python, so no thread of torch's may use it."""
        return AuthenticatedStore(self.store, self.key)

    @property
    def hidden(self) -> Any:
        """The store for back ends whose threads use it, such as NCCL's: its names cannot be guessed without the key."""
        return PrefixStore(mac(self.key, "names").hex(), self.store)


def meet(environment: RankEnvironment, timeout: timedelta) -> JobStore:
    """Meet the other ranks at the rendezvous, and keep the key of this run. Collective.

    Args:
        environment: this process's place among the ranks.
        timeout: how long to wait for the others.

    Raises:
        LaunchError: the ranks did not meet, or one of them does not know the secret.
    """
    address = urlsplit(environment.rendezvous)
    if address.scheme == "file":
        joined = _meet_in_file(environment, address.path, timeout)
    elif address.scheme == "tcp" and address.hostname and address.port:
        joined = _meet_at_port(environment, address.hostname, address.port, timeout)
    else:
        raise LaunchError(
            f"TUTTI_RENDEZVOUS = {environment.rendezvous!r} is no address; write tcp://HOST:PORT, or file:///PATH for "
            "the ranks of one host"
        )
    joined.store.set_timeout(timeout)
    set_session_key(joined.key)
    return joined


def _meet_in_file(environment: RankEnvironment, path: str, timeout: timedelta) -> JobStore:
    store = FileStore(path, environment.world_size)
    store.set_timeout(timeout)
    secret = find_secret()
    if environment.rank == 0:
        store.set("tutti session", secrets.token_hex(16))
    deadline = time.monotonic() + timeout.total_seconds()
    while SURVIVING_RANK.enabled and not store.check(["tutti session"]) and time.monotonic() < deadline:
        SURVIVING_RANK.check()
        time.sleep(_LOOK_EVERY_S)
    try:
        session = store.get("tutti session").decode()
    except RuntimeError:
        raise LaunchError(
            f"rank {environment.rank} of {environment.world_size} waited {timeout.total_seconds():g} s for rank 0 at "
            f"file://{path}; check that all ranks were started and that they see the same file"
        ) from None
    return JobStore(store, mac(secret, "session", session))


def _meet_at_port(environment: RankEnvironment, host: str, port: int, timeout: timedelta) -> JobStore:
    secret, agent = find_secret(), agent_store()
    spans_hosts = environment.local_world_size < environment.world_size
    if environment.rank == 0:
        resolve(host)  # raises a sentence; the other ranks wait for a name that is not known yet
        return _open_gate(environment, secret, here_address(host, spans_hosts=spans_hosts), port, agent, timeout)
    this_rank = Applicant(rank=environment.rank, world_size=environment.world_size, host=socket.gethostname())

    def address() -> tuple[str, int]:
        if agent is None:
            return here_address(host, spans_hosts=spans_hosts), port
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        where, _, gate = store.get(f"tutti gate {agent.attempt}").decode().rpartition(" ")
        return where if where != EVERYWHERE else host, int(gate)

    message, reached, own = apply_for_admission(address, secret, this_rank, timeout.total_seconds())
    _listen_on_interface_of(str(message["address"]) if own.startswith("127.") else own)
    store = TCPStore(reached, int(message["port"]), is_master=False, wait_for_workers=False, timeout=timeout)
    return JobStore(store, mac(secret, "session", str(message["session"])))


def _open_gate(
    environment: RankEnvironment, secret: bytes, address: str, port: int, agent: AgentStore | None, timeout: timedelta
) -> JobStore:
    """Rank 0's part: admit the others, then make the store."""
    listener = _listening(address, port if agent is None else 0)
    if agent is not None:
        host = urlsplit(environment.rendezvous).hostname or address
        published = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        published.set(f"tutti gate {agent.attempt}", f"{address} {listener.getsockname()[1]}")
    gate = Gate(listener, secret, environment.world_size)
    try:
        gate.admit(timeout.total_seconds())
        opened = _listening(address, 0)
        number = opened.getsockname()[1]
        store = TCPStore(
            address,
            number,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=opened.detach(),
        )
        session = secrets.token_hex(16)
        reached = gate.reached_address() if address == EVERYWHERE else address
        gate.welcome({"port": number, "session": session, "address": reached})
    finally:
        gate.close()
    _listen_on_interface_of(reached)
    return JobStore(store, mac(secret, "session", session))


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        here, reason = socket.gethostname(), error.strerror or os.strerror(error.errno or 0)
        raise LaunchError(
            f"rank 0 on {here} cannot wait for the others at {address}:{port} ({reason}): "
            f"port {port} on {here} is in use, or the address is another host's; choose another (--rendezvous "
            "host:PORT, or MASTER_ADDR and MASTER_PORT)"
        ) from None
    return listener


def _listen_on_interface_of(address: str) -> None:
    """Let Gloo listen only on the interface that leads to the other ranks, unless the user has named another."""
    name = local_addresses().get(address) or (loopback() if address.startswith("127.") else None)
    if name is not None:
        state_interface(name)
