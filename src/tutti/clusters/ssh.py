"""Runs over ssh, on hosts that no scheduler watches. A driver on this machine is the job, with a connection to each."""

import contextlib
import json
import math
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.clusters.cluster_job import JobRequest, JobStatus, NodeCommand, interrupts_let_through
from tutti.clusters.cluster_resources import ClusterNode, NodePool
from tutti.clusters.driver_job import cancel_driver, job_status, remove_errors, running_driver, start_driver
from tutti.clusters.local_files import moved_word, path_below
from tutti.clusters.ssh_driver import node_arguments
from tutti.clusters.ssh_hosts import (
    SshHost,
    SshSettings,
    bash_script,
    read_hosts,
    read_ssh_settings,
    ssh_command,
    ssh_words,
)
from tutti.clusters.ssh_prepare import (
    HostNeeds,
    PreparedHost,
    git_ignored,
    host_facts,
    prepare_hosts,
    rsync_command,
)
from tutti.config.run_folder import RunFolder
from tutti.errors import LaunchError

LOG = "ssh.log"

PLACE = "ssh.json"
"""File of the run folder that says under which name hosts keep it, which do not see this machine's disk."""

_START_S = 20.0


class Ssh:
    """See `tutti.clusters.cluster_job.Scheduler`."""

    def nodes(self, settings: Mapping[str, Any], nnodes: int | None) -> tuple[int | None, ...]:
        return tuple(host.ranks for host in _chosen(read_ssh_settings(settings), Path.cwd(), nnodes))

    def preview(self, request: JobRequest) -> str:
        settings = read_ssh_settings(request.settings)
        hosts = _chosen(settings, request.directory, request.nodes)
        needs = _needs(request, settings, hosts, "RUN")
        in_git, lines = settings.sync in (None, "rsync") and git_ignored(request.directory) is not None, []
        for number, host in enumerate(hosts):
            shared = settings.sync == "none"
            directory = (settings.directory or str(request.directory)) if shared else needs.directory
            folder = str(request.folder) if shared else f"{directory}/runs/{request.folder.name}"
            place = PreparedHost(
                host=host, python_path="", directory=directory, folder=folder, first_of=0,
                resume=str(request.resume or ""), address=host.name, outside="", port=0,
            )  # fmt: skip
            where = settings.rendezvous or f"{hosts[0].name}:PORT"
            lines.append(f"# {host.name}: node {number} of {len(hosts)}")
            if settings.sync == "git":
                lines.append(f"git archive HEAD .   # to {directory}")
            elif settings.sync != "none":
                seen = "" if settings.sync or settings.directory else "   # unless all hosts see the run folder"
                copy = rsync_command(needs, host, directory.removeprefix("~/"), in_git=in_git)
                lines.append(shlex.join(copy) + ("   # which reads what git ignores" if in_git else "") + seen)
            home = "~/" if directory.startswith("~/") else ""
            lines.append(shlex.join([*ssh_words(settings), host.address]))
            lines += [f"cd {home}{shlex.quote(directory.removeprefix('~/'))}", *settings.setup]
            options = _host_options(request, place, shared=shared)
            words = node_arguments(options, number, _ranks(request, len(hosts)), request.least_nodes, where)
            lines += [f"{settings.python or sys.executable} -m tutti.cli.main {shlex.join(words)}", ""]
        return "\n".join(lines)

    def submit(self, request: JobRequest) -> str:
        settings = read_ssh_settings(request.settings)
        hosts = _chosen(settings, request.directory, request.nodes)
        needs = _needs(request, settings, hosts, _remote_name(request.folder))
        with interrupts_let_through():
            prepared, shared = prepare_hosts(needs, lambda words: print(words, file=sys.stderr))
        where, ranks = _rendezvous(settings, prepared), _ranks(request, len(prepared))
        remove_errors(request.folder)
        tasks = []
        for number, place in enumerate(prepared):
            options = _host_options(request, place, shared=shared)
            words = node_arguments(options, number, ranks, request.least_nodes, where)
            tasks.append(
                {
                    "name": place.host.name,
                    "command": ssh_command(settings, place.host),
                    "script": bash_script(settings).decode(),
                    "options": options,
                    "ranks": ranks[number],
                    "rendezvous": _own_rendezvous(request, settings, prepared, number),
                    "request": {"arguments": words, **_sent_back(request, settings, prepared, number, shared=shared)},
                }
            )
        job = {
            "folder": str(request.folder),
            "grace_s": request.grace_s,
            "restarts": needs.restarts,
            **_failover(request, ranks, restarts=needs.restarts),
            "hosts": tasks,
            "places": [] if shared else [place.copy for place in prepared],
            "names": {} if shared else _names(request, prepared),
        }
        return start_driver("tutti.clusters.ssh_driver", job, request.folder / LOG, _START_S)

    def check_range(self, request: JobRequest) -> None:
        _chosen(read_ssh_settings(request.settings), request.directory, request.nodes)

    def log(self, request: JobRequest, job: str) -> str:
        return str(request.folder / LOG)

    def status(self, job: str) -> JobStatus:
        return job_status(job)

    def run_on_nodes(
        self, command: NodeCommand, settings: Mapping[str, Any], show: Callable[[str], None]
    ) -> tuple[int, tuple[str, ...]]:
        from tutti.clusters.ssh_foreground import ShownOutput, run_on_hosts

        read = read_ssh_settings(settings)
        hosts = _chosen(read, Path.cwd(), command.nodes)
        counts = [host.ranks for host in hosts if host.ranks is not None]
        nproc = command.nproc or min(counts, default=2)
        with tempfile.TemporaryDirectory(prefix="tutti-") as folder:
            request = JobRequest(
                name=command.words[0], folder=Path(folder), directory=Path.cwd(), words=command.words,
                nodes=len(hosts), script=command.script or "",
            )  # fmt: skip
            needs = _needs(request, read, hosts, f"{command.words[0]}-{secrets.token_hex(4)}")
            needs = replace(needs, bare=command.script is None)
            prepared, shared = prepare_hosts(needs, lambda words: print(words, file=sys.stderr))
            where, tasks = _rendezvous(read, prepared), []
            for number, place in enumerate(prepared):
                words = command.on_node(number, len(hosts), nproc, where)
                if not shared and not needs.bare:
                    words = [moved_word(word, request.directory, place.directory) for word in words]
                # What a host prints is all that comes back: its folder goes at the end.
                fields: dict[str, Any] = {"fetch": "none", "ranks": None, "checkpoints": False, "known": {}, "had": []}
                fields |= {"folder": place.folder, "directory": place.directory, "python_path": place.python_path}
                ssh = {"name": place.host.name, "command": ssh_command(read, place.host)}
                script = {"script": bash_script(read).decode()}
                tasks.append({**ssh, **script, "request": {"arguments": words, "temporary": not shared, **fields}})
            output = ShownOutput(show, several=len(hosts) > 1, together="--json" in command.words)
            return run_on_hosts(tasks, output), tuple(host.name for host in hosts)

    def pools(self, settings: Mapping[str, Any]) -> tuple[NodePool, ...]:
        read = read_ssh_settings(settings)
        hosts = _chosen(read, Path.cwd(), None)
        told = host_facts(read, hosts)
        nodes = []
        for host, facts in zip(hosts, told, strict=True):
            gpus = facts["gpus"] if host.ranks is None else facts["gpus"][: host.ranks]
            if len(set(gpus)) > 1:
                kinds = ", ".join(dict.fromkeys(gpus))
                raise LaunchError(
                    f"{host.name} has several kinds of GPUs ({kinds}); measure it: `tutti probe --on ssh`"
                )
            nodes.append(
                ClusterNode(
                    name=host.name,
                    cores=facts["cores"],
                    memory_nbytes=facts["memory"],
                    gpus=len(gpus),
                    gpu=gpus[0] if gpus else "",
                    idle=facts["load"] < max(1.0, 0.25 * facts["cores"]),
                )
            )
        probed = {host.name: facts["probed"] for host, facts in zip(hosts, told, strict=True) if facts["probed"]}
        return (NodePool(name="", nodes=tuple(nodes), whole=True, probed=probed),)

    def collect(self, job: str) -> bool:
        return False

    def stop(self, job: str) -> None:
        running_driver(job, "ssh").terminate()

    def cancel(self, job: str) -> None:
        cancel_driver(job, "ssh")


