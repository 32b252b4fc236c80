"""What Slurm is asked for: the settings of a job, its batch script, and srun for `tutti doctor` and `tutti probe`."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tutti.clusters.cluster_job import STAY_STOPPED, JobRequest
from tutti.clusters.profile_file import read_cluster_settings
from tutti.config.run_folder import RunFolder
from tutti.errors import LaunchError

LOG = "slurm-%j.out"

LOG_OF_ARRAY = "%a/slurm-%A_%a.out"
"""The same of an array's runs, below the folder that has theirs."""

MOST_REQUEUES = 1000
"""How often a job that stops with a checkpoint goes on by itself at most."""

_INHERITED = ("account", "qos", "reservation", "exclude", "mem")
"""What a component of a heterogeneous job has from the one before it, unless it says another."""

Text = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\"`$\\]*$")]


class SlurmNodes(BaseModel):
    """Which nodes are asked for, and what of each.

    Attributes:
        cpus: cores per node; all that a rank may use, times the ranks, if the cluster divides nodes.
        gpus: GPUs per node.
        mem: memory per node, such as "64G".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    constraint: Text | None = None
    reservation: Text | None = None
    nodelist: Text | None = None
    exclude: Text | None = None
    cpus: Annotated[int, Field(ge=1)] | None = None
    gpus: Text | None = None
    mem: Text | None = None


class SlurmComponent(SlurmNodes):
    """Nodes of one kind in a heterogeneous job: what it does not say is as for the whole job.

    Attributes:
        nodes: their number.
        ranks: on each of them.
    """

    nodes: Annotated[int, Field(ge=1)] = 1
    ranks: Annotated[int, Field(ge=1)] | None = None


class SlurmSettings(SlurmNodes):
    """The settings of a job, from `[slurm]` of tutti.toml and from --request.

    Attributes:
        time: a duration such as "2h30m", or as Slurm writes it.
        python: the interpreter on the nodes; the one of this command if not given.
        setup: shell lines that run first on each node, such as "module load cuda".
        container: what the command of a node is prefixed with, such as "apptainer exec --nv image.sif".
        options: further options of sbatch.
        components: the kinds of nodes of a heterogeneous job.
    """

    time: Text | None = None
    python: Text | None = None
    setup: tuple[str, ...] = ()
    container: str = ""
    options: tuple[Text, ...] = ()
    components: tuple[SlurmComponent, ...] = ()


def read_settings(given: Mapping[str, Any]) -> SlurmSettings:
    """Return the settings after a check.

    Raises:
        LaunchError: one does not exist, or has no value that it may have.
    """
    return read_cluster_settings(SlurmSettings, given, "slurm")


def components_of(settings: SlurmSettings) -> list[tuple[SlurmSettings, SlurmComponent]]:
    """Return the components of a heterogeneous job, each with the settings that hold for its nodes.

    Raises:
        LaunchError: a component lacks a setting that Slurm would take from the one before it.
    """
    found: list[tuple[SlurmSettings, SlurmComponent]] = []
    for number, each in enumerate(settings.components, 1):
        own = settings.model_copy(update=each.model_dump(exclude={"nodes", "ranks"}, exclude_none=True))
        for name in _INHERITED if found else ():
            before = getattr(found[-1][0], name)
            if getattr(own, name) is None and before is not None:
                raise LaunchError(
                    f"component {number} of [[slurm.components]] has no {name}, and Slurm would give it {before}, that "
                    "of the one before; name one for it, or put it before those that have one"
                )
        found.append((own, each))
    return found


def batch_script(request: JobRequest) -> str:
    """Return the batch script of a job.

    A job that ends with exit code 75 has stopped with a checkpoint: it is put into the queue again, and goes on there.

    Raises:
        LaunchError: a setting does not exist, or has no value that it may have.
    """
    settings = read_settings(request.settings)
    lines = ["#!/bin/bash", *_header(request, settings), "", f"cd {shlex.quote(str(request.directory))} || exit 2"]
    return "\n".join([*lines, *_body(request, settings)]) + "\n"


def array_script(requests: Mapping[int, JobRequest], at_once: int | None) -> str:
    """Return the batch script of an array of runs, each of which runs as a job of its own would.

    Raises:
        LaunchError: a setting does not exist, or has no value that it may have.
    """
    first = next(iter(requests.values()))
    settings = read_settings(first.settings)
    numbers = ",".join(map(str, requests)) + (f"%{at_once}" if at_once is not None else "")
    lines = ["#!/bin/bash", *_header(first, settings, LOG_OF_ARRAY), f"#SBATCH --array={numbers}", ""]
    lines += [f"cd {shlex.quote(str(first.directory))} || exit 2", "case $SLURM_ARRAY_TASK_ID in"]
    for number, request in requests.items():
        lines += [f"{number})", *_body(request, settings), ";;"]
    return "\n".join([*lines, "esac"]) + "\n"


def _header(request: JobRequest, settings: SlurmSettings, log: str = LOG) -> list[str]:
    if not settings.components:
        return [f"#SBATCH {option}" for option in _options(request, settings, log)]
    if log == LOG_OF_ARRAY:
        raise LaunchError(
            "--array: Slurm has no arrays of heterogeneous jobs; leave out [[slurm.components]], or --array"
        )
    lines: list[str] = []
    begin = 0
    for own, component in components_of(settings):
        counts = request.nproc[begin : begin + component.nodes] if request.nproc is not None else None
        part = replace(request, nodes=component.nodes, nproc=counts)
        lines += ["#SBATCH hetjob"] if lines else []
        lines += [f"#SBATCH {option}" for option in _options(part, own, log)]
        begin += component.nodes
    return lines


def _body(request: JobRequest, settings: SlurmSettings) -> list[str]:
    node = f"{shlex.quote(settings.python or sys.executable)} -m tutti.clusters.slurm_node"
    named = settings.components[:1] and settings.components[0].ranks and request.nproc
    ranks = ("--nproc", ",".join(map(str, request.nproc or ()))) if named else ()
    ranged = request.least_nodes is not None
    nodes = f"{request.least_nodes}:{request.nodes}" if ranged else str(request.nodes)
    place = (str(request.directory), nodes, str(request.folder), str(request.resume or ""))
    steps = [*_setup(settings), f"exec {settings.container} {node} {shlex.join((*place, *ranks, *request.words))}"]
    command = shlex.quote("\n".join(steps).replace("exec  ", "exec "))
    stay = shlex.quote(str(request.folder / STAY_STOPPED))
    metrics = shlex.quote(str(RunFolder(request.folder).metrics))
    groups = ",".join(map(str, range(len(settings.components))))  # one step, whose tasks are numbered over all of them
    where = f"--het-group={groups}" if groups else f"--nodes={request.nodes} --ntasks={request.nodes}"
    if ranged:  # of a node that is lost, srun makes a failure of the step
        where = "--no-kill --nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES"
    return [
        "trap : TERM USR1  # signals are for the ranks: they write a checkpoint",
        *([f"before=$(stat -c %s {metrics} 2>/dev/null || echo 0)"] if ranged else []),
        f"srun {where} --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c {command}",
        "code=$?",
        *([f"[ $code -eq 0 ] || {{ {_ended(request, settings)} $before $code; code=$?; }}"] if ranged else []),
        f"if [ $code -eq 75 ] && [ ! -e {stay} ] && [ ${{SLURM_RESTART_COUNT:-0}} -lt {MOST_REQUEUES} ]; then",
        "  scontrol requeue $SLURM_JOB_ID && sleep 60  # Slurm ends this shell meanwhile",
        "fi",
        "exit $code",
    ]


def _ended(request: JobRequest, settings: SlurmSettings) -> str:
    """Return the command that ends with the exit code of the run, as its folder has it; srun's code is added to it."""
    words = shlex.join(("--ended", str(request.folder)))
    python = shlex.quote(settings.python or sys.executable)
    steps = [*settings.setup, f'exec {settings.container} {python} -m tutti.clusters.slurm_node {words} "$1" "$2"']
    return f"bash -c {shlex.quote(chr(10).join(steps).replace('exec  ', 'exec '))} bash"


