"""The ranks that train together: how they join, and how they exchange small values that are not gradients."""

import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tutti.comm.devices import backend_of, choose_device, count_devices
from tutti.comm.group_proof import prove_members
from tutti.comm.job_store import meet
from tutti.comm.noted_collectives import note_collectives
from tutti.comm.object_collectives import broadcast_value, gather_values
from tutti.comm.rank_place import RankPlace, place_rank
from tutti.comm.rendezvous import connect_group
from tutti.comm.staged_gloo import STAGED, register_staged_backend
from tutti.environment import RankEnvironment, read_launch_options, read_rank_environment
from tutti.errors import LaunchError
from tutti.event_record import recorded
from tutti.job_secret import set_session_key

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
        backend: "gloo" on CPUs, "nccl" (or the device's own) on accelerators, "staged" if ranks share one; "none" with
            one rank.
        launcher: what started the ranks.
        rendezvous_s: seconds that the rendezvous took.
        devices: number of accelerators on which the ranks compute; 0 on CPUs.
        place: where this rank is on its host.
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
    devices: int = 0
    place: RankPlace = field(default_factory=RankPlace)

    @property
    def shares_device(self) -> bool:
        """Whether any two ranks compute on the same accelerator."""
        return 0 < self.devices < self.world_size

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
        """Return the `value` of every rank, in rank order, on every rank. For small values (`value_codec.encode`)."""
        if self.world_size == 1:
            return [value]
        return gather_values(value)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the `value` of the rank `source` on every rank."""
        if self.world_size == 1:
            return value
        return broadcast_value(value, source)


def join_world(environment: RankEnvironment | None = None) -> World:
    """Join the other ranks, if there are any, and return the world.

    Args:
        environment: the process's place among the ranks; None: read from the environment variables.

    Raises:
        LaunchError: the ranks did not meet, or two of them share a device without --share-device.
    """
    environment = environment or read_rank_environment()
    device = choose_device(environment.local_rank)
    if _JOINED.place is None:
        _JOINED.place = place_rank(environment, device, read_launch_options())
    started = time.perf_counter()
    if environment.world_size > 1 and not dist.is_initialized():
        with recorded("operation", "the rendezvous"):
            _JOINED.devices = _initialise(environment, device)
    backend = dist.get_backend() if environment.world_size > 1 else "none"
    return World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        host=socket.gethostname(),
        device=device,
        backend=backend,
        launcher=environment.launcher,
        rendezvous_s=time.perf_counter() - started,
        devices=_JOINED.devices if environment.world_size > 1 else int(device.type != "cpu"),
        place=_JOINED.place,
    )


def leave_world() -> None:
    """Destroy the process group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _JOINED.store = None


def abandon_world() -> None:
    """Leave the other ranks without a word to them: some are lost, and operations with them may be in flight.

    Connections close once nothing refers to the groups any more; the others' waits for this rank then fail.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.distributed_c10d._abort_process_group()
    _JOINED.store = None
    set_session_key(b"")


def thread_store() -> Any:
    """Return a connection of this thread's own to the store of the rendezvous; keep it as long as it is used."""
    if _JOINED.store is not None:
        return _JOINED.store.clone()
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Joined:
    """What was found when the process group was made.

    Attributes:
        devices: number of accelerators of the ranks; a later Job asks again for it.
        place: where this rank is; a process is bound to cores once.
        store: the groups' store, kept because torch keeps only the half of it that is not Python.
    """

    devices: int = 0
    place: RankPlace | None = None
    store: Any = None


_JOINED = _Joined()


def _initialise(environment: RankEnvironment, device: torch.device) -> int:
    """Make the default process group; return the number of the ranks' accelerators, 0 on CPUs."""
    timeout = timedelta(seconds=read_launch_options().timeout_s)
    try:
        joined = meet(environment, timeout)
        devices, shared = 0, ""
        if device.type != "cpu":
            devices, shared = _count_devices(joined.authenticated, environment, device)
        backend = backend_of(device, shared=bool(shared))
        if backend == STAGED:
            register_staged_backend(device.type)
        on_host = backend in ("gloo", STAGED)
        store = _JOINED.store = joined.authenticated if on_host else joined.hidden
        dist.init_process_group(
            backend, rank=environment.rank, world_size=environment.world_size, timeout=timeout, store=store
        )
        note_collectives()
        connect_group(None)
        prove_members()
        if on_host:
            dist.barrier()  # if a rank ended now because it refuses its plan, others would fail while connecting
            deprioritise_gloo_threads()
        return devices
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"rank {environment.rank} of {environment.world_size} could not meet the others at "
            f"{environment.rendezvous}: {reason}; "
            "check that all ranks were started and that the address is reachable, or run `tutti doctor`"
        ) from None


def _count_devices(store: Any, environment: RankEnvironment, device: torch.device) -> tuple[int, str]:
    """Count the ranks' devices, as `count_devices` does, and check that ranks share them only if they may."""
    devices, shared = count_devices(store, environment, device)
    if shared and not read_launch_options().share_device:
        raise LaunchError(
            f"two ranks would compute on one device ({shared}); start fewer ranks there, give each a device of its own "
            "(such as srun --gpus-per-task=1), hide the devices to train on the CPU (CUDA_VISIBLE_DEVICES=), or let "
            "ranks share a device with --share-device, which is slower"
        )
    return devices, shared


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
