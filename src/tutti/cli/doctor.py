"""`tutti doctor`: finds what would stop a launch on this host, and how to fix it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.cli.options import emit, hosts_option, json_option, request_option
from tutti.cli.submit import default_launcher
from tutti.errors import LaunchError

if TYPE_CHECKING:
    from tutti.launch.doctor_finding import Finding


@click.command()
@click.option("--nproc", type=click.IntRange(1), help="Ranks to run here; one per core if not given, at least 2.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where several nodes are to meet.")
@click.option("--nnodes", type=click.IntRange(1), help="Nodes that run this command together; 1 if not given.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="The number of this node, from 0.")
@click.option("--on", metavar="NAME", help="On whose nodes to look: slurm, ssh or kubernetes.")
@request_option
@hosts_option
@json_option
@click.argument("script", required=False, type=click.Path(path_type=Path))
def command(
    script: Path | None,
    nproc: int | None,
    rendezvous: str | None,
    nnodes: int | None,
    node_rank: int,
    on: str | None,
    requests: tuple[str, ...],
    hosts: str | None,
    as_json: bool,
) -> None:
    """Find what would stop a launch (of SCRIPT) on this host. Exits with 1 if anything would.

    With --nnodes, or as `srun --ntasks-per-node=1 tutti doctor`, hosts are checked together, and the links between them
    are measured. With --on slurm, Slurm is asked for --nnodes nodes, and these are checked; with --hosts, these are,
    over ssh.
    """
    from tutti.commands.doctor import diagnosed

    on = on or (None if hosts is None else default_launcher(hosts))
    if on is not None:
        from tutti.clusters.cluster_job import NodeCommand
        from tutti.commands.on_nodes import run_on_nodes, sends_to

        if rendezvous is not None or node_rank:
            raise LaunchError(
                f"--on {on}: the cluster numbers its nodes and says where they meet; leave --rendezvous and "
                "--node-rank out"
            )
        told = nproc is not None and not sends_to(on)  # else the cluster says so on each node
        words = ["doctor", *(("--nproc", str(nproc)) if told else ()), *(("--json",) if as_json else ())]
        words += [] if script is None else [str(script.resolve())]
        asked = NodeCommand(
            words=tuple(words), script=None if script is None else str(script), nodes=nnodes, nproc=nproc
        )
        sys.exit(run_on_nodes(asked, on=on, requests=requests, hosts=hosts).code)
    if requests:
        raise LaunchError("--request is for the nodes of a cluster; add --on slurm, or leave it out")

    show = (lambda finding: None) if as_json else _show
    diagnosis = diagnosed(script, nproc, rendezvous, nnodes or 1, node_rank, show=show)
    problems = sum(not finding.ok for finding in diagnosis.findings)
    if as_json:
        emit(diagnosis)
    elif not diagnosis.findings:
        print("the first task of this node checks it")
    elif problems:
        print(f"problems to fix: {problems}; start with the first")
    else:
        print("nothing would stop a launch here")
    sys.exit(1 if problems else 0)


def _show(finding: "Finding") -> None:
    mark = "PROBLEM" if not finding.ok else "warning" if finding.fix else "ok     "
    print(f"{mark}  {finding.name}: {finding.found}", flush=True)
    for line in finding.table:
        print(f"         {line}", flush=True)
    if finding.fix:
        print(f"         fix: {finding.fix}", flush=True)
