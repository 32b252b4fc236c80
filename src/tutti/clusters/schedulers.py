"""The schedulers by name, for `tutti submit --on NAME`: tutti's own, and those of installed packages.

A package offers one in its pyproject.toml, as a class with the methods of `tutti.clusters.cluster_job.Scheduler`:

    [project.entry-points."tutti.schedulers"]
    pbs = "their_package.pbs:Pbs"
"""

import inspect
from collections.abc import Callable

from tutti.clusters.cluster_job import Scheduler, SchedulerOffer, offered_schedulers
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


def _mpi() -> Scheduler:
    from tutti.clusters.mpi import Mpi

    return Mpi()


def _ray() -> Scheduler:
    from tutti.clusters.ray_jobs import RayJobs

    return RayJobs()


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "slurm": _slurm,
    "ssh": _ssh,
    "kubernetes": _kubernetes,
    "k8s": _kubernetes,
    "mpi": _mpi,
    "ray": _ray,
}
"""tutti's own schedulers by name."""

ALIASES = {"k8s": "kubernetes"}
"""Short names, and those by which tutti.toml and records call the scheduler."""

_METHODS = tuple(name for name, _ in inspect.getmembers(Scheduler, inspect.isfunction) if not name.startswith("_"))


def is_scheduler(name: str) -> bool:
    """Return whether a scheduler has this name, which starts no rank itself as a launcher does."""
    return name in SCHEDULERS or any(offer.name == name for offer in offered_schedulers())


def scheduler_for(name: str) -> Scheduler:
    """Return the scheduler of this name.

    Raises:
        LaunchError: there is none, several packages offer one, a package offers one by a name of tutti's own, or what
            it offers is no scheduler.
    """
    offers = [offer for offer in offered_schedulers() if offer.name == name]
    if name in SCHEDULERS:
        if offers:
            raise LaunchError(
                f"--on {name}: {_packages(offers)} offers a scheduler by this name, which is tutti's own; uninstall "
                "it, or let it use another name"
            )
        return SCHEDULERS[name]()
    if not offers:
        names = ", ".join(dict.fromkeys((*SCHEDULERS, *(offer.name for offer in offered_schedulers()))))
        raise LaunchError(f"--on {name}: there is no scheduler {name!r}; schedulers are {names}")
    if len(offers) > 1:
        raise LaunchError(
            f"--on {name}: {_packages(offers)} each offer a scheduler by this name; uninstall all but one"
        )
    return _loaded(offers[0])


def _packages(offers: list[SchedulerOffer]) -> str:
    return " and ".join(f"package {offer.package} ({offer.value})" for offer in offers)


def _loaded(offer: SchedulerOffer) -> Scheduler:
    """Return the scheduler of an installed package. Raises LaunchError if it cannot be made, or lacks a method."""
    try:
        made = offer.load()()
    except Exception as error:  # whatever the package does when it is imported
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise LaunchError(
            f"--on {offer.name}: package {offer.package} offers it as {offer.value}, which cannot be loaded ({words}); "
            "correct or reinstall that package"
        ) from error
    lacking = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if lacking:
        raise LaunchError(
            f"--on {offer.name}: {offer.value} of package {offer.package} is no scheduler, as it has no "
            f"{', '.join(lacking)}; ask for a version that fits this tutti"
        )
    scheduler: Scheduler = made
    return scheduler
