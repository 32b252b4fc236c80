"""`tutti.doctor`: finds what would stop a launch on this host, and how to fix it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.commands.messages import messages, status
from tutti.commands.values import StrPath, path_of, whole

if TYPE_CHECKING:
    from tutti.launch.doctor_checks import Diagnosis, Finding


def doctor(
    script: StrPath | None = None,
    *,
    nproc: int | None = None,
    rendezvous: str | None = None,
    verbose: bool = False,
) -> "Diagnosis":
    """Find what would stop a launch on this host. A problem is no error: the diagnosis has it, with its fix.

    Args:
        script: the script to launch, if there is one.
        nproc: ranks to run here; one per core if None, at least 2.
        rendezvous: where several nodes are to meet, as "HOST:PORT".
        verbose: show on standard error that checks run.
    """
    with messages(shown=verbose):
        return diagnosed(path_of("script", script), whole("nproc", nproc), rendezvous)


def diagnosed(
    script: Path | None, nproc: int | None, rendezvous: str | None, show: "Callable[[Finding], None]" = lambda _: None
) -> "Diagnosis":
    """Check this host.

    Args:
        script: the script to launch, if there is one.
        nproc: ranks to run here.
        rendezvous: where several nodes are to meet.
        show: called with each finding as soon as it is made.
    """
    from tutti.launch import doctor_checks
    from tutti.launch.launch_environment import granted_cores
    from tutti.launch.local_launcher import warm

    warm()
    findings: list[Finding] = []
    for check in doctor_checks.all_checks(script, nproc or max(2, granted_cores()), rendezvous):
        with status("checking"):
            findings.append(check())
        show(findings[-1])
    return doctor_checks.Diagnosis(ok=all(finding.ok for finding in findings), findings=tuple(findings))
