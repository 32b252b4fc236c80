"""`tutti doctor`: finds what would stop a launch on this host, and how to fix it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.cli.options import emit, json_option

if TYPE_CHECKING:
    from tutti.launch.doctor_checks import Finding


@click.command()
@click.option("--nproc", type=click.IntRange(1), help="Ranks to run here; one per core if not given, at least 2.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where several nodes are to meet.")
@json_option
@click.argument("script", required=False, type=click.Path(path_type=Path))
def command(script: Path | None, nproc: int | None, rendezvous: str | None, as_json: bool) -> None:
    """Find what would stop a launch (of SCRIPT) on this host. Exits with 1 if anything would."""
    from tutti.commands.doctor import diagnosed

    diagnosis = diagnosed(script, nproc, rendezvous, show=(lambda finding: None) if as_json else _show)
    problems = sum(not finding.ok for finding in diagnosis.findings)
    if as_json:
        emit(diagnosis)
    elif problems:
        print(f"problems to fix: {problems}; start with the first")
    else:
        print("nothing would stop a launch here")
    sys.exit(1 if problems else 0)


def _show(finding: "Finding") -> None:
    print(f"{'ok     ' if finding.ok else 'PROBLEM'}  {finding.name}: {finding.found}", flush=True)
    if finding.fix:
        print(f"         fix: {finding.fix}", flush=True)
