"""The state of a job on Kubernetes in words: why its pods wait, and how it has ended."""

import contextlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tutti.clusters.cluster_job import JobStatus
from tutti.clusters.kubernetes_api import Cluster, pod_index
from tutti.clusters.kubernetes_manifest import CONTAINER, QUEUE_LABEL
from tutti.config.safe_text import plain_text, shorten
from tutti.errors import RESUMABLE

STOP, EXIT_CODE = "tutti/stopped-at", "tutti/exit-code"
"""Annotations of a Job that was stopped: when, and the exit code of its pods."""

SEEN_S = 15.0
"""Seconds in which the end of a stopped job is noted, beyond those that its pods have."""

_WAITS = (
    (
        r"^Unschedulable",
        r"Insufficient|didn't match|untolerated|unbound",
        "ask for less, or set node_selector and tolerations as the nodes need it (`kubectl describe nodes`)",
    ),
    (
        r"^Unschedulable",
        r"persistentvolumeclaim",
        "`kubectl get pvc` lists the claims; name one with --request volumes=CLAIM:PATH",
    ),
    (
        r"^(ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull)",
        r"",
        "correct --request image=NAME:TAG, or name the registry's credentials with pull_secrets",
    ),
    (r"^CreateContainerConfigError", r"secret", "`kubectl get secrets` lists them; correct secrets or secret_env"),
    (
        r"^(CreateContainerError|RunContainerError|StartError|ContainerCannotRun)",
        r"",
        "the command cannot start in the image: correct python, prefix, directory or image",
    ),
    (r"^FailedCreate", r"exceeded quota", "ask for less, or wait for other jobs to end (`kubectl describe quota`)"),
    (r"^FailedCreate", r"serviceaccount", "`kubectl get serviceaccounts` lists them; correct service_account"),
    (r"^FailedCreate", r"PriorityClass", "`kubectl get priorityclasses` lists them; correct priority_class"),
    (r"^FailedCreate", r"violates PodSecurity", "set user=NUMBER, and the rest with `pod`"),
    (
        r"^(FailedMount|FailedAttachVolume)",
        r"",
        "correct volumes; a claim that several nodes use at once must be ReadWriteMany",
    ),
    (r"^OOMKilled", r"", "it used more memory than it may: ask for more with --request memory=SIZE"),
    (r"^Evicted", r"", "its node ran out of memory or disk: ask for more with --request memory=SIZE"),
)
"""Reason, what its message must have, and the remedy."""


