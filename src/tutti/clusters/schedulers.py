"""The schedulers by name, for `tutti submit --on NAME`."""

from collections.abc import Callable

from tutti.clusters.cluster_job import Scheduler
from tutti.errors import LaunchError


def _slurm() -> Scheduler:
    from tutti.clusters.slurm import Slurm

    return Slurm()


def _ssh() -> Scheduler:
    from tutti.clusters.ssh import Ssh

    return Ssh()


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {"slurm": _slurm, "ssh": _ssh}
"""The schedulers by name, for `--on NAME`."""


def scheduler_for(name: str) -> Scheduler:
    """Return the scheduler of this name.

    Raises:
        LaunchError: there is none.
    """
    if name not in SCHEDULERS:
        raise LaunchError(f"--on {name}: there is no scheduler {name!r}; schedulers are {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]()
