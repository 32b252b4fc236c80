"""The environment variables of ranks: the launcher sets them, and `tutti.environment` reads them in each rank."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tutti.launch.launcher import LaunchSpec
from tutti.launch.network import interface_towards, interfaces_beside
from tutti.network_interfaces import loopback

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=1"}
"""Settings of glibc's malloc.

With its caches of small blocks per thread, malloc cannot reuse the memory of a freed large tensor, because blocks of
32 to 96 bytes remain beside it. The heap of a pipeline grew by 100 MB per step (docs/traps.md).
"""


def stated_threads() -> int | None:
    """Return the threads per rank if the user's environment sets them, else None."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


@contextlib.contextmanager
def loading_defaults(threads: int) -> Iterator[None]:
    """Set defaults for libraries that read their settings when loaded, in processes started within the context.

    They are the numbers of threads and the C library's allocator. What the user's environment sets is kept.
    """
    wanted = dict.fromkeys(_THREAD_VARIABLES, str(threads)) | _ALLOCATOR
    values = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


def of_node(spec: LaunchSpec, rendezvous_folder: Path) -> dict[str, str]:
    """Return the variables that all ranks of this node share.

    Args:
        spec: what is started on this node.
        rendezvous_folder: a private folder of this node, in which the ranks of a single node meet without a port.
    """
    if spec.rendezvous is None:
        rendezvous, interface = f"file://{rendezvous_folder}/store", loopback()
    else:
        rendezvous, interface = f"tcp://{spec.rendezvous}", interface_towards(spec.rendezvous)
    environment = {
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "NODE_RANK": str(spec.node_rank),
        "TUTTI_RENDEZVOUS": rendezvous,
        "TUTTI_TIMEOUT_S": str(spec.timeout_s),
        "TUTTI_RUN_FOLDER": str(spec.folder),
        "TUTTI_SUPERVISED": "1",
        "OMP_NUM_THREADS": str(spec.threads),
    }
    if spec.nodes == 1:  # several are started one by one, and find the user's secret (tutti.job_secret)
        environment["TUTTI_SECRET"] = spec.secret
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = interface
        if len(beside := interfaces_beside(interface)) > 1:  # each rank takes the one near its device
            environment["TUTTI_INTERFACES"] = ",".join(beside)
    return environment | spec.environment


def of_rank(rank: int, local_rank: int) -> dict[str, str]:
    """Return the variables that differ between ranks."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}


def memory_root() -> Path:
    """Return the folder in this host's memory, in which launchers make theirs; the user may name another one.

    It is absolute: ranks may change their folder, and what removes it has another one.
    """
    return Path(os.environ.get("TUTTI_MEMORY_FOLDER") or "/dev/shm").resolve()


_OF_ONE_RUN = (
    *("TUTTI_MEMORY_CHECKPOINT_EVERY", "TUTTI_MEMORY_CHECKPOINTS"),
    *("TUTTI_PLAN", "TUTTI_RESUME", "TUTTI_RESTARTED", "TUTTI_SHRUNK", "TUTTI_STOP_AT_S"),
    *("TUTTI_RECOVER", "TUTTI_RECOVER_FROM", "TUTTI_GENERATORS", "TUTTI_LOST_GENERATORS"),
)


def become(environment: dict[str, str]) -> None:
    """Add variables to this process' own environment: a forked rank does so before anything else reads it.

    A plan or a checkpoint that was meant for another run, in which this one was started, is not inherited.
    """
    for name in _OF_ONE_RUN:
        os.environ.pop(name, None)
    os.environ.update(environment)


def variables() -> dict[str, str]:
    """Return all variables of this process."""
    return dict(os.environ)


def replace_variables(environment: dict[str, str]) -> None:
    """Let this process have these variables, and no others."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def started_rank() -> tuple[int, Path, int, dict[str, str]]:
    """Return what `of_node` and `of_rank` wrote for a rank that is a process of its own.

    Returns:
        Its rank, the run folder, threads per rank, and all variables.
    """
    read = os.environ
    return int(read["RANK"]), Path(read["TUTTI_RUN_FOLDER"]), int(read["OMP_NUM_THREADS"]), dict(read)


def library_path() -> str:
    """Return the folders in which the system looks for libraries first."""
    return os.environ.get("LD_LIBRARY_PATH", "")


def device_variables() -> dict[str, str]:
    """Return the variables that are set and choose which accelerators a process sees."""
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return {name: os.environ[name] for name in (*names, "ZE_AFFINITY_MASK") if name in os.environ}


def communication_variables() -> dict[str, str]:
    """Return the variables that are set and steer communication, threads and devices; they hold no secrets."""
    prefixes = ("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_NCCL_", "OMP_", "MKL_", "KMP_")
    names = {"TUTTI_SHARED_MEMORY", "TUTTI_SHARE_DEVICE", "TUTTI_TIMEOUT_S", "CUBLAS_WORKSPACE_CONFIG"}
    set_here = {name: value for name, value in os.environ.items() if name.startswith(prefixes) or name in names}
    return set_here | device_variables()


def granted_cores() -> int:
    """Return how many cores this process may use: its affinity, limited by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores, int(quota))) if quota is not None else cores


def _cgroup_quota(path: Path) -> float | None:
    """Return the cores that a cgroup v2 quota file ("max 100000" or "200000 100000") grants; None without a limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def threads_per_rank(ranks: int) -> int:
    """Return the threads of each of `ranks` ranks on this host: the user's setting, else an equal share of cores."""
    return stated_threads() or max(1, granted_cores() // ranks)