def _chosen(settings: SshSettings, directory: Path, nnodes: int | None) -> tuple[SshHost, ...]:
    """Return the first hosts, as many as are asked for. Raises LaunchError if there are fewer."""
    hosts = read_hosts(settings, directory)
    if nnodes is not None and nnodes > len(hosts):
        raise LaunchError(
            f"--nnodes {nnodes} is more than the {len(hosts)} hosts that are named; name more with --hosts"
        )
    return hosts[:nnodes]


def _needs(request: JobRequest, settings: SshSettings, hosts: tuple[SshHost, ...], remote_name: str) -> HostNeeds:
    return HostNeeds(
        settings=settings,
        hosts=hosts,
        here=request.directory,
        folder=request.folder,
        script=request.script,
        files=_files(request),
        outside=_outside(request),
        resume=request.resume,
        remote_name=remote_name,
        restarts=(request.restarts > 0 or request.least_nodes is not None) and len(hosts) > 1,
        least=request.least_nodes,
        first_ranks=request.nproc[0] if request.nproc else 1,
    )


def _files(request: JobRequest) -> tuple[str, ...]:
    """Return the files of this directory that the command names besides the script, such as a plan of another run."""
    found = []
    for word in request.words:
        for text in (word, word.partition("=")[2]):
            name = path_below(text, request.directory) if text and text != request.script else None
            if name is not None and os.path.isfile(request.directory / name):
                found.append(name)
    return tuple(found)


