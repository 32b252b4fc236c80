"""Slurm: a batch job that starts `tutti run` once on each node, by sbatch, squeue, scontrol and scancel."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tutti.clusters.cluster_job import STAY_STOPPED, JobRequest, JobState, JobStatus
from tutti.clusters.cluster_resources import NodePool
from tutti.clusters.profile_file import read_cluster_settings
from tutti.config.run_folder import RunFolder
from tutti.config.safe_text import plain_text
from tutti.environment import in_slurm_job
from tutti.errors import LaunchError

LOG = "slurm-%j.out"

LOG_OF_ARRAY = "%a/slurm-%A_%a.out"
"""The same of an array's runs, below the folder that has theirs."""

MOST_REQUEUES = 1000
"""How often a job that stops with a checkpoint goes on by itself at most."""

_TIMEOUT_S = 60.0

_STATES: dict[str, JobState] = {
    "PENDING": "pending", "CONFIGURING": "pending", "REQUEUED": "pending", "REQUEUE_HOLD": "pending",
    "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running", "STAGE_OUT": "running",
    "COMPLETED": "completed", "CANCELLED": "cancelled", "PREEMPTED": "failed", "FAILED": "failed",
    "TIMEOUT": "failed", "NODE_FAIL": "failed", "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "failed", "DEADLINE": "failed",
}  # fmt: skip

_REMEDIES = (
    (r"invalid partition", "`sinfo --summarize` lists the partitions; name one with --request partition=NAME"),
    (r"invalid account", "`sacctmgr show associations user=$USER` lists yours; name one with --request account=NAME"),
    (r"invalid qos", "`sacctmgr show qos` lists them; name one with --request qos=NAME"),
    (r"time limit", "ask for less with --request time=DURATION; `sinfo` shows the partition's limit"),
    (
        r"node configuration is not available|more processors|invalid generic resource|invalid gres|too many",
        "ask for nodes that there are: `sinfo --Node --long` shows them, with their cores, memory and GPUs",
    ),
    (r"quota|limit|violates", "wait for other jobs of yours to end, or ask for less"),
    (r"contact slurm controller|connection refused", "slurmctld does not answer: ask the administrator, or try later"),
)

_REASONS = (
    (
        r"^(PartitionNodeLimit|PartitionTimeLimit|PartitionConfig)$",
        "it asks for more than the partition gives, so it never starts",
    ),
    (r"^(BadConstraints|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed)$", "so it never starts"),
    (r"can't use this partition|not permitted to use", "name another one: --request partition=NAME, or account=NAME"),
    (r"^(ReqNodeNotAvail|NodeDown|PartitionDown|PartitionInactive)", "nodes that it needs are down or reserved"),
    (r"^(Assoc|QOS|MaxJobs)", "a limit of your account or its quota is reached"),
    (r"^(JobHeld|launch_failed_requeued_held)", "it is held: release it with `scontrol release`"),
)

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
    for component in settings.components:
        own = component.model_dump(exclude={"nodes", "ranks"}, exclude_none=True)
        counts = request.nproc[begin : begin + component.nodes] if request.nproc is not None else None
        part = replace(request, nodes=component.nodes, nproc=counts)
        lines += ["#SBATCH hetjob"] if lines else []
        lines += [f"#SBATCH {option}" for option in _options(part, settings.model_copy(update=own), log)]
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