def container_state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the container that trains."""
    found = pod.get("status", {}).get("containerStatuses") or []
    states: list[Mapping[str, Any]] = [each.get("state") or {} for each in found if each["name"] == CONTAINER]
    return states[0] if states else {}


def exit_code(pod: Mapping[str, Any]) -> int | None:
    """Return the exit code of a pod; None if it has none yet."""
    ended = container_state(pod).get("terminated")
    return int(ended["exitCode"]) if ended else None


def status_of(cluster: Cluster, space: str, job: Mapping[str, Any], pods: list[dict[str, Any]]) -> JobStatus:
    state = job.get("status", {})
    conditions = {each["type"]: each for each in state.get("conditions") or [] if each["status"] == "True"}
    notes = job["metadata"].get("annotations") or {}
    newest = list({pod_index(pod): pod for pod in pods}.values())
    nodes = ",".join(dict.fromkeys(pod["spec"]["nodeName"] for pod in newest if pod["spec"].get("nodeName")))
    if "Complete" in conditions:
        return JobStatus(state="completed", nodes=nodes, exit_code=0)
    if STOP in notes:
        return _stopped(notes, job, newest, nodes)
    if "Failed" in conditions:
        return _failed(conditions["Failed"], newest, nodes)
    if "Suspended" in conditions or (job["spec"].get("suspend") and not newest):
        queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
        reason = (
            f"it waits in the queue {queue} until Kueue admits it; `kubectl get workloads` says why" if queue else ""
        )
        return JobStatus(state="pending", reason=reason or "it is suspended")
    reason = _waiting(cluster, space, job, newest)
    begun = [pod for pod in newest if pod.get("status", {}).get("phase") in ("Running", "Succeeded")]
    return JobStatus(state="running" if begun else "pending", reason=reason, nodes=nodes)


def _stopped(notes: Mapping[str, str], job: Mapping[str, Any], pods: list[dict[str, Any]], nodes: str) -> JobStatus:
    """Return the state of a job that was told to stop."""
    if notes.get(EXIT_CODE, "").isdigit():
        code = int(notes[EXIT_CODE])
        return JobStatus(state="cancelled", reason="stopped by `tutti cancel`", nodes=nodes, exit_code=code)
    grace_s = job["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30) + SEEN_S
    with contextlib.suppress(ValueError):
        if (datetime.now(UTC) - datetime.fromisoformat(notes[STOP])).total_seconds() < grace_s:
            return JobStatus(state="running", reason="it was told to stop: ranks write a checkpoint", nodes=nodes)
    return JobStatus(state="cancelled", reason="it was stopped, and nobody saw its exit code", nodes=nodes)


def _failed(condition: Mapping[str, Any], pods: list[dict[str, Any]], nodes: str) -> JobStatus:
    ended = [(container_state(pod)["terminated"], pod) for pod in pods if exit_code(pod) is not None]
    ended = [(about, pod) for about, pod in ended if about["exitCode"] not in (0, RESUMABLE)]
    reason, code = str(condition.get("reason", "")), 1
    if ended:
        about, pod = min(ended, key=lambda pair: (pair[0].get("finishedAt") or "", pod_index(pair[1])))
        code = int(about["exitCode"])
        reason = f"pod {pod_index(pod)} ended with exit code {code}"
        remedy = waits_for(str(about.get("reason", "")), str(about.get("message", "")), known=True)
        reason += f": {remedy}" if remedy else ""
    elif condition.get("message"):
        reason += f": {condition['message']}"
    return JobStatus(state="failed", reason=reason, nodes=nodes, exit_code=code)


def _waiting(cluster: Cluster, space: str, job: Mapping[str, Any], pods: list[dict[str, Any]]) -> str:
    """Return why pods of a job do not run; empty if they do."""
    wanted = int(job["spec"]["completions"])
    if len(pods) < wanted:
        events = cluster.events(space, "Job", job["metadata"]["name"])
        reason, _, message = events[-1].partition(": ") if events else ("", "", "")
        missing = f"{wanted - len(pods)} of {wanted} pods do not exist yet"
        return f"{missing}: {waits_for(reason, message)}" if events else ""
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending"]
    if not waiting:
        return ""
    pod = waiting[0]
    conditions = pod["status"].get("conditions") or []
    unplaced = [each for each in conditions if each["type"] == "PodScheduled" and each["status"] == "False"]
    source: Mapping[str, Any] = unplaced[0] if unplaced else container_state(pod).get("waiting") or {}
    reason, message = str(source.get("reason", "")), str(source.get("message", ""))
    if reason in ("", "ContainerCreating"):
        events = cluster.events(space, "Pod", pod["metadata"]["name"])
        reason, _, message = events[-1].partition(": ") if events else (reason, "", message)
    words = waits_for(reason, message)
    return f"{len(waiting)} of {wanted} pods wait: {words}" if words else ""


def waits_for(reason: str, message: str, *, known: bool = False) -> str:
    """Return why a pod waits or ended, with the remedy.

    Args:
        reason: in one word, as the cluster has it.
        message: its sentence.
        known: return an empty text for a reason without a remedy.
    """
    words = shorten(plain_text(f"{reason}: {message}" if message else reason))
    for pattern, about, remedy in _WAITS:
        if re.search(pattern, reason) and re.search(about, message):
            return f"{words}; {remedy}"
    return "" if known else words
