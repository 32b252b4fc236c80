"""The objects of a run on Kubernetes, as plain data: an Indexed Job, the Service by which pods meet, and a Secret."""

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tutti.clusters.cluster_job import JobRequest
from tutti.clusters.local_files import moved_word, packed_files, path_in_word
from tutti.clusters.profile_file import listed, mapped, read_cluster_settings
from tutti.environment import FILES_VARIABLE
from tutti.errors import RESUMABLE, LaunchError

CONTAINER = "tutti"
"""Name of the container that trains."""

LABEL = "tutti/job"
"""Label of all objects of a run; its value is the job's name."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

EXTRA_GRACE_S = 30
"""Seconds that a pod has to end beyond those that ranks have to write a checkpoint."""

MARK = "kubernetes.json"
"""File of the run folder that says where pods keep the run, and by which they know that they see this folder."""

COMMAND = "command"
"""The kind of a job that runs another command than `tutti run`, and is removed when that has ended."""

ENDED = "tutti-ended "
"""Begins the last line of such a pod; the exit code of the command follows."""

_SECRET_KEY, _FILES_KEY = "secret", "files"

Text = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f]*$")]
Size = Annotated[str, Field(pattern=r"^\d+(\.\d+)?([EPTGM]i?|[kK]i|k)?$")]
Absolute = Annotated[str, Field(pattern=r"^/[^\x00-\x1f:]*$", max_length=300)]
Volume = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[^\x00-\x1f:]*$", max_length=300)]
Toleration = Annotated[
    str, Field(pattern=r"^[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?$", max_length=300)
]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$", max_length=200)]
KeyOfSecret = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[\w.-]+$", max_length=300)]


class KubernetesSettings(BaseModel):
    """The settings of a job, from `[kubernetes]` of tutti.toml and from --request.

    Attributes:
        image: the container's image, which has Python, torch, tutti and the script, unless a volume has them.
        namespace: where the objects are made; that of the context if not given.
        context, kubeconfig: which cluster; the current context of the usual file if not given.
        cpus, memory, gpus: what each pod gets; cores as many as ranks if not given.
        gpu_resource: the resource that counts GPUs.
        shared_memory: the most of /dev/shm, which is memory; all of the pod's if not given.
        volumes: claims and where they are mounted, such as "team-data:/data".
        folder: the folder in the pods in which run folders are made; if not given, pods see this machine's run folder.
        directory: where the command runs in the pods; that of the image if not given.
        python, prefix, setup: the interpreter in the image, what its command begins with, shell lines before it.
        env: variables and their values; secrets: Secrets all of whose keys become variables; secret_env: variables and
            "SECRET/KEY".
        node_selector, tolerations: which nodes; a toleration is "KEY:EFFECT" or "KEY=VALUE:EFFECT".
        queue: Kueue's LocalQueue.
        user, group: numbers of the user that runs the container and of the group that owns volumes.
        port: where pods meet.
        ttl: seconds after the end of the job at which the cluster removes it.
        pod, container: further fields of the pod's specification and of its container, such as volumes of other kinds;
            mappings are merged, lists are appended.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    image: Text | None = None
    namespace: Text | None = None
    context: Text | None = None
    kubeconfig: Text | None = None
    cpus: Annotated[int, Field(ge=1)] | None = None
    memory: Size | None = None
    gpus: Annotated[int, Field(ge=1)] | None = None
    gpu_resource: Text = "nvidia.com/gpu"
    shared_memory: Size | None = None
    volumes: Annotated[tuple[Volume, ...], BeforeValidator(listed)] = ()
    folder: Absolute | None = None
    directory: Absolute | None = None
    python: Text = "python"
    prefix: str = ""
    setup: tuple[str, ...] = ()
    env: Annotated[dict[Variable, str], BeforeValidator(mapped)] = {}
    secrets: Annotated[tuple[Text, ...], BeforeValidator(listed)] = ()
    secret_env: Annotated[dict[Variable, KeyOfSecret], BeforeValidator(mapped)] = {}
    node_selector: Annotated[dict[str, str], BeforeValidator(mapped)] = {}
    tolerations: Annotated[tuple[Toleration, ...], BeforeValidator(listed)] = ()
    service_account: Text | None = None
    pull_secrets: Annotated[tuple[Text, ...], BeforeValidator(listed)] = ()
    queue: Text | None = None
    priority_class: Text | None = None
    user: Annotated[int, Field(ge=0)] | None = None
    group: Annotated[int, Field(ge=0)] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 29400
    ttl: Annotated[int, Field(ge=60)] = 7 * 24 * 3600
    pod: dict[str, Any] = {}
    container: dict[str, Any] = {}