def _setup(settings: SlurmSettings) -> list[str]:
    """Return the lines of a node that come first; one that fails is named."""
    if not settings.setup:
        return []
    lines = ['fail() { echo "tutti: setup line $1 failed on $HOSTNAME; correct it in tutti.toml" >&2; exit 2; }']
    for number, line in enumerate(settings.setup, 1):
        lines += [f"{{ {line}", f"}} </dev/null || fail {number}"]
    return lines


def _options(request: JobRequest, settings: SlurmSettings, name: str) -> list[str]:
    notice = int(request.grace_s) + 60
    folder = request.folder if name == LOG else request.folder.parent
    log = str(folder).replace("%", "%%") + f"/{name}"
    found = [
        f"--job-name={_quoted(request.name)}",
        *_node_count(request),
        f"--output={_quoted(log)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{notice}",
    ]
    cores = settings.cpus
    if cores is None and request.nproc:
        cores = max(request.nproc)
    if cores is not None:
        found.append(f"--cpus-per-task={cores}")
    if settings.time is not None:
        found.append(f"--time={_minutes(settings.time, notice)}")
    return [*found, *_same_options(settings, _quoted), *settings.options]


def _node_count(request: JobRequest) -> list[str]:
    if request.least_nodes is None:
        return [f"--nodes={request.nodes}", "--ntasks-per-node=1"]
    # With --ntasks-per-node, Slurm allocates the fewest nodes of a range.
    return [f"--nodes={request.least_nodes}-{request.nodes}", "--no-kill"]


