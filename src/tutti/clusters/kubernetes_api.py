"""The API of a Kubernetes cluster through the official client, whose refusals become sentences with a remedy."""

import contextlib
import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tutti.clusters.kubernetes_manifest import CONTAINER, LABEL
from tutti.config.safe_text import plain_text, shorten
from tutti.errors import LaunchError

_INDEX = "batch.kubernetes.io/job-completion-index"
_TIMEOUTS_S = (5.0, 30.0)

_REFUSALS = (
    (
        401,
        r"",
        "the credentials of the kubeconfig are not accepted: log in again, or name another --request context=NAME",
    ),
    (403, r"exceeded quota", "`kubectl describe quota` shows the quota: ask for less, or wait for other jobs to end"),
    (403, r"violates PodSecurity", "the namespace's rules ask for more: set user=NUMBER, and the rest with `pod`"),
    (403, r"PriorityClass", "`kubectl get priorityclasses` lists them; name one with --request priority_class=NAME"),
    (
        403,
        r"nodes",
        "what a cluster has is shown to those who may list its nodes: ask the administrator for that, or describe the "
        "cluster with --cluster",
    ),
    (
        403,
        r"",
        "it takes the right to create jobs, services and secrets, and to read pods and their logs: `kubectl auth can-i "
        "create jobs` says whether you have it; ask the administrator, or name another --request namespace=NAME",
    ),
    (404, r"namespaces? ", "`kubectl get namespaces` lists them; name one with --request namespace=NAME"),
    (404, r"", "the address in the kubeconfig may be that of something else than a cluster: correct it"),
    (422, r"", "correct what it names in tutti.toml or --request"),
    (429, r"", "it has too much to do: try again later"),
    (500, r"", "ask the administrator, or try later"),
)


class Cluster:
    """The API of a cluster, whose refusals are sentences.

    Args:
        context: of the kubeconfig; None for the current one.
        kubeconfig: a file; None for the usual one, or in a pod its service account.

    Raises:
        LaunchError: the package is missing, or no cluster is configured.
    """

    def __init__(self, context: str | None, kubeconfig: str | None) -> None:
        client, config = package("kubernetes.client"), package("kubernetes.config")
        self._errors, self._http = package("kubernetes.client.exceptions"), package("urllib3.exceptions")
        settings = client.Configuration()
        settings.retries, settings.client_side_validation = False, False
        self.context, self.namespace = context, "default"
        try:
            config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
            contexts, current = config.list_kube_config_contexts(config_file=kubeconfig)
            chosen = next((each for each in contexts if each["name"] == context), current)
            self.context = str(chosen["name"])
            self.namespace = str(chosen["context"].get("namespace") or "default")
        except (config.ConfigException, OSError, ValueError, package("yaml").YAMLError) as error:
            if context is not None or kubeconfig is not None or not _inside_pod(config, settings):
                raise LaunchError(
                    f"no cluster is configured ({error}); log in to one, or name its file and context with --request "
                    "kubeconfig=FILE,context=NAME"
                ) from None
        self._host = str(settings.host)
        self._client = client.ApiClient(settings)
        self.batch, self.core = client.BatchV1Api(self._client), client.CoreV1Api(self._client)
        self._about = client.VersionApi(self._client)

    def ask(self, call: Callable[..., Any], *words: Any, absent: bool = False, **named: Any) -> Any:
        """Return what the API answers, as plain data.

        Args:
            call: a method of the client; words, named: its arguments.
            absent: return None for what does not exist.

        Raises:
            LaunchError: the API refuses, or does not answer.
        """
        with self._in_words(absent=absent):
            return self._client.sanitize_for_serialization(call(*words, _request_timeout=_TIMEOUTS_S, **named))
        return None

    @contextlib.contextmanager
    def _in_words(self, *, absent: bool = False) -> Iterator[None]:
        try:
            yield
        except self._errors.ApiException as error:
            if absent and error.status == 404:
                return
            raise LaunchError(refused(int(error.status or 0), str(error.body or error.reason))) from None
        except (self._http.HTTPError, OSError) as error:
            raise LaunchError(unreachable(self._host, error)) from None

    def version(self) -> tuple[int, int]:
        """Return the version of Kubernetes, such as (1, 33). Raises LaunchError if the API does not answer."""
        found = self.ask(self._about.get_code)
        major, minor = (re.match(r"\d+", str(found[key])) for key in ("major", "minor"))  # "33+" on some clouds
        return int(major[0] if major else 0), int(minor[0] if minor else 0)

    def pods(self, space: str, name: str) -> list[dict[str, Any]]:
        """Return the pods of a job, the oldest first."""
        found = self.ask(self.core.list_namespaced_pod, space, label_selector=f"{LABEL}={name}")["items"]
        return sorted(found, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod_index(pod)))

    def events(self, space: str, kind: str, name: str) -> list[str]:
        """Return the warnings about an object, the newest last."""
        fields = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        found = self.ask(self.core.list_namespaced_event, space, field_selector=fields, absent=True)
        return [f"{event.get('reason', '')}: {event.get('message', '')}" for event in (found or {}).get("items", [])]

    def output(self, space: str, pod: str, since_s: int | None) -> str:
        """Return what a pod has printed, each line with its time; empty before it has started, or after it is gone."""
        wanted: dict[str, Any] = {"container": CONTAINER, "timestamps": True, "_preload_content": False}
        wanted |= {"since_seconds": since_s} if since_s is not None else {}
        with self._in_words():
            try:
                answer = self.core.read_namespaced_pod_log(pod, space, _request_timeout=_TIMEOUTS_S, **wanted)
                code, text = int(answer.status), bytes(answer.data).decode("utf-8", "replace")
            except self._errors.ApiException as error:
                code, text = int(error.status or 0), str(error.body or error.reason)
        if code in (401, 403):
            raise LaunchError(refused(code, text))
        return text if code == 200 else ""  # such as while it starts, or from a node that is gone

    def changes(self, space: str, name: str, seconds: float) -> Iterator[dict[str, Any]]:
        """Yield the pods of a job whenever they change."""
        watch = package("kubernetes.watch").Watch()
        with self._in_words():
            for event in watch.stream(
                self.core.list_namespaced_pod, space, label_selector=f"{LABEL}={name}",
                timeout_seconds=max(1, math.ceil(seconds)), _request_timeout=(_TIMEOUTS_S[0], seconds + 5),
            ):  # fmt: skip
                yield {**event["raw_object"], "gone": event["type"] == "DELETED"}

    def delete(self, space: str, name: str, *, grace_s: int) -> None:
        """End a job and its pods, and remove what belongs to it."""
        self.ask(self.batch.delete_namespaced_job, name, space, propagation_policy="Background", absent=True)
        for call in (self.core.delete_namespaced_service, self.core.delete_namespaced_secret):
            self.ask(call, name, space, absent=True)
        for pod in self.pods(space, name):
            end = self.core.delete_namespaced_pod
            self.ask(end, pod["metadata"]["name"], space, grace_period_seconds=grace_s, absent=True)