def read_kubernetes_settings(given: Mapping[str, Any]) -> KubernetesSettings:
    """Return the settings after a check.

    Raises:
        LaunchError: one does not exist, has no value that it may have, or the image is missing.
    """
    settings = read_cluster_settings(KubernetesSettings, given, "kubernetes")
    if settings.image is None:
        raise LaunchError("a run on Kubernetes needs an image with tutti; name it with --request image=NAME:TAG")
    reserved = {"TUTTI_SECRET", FILES_VARIABLE, "JOB_COMPLETION_INDEX"} & {*settings.env, *settings.secret_env}
    if reserved:
        raise LaunchError(f"kubernetes setting env: {min(reserved)} is made for each run; leave it out")
    return settings


def object_name(name: str, nodes: int, unique: str) -> str:
    """Return a name for the objects of a run, by RFC 1123, of which names of pods can be made.

    Args:
        name: of the run.
        nodes: number of pods.
        unique: what tells the job from others of this name.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"  # a Service's begins with a letter
    most = 63 - len(unique) - len(str(nodes)) - 8  # "-UNIQUE", "-INDEX" and the random end of a pod's name
    return f"{plain[:most].rstrip('-')}-{unique}"


def unique_part() -> str:
    """Return what tells one job from others."""
    return secrets.token_hex(3)


def mounts(settings: KubernetesSettings) -> dict[str, str]:
    """Return the claim that each path of the pods is on."""
    return {path: claim for claim, _, path in (text.partition(":") for text in settings.volumes)}


def is_mounted(path: str, settings: KubernetesSettings) -> bool:
    """Return whether a path of the pods is on a volume that outlives them."""
    further = settings.container.get("volumeMounts") or []
    paths = [*mounts(settings), *(str(each.get("mountPath", "/")) for each in further if isinstance(each, dict))]
    places = [PurePosixPath(place) for place in paths]
    return any(place in (PurePosixPath(path), *PurePosixPath(path).parents) for place in places)


def manifests(
    request: JobRequest, settings: KubernetesSettings, name: str, folder: str, kind: str
) -> list[dict[str, Any]]:
    """Return the Job, the Service and the Secret of a run; the Secret has only the files that are sent along yet.

    Args:
        request: what the job is to run.
        settings: of the job.
        name: of the objects.
        folder: the run folder in the pods.
        kind: "seen" for the folder of this machine, "inside" for one on a volume, `COMMAND` for another command than
            `tutti run`; else the store in which a pod leaves its checkpoints.

    Raises:
        LaunchError: a word names a file of this machine that has no place in the pods.
    """
    same = settings.directory in (None, str(request.directory))
    words, files = packed_files(
        request.words, request.script, request.directory, lambda path: same and is_mounted(path, settings)
    )
    request = replace(request, words=tuple(words))
    labels = {LABEL: name, "app.kubernetes.io/managed-by": "tutti"}
    about: dict[str, Any] = {"name": name, "labels": labels}
    if settings.namespace is not None:
        about = {**about, "namespace": settings.namespace}
    pod = _pod(request, settings, name, folder, kind, files)
    queue = {QUEUE_LABEL: settings.queue} if settings.queue is not None else {}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**about, "labels": {**labels, **queue}},
        "spec": {
            **({"suspend": True} if queue else {}),  # until Kueue admits it
            **_success_policy(request),
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            "backoffLimit": request.restarts,
            "podFailurePolicy": _failure_policy(),
            "ttlSecondsAfterFinished": settings.ttl,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": about,
        "spec": {
            "clusterIP": "None",  # names of pods, no address of its own
            "publishNotReadyAddresses": True,
            "selector": {LABEL: name},
            "ports": [{"name": "rendezvous", "port": settings.port}],
        },
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "Opaque", "immutable": True}
    return [job, service, {**secret, "stringData": {_FILES_KEY: files}} if files else secret]


def with_secret(secret: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a Secret with its value."""
    return {**secret, "stringData": {**secret.get("stringData", {}), _SECRET_KEY: text}}


