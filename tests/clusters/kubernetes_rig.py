"""A stand-in for a cluster of Kubernetes: its HTTP API, its controller of Jobs, and a kubelet that really starts pods.

The container of a pod is a process of this machine with the container's command and variables. What stands for what:
the mount path of a volume is a folder of this machine, and names of pods are the loopback address. Objects are checked
against the published schemas as strictly as they can be.
"""

import base64
import copy
import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

TOKEN = "a token of the tests"

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "{server}"}}}}]
users: [{{name: me, user: {{token: "{token}"}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me, namespace: {namespace}}}}}]
current-context: here
"""

_KINDS = {"jobs": "Job", "pods": "Pod", "services": "Service", "secrets": "Secret", "events": "Event"}
_KINDS |= {"nodes": "Node", "resourcequotas": "ResourceQuota"}
_PATH = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/([^/]+)/(\w+)(?:/([^/]+))?(/log)?")

Thing = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def node(name: str, *, ready: bool = True, labels: Thing | None = None, spec: Thing | None = None, **has: str) -> Thing:
    """A node; `has` are its allocatable resources, with __ for what no name in Python may have."""
    resources = {key.replace("__", "nvidia.com/"): value for key, value in {"memory": "8Gi", **has}.items()}
    condition = {"type": "Ready", "status": str(ready), "reason": "KubeletReady" if ready else "NodeStatusUnknown"}
    about = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
    status = {"allocatable": resources, "capacity": resources, "conditions": [condition]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": about, "spec": spec or {}, "status": status}


class Refusal(Exception):
    """An answer that is no success, as the API words it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        self.code, self.reason, self.message = code, reason, message


class Kubelet:
    """The process of one pod."""

    def __init__(self, cluster: "Cluster", pod: Thing) -> None:
        self.cluster, self.pod = cluster, pod
        self.lines: list[tuple[float, str]] = []
        self.process: subprocess.Popen[str] | None = None
        self.kill_at = float("inf")
        self.told = False

    def look(self) -> None:
        """Start the process, note its end, and end it where the pod is deleted."""
        if self.process is None:
            if "deletionTimestamp" in self.pod["metadata"]:
                self.cluster.remove(self.pod)
            else:
                self._start()
            return
        code = self.process.poll()
        if code is None and "deletionTimestamp" in self.pod["metadata"]:
            if not self.told:
                self.process.send_signal(signal.SIGTERM)
                self.told = True
            if time.monotonic() > self.kill_at:
                os.killpg(self.process.pid, signal.SIGKILL)
        if code is not None and self.pod["status"]["phase"] == "Running":
            self.reader.join(5)
            code = code if code >= 0 else 128 - code
            ended = {
                "exitCode": code,
                "reason": "Error" if code else "Completed",
                "finishedAt": now(),
                "startedAt": now(),
            }
            self.pod["status"]["phase"] = "Failed" if code else "Succeeded"
            self._state({"terminated": ended})
            return
        if code is not None and "deletionTimestamp" in self.pod["metadata"]:
            self.cluster.remove(self.pod)

    def end_within(self, seconds: float) -> None:
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)

    def _start(self) -> None:
        spec = self.pod["spec"]
        if spec.get("nodeSelector"):
            message = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
            self._unplaced(message)
            return
        others = [each.pod for each in self.cluster.kubelets.values() if each is not self]
        placed = [
            pod for pod in others if "nodeName" in pod["spec"] and pod["status"]["phase"] in ("Pending", "Running")
        ]
        if len(placed) >= self.cluster.most_pods:
            self._unplaced("0/2 nodes are available: 2 Insufficient cpu.")
            return
        volumes = [each["persistentVolumeClaim"] for each in spec["volumes"] if "persistentVolumeClaim" in each]
        absent = [each["claimName"] for each in volumes if each["claimName"] not in self.cluster.claims]
        if absent:
            self._unplaced(f'persistentvolumeclaim "{absent[0]}" not found')
            return
        spec["nodeName"] = f"node{self.index % 2}"
        (container,) = spec["containers"]
        if container["image"] not in self.cluster.images:
            self._waiting("ImagePullBackOff", f'Back-off pulling image "{container["image"]}"')
            return
        try:
            environment = {each["name"]: self._value(each) for each in container["env"]}
        except LookupError as error:
            self._waiting("CreateContainerConfigError", f'secret "{error.args[0]}" not found')
            return
        name = self.pod["metadata"]["labels"]["job-name"]
        command = [word.replace(f"{name}-{{}}.{spec['subdomain']}", "127.0.0.1") for word in container["command"]]
        base = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
        self.process = subprocess.Popen(
            command, cwd=container.get("workingDir"), text=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**base, "HOME": str(self.cluster.home), "OMP_NUM_THREADS": "1", **environment,
                 "JOB_COMPLETION_INDEX": str(self.index)},
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self.reader.start()
        self.pod["status"]["phase"] = "Running"
        self._state({"running": {"startedAt": now()}})

    @property
    def index(self) -> int:
        return int(self.pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))

    def _value(self, variable: Thing) -> str:
        if "value" in variable:
            return str(variable["value"])
        of = variable["valueFrom"]["secretKeyRef"]
        secret = self.cluster.find("secrets", self.pod["metadata"]["namespace"], of["name"])
        if secret is None:
            raise LookupError(of["name"])
        return base64.b64decode(secret["data"][of["key"]]).decode()

    def _unplaced(self, message: str) -> None:
        status = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        if self.pod["status"].get("conditions") != [status]:
            self.pod["status"]["conditions"] = [status]
            self.cluster.changed("MODIFIED", self.pod)

    def _waiting(self, reason: str, message: str) -> None:
        self._state({"waiting": {"reason": reason, "message": message}})

    def _state(self, state: Thing) -> None:
        ready = "running" in state
        status = {"name": "tutti", "state": state, "ready": ready, "restartCount": 0, "image": "i", "imageID": "i"}
        if self.pod["status"].get("containerStatuses") != [status]:
            self.pod["status"]["containerStatuses"] = [status]
            self.cluster.changed("MODIFIED", self.pod)


