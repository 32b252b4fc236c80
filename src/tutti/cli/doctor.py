"""`tutti doctor`: finds what would stop a launch on this host, and how to fix it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.cli.options import console, emit, json_option

if TYPE_CHECKING:
    from tutti.launch.doctor_checks import Finding


@click.command()
@click.option("--nproc", type=click.IntRange(1), help="Ranks to run here; one per core if not given, at least 2.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where several nodes are to meet.")
@json_option
@click.argument("script", required=False, type=click.Path(path_type=Path))
def command(script: Path | None, nproc: int | None, rendezvous: str | None, as_json: bool) -> None:
    """Find what would stop a launch (of SCRIPT) on this host. Exits with 1 if anything would."""
    from tutti.launch import doctor_checks
    from tutti.launch.launch_environment import granted_cores
    from tutti.launch.local_launcher import warm

    warm()
    findings: list[Finding] = []
    for check in doctor_checks.all_checks(script, nproc or max(2, granted_cores()), rendezvous):
        with console.status("checking"):
            findings.append(check())
        if not as_json:
            _show(findings[-1])
    problems = sum(not finding.ok for finding in findings)
    if as_json:
        emit(doctor_checks.Diagnosis(ok=not problems, findings=tuple(findings)))
    else:
        verdict = (
            "nothing would stop a launch here" if not problems else f"problems to fix: {problems}; start with the first"
        )
        print(verdict)
    sys.exit(1 if problems else 0)


def _show(finding: "Finding") -> None:
    print(f"{'ok     ' if finding.ok else 'PROBLEM'}  {finding.name}: {finding.found}", flush=True)
    if finding.fix:
        print(f"         fix: {finding.fix}", flush=True)
