"""The real rate of a lab's links: bytes that arrive through sockets and in Gloo's all-reduces. Needs root.

Every limit is tried between two hosts of one rank: a socket in one direction, sockets in both directions at once,
and all-reduces. Only payload counts; the headers of Ethernet, IP and TCP (66 of each 1514 bytes) leave at most 95.6
% of a limit.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

PIECE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Each transfer lasts `seconds`. An all-reduce has `mib` MiB and is repeated `repeats` times, after one to warm
    up.
    """

    rates: tuple[str, ...] = ("unlimited", "10gbit", "1gbit", "100mbit")
    seconds: int = 5
    mib: int = 16
    repeats: int = 5


QUICK = Sizes(rates=("1gbit", "100mbit"), seconds=1, mib=4, repeats=2)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all limits. Returns {"summary": {rate: bytes a second in one direction, by kind of transfer, and the
    limit}}.
    """
    from tutti.lab import Lab, parse_rate

    rates = {}
    for rate in sizes.rates:
        with Lab(2, rates=rate) as lab:
            words = (f"--seconds={sizes.seconds}", f"--mib={sizes.mib}", f"--repeats={sizes.repeats}")
            done = lab.run((sys.executable, __file__, *words), timeout_s=300)
        if any(host.code for host in done):
            raise SystemExit("\n".join(host.err for host in done))
        bits = parse_rate(rate)
        rates[rate] = {"limit_bytes_per_s": bits and bits / 8, **json.loads(done[0].out)}
    return {"summary": rates}


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: header and rows, megabytes a second in one direction and parts of the limit."""
    kinds = ("socket_bytes_per_s", "duplex_bytes_per_s", "all_reduce_bytes_per_s")
    table = []
    for rate, entry in result["summary"].items():
        limit = entry["limit_bytes_per_s"]
        shown = [f"{entry[kind] / 1e6:.1f}" + (f" ({entry[kind] / limit:.1%})" if limit else "") for kind in kinds]
        table.append([rate, *shown])
    return ["limit", "one way MB/s", "both ways MB/s", "all-reduce MB/s"], table


# What runs on each of the two hosts


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("seconds", "mib", "repeats"):
        parser.add_argument(f"--{name}", type=int)
    sizes = parser.parse_args()
    first = os.environ["NODE_RANK"] == "0"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with _connection(first, address, port) as wire:
        rates = {
            "socket_bytes_per_s": _receive(wire) if first else _send(wire, sizes.seconds),
            "duplex_bytes_per_s": _both_ways(wire, sizes.seconds),
        }
    rates["all_reduce_bytes_per_s"] = _all_reduce(first, f"tcp://{address}:{port + 1}", sizes.mib, sizes.repeats)
    if first:
        print(json.dumps(rates))


def _connection(first: bool, address: str, port: int) -> socket.socket:
    if first:
        with socket.create_server((address, port)) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def _send(wire: socket.socket, seconds: float) -> float:
    """Send pieces for some time, and mark the last one."""
    until, piece = time.perf_counter() + seconds, bytes(PIECE)
    while time.perf_counter() < until:
        wire.sendall(piece)
    wire.sendall(b"\1" * PIECE)
    return 0.0


def _receive(wire: socket.socket) -> float:
    """Return the bytes a second that arrive until the last piece, without the first 0.3 s (slow start, full token
    buckets).
    """
    buffer, count, start, skipped = bytearray(PIECE), 0, time.perf_counter(), 0
    while True:
        view = memoryview(buffer)
        while view:
            view = view[wire.recv_into(view) :]
        count += PIECE
        if time.perf_counter() - start < 0.3:
            skipped, began = count, time.perf_counter()
        if buffer[0]:
            return (count - skipped) / (time.perf_counter() - began)


def _both_ways(wire: socket.socket, seconds: float) -> float:
    sender = threading.Thread(target=_send, args=(wire, seconds))
    sender.start()
    rate = _receive(wire)
    sender.join()
    return rate


def _all_reduce(first: bool, meet: str, mib: int, repeats: int) -> float:
    """Return the bytes a second that each of the two ranks sends in an all-reduce; it sends as many as the tensor
    has.
    """
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=meet, rank=0 if first else 1, world_size=2)
    tensor, times = torch.zeros(mib * 2**18), []
    for _ in range(1 + repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return mib * 2**20 / statistics.median(times[1:])


if __name__ == "__main__":
    main()