def _same_options(settings: SlurmSettings, quoted: Callable[[str], str]) -> list[str]:
    """Return the options that sbatch and srun share."""
    found = [] if settings.gpus is None else [f"--gpus-per-node={quoted(settings.gpus)}"]
    for name in ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "mem"):
        value = getattr(settings, name)
        if value is not None:
            found.append(f"--{name}={quoted(value)}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """The nodes of a command, or of a component of a heterogeneous job.

    Attributes:
        step: options of srun that say how often it starts the command, and where.
        nodes: options that say which nodes are asked for.
    """

    step: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.step, *self.nodes)


def step_requests(settings: SlurmSettings, nodes: int, tasks_per_node: int | None) -> list[StepRequest]:
    """Return what is asked for a command on nodes, for each component of a heterogeneous job.

    Args:
        settings: of the job.
        nodes: number of nodes of a job of equal nodes.
        tasks_per_node: how often the command is started on each node; None for the `ranks` of each component, or once.

    Raises:
        LaunchError: a setting has no value that it may have.
    """
    counted = [(own, each.nodes, each.ranks) for own, each in components_of(settings)] or [(settings, nodes, None)]
    found = []
    for own, count, ranks in counted:
        tasks = tasks_per_node or ranks or 1
        step = [f"--nodes={count}", f"--ntasks-per-node={tasks}", f"--ntasks={count * tasks}"]
        if own.cpus is not None:
            step.append(f"--cpus-per-task={max(1, own.cpus // tasks)}")
        asked = [] if own.time is None else [f"--time={_minutes(own.time, 0)}"]
        asked += [*_same_options(own, lambda text: text), *own.options]
        found.append(StepRequest(step=tuple(step), nodes=tuple(asked)))
    return found


def step_words(requests: Sequence[StepRequest], command: Sequence[str], *, allocated: bool) -> list[str]:
    """Return the command of Slurm that starts a command on the nodes of all requests, as one step.

    For components of a heterogeneous job, salloc asks for the nodes: only then do tasks learn which node has rank 0.

    Args:
        requests: the nodes.
        command: what is started.
        allocated: whether this process runs inside an allocation.
    """
    if len(requests) == 1:
        return ["srun", "--job-name=tutti", *requests[0].all, *command]
    asked, steps = list[str](), list[str]()
    for number, request in enumerate(requests):
        between = [":"] if number else []
        asked += [*between, "--job-name=tutti", *request.all]
        steps += [*between, f"--het-group={number}", *request.step, *command]
    return [*([] if allocated else ["salloc", "--quiet", *asked]), "srun", *steps]


def node_script(settings: SlurmSettings, words: Sequence[str]) -> list[str]:
    """Return the command that runs `tutti WORDS` on a node, after the lines of `setup`."""
    python = shlex.quote(settings.python or sys.executable)
    steps = [*_setup(settings), f"exec {settings.container} {python} -m tutti.cli.main {shlex.join(words)}"]
    return ["bash", "-c", "\n".join(steps).replace("exec  ", "exec ")]


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w@%+=:,./\[\]-]+", text) else f'"{text}"'


def _minutes(time: str, notice_s: int) -> str:
    """Return a duration as Slurm reads it.

    Raises:
        LaunchError: it leaves no time for training.
    """
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", time.replace(" ", "").lower())
    if match is None or not any(match.groups()):
        return time  # Slurm's own form, such as 1-12:00:00
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s <= notice_s:
        raise LaunchError(
            f"time={time}: ranks are told to write a checkpoint {notice_s} s before the limit; ask for more time, or "
            "lower --grace"
        )
    return str(-(-total_s // 60))
