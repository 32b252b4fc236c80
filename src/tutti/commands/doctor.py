"""`tutti.doctor`: finds what would stop a launch on this host, and how to fix it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.commands.messages import messages, status
from tutti.commands.values import StrPath, path_of, whole
from tutti.errors import LaunchError

if TYPE_CHECKING:
    from tutti.launch.doctor_checks import Diagnosis
    from tutti.launch.doctor_finding import Finding


def doctor(
    script: StrPath | None = None,
    *,
    nproc: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    verbose: bool = False,
) -> "Diagnosis":
    """Find what would stop a launch on this host. A problem is no error: the diagnosis has it, with its fix.

    Args:
        script: the script to launch, if there is one.
        nproc: ranks to run here; one per core if None, at least 2.
        nnodes: nodes that make this call together, to compare their versions and devices.
        node_rank: the number of this node, from 0.
        rendezvous: where several nodes are to meet, as "HOST:PORT".
        verbose: show on standard error that checks run.
    """
    with messages(shown=verbose):
        count, number = whole("nnodes", nnodes) or 1, whole("node_rank", node_rank, 0) or 0
        return diagnosed(path_of("script", script), whole("nproc", nproc), rendezvous, count, number)


def diagnosed(
    script: Path | None,
    nproc: int | None,
    rendezvous: str | None,
    nnodes: int = 1,
    node_rank: int = 0,
    show: "Callable[[Finding], None]" = lambda _: None,
) -> "Diagnosis":
    """Check this host.

    Args:
        script: the script to launch, if there is one.
        nproc: ranks to run here.
        rendezvous: where several nodes are to meet.
        nnodes: nodes that are checked together.
        node_rank: the number of this node.
        show: called with each finding as soon as it is made.

    Raises:
        LaunchError: several nodes are to be checked, and nothing says where they meet or how many ranks each has.
    """
    from tutti.launch import doctor_checks
    from tutti.launch.doctor_checks import Diagnosis
    from tutti.launch.launch_environment import granted_cores
    from tutti.launch.local_launcher import warm

    if nnodes == 1 and rendezvous is None:
        nnodes, node_rank, rendezvous, first = _under_slurm()
        if not first:
            return Diagnosis(ok=True, findings=())
        nproc = nproc or (2 if nnodes > 1 else None)
    if nnodes > 1 and (rendezvous is None or nproc is None):
        raise LaunchError(
            f"--nnodes {nnodes} checks nodes together, which need to meet; add --rendezvous HOST:PORT (of node 0) and "
            "--nproc N"
        )
    warm()
    findings: list[Finding] = []
    nodes = doctor_checks.Nodes(count=nnodes, rank=node_rank, rendezvous=rendezvous)
    for check in doctor_checks.all_checks(script, nproc or max(2, granted_cores()), nodes, findings):
        with status("checking"):
            made = check()
        for finding in made if isinstance(made, list) else [made]:
            findings.append(finding)
            show(finding)
    return Diagnosis(ok=all(finding.ok for finding in findings), findings=tuple(findings))


def _under_slurm() -> tuple[int, int, str | None, bool]:
    """Return the nodes of the Slurm step, this one's number, where they meet, and whether this task checks its node."""
    from tutti.environment import read_rank_environment, slurm_nodes

    nodes, number = slurm_nodes()
    if nodes == 1:
        return 1, 0, None, True
    task = read_rank_environment()
    return nodes, number, task.rendezvous.removeprefix("tcp://"), task.local_rank == 0
