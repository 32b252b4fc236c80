"""The launchers by name, for `tutti run --on NAME`.

A launcher is one file beside `local_launcher.py` with a class that has `start(spec) -> Handle` (see
`tutti.launch.launcher`), one line in `LAUNCHERS` and one test. A Kubernetes launcher would be
`tutti/launch/kubernetes.py`: its `start` creates one pod for each rank, its handle reads and deletes those pods.
`tutti.launch.launcher.Launcher` says what ranks need that share no host.

Another package adds its own with `register_launcher`, or in its pyproject.toml:

    [project.entry-points."tutti.launchers"]
    kubernetes = "their_package.kubernetes:KubernetesLauncher"
"""

import difflib
from collections.abc import Callable
from importlib import metadata

from tutti.errors import LaunchError
from tutti.launch.launcher import Launcher

LauncherFactory = Callable[[], Launcher]

ENTRY_POINT_GROUP = "tutti.launchers"


def _local() -> Launcher:
    from tutti.launch.local_launcher import LocalLauncher

    return LocalLauncher()


LAUNCHERS: dict[str, LauncherFactory] = {"local": _local}
"""Factory of each launcher by name. A factory imports its launcher only when it is called."""


def register_launcher(name: str, factory: LauncherFactory) -> None:
    """Make a launcher available as `tutti run --on NAME`.

    Args:
        name: what users write after `--on`.
        factory: called without arguments for each launch; a launcher class is one.

    Raises:
        LaunchError: another launcher has this name.
    """
    if LAUNCHERS.setdefault(name, factory) is not factory:
        raise LaunchError(f"a launcher {name!r} is registered already; register yours under another name")


def launcher_names() -> list[str]:
    """Return the names of all launchers: those registered, and those of installed packages."""
    return sorted({*LAUNCHERS, *(entry.name for entry in _entry_points())})


def launcher_for(name: str) -> Launcher:
    """Return a new launcher of this name.

    Raises:
        LaunchError: no launcher has this name, or the package that offers it cannot be imported.
    """
    if name in LAUNCHERS:
        return LAUNCHERS[name]()
    for entry in _entry_points():
        if entry.name == name:
            try:
                factory: LauncherFactory = entry.load()
            except (ImportError, AttributeError) as error:
                raise LaunchError(
                    f"launcher {name} cannot be loaded from {entry.value} ({error}); fix or reinstall that package"
                ) from error
            return factory()
    names = launcher_names()
    close = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"launchers are {', '.join(names)}"
    raise LaunchError(f"--on {name}: there is no launcher {name!r}; {remedy}")


def _entry_points() -> metadata.EntryPoints:
    return metadata.entry_points(group=ENTRY_POINT_GROUP)
