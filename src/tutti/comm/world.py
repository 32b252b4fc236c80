"""The ranks that train together: how they join, and how they exchange small values that are not gradients."""

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
    """All ranks of a run. With one rank there is nothing to exchange, and every method works all the same.

    Attributes:
        rank: global rank of this process.
        world_size: number of ranks.
        local_rank: rank on this host.
        local_world_size: number of ranks on this host.
        host: name of this host.
        device: the device on which this rank computes.
        backend: "nccl" or "gloo"; "none" with one rank.
        launcher: what started the ranks.
        rendezvous_s: seconds that the rendezvous took.
    """

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
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce `tensor` in place by summation; the result is identical on every rank."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order, on every rank. For small Python objects."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def join_world(environment: RankEnvironment | None = None) -> World:
    """Join the other ranks, if there are any, and return the world.

    Args:
        environment: the process's place among the ranks; None: read from the environment variables.

    Raises:
        LaunchError: the ranks did not meet, or this host has fewer GPUs than ranks.
    """
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
    """Destroy the process group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(environment: RankEnvironment) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if environment.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {environment.local_rank} has no GPU, because this host has {torch.cuda.device_count()}; start "
            "at most that many ranks here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
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
            dist.barrier()  # if a rank ended now because it refuses its plan, others would fail while connecting
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
            f"rank {environment.rank} of {environment.world_size} could not meet the others at "
            f"{environment.rendezvous}: {reason}; "
            "check that all ranks were started and that the address is reachable, or run `tutti doctor`"
        ) from None


GLOO_THREAD_NAME = "gloo_tcp_loop"


def deprioritise_gloo_threads() -> None:
    """Keep Gloo's network threads from preempting other threads (SCHED_BATCH). Call it after groups were opened.

    Every group has a thread of its own. Does nothing where the system has no such policy, or where a thread has another
    policy already.
    """
    for thread in gloo_thread_ids() if hasattr(os, "SCHED_BATCH") else ():
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # the thread has ended, or this is forbidden; exchanges are then slower, but correct
            continue


def gloo_thread_ids() -> list[int]:
    """Return the ids of this process's Gloo network threads; empty where the system lists no threads."""
    thread_ids = []
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() == GLOO_THREAD_NAME:
                thread_ids.append(int(task.name))
        except OSError:  # the thread has ended
            continue
    return thread_ids
