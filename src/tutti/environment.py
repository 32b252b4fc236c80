"""Environment variables, which are read only here: which rank this process is, and what the launcher asks of it."""

import contextlib
import math
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from tutti.config.compression import Compression, parse_compression
from tutti.config.mesh_axes import parse_mesh
from tutti.config.plan import SyncPlan
from tutti.config.run_folder import checkpoint_place
from tutti.config.sync_notation import parse_sync
from tutti.config.vocabulary import RENDEZVOUS_PORTS, AxisName, OnSlowRank
from tutti.errors import LaunchError

_LOOPBACK = ("localhost", "127.", "::1", "[::1]")

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


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
        shard: settings of the plan's sharding as text, such as "level=2,engine=fsdp2".
        resume: a run folder or a checkpoint.
        recover: ranks outlive the loss of others, and keep their state in memory for that.
        recover_from: the rank that has the state in memory to continue from, and the number of its updates.
        generators: file for this rank's states of random generators.
        lost_generators: the file of the rank whose place this rank takes.
        on_slow_rank: what happens where a rank is slower than the others.
        restarted: the launcher started the ranks again: `resume` is newer than what the script resumes from.
        shrunk: the launcher started fewer ranks than were asked for.
        observer: "module:factory" of an observer to load.
        steps: number of steps that the observer `stop_after_steps` lets the run make.
        supervised: whether `tutti run` watches the ranks: it keeps their output and reports their failures.
        timeout_s: longest wait for other ranks.
        frugal: give freed memory back to the system at once.
        memory_checkpoint_every: steps between two checkpoints in the memory of the nodes.
        memory_checkpoints: this node's folder for them.
        profile: number of steps that torch's profiler records.
        share_device: ranks may compute on the same accelerator.
        bind_cores: bind each rank to the cores near its device.
        threads_stated: the user chose the number of threads.
        stop_at_s: Unix time in seconds after which the run stops with a checkpoint.
        stop_signals: whether SIGTERM and SIGUSR1 stop the run with a checkpoint.
    """

    run_folder: Path | None = None
    plan: Path | None = None
    mesh: dict[AxisName, int] | None = None
    compress: Compression | None = None
    sync: SyncPlan | None = None
    bucket_mb: str | None = None
    shard: str | None = None
    resume: Path | str | None = None
    observer: str | None = None
    recording: Recording | None = None
    checkpoint_every: int | None = None
    steps: int | None = None
    supervised: bool = False
    timeout_s: float = 600.0
    frugal: bool = False
    profile: int | None = None
    share_device: bool = False
    bind_cores: bool = False
    threads_stated: bool = False
    stop_at_s: float | None = None
    stop_signals: bool = True
    restarted: bool = False
    shrunk: bool = False
    recover: bool = False
    recover_from: tuple[int, int] | None = None
    generators: Path | None = None
    lost_generators: Path | None = None
    checkpoint_store: str | None = None
    on_slow_rank: OnSlowRank = "warn"
    memory_checkpoint_every: int | None = None
    memory_checkpoints: Path | None = None


def read_launch_options(environ: Mapping[str, str] = os.environ) -> LaunchOptions:
    """Read the launcher's options from the TUTTI_* variables."""

    def path(name: str) -> Path | None:
        return Path(environ[name]) if environ.get(name) else None

    every, in_memory = environ.get("TUTTI_CHECKPOINT_EVERY"), environ.get("TUTTI_MEMORY_CHECKPOINT_EVERY")
    return LaunchOptions(
        run_folder=path("TUTTI_RUN_FOLDER"),
        plan=path("TUTTI_PLAN"),
        mesh=parse_mesh(environ["TUTTI_MESH"]) if environ.get("TUTTI_MESH") else None,
        sync=parse_sync(environ["TUTTI_SYNC"]) if environ.get("TUTTI_SYNC") else None,
        compress=parse_compression(environ["TUTTI_COMPRESS"]) if environ.get("TUTTI_COMPRESS") else None,
        bucket_mb=environ.get("TUTTI_BUCKET_MB") or None,
        shard=environ.get("TUTTI_SHARD") or None,
        resume=checkpoint_place(environ["TUTTI_RESUME"]) if environ.get("TUTTI_RESUME") else None,
        observer=environ.get("TUTTI_OBSERVER") or None,
        recording=_recording(environ),
        checkpoint_every=_number(environ, "TUTTI_CHECKPOINT_EVERY") if every else None,
        steps=_number(environ, "TUTTI_STEPS") if environ.get("TUTTI_STEPS") else None,
        supervised=environ.get("TUTTI_SUPERVISED") == "1",
        frugal=environ.get("TUTTI_FRUGAL") == "1",
        profile=_number(environ, "TUTTI_PROFILE") if environ.get("TUTTI_PROFILE") else None,
        timeout_s=_seconds(environ, "TUTTI_TIMEOUT_S", 600.0),
        share_device=environ.get("TUTTI_SHARE_DEVICE") == "1",
        bind_cores=_binds_cores(environ),
        threads_stated=environ.get("TUTTI_THREADS_STATED") == "1",
        stop_at_s=_seconds(environ, "TUTTI_STOP_AT_S") if environ.get("TUTTI_STOP_AT_S") else None,
        stop_signals=environ.get("TUTTI_STOP_SIGNALS") != "0",
        restarted=environ.get("TUTTI_RESTARTED") == "1",
        shrunk=environ.get("TUTTI_SHRUNK") == "1",
        recover=environ.get("TUTTI_RECOVER") == "memory",
        recover_from=_holder(environ),
        generators=path("TUTTI_GENERATORS"),
        lost_generators=path("TUTTI_LOST_GENERATORS"),
        checkpoint_store=environ.get("TUTTI_CHECKPOINT_STORE") or None,
        on_slow_rank=_on_slow_rank(environ),
        memory_checkpoint_every=_number(environ, "TUTTI_MEMORY_CHECKPOINT_EVERY") if in_memory else None,
        memory_checkpoints=path("TUTTI_MEMORY_CHECKPOINTS") if in_memory else None,
    )


