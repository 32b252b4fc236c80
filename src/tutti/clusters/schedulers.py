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


def _kubernetes() -> Scheduler:
    from tutti.clusters.kubernetes import Kubernetes

    return Kubernetes()


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "slurm": _slurm,
    "ssh": _ssh,
    "kubernetes": _kubernetes,
    "k8s": _kubernetes,
}
"""The schedulers by name, for `--on NAME`."""

ALIASES = {"k8s": "kubernetes"}
"""Short names, and those by which tutti.toml and records call the scheduler."""


def scheduler_for(name: str) -> Scheduler:
    """Return the scheduler of this name.

    Raises:
        LaunchError: there is none.
    """
    if name not in SCHEDULERS:
        raise LaunchError(f"--on {name}: there is no scheduler {name!r}; schedulers are {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]()
