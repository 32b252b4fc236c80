"""Environment variables, which are read only here: which rank this process is, and what the launcher asks of it."""

import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.config.compression import Compression, parse_compression
from tutti.config.mesh_axes import parse_mesh
from tutti.config.plan import SyncPlan
from tutti.config.sync_notation import parse_sync
from tutti.config.vocabulary import AxisName
from tutti.errors import LaunchError

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Below 32768, where Linux's ephemeral ports begin: another program's connection may occupy any of those.
RENDEZVOUS_PORTS = range(20000, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The identity of this process among the ranks.

    Attributes:
        rendezvous: file:// or tcp:// address at which the ranks find each other; empty for one device.
        launcher: the command that started the ranks: "tutti", "torchrun", "srun", "mpirun", or "python" for none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    rendezvous: str = ""
    launcher: str = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The recording of a run that `tutti verify` asks for.

    Attributes:
        folder: where the recording is written.
        steps: number of steps to record; the run ends after them.
        reference: the one-device recording to follow; None if this run is the one-device run.
        double: compute in float64, whatever the script's dtype.
        still: train without dropout.
        epochs: record until so many epochs have ended; None: only `steps` counts.
        own_step: run tutti's own step also on one device.
        save_at: write a checkpoint after so many steps, whatever the script asks for.
        resumed: the run is resumed from a checkpoint, with whose state it begins.
    """

    folder: Path
    steps: int
    reference: Path | None
    double: bool
    still: bool = False
    epochs: int | None = None
    own_step: bool = False
    save_at: int | None = None
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options that the launcher sets for the Job; None leaves the choice to the script.

    Attributes:
        mesh: degrees by axis, where no plan file is given.
        bucket_mb: size of gradient buckets in MiB as text, or "auto" to measure it.
        resume: a run folder or a checkpoint.
        observer: "module:factory" of an observer to load.
        steps: number of steps that the observer `stop_after_steps` lets the run make.
        supervised: whether `tutti run` watches the ranks: it keeps their output and reports their failures.
        timeout_s: longest wait for other ranks.
        frugal: give freed memory back to the system at once.
        profile: number of steps that torch's profiler records.
    """

    run_folder: Path | None = None
    plan: Path | None = None
    mesh: dict[AxisName, int] | None = None
    compress: Compression | None = None
    sync: SyncPlan | None = None
    bucket_mb: str | None = None
    resume: Path | None = None
    observer: str | None = None
    recording: Recording | None = None
    checkpoint_every: int | None = None
    steps: int | None = None
    supervised: bool = False
    timeout_s: float = 600.0
    frugal: bool = False
    profile: int | None = None


def read_launch_options(environ: Mapping[str, str] = os.environ) -> LaunchOptions:
    """Read the launcher's options from the TUTTI_* variables."""

    def path(name: str) -> Path | None:
        return Path(environ[name]) if environ.get(name) else None

    every = environ.get("TUTTI_CHECKPOINT_EVERY")
    return LaunchOptions(
        run_folder=path("TUTTI_RUN_FOLDER"),
        plan=path("TUTTI_PLAN"),
        mesh=parse_mesh(environ["TUTTI_MESH"]) if environ.get("TUTTI_MESH") else None,
        sync=parse_sync(environ["TUTTI_SYNC"]) if environ.get("TUTTI_SYNC") else None,
        compress=parse_compression(environ["TUTTI_COMPRESS"]) if environ.get("TUTTI_COMPRESS") else None,
        bucket_mb=environ.get("TUTTI_BUCKET_MB") or None,
        resume=path("TUTTI_RESUME"),
        observer=environ.get("TUTTI_OBSERVER") or None,
        recording=_recording(environ),
        checkpoint_every=_number(environ, "TUTTI_CHECKPOINT_EVERY") if every else None,
        steps=_number(environ, "TUTTI_STEPS") if environ.get("TUTTI_STEPS") else None,
        supervised=environ.get("TUTTI_SUPERVISED") == "1",
        frugal=environ.get("TUTTI_FRUGAL") == "1",
        profile=_number(environ, "TUTTI_PROFILE") if environ.get("TUTTI_PROFILE") else None,
        timeout_s=float(environ.get("TUTTI_TIMEOUT_S", "600")),
    )


def _recording(environ: Mapping[str, str]) -> Recording | None:
    if not environ.get("TUTTI_RECORD"):
        return None
    reference = environ.get("TUTTI_RECORD_REFERENCE")
    return Recording(
        folder=Path(environ["TUTTI_RECORD"]),
        steps=_number(environ, "TUTTI_RECORD_STEPS", 1),
        reference=Path(reference) if reference else None,
        double=environ.get("TUTTI_RECORD_DOUBLE") == "1",
        still=environ.get("TUTTI_RECORD_STILL") == "1",
        epochs=_number(environ, "TUTTI_RECORD_EPOCHS") if environ.get("TUTTI_RECORD_EPOCHS") else None,
        own_step=environ.get("TUTTI_RECORD_OWN_STEP") == "1",
        save_at=_number(environ, "TUTTI_RECORD_SAVE_AT") if environ.get("TUTTI_RECORD_SAVE_AT") else None,
        resumed=environ.get("TUTTI_RECORD_RESUMED") == "1",
    )


def read_rank_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Find rank and world size from the variables of tutti, torchrun, Slurm (srun), Open MPI or PMI.

    Without any of these, the process is the only rank.

    Raises:
        LaunchError: the variables contradict each other, or are not numbers.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank_environment = _from_variables(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun")
    elif "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        rank_environment = _from_slurm(environ)
    else:
        rank_environment = next(
            (
                _from_variables(environ, *names, "mpirun")
                for names in _MPI
                if names[0] in environ and names[1] in environ
            ),
            RankEnvironment(),
        )
    if not 0 <= rank_environment.rank < rank_environment.world_size:
        raise LaunchError(
            f"rank {rank_environment.rank} does not fit a world of {rank_environment.world_size} "
            f"({rank_environment.launcher} environment); set RANK to 0..WORLD_SIZE-1, or unset both to "
            "run on one device"
        )
    return rank_environment


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(
            f"environment variable {name}={text!r} is not a whole number; set it to one, or unset it"
        ) from None


def _from_variables(
    environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str, launcher: str
) -> RankEnvironment:
    world_size = _number(environ, size)
    rank_environment = RankEnvironment(
        rank=_number(environ, rank),
        world_size=world_size,
        local_rank=_number(environ, local_rank, 0),
        local_world_size=_number(environ, local_size, 1 if world_size == 1 else world_size),
        launcher="tutti" if "TUTTI_RENDEZVOUS" in environ else launcher,
    )
    return _with_rendezvous(rank_environment, environ, _mpi_host(environ), _mpi_job(environ))


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    rank_environment = RankEnvironment(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=tasks,
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        local_world_size=_slurm_tasks_here(environ) or max(1, tasks // nodes),
        launcher="srun",
    )
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return _with_rendezvous(rank_environment, environ, _slurm_host(environ), job)


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Return this node's entry in the step's list of tasks ("2(x3),1" means 2, 2, 2, 1); 0 if unknown."""
    node = _number(environ, "SLURM_NODEID", 0)
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, repeat = entry.rstrip(")").partition("(x")
        node -= int(repeat) if repeat.isdigit() else 1
        if node < 0:
            return int(count) if count.isdigit() else 0
    return 0


def _with_rendezvous(
    rank_environment: RankEnvironment, environ: Mapping[str, str], host: str, job: str
) -> RankEnvironment:
    """Add the rendezvous address: stated, or derived from the launcher's job, so that every rank derives the same."""
    rendezvous = environ.get("TUTTI_RENDEZVOUS", "")
    if not rendezvous and rank_environment.world_size > 1:
        host = environ.get("MASTER_ADDR") or host
        if not host:
            raise LaunchError(
                f"{rank_environment.world_size} ranks on several hosts cannot find each other: no MASTER_ADDR; "
                "export MASTER_ADDR (host of rank 0) and MASTER_PORT, or start them with `tutti run`"
            )
        port = _number(environ, "MASTER_PORT", RENDEZVOUS_PORTS[zlib.crc32(job.encode()) % len(RENDEZVOUS_PORTS)])
        rendezvous = f"tcp://{host}:{port}"
    return RankEnvironment(
        rank=rank_environment.rank,
        world_size=rank_environment.world_size,
        local_rank=rank_environment.local_rank,
        local_world_size=rank_environment.local_world_size,
        rendezvous=rendezvous,
        launcher=rank_environment.launcher,
    )


def _mpi_host(environ: Mapping[str, str]) -> str:
    """Return rank 0's host if MPI's variables tell it: this host if all ranks are local, else the launching one."""
    for _, size, _, local_size in _MPI:
        if size in environ and environ.get(local_size) == environ[size]:
            return "127.0.0.1"
    uri = environ.get("PMIX_SERVER_URI2", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return uri.split("tcp://")[-1].split("tcp4://")[-1].split(":")[0].split(",")[0] if "://" in uri else ""


def _mpi_job(environ: Mapping[str, str]) -> str:
    return environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or environ.get("OMPI_MCA_ess_base_jobid") or ""


def _slurm_host(environ: Mapping[str, str]) -> str:
    """Return the first host of the step's node list ("n[3-6,9]" -> "n3") if it resolves, else srun's host."""
    name = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    head, bracket, rest = name.partition("[")
    host = head + rest.replace("-", ",").replace("]", ",").split(",")[0] if bracket else name.split(",")[0]
    if "," in head:
        host = head.split(",")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR", host)
    return host


SHARED_MEMORY_VARIABLE = "TUTTI_SHARED_MEMORY"
SHARED_MEMORY_ON, SHARED_MEMORY_OFF = "on", "off"


def shared_memory_setting(environ: Mapping[str, str] = os.environ) -> str:
    """Return the variable's value unchecked, because all ranks must refuse an invalid one together."""
    return environ.get(SHARED_MEMORY_VARIABLE) or SHARED_MEMORY_ON
