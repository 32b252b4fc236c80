"""The ranks that train together: joining them, and the few exchanges that are not gradients."""

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tutti.environment import RankEnvironment, read_launch_options, read_rank_environment
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


def join_world(environment: RankEnvironment | None = None) -> World:
    """Join the other ranks (or stand alone) and return the world. Raises LaunchError when they do not meet."""
    environment = environment or read_rank_environment()
    device = _device(environment)
    backend = "nccl" if device.type == "cuda" else "gloo"
    started = time.perf_counter()
    if environment.world_size > 1 and not dist.is_initialized():
        _initialise(environment, backend)
    return World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        host=socket.gethostname(),
        device=device,
        backend=backend if environment.world_size > 1 else "none",
        launcher=environment.launcher,
        rendezvous_s=time.perf_counter() - started,
    )


def leave_world() -> None:
    """Leave the world cleanly; harmless when alone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(environment: RankEnvironment) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if environment.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {environment.local_rank} has no GPU: this host has {torch.cuda.device_count()}; start at most "
            "that many ranks here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def _initialise(environment: RankEnvironment, backend: str) -> None:
    try:
        dist.init_process_group(
            backend,
            init_method=environment.rendezvous,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=read_launch_options().timeout_s),
        )
        if backend == "gloo":
            dist.barrier()  # a rank that ended now, refusing its plan, would break off how others still connect
            deprioritise_gloo_threads()
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason or "address already in use" in reason:
            port = environment.rendezvous.rpartition(":")[2]
            raise LaunchError(
                f"port {port} on {socket.gethostname()} is in use, so rank 0 cannot wait for the others there; choose "
                "another port (--rendezvous host:PORT, or MASTER_PORT)"
            ) from None
        raise LaunchError(
            f"rank {environment.rank} could not meet the {environment.world_size - 1} others at "
            f"{environment.rendezvous}: {reason}; "
            "check that all ranks were started, that the address is reachable, or run `tutti doctor`"
        ) from None


GLOO_THREAD_NAME = "gloo_tcp_loop"


def deprioritise_gloo_threads() -> None:
    """Let network threads of this process not interrupt others (SCHED_BATCH): to be called when groups were made.

    Every group has a thread of its own. Does nothing where the system has no such policy, or another one is set.
    """
    for thread in gloo_thread_ids() if hasattr(os, "SCHED_BATCH") else ():
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # it has ended, or it is forbidden: exchanges are slower then, and right
            continue


def gloo_thread_ids() -> list[int]:
    """The ids of this process' threads that serve Gloo's connections; none where the system does not list threads."""
    found = []
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() == GLOO_THREAD_NAME:
                found.append(int(task.name))
        except OSError:  # it has ended
            continue
    return found
