"""Run as a module by the ranks of `tutti doctor`: they meet, all-reduce, and measure the links between their hosts.

Each node's first rank writes what all ranks told to facts.json in the run folder; host.json there has what the node's
doctor knows.
"""

import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

import tutti.network_interfaces as network_interfaces
from tutti.comm.devices import choose_device
from tutti.comm.group_proof import prove_members
from tutti.comm.host_versions import differences, host_versions
from tutti.comm.job_store import meet
from tutti.comm.object_collectives import gather_values
from tutti.comm.rank_place import place_rank
from tutti.environment import (
    LaunchOptions,
    RankEnvironment,
    gloo_interface,
    read_launch_options,
    read_rank_environment,
)

CONNECT_S = 5.0
"""Seconds that a connection between two hosts may take."""

_PINGS = 20
_FIRST_NBYTES, _MOST_NBYTES = 2**18, 2**26
_LONG_ENOUGH_S = 0.2
"""A message is long enough to measure a link by if it takes this long."""

Told = dict[str, Any]
"""What facts.json has."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` hosts in rounds in which each host is in one pair, so that none disturbs another.

    Examples:
        >>> [sorted(pairs) for pairs in rounds(4)]
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
        >>> len(rounds(5)), sum(map(len, rounds(5)))
        (5, 10)
    """
    hosts = list(range(count + count % 2))
    found = []
    for _ in range(len(hosts) - 1):
        pairs = [(hosts[at], hosts[-1 - at]) for at in range(len(hosts) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        hosts = [hosts[0], hosts[-1], *hosts[1:-1]]
    return found


class _Host:
    """This node among those that are checked, as its first rank sees it.

    Args:
        store: the store of the rendezvous.
        environment: this rank's place.
        known: contents of host.json.
    """

    def __init__(self, store: Any, environment: RankEnvironment, known: Told) -> None:
        self._store, self._size = store, environment.local_world_size
        self.count, self.number = environment.world_size // self._size, environment.rank // self._size
        self.first, self._known = environment.local_rank == 0, known

    def labels(self) -> list[str]:
        """Return the hosts' names, with their numbers where two are alike. Called by all ranks."""
        if self.first:
            self._store.set(f"doctor/name/{self.number}", socket.gethostname())
        names = [self._store.get(f"doctor/name/{node}").decode() for node in range(self.count)]
        alike = len(set(names)) < len(names)
        return [f"{name} (node {node})" if alike else name for node, name in enumerate(names)]

    def unreachable(self, labels: list[str]) -> list[list[str]]:
        """Connect every host with every other, before Gloo does; return (from, to, address, reason). By all ranks."""
        listener = None
        if self.first:
            address = _own_address()
            listener = socket.create_server((address, 0), backlog=self.count + 8)
            self._store.set(f"doctor/port/{self.number}", json.dumps(listener.getsockname()[:2]))
            failed = []
            for node in range(self.count):
                host, port = json.loads(self._store.get(f"doctor/port/{node}"))
                if node != self.number:
                    try:
                        socket.create_connection((host, port), timeout=CONNECT_S).close()
                    except OSError as error:
                        why = error.strerror or str(error) or type(error).__name__
                        failed.append([labels[self.number], labels[node], host, why])
            self._store.set(f"doctor/reach/{self.number}", json.dumps(failed))
        failures = [json.loads(self._store.get(f"doctor/reach/{node}")) for node in range(self.count)]
        if listener is not None:
            listener.close()
        return [failure for each in failures for failure in each]

    def measured(self) -> tuple[list[tuple[int, int, float, float]], float | None]:
        """Measure this host's links, round by round. Collective.

        Returns:
            (from, to, bytes per second, latency) of the links that this host received from, and by how much its clock
            is ahead of the first host's.
        """
        links: list[tuple[int, int, float, float]] = []
        offset: float | None = 0.0 if self.number == 0 else None
        for pairs in rounds(self.count):
            own = next((pair for pair in pairs if self.number in pair), None)
            if self.first and own is not None:
                other = own[0] if own[1] == self.number else own[1]
                latency, ahead = _answers(other * self._size, asks=self.number == own[0])
                offset = ahead if own[0] == 0 and self.number else offset
                for receiver in own:
                    rate = _rate(other * self._size, receives=self.number == receiver, latency_s=latency)
                    if self.number == receiver:
                        links.append((other, self.number, rate, latency))
            dist.barrier()
        return links, offset

    def sees_token(self, labels: list[str]) -> bool:
        """Write a file on the first host, and tell whether this host sees it at the same place. Collective."""
        place, token = Path(self._known.get("place", ".")), None
        if self.first and self.number == 0:
            token = place / f".tutti-doctor-{uuid4().hex[:12]}"
            with suppress(OSError):
                token.write_text(labels[0], encoding="utf-8")
        name = gather_values(token.name if token is not None else "")[0]
        time.sleep(0.05)
        with suppress(OSError):
            os.scandir(place).close()  # NFS looks again at the folder
        sees = bool(name) and (place / name).is_file()
        dist.barrier()
        if token is not None:
            token.unlink(missing_ok=True)
        return sees


def _own_address() -> str:
    """Return the address that the other hosts reach this one at: that of the interface which Gloo listens on."""
    name = gloo_interface()
    named = [
        ip for ip, interface in network_interfaces.local_addresses().items() if interface == name and ":" not in ip
    ]
    return next(iter([*named, *network_interfaces.outside_addresses()]), "127.0.0.1")


def _answers(other: int, *, asks: bool) -> tuple[float, float]:
    """Exchange small messages with another rank; return their latency, and by how much the answering clock is ahead."""
    best, ahead = float("inf"), 0.0
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS + 1):
        if asks:
            before, clock = time.perf_counter(), time.time()
            dist.send(message, other)
            dist.recv(message, other)
            seconds = time.perf_counter() - before
            if seconds < best:
                best, ahead = seconds, message.item() - (clock + seconds / 2)
        else:
            dist.recv(message, other)
            message.fill_(time.time())
            dist.send(message, other)
    told = torch.tensor([best / 2, ahead], dtype=torch.float64)
    if asks:
        dist.send(told, other)
    else:
        dist.recv(told, other)
    return told[0].item(), told[1].item()


def _rate(other: int, *, receives: bool, latency_s: float) -> float:
    """Send longer and longer messages in one direction; return the bytes per second of the last."""
    nbytes, seconds = _FIRST_NBYTES, torch.zeros(1, dtype=torch.float64)
    while True:
        data = torch.zeros(nbytes, dtype=torch.uint8)
        if receives:
            dist.send(seconds, other)  # go
            before = time.perf_counter()
            dist.recv(data, other)
            seconds[0] = max(time.perf_counter() - before - 2 * latency_s, 1e-9)
            dist.send(seconds, other)
        else:
            dist.recv(seconds, other)
            dist.send(data, other)
            dist.recv(seconds, other)
        if seconds.item() >= _LONG_ENOUGH_S or nbytes >= _MOST_NBYTES:
            return nbytes / seconds.item()
        nbytes *= 4


def check(environment: RankEnvironment, options: LaunchOptions) -> None:
    """Meet the other ranks and write facts.json.

    Raises:
        SystemExit: hosts cannot reach each other, or the all-reduce is wrong.
    """
    rank, world_size, folder = environment.rank, environment.world_size, options.run_folder
    device = choose_device(environment.local_rank)
    place = place_rank(environment, device, options)
    timeout = timedelta(seconds=options.timeout_s)
    store = meet(environment, timeout).authenticated  # kept: torch holds only the half of it that is not Python
    known = json.loads((folder / "host.json").read_text(encoding="utf-8")) if folder is not None else {}
    host, labels = _Host(store, environment, known), []
    if environment.local_world_size < world_size:
        labels = host.labels()
        failures = host.unreachable(labels)
        if failures:
            _tell(environment, folder, {"unreachable": failures})
            source, target, address, why = failures[0]
            raise SystemExit(f"{source} cannot reach {target} at {address}: {why}")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    prove_members()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if total.item() != world_size * (world_size - 1) / 2:
        raise SystemExit(f"rank {rank}: the all-reduce over {world_size} ranks gave a wrong sum, {total.item()}")
    everyone: list[tuple[str, dict[str, str]]] = gather_values((socket.gethostname(), host_versions(device)))
    places: list[tuple[str, str, str]] = gather_values((f"cores {place.cores}", place.binding, place.network))
    facts: Told = {
        "places": places,
        "hosts": sorted({name for name, _ in everyone}),
        "differences": differences(everyone),
    }
    if labels:
        links, offset = host.measured()
        own = {**known, "label": labels[host.number], "offset_s": offset, "sees": host.sees_token(labels)}
        told: list[tuple[Told, list[tuple[int, int, float, float]]]] = gather_values((own, links))
        firsts = told[:: environment.local_world_size]
        facts |= {"nodes": [each for each, _ in firsts], "links": sorted(link for _, each in firsts for link in each)}
    _tell(environment, folder, facts)
    dist.destroy_process_group()


def _tell(environment: RankEnvironment, folder: Path | None, facts: Told) -> None:
    if environment.local_rank == 0 and folder is not None:
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    check(read_rank_environment(), read_launch_options())