@functools.lru_cache
def cluster_of(context: str | None, kubeconfig: str | None) -> Cluster:
    """Return the API of a cluster, which is logged in to once."""
    return Cluster(context, kubeconfig)


def package(name: str) -> Any:
    """Return a module of the official client. Raises LaunchError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LaunchError(
            f"the package kubernetes is not installed ({error}); install it: pip install 'tutti[kubernetes]'"
        ) from None


def _inside_pod(config: Any, settings: Any) -> bool:
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        return False
    return True


def pod_index(pod: Mapping[str, Any]) -> int:
    """Return the number of a pod among those of its job."""
    return int(pod["metadata"].get("annotations", {}).get(_INDEX, 0))


def refused(code: int, body: str) -> str:
    """Return a refusal of the API as a sentence.

    Args:
        code: of HTTP.
        body: the answer, JSON of the kind Status if the API itself has refused.
    """
    words = body
    try:
        document = json.loads(body)
        words = str(document["message"]) if isinstance(document, dict) else body
    except (ValueError, KeyError, RecursionError):
        pass
    words = shorten(plain_text(words)) or f"HTTP {code}"
    known = (remedy for number, pattern, remedy in _REFUSALS if number == code and re.search(pattern, words))
    remedy = next(known, "ask the administrator, or try later")
    return f"Kubernetes refuses it ({words}); {remedy}"


def unreachable(address: str, error: BaseException) -> str:
    """Return the sentence about a cluster that does not answer."""
    words = shorten(plain_text(str(getattr(error, "reason", None) or error)))
    if "certificate" in words.lower():
        return (
            f"the cluster at {address} shows a certificate that the kubeconfig does not know ({words}); fetch the "
            "kubeconfig again, or name another with --request kubeconfig=FILE"
        )
    return (
        f"the cluster at {address} cannot be reached ({words}); correct the kubeconfig, bring up the VPN or tunnel "
        "that leads there, or name another --request context=NAME"
    )