def _holder(environ: Mapping[str, str]) -> tuple[int, int] | None:
    text = environ.get("TUTTI_RECOVER_FROM")
    if not text:
        return None
    rank, _, step = text.partition(" ")
    if not (rank.isdecimal() and step.isdecimal()):
        raise LaunchError(f"TUTTI_RECOVER_FROM={text!r} is no rank and step; unset it: `tutti run` sets it")
    return int(rank), int(step)


def _binds_cores(environ: Mapping[str, str]) -> bool:
    value = environ.get("TUTTI_BIND_CORES") or "none"
    if value not in ("auto", "none"):
        raise LaunchError(f"TUTTI_BIND_CORES={value!r} is neither auto nor none; set it to one of them, or unset it")
    return value == "auto"


def _on_slow_rank(environ: Mapping[str, str]) -> OnSlowRank:
    value = environ.get("TUTTI_ON_SLOW_RANK") or "warn"
    if value == "rebalance":
        return "rebalance"
    if value != "warn":
        raise LaunchError(
            f"TUTTI_ON_SLOW_RANK={value!r} is neither warn nor rebalance; set it to one of them, or unset it"
        )
    return "warn"


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


def _seconds(environ: Mapping[str, str], name: str, default: float = math.nan) -> float:
    """Return a time that a variable states: a finite number of seconds above 0."""
    text = environ.get(name)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(
            f"environment variable {name}={text!r} is not a number of seconds above 0; set it to one, or unset it"
        )
    return seconds