def _outside(request: JobRequest) -> tuple[str, ...]:
    """Return the relative paths that the command names and that lead out of this directory to something."""
    texts = [text for word in request.words for text in (word, word.partition("=")[2])]
    return tuple(
        text
        for text in dict.fromkeys(texts)
        if os.path.normpath(text).startswith("../")
        and path_below(text, request.directory) is None
        and os.path.exists(request.directory / text)
    )


def _remote_name(folder: Path) -> str:
    """Return the name of the run folder on hosts with disks of their own: the one that it has there, or a new one."""
    file = folder / PLACE
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(file.read_text(encoding="utf-8"))["name"])
    name = f"{folder.name}-{secrets.token_hex(3)}"
    file.write_text(json.dumps({"name": name}) + "\n", encoding="utf-8")
    return name


def _rendezvous(settings: SshSettings, hosts: Sequence[PreparedHost]) -> str:
    """Return HOST:PORT where the hosts meet: the first one, under the address by which ssh has reached it."""
    if settings.rendezvous is not None:
        return settings.rendezvous
    where = _address(hosts, 0)
    if not where:
        raise LaunchError(
            f"{hosts[0].host.name} does not tell an address or a free port where the hosts can meet; name them: "
            "--request rendezvous=HOST:PORT"
        )
    return where


def _own_rendezvous(request: JobRequest, settings: SshSettings, hosts: Sequence[PreparedHost], number: int) -> str:
    """Return where the hosts would meet if this one had to be node 0; "" if it cannot be."""
    if settings.rendezvous is not None or (request.checkpoint_store is not None and request.resume is not None):
        return ""
    return _address(hosts, number)


def _address(hosts: Sequence[PreparedHost], number: int) -> str:
    """Return the HOST:PORT of a host at which the others reach it; "" if it does not tell one."""
    host, loopback = hosts[number], ("127.", "::1")
    address = host.address
    if address.startswith(loopback) and not all(other.address.startswith(loopback) for other in hosts):
        address = host.outside  # ssh reached this very machine, and the others cannot by that address
    if not address or not host.port:
        return ""
    return f"[{address}]:{host.port}" if ":" in address else f"{address}:{host.port}"


def _host_options(request: JobRequest, place: PreparedHost, *, shared: bool) -> dict[str, Any]:
    """Return what differs between hosts in their commands. Paths below this directory mean those of the copy."""
    words = list(request.words)
    if not shared and str(request.directory) != place.directory:
        words = [moved_word(word, request.directory, place.directory) for word in words]
    return {"folder": place.folder, "resume": place.resume, "words": words}


def _ranks(request: JobRequest, count: int) -> list[int | None]:
    """Return the ranks of each host; None where the plan chooses them."""
    counts = request.nproc or (None,)
    return list(counts) if len(counts) == count else [counts[0]] * count


def _failover(request: JobRequest, ranks: Sequence[int | None], *, restarts: bool) -> dict[str, Any]:
    """Return whether another host takes the place of node 0 when that one is lost, and with how many at the least."""
    first, least = ranks[0], request.least_nodes
    left_out = least is None and request.least_ranks is not None
    if left_out and first is not None:
        least = math.ceil((request.least_ranks or 1) / first)
    return {
        "failover": restarts and not (left_out and (first is None or set(ranks) != {first})),
        "least_nodes": least,
    }


def _sent_back(
    request: JobRequest, settings: SshSettings, hosts: Sequence[PreparedHost], number: int, *, shared: bool
) -> dict[str, Any]:
    """Return what a host is to know besides its command: where it runs, and what it sends back."""
    place, folder = hosts[number], request.folder
    counts = request.nproc or ()
    senders = range(len(hosts)) if number == 0 else [number]
    own = [each for each in senders if hosts[each].first_of == place.first_of]
    ranks = [rank for each in own for rank in range(sum(counts[:each]), sum(counts[: each + 1]))] if counts else None
    fetch = "none" if shared or (number > 0 and place.first_of == 0) else "all" if number == 0 else "ranks"
    temporary = fetch == "ranks"
    grown = [path for pattern in ("*.log", "*.jsonl") for path in folder.glob(f"ranks/*/{pattern}")]
    return {
        "folder": place.folder,
        "directory": place.directory,
        "python_path": place.python_path,
        "fetch": fetch,
        "ranks": ranks,
        "temporary": temporary,
        "checkpoints": fetch == "all" and settings.fetch == "all",
        "known": {path.relative_to(folder).as_posix(): path.stat().st_size for path in grown} if temporary else {},
        "had": sorted(RunFolder(folder).checkpoint_times()),
    }


def _names(request: JobRequest, hosts: Sequence[PreparedHost]) -> dict[str, str]:
    """Return what hosts call the run folder, the longest first, and what it is called here."""
    folder = request.folder
    here = str(folder.relative_to(request.directory) if folder.is_relative_to(request.directory) else folder)
    names = {place.folder: str(folder) for place in hosts}
    return names | {f"runs/{Path(place.folder).name}": here for place in hosts}
