"""What a pod of a run on Kubernetes starts: `tutti run`, with this pod's number and where the pods meet.

It is the first process of its container, to which the kernel passes no signal without a handler, and which has to wait
for orphans. So it stays, and passes signals on.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tutti.clusters.cluster_job import NodeCommand
from tutti.clusters.kubernetes_manifest import COMMAND, ENDED, MARK
from tutti.clusters.local_files import SentFiles
from tutti.config.run_folder import RunFolder
from tutti.environment import completion_index, sent_files
from tutti.errors import RESUMABLE, LaunchError

_POLL_S = 1.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def wait_for_names(hosts: Sequence[str], resolve: Callable[[str], object], pause_s: float = _POLL_S) -> None:
    """Wait until all hosts have a name: until all pods have been placed, which can take as long as a queue.

    Args:
        hosts: their names.
        resolve: looks a name up; raises OSError without an address.
        pause_s: seconds between attempts.
    """
    said = False
    for number, host in enumerate(hosts):
        while True:
            with contextlib.suppress(OSError):
                resolve(host)
                break
            if not said:
                print(f"waiting until pod {number} is placed", file=sys.stderr, flush=True)
                said = True
            time.sleep(pause_s)


def pod_command(
    kind: str, folder: Path, resume: str, nodes: str, rendezvous: str, index: int, words: Sequence[str]
) -> list[str]:
    """Return the arguments of `tutti run` in this pod.

    A folder in which a run has begun is gone on with: rank 0 writes its header once all pods have met, so all pods find
    it, or none does.

    Args:
        kind: "seen", "inside", or a store; see `tutti.clusters.kubernetes_manifest.manifests`.
        folder: the run folder in the pods.
        resume: what the job's first start continues from; empty if it begins.
        nodes: number of pods, or such as "1:4" for a range.
        rendezvous: HOST:PORT of a pod, with "{}" for its number.
        index: number of this pod.
        words: the arguments that are the same in all pods.

    Raises:
        LaunchError: the pod does not see the run folder of the submitting machine.
    """
    if kind == "seen" and not (folder / MARK).exists():
        raise LaunchError(
            f"the pods do not see {folder} of the machine that submitted the run; mount its disk there, or name a "
            "folder on a volume with --request folder=PATH"
        )
    found = ["run", "--on", "local", "--folder", str(folder)]
    if kind not in ("seen", "inside"):
        resume = _newest_in_store(kind, folder.name) or resume
    elif RunFolder(folder).header.exists():
        resume = str(folder)
    found += ["--resume", resume] if resume else []
    if nodes != "1":
        found += ["--nnodes", nodes, "--node-rank", str(index), "--rendezvous", rendezvous.format(0)]
        found += ["--one-screen"]
    return [*found, *words]


def command_in_pod(
    numbered: str, nproc: int, nodes: int, rendezvous: str, index: int, words: Sequence[str]
) -> list[str]:
    """Return the arguments of a command of `tutti` other than `tutti run` in this pod, such as those of the doctor.

    Args:
        numbered: how the command calls the number of nodes.
        nproc: ranks of each pod.
        nodes: number of pods.
        rendezvous, index: see `pod_command`.
        words: the arguments that are the same in all pods.
    """
    command = NodeCommand(words=tuple(words), numbered=numbered)
    return command.on_node(index, nodes, nproc, rendezvous.format(0))


def _newest_in_store(address: str, name: str) -> str:
    """Return the address of the newest checkpoint that a job has left in its store; empty without one.

    On its first start the job notes there which checkpoints others have left.

    Raises:
        LaunchError: the store cannot be read or written.
    """
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
        root = root.rstrip("/")
        mark = f"{root}/tutti-job-{name}"
        there = {path.rsplit("/", 2)[1] for path in files.glob(f"{root}/step-*/index.json")}
        if not files.exists(mark):
            files.makedirs(root, exist_ok=True)
            files.pipe_file(mark, json.dumps(sorted(there)).encode())
            return ""
        own = there - set(json.loads(files.cat_file(mark)))
    except Exception as error:  # each kind of store raises its own
        words = f"{type(error).__name__}: {error}"
        raise LaunchError(
            f"{address} cannot be used from the pod ({words}); correct --checkpoint-store, its package in the image, "
            "or the credentials in secrets"
        ) from None
    return f"{address.rstrip('/')}/{max(own)}" if own else ""


class Child:
    """`tutti run`, to which signals are passed on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._told = False
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)

    def run(self, arguments: Sequence[str]) -> int:
        """Start it, wait for its end, and return the exit code of the pod."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until it is known to whom they go
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tutti.cli.main", *arguments],
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON),
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        while True:
            pid, status = os.waitpid(-1, 0)  # orphans, too
            if pid == self._process.pid:
                code = os.waitstatus_to_exitcode(status)
                if self._told and code == -signal.SIGTERM:
                    return RESUMABLE  # it had not begun yet
                return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: object) -> None:
        self._told = True
        if self._process is None:
            sys.exit(RESUMABLE)  # nothing has begun
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)


def main() -> None:
    """Run this pod's part. The arguments are those of `pod_command`, without the pod's number.

    For a command that is not `tutti run`, folder and resume are the first two of `command_in_pod`, and the exit code is
    printed: a pod that failed would end the others.
    """
    kind, folder, resume, nodes, rendezvous, *words = sys.argv[1:]
    child = Child()
    try:
        index = completion_index()
        if kind == COMMAND:
            arguments = command_in_pod(folder, int(resume), int(nodes), rendezvous, index, words)
        else:
            arguments = pod_command(kind, Path(folder), resume, nodes, rendezvous, index, words)
    except LaunchError as error:
        print(f"tutti: {error}", file=sys.stderr)
        sys.exit(2)
    if nodes != "1":
        awaited = 1 if ":" in nodes else int(nodes)  # with a range the run begins with the pods that there are
        hosts = [rendezvous.format(number).rpartition(":")[0] for number in range(awaited)]
        wait_for_names(hosts, lambda host: socket.getaddrinfo(host, None))
    files = SentFiles(sent_files())
    code = child.run(files.in_command(arguments))
    files.remove()
    if kind == COMMAND:
        print(f"{ENDED}{code}", flush=True)
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