def _from_variables(
    environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str, launcher: str
) -> RankEnvironment:
    world_size = _number(environ, size)
    # Where nothing says which ranks share a host, as in Kubeflow's PyTorchJob, each has one of its own.
    own_host = local_rank not in environ and not environ.get("MASTER_ADDR", "localhost").startswith(_LOOPBACK)
    rank_environment = RankEnvironment(
        rank=_number(environ, rank),
        world_size=world_size,
        local_rank=_number(environ, local_rank, 0),
        local_world_size=_number(environ, local_size, 1 if own_host else world_size),
        launcher="tutti" if "TUTTI_RENDEZVOUS" in environ else launcher,
    )
    if not 0 <= rank_environment.local_rank < rank_environment.local_world_size:
        raise LaunchError(
            f"local rank {rank_environment.local_rank} does not fit the {rank_environment.local_world_size} ranks of "
            f"this host; set {local_rank} to 0..{local_size}-1, or unset both"
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


def in_slurm_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process runs inside an allocation of Slurm."""
    return "SLURM_JOB_ID" in environ


def in_heterogeneous_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process runs inside a heterogeneous allocation of Slurm."""
    return _number(environ, "SLURM_HET_SIZE", 1) > 1


def slurm_nodes(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of nodes of the Slurm step that this process is a task of, and this node's; (1, 0) outside."""
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return 1, 0
    return _number(environ, "SLURM_STEP_NUM_NODES", 1), _number(environ, "SLURM_NODEID", 0)


def mpi_place(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the rank that mpirun has given to this process, and the number of ranks; None outside of mpirun."""
    for rank, size, *_ in _MPI:
        if rank in environ and size in environ:
            return _number(environ, rank), _number(environ, size)
    return None


def allocated_nodes(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes of the batch job that this process is in; 0 outside, or where it is not known."""
    if environ.get("SLURM_JOB_NUM_NODES"):
        return _number(environ, "SLURM_JOB_NUM_NODES")
    if environ.get("LSB_MCPU_HOSTS"):  # HOST SLOTS HOST SLOTS
        return len(set(environ["LSB_MCPU_HOSTS"].split()[::2]))
    for name in ("PBS_NODEFILE", "PE_HOSTFILE"):  # a host begins each line
        if environ.get(name):
            try:
                lines = Path(environ[name]).read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError as error:
                raise LaunchError(
                    f"{name}={environ[name]} cannot be read ({error.strerror}); say how many nodes with --nnodes N"
                ) from None
            return len({line.split()[0] for line in lines if line.strip()})
    return 0


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return what Slurm calls the node on which this process runs as a task; the host's name elsewhere."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def slurm_node_names(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the nodes of this process' Slurm step, or else of its allocation; none outside of Slurm."""
    listed = expand_hostlist(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    return _nodes_by_component(environ, listed) or listed


def _nodes_by_component(environ: Mapping[str, str], listed: tuple[str, ...]) -> tuple[str, ...]:
    """Return nodes of a heterogeneous job in the order of its components; lists of Slurm have them sorted by name.

    It is empty in other jobs, and where srun itself has asked for the nodes, which then tells of no component.
    """
    groups = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(_number(environ, "SLURM_HET_SIZE", 0))]
    nodes = [node for group in groups for node in expand_hostlist(environ.get(group, ""))]
    return tuple(node for node in nodes if node in listed) if set(listed) <= set(nodes) else ()


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names in a list of hosts as Slurm writes it.

    Examples:
        >>> expand_hostlist("n[08-10,12],login")
        ('n08', 'n09', 'n10', 'n12', 'login')
    """
    return tuple(name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in _expanded(part))


def _expanded(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, tail = rest.partition("]")
    numbers: list[str] = []
    for text in ranges.split(","):
        first, dash, last = text.partition("-")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)] if dash else [text]
    return [f"{head}{number}{after}" for number in numbers for after in _expanded(tail)]


def gloo_interface(environ: Mapping[str, str] = os.environ) -> str:
    """Return the first interface that Gloo is told to listen on; empty if it is told none."""
    return environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Return this node's entry in the step's list of tasks ("2(x3),1" means 2, 2, 2, 1); 0 if unknown.

    In a heterogeneous job, nodes are numbered by component, and the list is in the order of their names.
    """
    names = expand_hostlist(environ.get("SLURM_STEP_NODELIST", ""))
    name = environ.get("SLURMD_NODENAME", "")
    node = names.index(name) if name in names else _number(environ, "SLURM_NODEID", 0)
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
    if rendezvous:
        _check_rendezvous(rendezvous)
    return RankEnvironment(
        rank=rank_environment.rank,
        world_size=rank_environment.world_size,
        local_rank=rank_environment.local_rank,
        local_world_size=rank_environment.local_world_size,
        rendezvous=rendezvous,
        launcher=rank_environment.launcher,
    )


def _check_rendezvous(address: str) -> None:
    """Refuse an address that is neither file:///PATH nor tcp://HOST:PORT."""
    scheme, separator, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    known = scheme == "file" and rest.startswith("/")
    known |= scheme == "tcp" and bool(host) and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536
    if not (separator and known):
        raise LaunchError(
            f"the ranks cannot meet at {address!r}: give file:///PATH or tcp://HOST:PORT with a port of 1 to 65535, by "
            "TUTTI_RENDEZVOUS, or by MASTER_ADDR and MASTER_PORT"
        )


def _mpi_host(environ: Mapping[str, str]) -> str:
    """Return rank 0's host if MPI's variables tell it: this host if all ranks are local, else the launching one."""
    for _, size, _, local_size in _MPI:
        if size in environ and environ.get(local_size) == environ[size]:
            return "127.0.0.1"
    for name in ("PMIX_SERVER_URI2", "OMPI_MCA_orte_hnp_uri"):  # the first is of this host, often by loopback
        _, separator, address = environ.get(name, "").partition("://")
        host = address.split(":")[0].split(",")[0]
        if separator and not host.startswith("127."):
            return host
    return ""


def _mpi_job(environ: Mapping[str, str]) -> str:
    return environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or environ.get("OMPI_MCA_ess_base_jobid") or ""


def _slurm_host(environ: Mapping[str, str]) -> str:
    """Return the first host of the step's node list ("n[3-6,9]" -> "n3") if it resolves, else srun's host.

    In a heterogeneous job it is the first of the first component; empty where the components are not told.
    """
    name = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    if in_heterogeneous_job(environ):
        listed = expand_hostlist(name)
        name = ",".join(_nodes_by_component(environ, listed)) or ("" if len(listed) > 1 else name)
        if not name:
            return ""
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


SECRET_VARIABLE, SECRET_FILE_VARIABLE = "TUTTI_SECRET", "TUTTI_SECRET_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSettings:
    """Where the secret of a job may be.

    Attributes:
        secret: the secret itself; empty if it is not given. Not shown.
        named_file: the file that the user names.
        users_file: the file in the user's folder of settings.
    """

    secret: str = field(repr=False)
    named_file: Path | None
    users_file: Path


def secret_settings(environ: Mapping[str, str] = os.environ) -> SecretSettings:
    """Return where the secret of a job may be."""
    named = environ.get(SECRET_FILE_VARIABLE)
    folder = environ.get("XDG_CONFIG_HOME")
    return SecretSettings(
        secret=environ.get(SECRET_VARIABLE, ""),
        named_file=Path(named) if named else None,
        users_file=(Path(folder) if folder else Path("~/.config").expanduser()) / "tutti" / "secret",
    )


@dataclass(frozen=True, slots=True)
class AgentStore:
    """The store that torchrun's agent offers its ranks.

    Attributes:
        attempt: tells the run and its restarts alone.
    """

    attempt: str


def agent_store(environ: Mapping[str, str] = os.environ) -> AgentStore | None:
    """Return what identifies the store of torchrun's agent at the rendezvous; None where rank 0 makes a store there."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "TUTTI_RENDEZVOUS" in environ:
        return None
    return AgentStore(f"{environ.get('TORCHELASTIC_RUN_ID', '')} {environ.get('TORCHELASTIC_RESTART_COUNT', '')}")


def state_interface(name: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let Gloo listen on one network interface, unless the user has named one.

    Args:
        name: the interface.
        environ: the variables.
    """
    environ.setdefault("GLOO_SOCKET_IFNAME", name)


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that CUDA may show this process, as numbers, UUIDs or MIG instances; empty for all."""
    return [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def visible_entry(kind: str, index: int, *, rocm: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Return which entry of the variables that choose devices a visible device is; empty if none of them is set.

    Args:
        kind: the device's kind in torch.
        index: its number in torch.
        rocm: whether torch was built for ROCm, which reads CUDA_VISIBLE_DEVICES only without HIP_VISIBLE_DEVICES.
        environ: the environment variables.
    """
    hip = ("HIP_VISIBLE_DEVICES",) if "HIP_VISIBLE_DEVICES" in environ else ("CUDA_VISIBLE_DEVICES",)
    of_kind = {
        "cuda": (*hip, "ROCR_VISIBLE_DEVICES") if rocm else ("CUDA_VISIBLE_DEVICES",),
        "xpu": ("ZE_AFFINITY_MASK",),
    }
    words = []
    for name in of_kind.get(kind, ()):
        entries = environ.get(name, "").split(",")
        if environ.get(name) and index < len(entries):
            words.append(f"entry {entries[index].strip()} of {name}={environ[name]}")
            index = int(entries[index]) if entries[index].strip().isdigit() else index
    return ", ".join(words)


def choose_interface(node_of: Mapping[str, int | None], node: int | None) -> str:
    """Let Gloo use the interface on a rank's NUMA node, if the launcher found several in the job's network.

    Args:
        node_of: the NUMA node of each network card.
        node: the rank's NUMA node; None if it has none.

    Returns:
        The interface that was chosen instead of the launcher's; empty if that stays.
    """
    candidates = os.environ.get("TUTTI_INTERFACES", "").split(",")
    near = [name for name in candidates if name and node is not None and node_of.get(name) == node]
    if not near or os.environ.get("GLOO_SOCKET_IFNAME") in near:
        return ""
    os.environ["GLOO_SOCKET_IFNAME"] = near[0]
    return near[0]


_OPTIONS = {
    "TUTTI_SHARD": "--shard",
    "TUTTI_SYNC": "--sync",
    "TUTTI_COMPRESS": "--compress",
    "TUTTI_BUCKET_MB": "--bucket-mb",
    "TUTTI_CHECKPOINT_EVERY": "--checkpoint-every",
    "TUTTI_CHECKPOINT_STORE": "--checkpoint-store",
    "TUTTI_ON_SLOW_RANK": "--on-slow-rank",
}


def options_given(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the options of `tutti run` that this rank was started with and that a repeated command needs."""
    return [word for name, option in _OPTIONS.items() if environ.get(name) for word in (option, environ[name])]


def slurm_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often Slurm has started this job again, after it was requeued."""
    return _number(environ, "SLURM_RESTART_COUNT", 0)


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this user's folder for what tutti remembers from run to run."""
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tutti"


def sent_files(environ: MutableMapping[str, str] = os.environ) -> str:
    """Return the files that a job sends along to its pods, and remove the variable, which children do not need."""
    return environ.pop(FILES_VARIABLE, "")


def completion_index(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this pod among those of its Indexed Job on Kubernetes."""
    return _number(environ, "JOB_COMPLETION_INDEX")


FILES_VARIABLE = "TUTTI_SENT_FILES"
"""The variable of a pod that has the files of the submitting machine that the command names."""


@dataclass(frozen=True, slots=True)
class RaySign:
    """How this user proves to a Ray cluster who they are; Ray's client reads it itself.

    Attributes:
        mode: what RAY_AUTH_MODE says; empty if it is not set.
        place: the variable in which the token is, or that names its file; empty for the usual file.
    """

    mode: str
    place: str


def ray_sign(environ: Mapping[str, str] = os.environ) -> RaySign:
    """Return where Ray's client finds its token."""
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    place = next((name for name in names if environ.get(name)), "")
    mode = environ.get("RAY_AUTH_MODE", "")
    return RaySign("" if mode == "disabled" else mode, place)


def ray_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of the Ray cluster that the user's variables name; empty if they name none."""
    return environ.get("RAY_API_SERVER_ADDRESS") or environ.get("RAY_ADDRESS") or ""


@contextlib.contextmanager
def stated_ray_address(address: str, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let Ray's client use an address while the context lasts, whatever the user's variables say.

    Args:
        address: of the cluster's dashboard.
        environ: the variables.
    """
    before = environ.get("RAY_API_SERVER_ADDRESS")
    environ["RAY_API_SERVER_ADDRESS"] = address
    try:
        yield
    finally:
        if before is None:
            environ.pop("RAY_API_SERVER_ADDRESS", None)
        else:
            environ["RAY_API_SERVER_ADDRESS"] = before