class Cluster:
    """The cluster.

    Attributes:
        images, claims, namespaces: that there are.
        release: of Kubernetes.
        most_pods: how many pods find a place; others wait.
        nodes: what the list of nodes has.
        quota: most jobs; pods_quota: most pods.
        refuse: called with method and path; may raise a Refusal.
        admitted: whether jobs that were made suspended begin, as Kueue lets them.
    """

    def __init__(self, base: Path) -> None:
        self.base, self.home = base, base / "home"
        self.home.mkdir(parents=True)
        self.images, self.claims, self.namespaces = {"train:1"}, {"runs"}, {"team"}
        self.quota, self.pods_quota, self.admitted = 99, 99, False
        self.release, self.most_pods = "34", 99
        self.nodes = [node("node0", cpu="4"), node("node1", cpu="3500m")]
        self.refuse: Callable[[str, str], None] = lambda method, path: None
        self.things: dict[tuple[str, str, str], Thing] = {}
        self.history: list[tuple[int, str, Thing]] = []
        self.version = 0
        self.lock = threading.Condition(threading.RLock())
        self.kubelets: dict[str, Kubelet] = {}
        self.posted: list[Thing] = []
        self.over = False

    @property
    def variables(self) -> dict[str, str]:
        """By which commands find it."""
        return {"KUBECONFIG": str(self.base / "kubeconfig"), "XDG_STATE_HOME": str(self.base)}

    # Objects

    def find(self, plural: str, space: str, name: str) -> Thing | None:
        return self.things.get((plural, space, name))

    def changed(self, what: str, thing: Thing) -> None:
        with self.lock:
            self.version += 1
            thing["metadata"]["resourceVersion"] = str(self.version)
            self.history.append((self.version, what, copy.deepcopy(thing)))
            self.lock.notify_all()

    def add(self, plural: str, space: str, thing: Thing) -> Thing:
        name = thing["metadata"]["name"]
        if (plural, space, name) in self.things:
            raise Refusal(409, "AlreadyExists", f'{plural} "{name}" already exists')
        thing["metadata"] |= {"namespace": space, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        self.things[plural, space, name] = thing
        self.changed("ADDED", thing)
        return thing

    def remove(self, thing: Thing) -> None:
        key = next((key for key, other in self.things.items() if other is thing), None)
        if key is not None:
            del self.things[key]
            self.changed("DELETED", thing)

    def of_job(self, job: Thing) -> list[Thing]:
        uid = job["metadata"]["uid"]
        owners = {id(thing): thing["metadata"].get("ownerReferences", []) for thing in self.things.values()}
        return [thing for thing in self.things.values() if any(owner["uid"] == uid for owner in owners[id(thing)])]

    def pods(self, job: Thing) -> list[Thing]:
        return [thing for thing in self.of_job(job) if thing["kind"] == "Pod"]

    def delete_pod(self, pod: Thing, grace_s: float | None = None) -> None:
        given = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
        pod["metadata"].setdefault("deletionTimestamp", now())
        self.kubelets[pod["metadata"]["uid"]].end_within(given)
        self.changed("MODIFIED", pod)

    def evict(self, pod: Thing) -> None:
        """What happens before a pod of more importance takes its place, and when a node is drained."""
        with self.lock:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            pod["status"].setdefault("conditions", []).append(condition)
            self.delete_pod(pod)

    # The controller of Jobs

    def work(self) -> None:
        while not self.over:
            with self.lock:
                for thing in list(self.things.values()):
                    if thing["kind"] == "Job":
                        self._reconcile(thing)
                for uid, kubelet in list(self.kubelets.items()):
                    kubelet.look()
                    if kubelet.pod not in self.things.values():
                        del self.kubelets[uid]
            time.sleep(0.05)

    def _reconcile(self, job: Thing) -> None:
        status, spec = job["status"], job["spec"]
        if any(each["type"] in ("Complete", "Failed") for each in status["conditions"]):
            return
        if spec.get("suspend"):
            if self.admitted:
                spec["suspend"] = False
            return
        status.setdefault("startTime", now())
        pods = self.pods(job)
        active = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        failing = status.get("failing") or self._verdict(job, pods)
        if failing is not None:
            status["failing"] = failing
            for pod in active:
                if "deletionTimestamp" not in pod["metadata"]:
                    self.delete_pod(pod)
            if not active:
                self._end(job, "Failed", *failing)
            return
        done = {self.index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        if len(done) == spec["completions"]:
            self._end(job, "Complete", "CompletionsReached", "")
            return
        rules = spec.get("successPolicy", {}).get("rules", [])
        if any(int(rule["succeededIndexes"]) in done for rule in rules):  # lingering pods end
            for pod in active:
                if "deletionTimestamp" not in pod["metadata"]:
                    self.delete_pod(pod)
            if not active:
                self._end(job, "Complete", "SuccessPolicy", "")
            return
        for index in set(range(spec["completions"])) - done - {self.index(pod) for pod in active}:
            self._make_pod(job, index)

    def _verdict(self, job: Thing, pods: list[Thing]) -> tuple[str, str] | None:
        """What lets a job fail: its deadline, or a pod by the policy."""
        spec, status = job["spec"], job["status"]
        limit_s = spec.get("activeDeadlineSeconds")
        begun = datetime.fromisoformat(status["startTime"])
        if limit_s is not None and (datetime.now(UTC) - begun).total_seconds() > limit_s:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        counted = 0
        for pod in pods:
            if pod["status"]["phase"] != "Failed":
                continue
            code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
            for number, rule in enumerate(spec["podFailurePolicy"]["rules"]):
                disrupted = any(each["type"] == "DisruptionTarget" for each in pod["status"].get("conditions", []))
                if ("onExitCodes" in rule and code in rule["onExitCodes"]["values"]) or (
                    rule.get("onPodConditions") and disrupted
                ):
                    if rule["action"] == "FailJob":
                        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                        return "PodFailurePolicy", (
                            f"Container tutti for pod {name} failed with exit code {code} matching FailJob rule at "
                            f"index {number}"
                        )
                    break
            else:
                counted += 1
        if counted > spec["backoffLimit"]:
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def _end(self, job: Thing, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
        job["status"]["conditions"].append(condition)
        self.changed("MODIFIED", job)

    def _make_pod(self, job: Thing, index: int) -> None:
        space, name, template = job["metadata"]["namespace"], job["metadata"]["name"], job["spec"]["template"]
        if sum(thing["kind"] == "Pod" for thing in self.things.values()) >= self.pods_quota:
            most = self.pods_quota
            words = f"requested: pods=1, used: pods={most}, limited: pods={most}"
            refused = f'pods "{name}-{index}-abcde" is forbidden: exceeded quota: compute, {words}'
            self._warn(job, "FailedCreate", f"Error creating: {refused}")
            return
        about = {
            "name": f"{name}-{index}-{uuid.uuid4().hex[:5]}",
            "labels": {**template["metadata"]["labels"], "job-name": name},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [{"kind": "Job", "apiVersion": "batch/v1", "name": name, "uid": job["metadata"]["uid"]}],
        }
        spec = copy.deepcopy(template["spec"])
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec, "status": {"phase": "Pending"}}
        self.add("pods", space, pod)
        self.kubelets[pod["metadata"]["uid"]] = Kubelet(self, pod)  # type: ignore[index]

    def _warn(self, thing: Thing, reason: str, message: str) -> None:
        about, space = thing["metadata"], thing["metadata"]["namespace"]
        name = f"{about['name']}.{reason.lower()}"
        if self.find("events", space, name) is None:
            of = {"kind": thing["kind"], "name": about["name"], "namespace": space}
            event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": name}, "involvedObject": of}
            self.add("events", space, {**event, "type": "Warning", "reason": reason, "message": message})

    @staticmethod
    def index(pod: Thing) -> int:
        return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])

    # What the API does

    def create(self, plural: str, space: str, thing: Thing) -> Thing:
        name = thing["metadata"]["name"]
        try:
            kubernetes_validate.validate(thing, "1.34", strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refusal(422, "Invalid", f'{thing["kind"]} "{name}" is invalid: {error.message}') from None
        self.posted.append(copy.deepcopy(thing))
        if plural == "jobs":
            jobs = sum(other["kind"] == "Job" for other in self.things.values())
            if jobs >= self.quota:
                counted = "count/jobs.batch"
                count = f"requested: {counted}=1, used: {counted}={jobs}, limited: {counted}={self.quota}"
                words = f'jobs.batch "{name}" is forbidden: exceeded quota: compute, {count}'
                raise Refusal(403, "Forbidden", words)
            thing["status"] = {"conditions": []}
        if plural == "secrets":
            plain = thing.pop("stringData", {})
            thing["data"] = {key: base64.b64encode(text.encode()).decode() for key, text in plain.items()}
        return self.add(plural, space, thing)

    def delete(self, thing: Thing, grace_s: float | None) -> None:
        if thing["kind"] == "Pod":
            self.delete_pod(thing, grace_s)
            return
        if thing["kind"] == "Job":
            for other in self.of_job(thing):
                if other["kind"] == "Pod":
                    self.delete_pod(other)
                else:
                    self.remove(other)
        self.remove(thing)


def merge(thing: Thing, patch: Thing) -> None:
    for key, value in patch.items():
        if isinstance(value, dict):
            merge(thing.setdefault(key, {}), value)
        else:
            thing[key] = value


class Handler(BaseHTTPRequestHandler):
    """What the API of a cluster answers."""

    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method: Callable[[], None]) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.body = json.loads(self.rfile.read(size)) if size else {}
        parts = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            self.cluster.refuse(self.command, parts.path)
            if parts.path == "/api/v1/nodes":
                nodes = {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": self.cluster.nodes}
                self._send(nodes)
                return
            if parts.path == "/version/":
                self._send({"major": "1", "minor": self.cluster.release, "gitVersion": f"v1.{self.cluster.release}.0"})
                return
            match = _PATH.fullmatch(parts.path)
            if match is None:
                raise Refusal(404, "NotFound", "the server could not find the requested resource")
            self.space, self.plural, self.name, self.sub = match.groups()
            if self.space not in self.cluster.namespaces:
                raise Refusal(404, "NotFound", f'namespaces "{self.space}" not found')
            method()
        except Refusal as error:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            about = {"message": error.message, "reason": error.reason, "code": error.code}
            self._send({**status, **about}, error.code)

    def _send(self, document: object, code: int = 200) -> None:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(document, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(data)

    def _thing(self) -> Thing:
        found = self.cluster.find(self.plural, self.space, self.name)
        if found is None:
            raise Refusal(404, "NotFound", f'{self.plural} "{self.name}" not found')
        return found

    def _get(self) -> None:
        if self.sub:
            self._log()
        elif self.query.get("watch", "").lower() == "true":
            self._watch()
        elif self.name:
            with self.cluster.lock:
                self._send(self._thing())
        else:
            with self.cluster.lock:
                found = [thing for thing in self.cluster.things.values() if self._asked(thing)]
                kind = f"{_KINDS[self.plural]}List"
                about = {"resourceVersion": str(self.cluster.version)}
                self._send({"kind": kind, "apiVersion": "v1", "metadata": about, "items": found})

    def _asked(self, thing: Thing) -> bool:
        about = thing["metadata"]
        if thing["kind"] != _KINDS[self.plural] or about["namespace"] != self.space:
            return False
        labels = dict(part.split("=") for part in self.query.get("labelSelector", "").split(",") if part)
        fields = dict(part.split("=") for part in self.query.get("fieldSelector", "").split(",") if part)
        of = {**thing, **{f"involvedObject.{key}": text for key, text in thing.get("involvedObject", {}).items()}}
        return all(about.get("labels", {}).get(key) == text for key, text in labels.items()) and all(
            of.get(key) == text for key, text in fields.items()
        )

    def _watch(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        deadline = time.monotonic() + float(self.query.get("timeoutSeconds", 60))
        with self.cluster.lock:
            seen = self.cluster.version
            told = [("ADDED", copy.deepcopy(thing)) for thing in self.cluster.things.values() if self._asked(thing)]
        while time.monotonic() < deadline and not self.cluster.over:
            try:
                for what, thing in told:
                    line = json.dumps({"type": what, "object": thing}).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                self.wfile.flush()
            except OSError:
                return
            with self.cluster.lock:
                self.cluster.lock.wait(0.2)
                told = [(what, thing) for at, what, thing in self.cluster.history if at > seen and self._asked(thing)]
                seen = self.cluster.version
        with suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")

    def _log(self) -> None:
        with self.cluster.lock:
            kubelet = self.cluster.kubelets.get(self._thing()["metadata"]["uid"])
            lines = list(kubelet.lines) if kubelet is not None else []
            if kubelet is None or kubelet.process is None:
                raise Refusal(400, "BadRequest", f'container "tutti" in pod "{self.name}" is waiting to start')
        since = time.time() - float(self.query.get("sinceSeconds", "1e9"))
        text = ""
        for at, line in lines:
            if at >= since:
                stamp = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "000Z")
                text += f"{stamp} {line}\n"
        self._send(text.encode())

    def _post(self) -> None:
        with self.cluster.lock:
            self._send(self.cluster.create(self.plural, self.space, self.body), 201)

    def _patch(self) -> None:
        if self.headers["Content-Type"] not in (
            "application/merge-patch+json", "application/strategic-merge-patch+json"
        ):  # fmt: skip
            raise Refusal(415, "UnsupportedMediaType", f"{self.headers['Content-Type']} is no merge of mappings")
        with self.cluster.lock:
            thing = self._thing()
            merge(thing, self.body)
            self.cluster.changed("MODIFIED", thing)
            self._send(thing)

    def _delete(self) -> None:
        with self.cluster.lock:
            thing = self._thing()
            grace = self.query.get("gracePeriodSeconds") or self.body.get("gracePeriodSeconds")
            self.cluster.delete(thing, None if grace is None else float(grace))
            self._send(thing)


@contextmanager
def kubernetes(base: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and a kubeconfig that leads to it."""
    cluster = Cluster(base)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    threads = [threading.Thread(target=target, daemon=True) for target in (server.serve_forever, cluster.work)]
    config = base / "kubeconfig"
    address = f"http://127.0.0.1:{server.server_port}"
    config.write_text(KUBECONFIG.format(server=address, token=TOKEN, namespace="team"))
    for thread in threads:
        thread.start()
    try:
        yield cluster, config
    finally:
        cluster.over = True
        threads[1].join(10)
        for kubelet in cluster.kubelets.values():
            if kubelet.process is not None and kubelet.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(kubelet.process.pid, signal.SIGKILL)
                kubelet.process.wait(10)
        server.shutdown()
        server.server_close()
