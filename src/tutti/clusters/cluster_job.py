"""A run as a job of a cluster: what is asked for, what a scheduler answers, and the record in the run folder."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from tutti.config import serialization
from tutti.errors import LaunchError, SpecError

JobState = Literal["pending", "running", "completed", "failed", "cancelled", "unknown"]

RECORD = "job.json"
"""File of the run folder that names the job."""

ENTRY_POINT_GROUP = "tutti.schedulers"
"""The entry points by which installed packages offer schedulers."""

STAY_STOPPED = "stay-stopped"
"""File of the run folder: a job that stops with a checkpoint does not go on by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a job is to run, and what it needs.

    Attributes:
        name: of the job.
        folder: the run folder, absolute, which all nodes see.
        directory: where the command runs, absolute.
        words: arguments of `tutti run` on each node, without those that say which node it is and where the run lies.
        resume: the run folder, checkpoint or store that the first start continues from.
        nodes: number of nodes; with `least_nodes` the most.
        least_nodes: fewest nodes that it may have; None if their number is fixed.
        nproc: ranks per node, one number for all nodes or one for each; None leaves it to the plan.
        grace_s: seconds that ranks have to write a checkpoint when the job is stopped.
        time_limit_s: seconds after which the ranks stop with a checkpoint by themselves; None for no limit.
        script: the script's path as the command names it; empty for a module.
        restarts: how often the ranks are started again after failures.
        least_ranks: fewest ranks to go on with after failures; None if none may be left out.
        checkpoint_store: the object store for checkpoints, if there is one.
        settings: the scheduler's own settings, such as a partition.
    """

    name: str
    folder: Path
    directory: Path
    words: tuple[str, ...]
    resume: Path | str | None = None
    nodes: int = 1
    least_nodes: int | None = None
    nproc: tuple[int, ...] | None = None
    grace_s: float = 30.0
    time_limit_s: float | None = None
    script: str = ""
    restarts: int = 0
    least_ranks: int | None = None
    checkpoint_store: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What a scheduler says of a job.

    Attributes:
        reason: why it waits, or how it ended, in the scheduler's words; empty if there is none.
        nodes: the nodes that it has.
        exit_code: of the job; None until it has ended.
    """

    state: JobState
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("completed", "failed", "cancelled")


class Scheduler(Protocol):
    """A cluster's scheduler, as the commands use it. It places, queues and kills; tutti only asks."""

    def nodes(self, settings: Mapping[str, Any], nnodes: int | None) -> tuple[int | None, ...]:
        """Return the ranks of each node where the settings name the nodes; empty where the scheduler chooses them.

        Args:
            settings: the scheduler's own.
            nnodes: the number of nodes that is asked for; None for all.

        Raises:
            LaunchError: a setting does not exist, or fewer nodes are named.
        """
        ...

    def preview(self, request: JobRequest) -> str:
        """Return what would be submitted, as text.

        Raises:
            LaunchError: a setting does not exist, or has no value that it may have.
        """
        ...

    def submit(self, request: JobRequest) -> str:
        """Submit a job and return its number.

        Raises:
            LaunchError: the scheduler refuses it.
        """
        ...

    def log(self, request: JobRequest, job: str) -> str:
        """Return the file that takes what the nodes print."""
        ...

    def status(self, job: str) -> JobStatus:
        """Return what the scheduler knows of a job; "unknown" if it has forgotten it."""
        ...

    def collect(self, job: str) -> bool:
        """Bring what the nodes have printed into the log, where the cluster keeps it.

        Returns:
            Whether the run folder is in the cluster, so that the log is all that this machine sees of the run.

        Raises:
            LaunchError: the scheduler does not answer.
        """
        ...

    def stop(self, job: str) -> None:
        """Let the ranks write a checkpoint and end."""
        ...

    def cancel(self, job: str) -> None:
        """End a job at once."""
        ...


@runtime_checkable
class TakesRanges(Protocol):
    """A scheduler whose jobs may have fewer nodes than were asked for, as `--nnodes 1:4` allows."""

    def check_range(self, request: JobRequest) -> None:
        """Check that a job may have a range of nodes.

        Raises:
            LaunchError: its settings do not go with one.
        """
        ...


@runtime_checkable
class NodeCommands(Protocol):
    """A scheduler that lets a command run on nodes and waits for it, as `tutti doctor --on NAME` needs."""

    def command_on_nodes(
        self, words: Sequence[str], nodes: int, tasks_per_node: int | None, settings: Mapping[str, Any]
    ) -> list[str]:
        """Return the command that asks for nodes, runs `tutti WORDS` there, and ends with it.

        Args:
            words: arguments of `tutti`.
            nodes: number of nodes.
            tasks_per_node: how often it is started on each; None for as many ranks as the settings name, or once.
            settings: the scheduler's own.

        Raises:
            LaunchError: the scheduler refuses it.
        """
        ...


