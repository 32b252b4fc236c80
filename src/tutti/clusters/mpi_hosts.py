"""Nodes that mpirun reaches: the settings, the command that starts a program once on each, and what its errors mean."""

import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tutti.clusters.node_run import LOST_GRACE_S
from tutti.clusters.profile_file import read_cluster_settings
from tutti.clusters.ssh_hosts import SshHost, SshSettings, read_hosts
from tutti.config.safe_text import plain_text
from tutti.environment import allocated_nodes
from tutti.errors import LaunchError
from tutti.launch.launch_environment import communication_variables, device_variables

Text = Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\x00-\x1f]*$")]

Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(=[^\x00]*)?$")]

MpiKind = Literal["Open MPI", "Intel MPI"]

NO_PYTHON, NO_SETUP = "tutti-no-python", "tutti-no-setup"

_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_NUM_THREADS")

_VERSION_S = 20.0


class MpiSettings(BaseModel):
    """The settings of a run by mpirun, from `[mpi]` of tutti.toml and from --request.

    Attributes:
        hosts: such as "node0:8,node1:4", a list of such texts, or a file with one a line, as mpirun has it; none where
            mpirun knows the nodes, as in an allocation of PBS, LSF or Grid Engine.
        mpirun: the program.
        options: further arguments of it.
        python: the interpreter on the nodes; the one of this command if not given.
        setup: shell lines that run first on each node.
        env: variables that nodes get, as NAME or NAME=VALUE, besides those that they get anyway.
        rendezvous: HOST:PORT where the nodes meet, instead of what all of them are found to reach.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    hosts: Text | tuple[Text, ...] = ()
    mpirun: Text = "mpirun"
    options: tuple[Text, ...] = ()
    python: Text | None = None
    setup: tuple[Annotated[str, Field(pattern=r"^[^\x00]*$")], ...] = ()
    env: tuple[Name, ...] = ()
    rendezvous: Annotated[str, Field(pattern=r"^.+:\d+$")] | None = None


def read_mpi_settings(given: Mapping[str, Any]) -> MpiSettings:
    """Return the settings after a check.

    Raises:
        LaunchError: one does not exist, or has no value that it may have.
    """
    lists = ("options", "setup", "env")  # which --request gives as one text
    read = {name: (value,) if name in lists and isinstance(value, str) else value for name, value in given.items()}
    return read_cluster_settings(MpiSettings, read, "mpi")


def chosen_nodes(settings: MpiSettings, directory: Path, nnodes: int | None) -> tuple[SshHost | None, ...]:
    """Return the nodes: hosts that are named, or None for each that mpirun chooses.

    Args:
        settings: of the run.
        directory: where a relative path of a file of hosts begins.
        nnodes: number of nodes; None for all that are named, or that the allocation has.

    Raises:
        LaunchError: fewer are named, or the file cannot be read.
    """
    if not settings.hosts:
        return (None,) * (nnodes or allocated_nodes() or 1)
    hosts = _merged(settings, directory)
    if nnodes is not None and nnodes > len(hosts):
        raise LaunchError(
            f"--nnodes {nnodes} is more than the {len(hosts)} hosts that are named; name more with --hosts"
        )
    return hosts[:nnodes]


def _merged(settings: MpiSettings, directory: Path) -> tuple[SshHost, ...]:
    """Return the hosts; one that stands in several lines of a file has a rank for each, as PBS writes it."""
    file = directory / settings.hosts if isinstance(settings.hosts, str) else directory
    if file.is_file():
        lines = [
            line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8", errors="replace").split("\n")
        ]
        counts = Counter(line for line in lines if line)
        if max(counts.values(), default=1) > 1 and not any(re.search(r"[:\s]", line) for line in counts):
            return tuple(SshHost(address=name, ranks=count) for name, count in counts.items())
    return read_hosts(SshSettings(hosts=settings.hosts), directory)


def mpi_kind(settings: MpiSettings) -> MpiKind:
    """Return which MPI the program is of.

    Raises:
        LaunchError: it is not there, or is of one that cannot be used.
    """
    program = settings.mpirun
    if shutil.which(program) is None:
        raise LaunchError(
            f"there is no {program} here; load MPI's module, or name the program with --request mpirun=PATH"
        )
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{program} --version gives no answer ({error}); name another with --request mpirun=PATH"
        ) from None
    said = done.stdout + done.stderr
    if "Open MPI" in said or "OpenRTE" in said:
        return "Open MPI"
    if "Intel" in said and "MPI" in said:
        return "Intel MPI"
    about = "is MPICH's, which passes its input to one process only" if "HYDRA" in said else "is no mpirun known here"
    raise LaunchError(f"{program} {about}; name Open MPI's or Intel MPI's with --request mpirun=PATH, or use --on ssh")


def forwarded_names(settings: MpiSettings) -> tuple[str, ...]:
    """Return the names of the variables that nodes get from this process, apart from the secret."""
    steering = communication_variables().keys() - device_variables().keys()
    named = (text.partition("=")[0] for text in settings.env)
    return tuple(dict.fromkeys((*_FORWARDED, *sorted(steering), *named)))


def stated_variables(settings: MpiSettings) -> dict[str, str]:
    """Return the variables of the settings that have a value there."""
    return {name: value for name, equals, value in (text.partition("=") for text in settings.env) if equals}


def mpirun_command(
    settings: MpiSettings, kind: MpiKind, nodes: Sequence[SshHost | None], variables: Mapping[str, str], grace_s: float
) -> list[str]:
    """Return the command that starts this node's part of a run once on each node.

    Args:
        settings: of the run.
        kind: which MPI the program is of.
        nodes: hosts that are named, or None for each.
        variables: those of this process, of which some are forwarded.
        grace_s: seconds that ranks have to write a checkpoint where mpirun ends them, 8 at most, as it waits so long
            in any case.
    """
    part = ["bash", "-c", _node_script(settings)]
    options = [word for option in settings.options for word in shlex.split(option)]
    named = [host.address.replace("[", "").replace("]", "") for host in nodes if host is not None]
    if kind == "Intel MPI":
        where = ["-hosts", ",".join(named)] if named else []
        return [settings.mpirun, "-s", "all", "-n", str(len(nodes)), "-ppn", "1", *where, *options, *part]
    passed = [word for name in forwarded_names(settings) if name in variables for word in ("-x", name)]
    first = [settings.mpirun, "--stdin", "all", "--bind-to", "none"]
    first += ["--mca", "odls_base_sigkill_timeout", str(int(min(grace_s, LOST_GRACE_S)) + 1), *options]
    if not named:
        return [*first, "--map-by", "ppr:1:node", "-n", str(len(nodes)), *passed, *part]
    for name in named:  # one after another, so that node numbers follow the list
        first += ["--host", name, "-n", "1", *passed, *part, ":"]
    return first[:-1]


def _node_script(settings: MpiSettings) -> str:
    """Return what runs on a node: the setup lines, then Python."""
    lines = []
    for number, line in enumerate(settings.setup, 1):
        lines.append(f"eval {shlex.quote(line)} </dev/null || {{ echo {NO_SETUP} {number} $HOSTNAME >&2; exit 97; }}")
    python = shlex.quote(settings.python or sys.executable)
    lines.append(f"command -v {python} >/dev/null || {{ echo {NO_PYTHON} $HOSTNAME >&2; exit 96; }}")
    return "\n".join([*lines, f"exec {python} -u -m tutti.clusters.mpi_node"])


_MEANINGS = (
    (r"attempt to run as root|strongly suggest that you run mpirun as a non-root",
     "Open MPI refuses to run as root",
     "submit as another user, or, if root is meant, export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    (r"not enough slots|requested more processes than the ppr|already filled|more processes than",
     "mpirun knows fewer nodes than {nodes}",
     "ask for an allocation of as many, or name them with --hosts node0:8,node1:8"),
    (r"host list[^.]*not.*allocation|not in the allocation|hosts? .*not.* in .*allocation",
     "a host that is named is not in this allocation", "correct --hosts, or leave it out"),
    (r"remote host identification has changed|host key verification failed",
     "mpirun's ssh does not know the key of a host ({said})",
     "connect once by hand and compare the fingerprint, or add it to known_hosts"),
    (r"permission denied", "mpirun's ssh is not let in without a password ({said})",
     "add your key on the hosts (`ssh-copy-id HOST`)"),
    (r"could not resolve hostname|unknown host|name or service not known", "the name of a host is not known ({said})",
     "correct it in --hosts"),
    (r"connection refused|timed out|no route to host|network is unreachable", "a host cannot be reached ({said})",
     "check that it is up and has an sshd, and the network to it"),
    (r"no module named '?tutti", "Python on the nodes has no tutti",
     "install it there, or name the interpreter that has it with --request python=PATH"),
    (r"orted: (command )?not found|orted.*no such file|pmi_proxy.*no such file",
     "a node has no MPI where this machine has it ({said})",
     'install it there, or say where it is: options = ["--prefix PATH"]'),
    (r"unrecognized argument|unknown option|unrecognized option", "mpirun does not take its options ({said})",
     "correct `options` in tutti.toml or --request"),
)  # fmt: skip


def explain_mpirun(settings: MpiSettings, nodes: int, code: int | None, said: str) -> str:
    """Return why mpirun has started nothing, as a sentence that ends with the remedy.

    Args:
        settings: of the run.
        nodes: number of nodes that were asked for.
        code: mpirun's exit code; None if it still runs.
        said: what it, its ssh and the nodes' shells wrote.
    """
    lines = [line.strip() for line in plain_text(said).splitlines() if line.strip(" -=*\t")]
    for line in lines:
        if line.startswith(NO_PYTHON):
            python, host = settings.python or sys.executable, line.removeprefix(NO_PYTHON).strip()
            return f"there is no {python} on {host or 'a node'}; name Python there with --request python=PATH"
        if line.startswith(NO_SETUP):
            number, _, host = line.removeprefix(NO_SETUP).strip().partition(" ")
            failed = settings.setup[int(number) - 1] if number.isdigit() else ""
            return f"setup line {number} failed on {host or 'a node'} ({failed}); correct it in tutti.toml"
    for pattern, meaning, remedy in _MEANINGS:
        if (match := re.search(pattern, said, re.IGNORECASE)) is not None:
            line = next((line for line in lines if match.group(0).partition("\n")[0] in line), "")
            return f"{meaning.format(nodes=nodes, said=line[:200])}; {remedy}"
    words = " ".join(lines)[:300] or "it said nothing"
    ended = "has not started the nodes in time" if code is None else f"ended with exit code {code}"
    return f"{settings.mpirun} {ended} ({words}); correct what it names in tutti.toml or --request"
