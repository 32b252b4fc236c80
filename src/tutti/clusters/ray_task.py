"""What a run on Ray is as plain data: its settings, the task of its driver, and the environment that it gets."""

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tutti.clusters.cluster_job import JobRequest, NodeCommand
from tutti.clusters.local_files import moved_word, packed_files
from tutti.clusters.profile_file import listed, mapped, read_cluster_settings
from tutti.clusters.ray_driver import EXTRA_GRACE_S
from tutti.clusters.ray_node import MARK
from tutti.errors import LaunchError

_BOOT = (
    "import sys\n"
    "if sys.version_info < (3, 11): sys.exit('tutti: Python %d.%d runs the cluster, and tutti needs 3.11; name another "
    "cluster, or another image' % sys.version_info[:2])\n"
    "try:\n"
    " import ray\n"
    " from tutti.clusters.ray_driver import main\n"
    "except ImportError as error:\n"
    " sys.exit(f'tutti: {sys.executable}, which is python3 on the PATH of the head node, has no {error.name}; let Ray "
    "bring tutti with --request tutti=upload, and start Ray with the bin folder of its environment first on PATH')\n"
    "main(sys.argv[1:])"
)
"""What the driver's interpreter runs first; it must be read by old ones, too."""

_NOT_COPIED = (".git", ".venv", "venv", "__pycache__", "runs", "build", "dist", ".mypy_cache", ".ruff_cache")

Text = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f]*$")]
Absolute = Annotated[str, Field(pattern=r"^/[^\x00-\x1f]*$", max_length=300)]
Size = Annotated[str, Field(pattern=r"^\d+(\.\d+)?([KMGT]i?B?|B)?$")]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$", max_length=200)]