@runtime_checkable
class JobArrays(Protocol):
    """A scheduler that takes several runs at once, as `tutti submit --array` needs."""

    def preview_array(self, requests: Mapping[int, JobRequest], at_once: int | None) -> str:
        """Return what would be submitted, as text.

        Args:
            requests: the runs by number. They differ in words, and in the last part of the folder, which is the number.
            at_once: how many may run at once; None for all.

        Raises:
            LaunchError: a setting does not exist, or has no value that it may have.
        """
        ...

    def submit_array(self, requests: Mapping[int, JobRequest], at_once: int | None) -> dict[int, str]:
        """Submit them, and return the job of each.

        Raises:
            LaunchError: the scheduler refuses them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOffer:
    """An entry point by which an installed package offers a scheduler.

    Attributes:
        name: what users write after `--on`.
        package: its name and version.
        value: where it is, as "module:Class".
        load: imports the class.
    """

    name: str
    package: str
    value: str
    load: Callable[[], Any]


def offered_schedulers() -> list[SchedulerOffer]:
    """Return the schedulers that installed packages offer, one for each package and name."""
    found = {}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        made_by = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module
        offer = SchedulerOffer(name=entry.name, package=made_by, value=entry.value, load=entry.load)
        found[offer.name, offer.package, offer.value] = offer
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """A command of `tutti` that is to run once on each of several nodes, which find each other.

    Attributes:
        words: arguments of `tutti`, without those that say which node it is.
        script: the script among them, relative to this directory; None if no code of the project is needed.
        nodes: number of nodes; None for all that are named, or else 1.
        nproc: ranks of each node; None for those that the settings name.
        numbered: how the command calls the number of nodes, such as "--nnodes".
    """

    words: tuple[str, ...]
    script: str | None = None
    nodes: int | None = None
    nproc: int | None = None
    numbered: str = "--nnodes"

    def on_node(self, number: int, nodes: int, nproc: int, rendezvous: str) -> list[str]:
        """Return the arguments of `tutti` on one of the nodes.

        Args:
            number: of the node, from 0.
            nodes: how many there are.
            nproc: ranks of each.
            rendezvous: where they meet, as HOST:PORT.
        """
        command, *others = self.words
        found = [command, "--nproc", str(nproc)]
        if nodes > 1:
            found += [self.numbered, str(nodes), "--node-rank", str(number), "--rendezvous", rendezvous]
        return [*found, *others]


@runtime_checkable
class NodeRuns(Protocol):
    """A cluster that runs a command on nodes while one waits, and passes on what it prints."""

    def run_on_nodes(
        self, command: NodeCommand, settings: Mapping[str, Any], show: Callable[[str], None]
    ) -> tuple[int, tuple[str, ...]]:
        """Run a command on nodes, end it everywhere on Ctrl-C, and return its exit code and the nodes' names.

        Args:
            command: what is to run.
            settings: the cluster's own.
            show: called with each line that a node prints.

        Raises:
            LaunchError: a node cannot be used, or the cluster refuses.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A submitted run, as its folder names it.

    Attributes:
        scheduler: its name, such as "slurm".
        job: the job's number.
        name: of the job.
        nodes: number of nodes.
        nproc: ranks per node.
        submitted_utc: when it was submitted.
        log: the file that takes what the nodes print.
        values: what a run of an array has of its own, such as "lr=0.1 seed=2".
    """

    scheduler: str
    job: str
    name: str
    nodes: int
    nproc: tuple[int, ...] | None
    submitted_utc: str
    log: str
    values: str = ""


class HeldInterrupts:
    """A handler of SIGINT that only notes it.

    Attributes:
        came: whether a SIGINT has come.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, *_: object) -> None:
        self.came = True


@contextlib.contextmanager
def interrupts_held() -> Iterator[HeldInterrupts]:
    """Hold Ctrl-C back, so that it does not come between the start of a job and its record."""
    held, before = HeldInterrupts(), signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield held
        return
    signal.signal(signal.SIGINT, held)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupts_let_through() -> Iterator[None]:
    """Let Ctrl-C through inside `interrupts_held`, while nothing is started.

    Raises:
        KeyboardInterrupt: one comes, or has come.
    """
    held = signal.getsignal(signal.SIGINT)
    if not isinstance(held, HeldInterrupts) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if held.came:
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, held)


def write_record(folder: Path, record: JobRecord) -> None:
    """Write the record of a submitted run into its folder."""
    serialization.save(record, folder / RECORD)


def read_record(folder: Path) -> JobRecord:
    """Return the record in a run folder.

    Raises:
        LaunchError: there is none, or it is damaged.
    """
    file = folder / RECORD
    if file.exists():
        try:
            return serialization.load(JobRecord, file)
        except SpecError as error:
            raise LaunchError(f"{file} is no record of a submitted run ({error}); submit the run again") from None
    runs = [path.parent for path in folder.glob(f"[0-9]*/{RECORD}") if path.parent.name.isdecimal()]
    if runs:
        one = min(runs, key=lambda run: int(run.name))
        raise LaunchError(f"{folder} has the runs of an array; name one of them, such as {one}")
    raise LaunchError(
        f"{folder} is no submitted run (it has no {RECORD}); `tutti status` lists those below this directory"
    )