class Slurm:
    """See `tutti.clusters.cluster_job.Scheduler`."""

    def nodes(self, settings: Mapping[str, Any], nnodes: int | None) -> tuple[int | None, ...]:
        found = tuple(each.ranks for each in read_settings(settings).components for _ in range(each.nodes))
        if found and nnodes not in (None, len(found)):
            raise LaunchError(f"--nnodes {nnodes}: [[slurm.components]] has {len(found)} nodes; leave one out")
        if None in found and any(found):
            raise LaunchError("[[slurm.components]]: only some have `ranks`; give all of them one, or none")
        return found

    def preview(self, request: JobRequest) -> str:
        return batch_script(request)

    def submit(self, request: JobRequest) -> str:
        script = batch_script(request)
        code, out, err = _ask("sbatch", "--parsable", text=script)
        if code:
            raise LaunchError(_refusal(err or out))
        return out.strip().partition(";")[0]

    def preview_array(self, requests: Mapping[int, JobRequest], at_once: int | None) -> str:
        return array_script(requests, at_once)

    def submit_array(self, requests: Mapping[int, JobRequest], at_once: int | None) -> dict[int, str]:
        code, out, err = _ask("sbatch", "--parsable", text=array_script(requests, at_once))
        if code:
            raise LaunchError(_refusal(err or out))
        job = out.strip().partition(";")[0]
        return {number: f"{job}_{number}" for number in requests}

    def check_range(self, request: JobRequest) -> None:
        if read_settings(request.settings).components:
            raise LaunchError(
                f"--nnodes {request.least_nodes}:{request.nodes}: a heterogeneous job has the nodes that "
                "[[slurm.components]] say; leave one out"
            )

    def log(self, request: JobRequest, job: str) -> str:
        return str(request.folder / LOG.replace("%j", job))  # an array's job is ARRAY_NUMBER

    def status(self, job: str) -> JobStatus:
        code, out, err = _ask("scontrol", "--oneliner", "show", "job", job)
        if code:
            if "invalid job id" in err.lower():
                return _accounted(job)
            raise LaunchError(_refusal(err or out))
        parts = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in out.splitlines()]  # of a heterogeneous job
        fields = next((part for part in parts if part.get("JobId") == job), dict(re.findall(r"(\w+)=(\S*)", out)))
        nodes = [part["NodeList"] for part in parts if part.get("NodeList", "(null)") != "(null)"]
        state = _STATES.get(fields.get("JobState", ""), "unknown")
        status, _, number = fields.get("ExitCode", "").partition(":")
        ended = state in ("completed", "failed", "cancelled")
        exit_code = int(status or 0) or (128 + int(number) if number.isdigit() and int(number) else 0)
        reason = _plain_reason(fields.get("Reason", "None"))
        return JobStatus(
            state=state,
            reason=_explained(reason) if reason != "None" and state in ("pending", "failed") else "",
            nodes=",".join(nodes),
            exit_code=exit_code if ended else None,
        )

    def command_on_nodes(
        self, words: Sequence[str], nodes: int, tasks_per_node: int, settings: Mapping[str, Any]
    ) -> list[str]:
        read = read_settings(settings)
        found = [f"--nodes={nodes}", f"--ntasks-per-node={tasks_per_node}", f"--ntasks={nodes * tasks_per_node}"]
        if read.cpus is not None:
            found.append(f"--cpus-per-task={max(1, read.cpus // tasks_per_node)}")
        if read.time is not None:
            found.append(f"--time={_minutes(read.time, 0)}")
        asked = [*found, *_same_options(read, lambda text: text), *read.options]
        if not in_slurm_job():  # in an allocation that there is, srun asks for nothing new
            code, out, err = _ask("srun", "--test-only", *asked, "true")
            if code:
                raise LaunchError(_refusal(err or out))
        python = shlex.quote(read.python or sys.executable)
        steps = [*_setup(read), f"exec {read.container} {python} -m tutti.cli.main {shlex.join(words)}"]
        return ["srun", "--job-name=tutti", *asked, "bash", "-c", "\n".join(steps).replace("exec  ", "exec ")]

    def pools(self, settings: Mapping[str, Any]) -> tuple[NodePool, ...]:
        from tutti.clusters.slurm_resources import NodeChoice, slurm_pools

        names = set(NodeChoice.__dataclass_fields__)
        return slurm_pools(_answer, NodeChoice(**read_settings(settings).model_dump(include=names)))

    def collect(self, job: str) -> bool:
        return False

    def stop(self, job: str) -> None:
        self._cancel("--signal=TERM", job)

    def cancel(self, job: str) -> None:
        self._cancel(job)

    def _cancel(self, *words: str) -> None:
        code, out, err = _ask("scancel", *words)
        if code and "already completed" not in err.lower() and "invalid job id" not in err.lower():
            raise LaunchError(_refusal(err or out))


def _answer(program: str, *words: str) -> str:
    """Return what a command of Slurm prints. Raises LaunchError if it fails."""
    code, out, err = _ask(program, *words)
    if code:
        raise LaunchError(_refusal(err or out))
    return out


def _plain_reason(text: str) -> str:
    """Return a reason as Slurm means it: a word of its own, or a sentence that has underscores for spaces."""
    head = text.partition(",")[0]
    return head if re.fullmatch(r"[A-Za-z]+|launch_failed_requeued_held", head) else text.replace("_", " ")


def _explained(reason: str) -> str:
    """Return Slurm's reason, with what it means where that is not plain."""
    return next((f"{reason}: {words}" for pattern, words in _REASONS if re.search(pattern, reason)), reason)


def _accounted(job: str) -> JobStatus:
    """Return what the accounting knows of a job that slurmctld has forgotten."""
    if shutil.which("sacct") is None:
        return JobStatus(state="unknown")
    code, out, _ = _ask("sacct", "--noheader", "--parsable2", "--allocations", "-j", job, "--format=State,ExitCode")
    state, _, exit_code = out.strip().partition("\n")[0].partition("|")
    if code or not state:
        return JobStatus(state="unknown")
    status, _, number = exit_code.partition(":")
    return JobStatus(
        state=_STATES.get(state.split()[0], "unknown"),
        exit_code=int(status or 0) or (128 + int(number) if number.isdigit() and int(number) else 0),
    )


def _ask(program: str, *words: str, text: str | None = None) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            [program, *words], input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{program} is not here: Slurm's commands are on its login nodes; log in to one, or add them to PATH"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{program} did not answer in {_TIMEOUT_S:g} s; is slurmctld up (sinfo)?") from None
    return done.returncode, done.stdout, done.stderr


def _refusal(said: str) -> str:
    """Return Slurm's refusal as a sentence with a remedy."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in said.splitlines() if line.strip()]
    words = plain_text("; ".join(dict.fromkeys(lines)))[:300] or "it gave no reason"
    if re.search(r"resolve_ctls|configuration source|SLURM_CONF", words, re.IGNORECASE):
        return (
            f"this machine does not know where Slurm is ({words}); run this on a login node, or name its configuration "
            "in SLURM_CONF"
        )
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, words, re.IGNORECASE):
            return f"Slurm refuses the job ({words}); {remedy}"
    return f"Slurm refuses the job ({words}); correct what it names in tutti.toml or --request"