class RaySettings(BaseModel):
    """The settings of a job, from `[ray]` of tutti.toml and from --request.

    Attributes:
        address: of the cluster's dashboard; that of RAY_ADDRESS if not given, else of this machine.
        cpus, gpus, memory, resources: what each node's part of the job reserves there; cores as many as ranks if not
            given.
        grow_s: with a range of nodes, seconds that further ones must be free before the run goes on on them.
        folder: the folder in the cluster in which run folders are made; if not given, nodes see this machine's.
        sync: `upload` lets Ray copy this directory; `none` runs in `directory`, which nodes see.
        directory: where the command runs on the nodes; this one if not given.
        exclude: what is not copied, as a .gitignore writes it.
        tutti: `upload` brings this tutti; `installed` uses the cluster's.
        python, setup: the interpreter on the nodes, and shell lines before it.
        env: variables and their values; everybody who may use the cluster sees them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    address: Text | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    gpus: Annotated[float, Field(gt=0)] | None = None
    memory: Size | None = None
    resources: Annotated[dict[Text, Amount], BeforeValidator(mapped)] = {}
    grow_s: Annotated[float, Field(ge=0)] = 30.0
    folder: Absolute | None = None
    sync: Literal["upload", "none"] | None = None
    directory: Absolute | None = None
    exclude: Annotated[tuple[Text, ...], BeforeValidator(listed)] = ()
    tutti: Literal["upload", "installed"] = "upload"
    python: Text | None = None
    setup: tuple[str, ...] = ()
    env: Annotated[dict[Variable, str], BeforeValidator(mapped)] = {}


def read_ray_settings(given: Mapping[str, Any]) -> RaySettings:
    """Return the settings after a check.

    Raises:
        LaunchError: one does not exist, has no value that it may have, or contradicts another.
    """
    settings = read_cluster_settings(RaySettings, given, "ray")
    if settings.sync == "upload" and settings.directory is not None:
        raise LaunchError(
            f"sync=upload copies this directory, and directory={settings.directory} names another; leave one out"
        )
    reserved = {"TUTTI_SECRET", "RAY_JOB_STOP_WAIT_TIME_S"} & set(settings.env)
    if reserved:
        raise LaunchError(f"ray setting env: {min(reserved)} is made for each run; leave it out")
    return settings


def task_of(request: JobRequest, settings: RaySettings, job: str) -> dict[str, Any]:
    """Return what the driver in the cluster is to do, as plain data.

    Args:
        request: what the job is to run.
        settings: of the job.
        job: its name.

    Raises:
        LaunchError: it is not known what is to be reserved.
    """
    kind = "inside" if settings.folder is not None else "seen"
    folder = str(request.folder)
    if settings.folder is not None:
        folder = _earlier_folder(request.folder) or f"{settings.folder.rstrip('/')}/{job}"
    resume = request.resume
    if isinstance(resume, Path) and settings.folder is not None:
        resume = _earlier_folder(resume) or resume
    uploads = _uploads(settings)
    cpus = settings.cpus or (max(request.nproc) if request.nproc else None)
    if cpus is None:
        raise LaunchError("a run on Ray reserves cores for its ranks; say how many ranks a node has with --nproc N")
    words, files = list(request.words), ""
    if uploads or kind == "inside":  # nodes do not see this machine's files
        words, files = packed_files(words, request.script, request.directory)
    bundle = {
        "CPU": cpus,
        "GPU": settings.gpus,
        "memory": None if settings.memory is None else _nbytes(settings.memory),
    }
    return {
        "job": job,
        "kind": kind,
        "folder": folder,
        "resume": "" if resume is None or str(resume) == folder else str(resume),
        "directory": "" if uploads else settings.directory or str(request.directory),
        "words": [moved_word(word, request.directory, ".") for word in words] if uploads else words,
        "files": files,
        "nodes": request.nodes,
        "least_nodes": request.least_nodes or request.nodes,
        "grow_s": settings.grow_s,
        "bundle": {name: amount for name, amount in bundle.items() if amount is not None} | settings.resources,
        "threads": max(1, int(cpus // max(request.nproc or (1,)))),
        "keeps_threads": "OMP_NUM_THREADS" in settings.env,
        "python": settings.python or "",
        "setup": list(settings.setup),
        "grace_s": request.grace_s,
        "restarts": request.restarts,
    }


def command_task(command: NodeCommand, settings: RaySettings, job: str) -> dict[str, Any]:
    """Return what the driver in the cluster is to do for a command that needs no run folder, such as the doctor.

    Args:
        command: what is to run on each node.
        settings: of the job.
        job: its name.
    """
    nodes, nproc = command.nodes or 1, command.nproc or int(settings.gpus or 0) or 2
    request = JobRequest(
        name=command.words[0], folder=Path("/"), directory=Path.cwd(), words=command.words, nodes=nodes,
        nproc=(nproc,) * nodes, script=command.script or "", grace_s=1,
    )  # fmt: skip
    task = task_of(request, settings, job)
    return {**task, "kind": "command", "numbered": command.numbered, "nproc": nproc, "folder": "/", "resume": ""}


def _uploads(settings: RaySettings) -> bool:
    if settings.sync is None:
        return settings.folder is not None and settings.directory is None
    return settings.sync == "upload"


def _nbytes(size: str) -> int:
    number = size.rstrip("KMGTiB")
    unit = size[len(number) :].removesuffix("B")
    base = 1024 if unit.endswith("i") else 1000
    return int(float(number) * base ** "KMGT".find(unit[0]) * base if unit else float(number))


def runtime_env_of(request: JobRequest, settings: RaySettings) -> dict[str, Any]:
    """Return the environment that Ray makes for the job."""
    wait_s = int(request.grace_s + EXTRA_GRACE_S) + 30
    found: dict[str, Any] = {"env_vars": {**settings.env, "RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}}
    if settings.tutti == "upload":
        found["py_modules"] = [str(Path(__file__).parents[1])]
    if _uploads(settings):
        found["working_dir"] = str(request.directory)
        found["excludes"] = [*_NOT_COPIED, *settings.exclude]
    return found


def entrypoint(*arguments: str) -> str:
    """Return the shell command of a job's driver, with the arguments of `tutti.clusters.ray_driver.main`."""
    return shlex.join(["python3", "-c", f"exec({_BOOT!r})", *arguments])


def plain_name(name: str) -> str:
    """Return a name with letters, digits and dashes only."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name).strip("-")[:60] or "run"


def _earlier_folder(folder: Path) -> str:
    """Return the folder in the cluster of an earlier job of this run folder; empty without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / MARK).read_text(encoding="utf-8"))["inside"])
    return ""
