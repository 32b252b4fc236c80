"""Slurm: a batch job that starts `tutti run` once on each node, by sbatch, squeue, scontrol and scancel."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tutti.clusters.cluster_job import STAY_STOPPED, JobRequest, JobState, JobStatus
from tutti.clusters.cluster_resources import NodePool
from tutti.clusters.profile_file import read_cluster_settings
from tutti.config.safe_text import plain_text
from tutti.environment import in_slurm_job
from tutti.errors import LaunchError

LOG = "slurm-%j.out"

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
    (r"^(ReqNodeNotAvail|NodeDown|PartitionDown|PartitionInactive)", "nodes that it needs are down or reserved"),
    (r"^(Assoc|QOS|MaxJobs)", "a limit of your account or its quota is reached"),
    (r"^(JobHeld|launch_failed_requeued_held)", "it is held: release it with `scontrol release`"),
)

Text = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\"`$\\]*$")]


class SlurmSettings(BaseModel):
    """The settings of a job, from `[slurm]` of tutti.toml and from --request.

    Attributes:
        time: a duration such as "2h30m", or as Slurm writes it.
        cpus: cores per node; all that a rank may use, times the ranks, if the cluster divides nodes.
        gpus: GPUs per node.
        mem: memory per node, such as "64G".
        python: the interpreter on the nodes; the one of this command if not given.
        setup: shell lines that run first on each node, such as "module load cuda".
        container: what the command of a node is prefixed with, such as "apptainer exec --nv image.sif".
        options: further options of sbatch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    constraint: Text | None = None
    reservation: Text | None = None
    nodelist: Text | None = None
    exclude: Text | None = None
    time: Text | None = None
    cpus: Annotated[int, Field(ge=1)] | None = None
    gpus: Text | None = None
    mem: Text | None = None
    python: Text | None = None
    setup: tuple[str, ...] = ()
    container: str = ""
    options: tuple[Text, ...] = ()


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
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(request, settings))]
    lines += ["", f"cd {shlex.quote(str(request.directory))} || exit 2"]
    node = f"{shlex.quote(settings.python or sys.executable)} -m tutti.clusters.slurm_node"
    arguments = (str(request.folder), str(request.resume or ""), *request.words)
    steps = [*settings.setup, f"exec {settings.container} {node} {shlex.join(arguments)}".replace("  ", " ")]
    command = shlex.quote("\n".join(steps))
    stay = shlex.quote(str(request.folder / STAY_STOPPED))
    lines += [
        "trap : TERM USR1  # signals are for the ranks: they write a checkpoint",
        f"srun --nodes={request.nodes} --ntasks={request.nodes} --ntasks-per-node=1 --kill-on-bad-exit=0 "
        f"bash -c {command}",
        "code=$?",
        f"if [ $code -eq 75 ] && [ ! -e {stay} ] && [ ${{SLURM_RESTART_COUNT:-0}} -lt {MOST_REQUEUES} ]; then",
        "  scontrol requeue $SLURM_JOB_ID && sleep 60  # Slurm ends this shell meanwhile",
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _options(request: JobRequest, settings: SlurmSettings) -> list[str]:
    notice = int(request.grace_s) + 60
    log = str(request.folder).replace("%", "%%") + f"/{LOG}"
    found = [
        f"--job-name={_quoted(request.name)}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
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
        return ()

    def preview(self, request: JobRequest) -> str:
        return batch_script(request)

    def submit(self, request: JobRequest) -> str:
        script = batch_script(request)
        code, out, err = _ask("sbatch", "--parsable", text=script)
        if code:
            raise LaunchError(_refusal(err or out))
        return out.strip().partition(";")[0]

    def log(self, request: JobRequest, job: str) -> str:
        return str(request.folder / LOG.replace("%j", job))

    def status(self, job: str) -> JobStatus:
        code, out, err = _ask("scontrol", "--oneliner", "show", "job", job)
        if code:
            if "invalid job id" in err.lower():
                return _accounted(job)
            raise LaunchError(_refusal(err or out))
        fields = dict(re.findall(r"(\w+)=(\S*)", out))
        state = _STATES.get(fields.get("JobState", ""), "unknown")
        status, _, number = fields.get("ExitCode", "").partition(":")
        ended = state in ("completed", "failed", "cancelled")
        exit_code = int(status or 0) or (128 + int(number) if number.isdigit() and int(number) else 0)
        reason = fields.get("Reason", "None").partition(",")[0]
        return JobStatus(
            state=state,
            reason=_explained(reason) if reason != "None" and state in ("pending", "failed") else "",
            nodes="" if fields.get("NodeList", "(null)") == "(null)" else fields["NodeList"],
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
        steps = [*read.setup, f"exec {read.container} {python} -m tutti.cli.main {shlex.join(words)}"]
        return ["srun", "--job-name=tutti", *asked, "bash", "-c", "\n".join(steps).replace("  ", " ")]

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
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, words, re.IGNORECASE):
            return f"Slurm refuses the job ({words}); {remedy}"
    return f"Slurm refuses the job ({words}); correct what it names in tutti.toml or --request"
