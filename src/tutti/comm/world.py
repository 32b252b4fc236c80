"""The ranks that train together: joining them, and the few exchanges that are not gradients."""

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tutti.comm.network_threads import defer_network_threads
from tutti.environment import Place, read_place, read_wishes
from tutti.errors import LaunchError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks of a run. One rank is a world with nothing to exchange: every method works there too."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    device: torch.device
    backend: str
    launcher: str
    rendezvous_s: float

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of `tensor` over ranks, in place; identical on every rank."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in order of rank, on every rank. For small Python objects."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def join(place: Place | None = None) -> World:
    """Join the other ranks (or stand alone) and return the world. Raises LaunchError when they do not meet."""
    place = place or read_place()
    device = _device(place)
    backend = "nccl" if device.type == "cuda" else "gloo"
    started = time.perf_counter()
    if place.world_size > 1 and not dist.is_initialized():
        _initialise(place, backend)
    return World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        host=socket.gethostname(),
        device=device,
        backend=backend if place.world_size > 1 else "none",
        launcher=place.launcher,
        rendezvous_s=time.perf_counter() - started,
    )


def leave() -> None:
    """Leave the world cleanly; harmless when alone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {place.local_rank} has no GPU: this host has {torch.cuda.device_count()}; start at most that "
            "many ranks here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _initialise(place: Place, backend: str) -> None:
    try:
        dist.init_process_group(
            backend,
            init_method=place.rendezvous,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=read_wishes().timeout_s),
        )
        if backend == "gloo":
            dist.barrier()  # a rank that ended now, refusing its plan, would break off how others still connect
            defer_network_threads()
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason or "address already in use" in reason:
            port = place.rendezvous.rpartition(":")[2]
            raise LaunchError(
                f"port {port} on {socket.gethostname()} is in use, so rank 0 cannot wait for the others there; choose "
                "another port (--rendezvous host:PORT, or MASTER_PORT)"
            ) from None
        raise LaunchError(
            f"rank {place.rank} could not meet the {place.world_size - 1} others at {place.rendezvous}: {reason}; "
            "check that all ranks were started, that the address is reachable, or run `tutti doctor`"
        ) from None