def owned(thing: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object that the cluster removes with a job.

    Args:
        thing: the object.
        job: the metadata that the cluster has given the Job.
    """
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["name"], "uid": job["uid"]}
    return {**thing, "metadata": {**thing["metadata"], "ownerReferences": [owner]}}


def _success_policy(request: JobRequest) -> dict[str, Any]:
    """Return the policy of a range of nodes: the Job ends with pod 0, as other pods may never have been placed."""
    return {} if request.least_nodes is None else {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}


def _failure_policy() -> dict[str, Any]:
    """Pods that stopped with a checkpoint or lost their node are made again; a failure that tutti reports is final."""

    def on_code(action: str, *codes: int) -> dict[str, Any]:
        return {
            "action": action,
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)},
            "onPodConditions": [],  # the schema of Kubernetes 1.28 asks for it
        }

    lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [on_code("Ignore", RESUMABLE), lost, on_code("FailJob", 1, 2)]}


def _pod(
    request: JobRequest, settings: KubernetesSettings, name: str, folder: str, kind: str, files: str
) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if settings.shared_memory is not None:
        volumes[0]["emptyDir"]["sizeLimit"] = settings.shared_memory
    places = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, claim in enumerate(dict.fromkeys(mounts(settings).values())):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        of_claim = (path for path, other in mounts(settings).items() if other == claim)
        places += [{"name": f"volume-{number}", "mountPath": path} for path in of_claim]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": math.ceil(request.grace_s) + EXTRA_GRACE_S,
        "containers": [_container(request, settings, name, folder, kind, places, files)],
        "volumes": volumes,
    }
    if settings.user is not None or settings.group is not None:
        numbers = {"runAsUser": settings.user, "fsGroup": settings.group}
        pod["securityContext"] = {key: value for key, value in numbers.items() if value is not None}
    optional = {
        "nodeSelector": settings.node_selector,
        "tolerations": [_toleration(text) for text in settings.tolerations],
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": secret} for secret in settings.pull_secrets],
        "priorityClassName": settings.priority_class,
    }
    pod |= {key: value for key, value in optional.items() if value}
    merged: dict[str, Any] = _merged(pod, settings.pod)
    return merged


def _container(
    request: JobRequest,
    settings: KubernetesSettings,
    name: str,
    folder: str,
    kind: str,
    places: list[dict[str, str]],
    files: str,
) -> dict[str, Any]:
    directory, words = _placed(request, settings)
    resume = f"{request.resume or ''}"
    nodes = f"{'' if request.least_nodes is None else f'{request.least_nodes}:'}{request.nodes}"
    node = [*settings.prefix.split(), settings.python, "-m", "tutti.clusters.kubernetes_node"]
    node += [kind, folder, resume, nodes, f"{name}-{{}}.{name}:{settings.port}", *words]
    if settings.setup:
        node = ["sh", "-c", "\n".join(["set -e", *settings.setup, 'exec "$@"']), "sh", *node]
    secret = {"secretKeyRef": {"name": name, "key": _SECRET_KEY}}
    variables: list[dict[str, Any]] = [{"name": "TUTTI_SECRET", "valueFrom": secret}]
    if files:
        of_files = {"secretKeyRef": {"name": name, "key": _FILES_KEY}}
        variables.append({"name": FILES_VARIABLE, "valueFrom": of_files})
    variables += [{"name": key, "value": value} for key, value in settings.env.items()]
    for variable, place in settings.secret_env.items():
        of, _, key = place.partition("/")
        variables.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": of, "key": key}}})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": settings.image,
        "command": node,
        "env": variables,
        "volumeMounts": places,
        "ports": [{"name": "rendezvous", "containerPort": settings.port}],
        "securityContext": {"allowPrivilegeEscalation": False},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if directory is not None:
        container["workingDir"] = directory
    if settings.secrets:
        container["envFrom"] = [{"secretRef": {"name": each}} for each in settings.secrets]
    resources = _resources(request, settings)
    if resources:
        container["resources"] = {"requests": resources, "limits": resources}
    merged: dict[str, Any] = _merged(container, settings.container)
    return merged


def _resources(request: JobRequest, settings: KubernetesSettings) -> dict[str, str]:
    cores = settings.cpus or (max(request.nproc) if request.nproc else None)
    found = {"cpu": cores, "memory": settings.memory, settings.gpu_resource: settings.gpus}
    return {key: str(value) for key, value in found.items() if value is not None}


def _placed(request: JobRequest, settings: KubernetesSettings) -> tuple[str | None, list[str]]:
    """Return the directory in the pods, and the words with the paths that files of this directory have there.

    Raises:
        LaunchError: a word names such a file, and no directory is known.
    """
    directory = settings.directory
    if directory is None and str(request.directory) != "/" and is_mounted(str(request.directory), settings):
        directory = str(request.directory)
    words = []
    for word in request.words:
        found = path_in_word(word, request.directory)
        if found is not None and directory is None:
            raise LaunchError(
                f"{request.directory / found[1]} is a file of this machine; name the folder of the project in the "
                "image or on a volume with --request directory=PATH, or give a relative path"
            )
        words.append(moved_word(word, request.directory, str(directory)))
    return directory, words


def _toleration(text: str) -> dict[str, str]:
    about, _, effect = text.partition(":")
    key, equals, value = about.partition("=")
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    return found | ({"value": value} if equals else {}) | ({"effect": effect} if effect else {})


def _merged(value: Any, further: Any) -> Any:
    """Return a value with a further one: mappings are merged, lists are appended, others are replaced."""
    if isinstance(value, dict) and isinstance(further, dict):
        shared = {key: _merged(value[key], further[key]) for key in value.keys() & further.keys()}
        return {**value, **further, **shared}
    if isinstance(value, list) and isinstance(further, (list, tuple)):
        return [*value, *further]
    return further
