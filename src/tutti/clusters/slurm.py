"""Slurm: a batch job that starts `tutti run` once on each node, by sbatch, squeue, scontrol and scancel."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tutti.clusters.cluster_job import JobRequest, JobState, JobStatus
from tutti.clusters.cluster_resources import NodePool, NodeRequest
from tutti.clusters.slurm_script import (
    LOG,
    SlurmSettings,
    array_script,
    batch_script,
    components_of,
    node_script,
    read_settings,
    step_requests,
    step_words,
)
from tutti.config.safe_text import plain_text
from tutti.environment import in_slurm_job
from tutti.errors import LaunchError

if TYPE_CHECKING:
    from tutti.clusters.slurm_resources import NodeChoice

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
        self, words: Sequence[str], nodes: int, tasks_per_node: int | None, settings: Mapping[str, Any]
    ) -> list[str]:
        read = read_settings(settings)
        requests, allocated = step_requests(read, nodes, tasks_per_node), in_slurm_job()
        for request in () if allocated else requests:  # in an allocation that there is, srun asks for nothing new
            code, out, err = _ask("srun", "--test-only", *request.all, "true")
            if code:
                raise LaunchError(_refusal(err or out))
        return step_words(requests, node_script(read, words), allocated=allocated)

    def pools(self, settings: Mapping[str, Any]) -> tuple[NodePool, ...]:
        from tutti.clusters.slurm_resources import slurm_pools

        return slurm_pools(_answer, _choice(read_settings(settings)))

    def kinds(self, settings: Mapping[str, Any]) -> int:
        return len({own.model_dump_json() for own, _ in components_of(read_settings(settings))})

    def requests(self, settings: Mapping[str, Any]) -> tuple[NodeRequest, ...]:
        from tutti.clusters.slurm_resources import ComponentChoice, component_nodes

        asked = components_of(read_settings(settings))
        choices = [ComponentChoice(choice=_choice(own), nodes=each.nodes, ranks=each.ranks) for own, each in asked]
        return component_nodes(_answer, choices)

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


def _choice(settings: SlurmSettings) -> "NodeChoice":
    from tutti.clusters.slurm_resources import NodeChoice

    names = set(NodeChoice.__dataclass_fields__)
    return NodeChoice(**settings.model_dump(include=names))


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
