"""The folder of a node's checkpoints in memory: its `tutti run` makes it, and removes it, however that ends."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tutti.errors import LaunchError
from tutti.launch.launch_environment import memory_root
from tutti.launch.launcher import LaunchSpec
from tutti.launch.local_launcher import LockedFolder

_REMOVER = 'read -r _; for _ in 1 2 3 4 5 6 7 8 9 10; do rm -rf -- "$1"; [ -e "$1" ] || break; sleep 0.2; done'
"""What a shell does: wait until the launcher has ended, then remove the folder; ranks may die a moment later."""


@contextlib.contextmanager
def memory_folder(asked: bool) -> Iterator[dict[str, str]]:
    """Yield the variables that tell ranks where checkpoints in memory lie; none if they are not asked for.

    Raises:
        LaunchError: there is no folder in memory.
    """
    if not asked:
        yield {}
        return
    root = memory_root()
    try:
        folder = LockedFolder(root)
    except OSError as error:
        raise LaunchError(
            f"--memory-checkpoint-every needs a folder in memory, and {root} cannot be used ({error.strerror}); name "
            "another one in TUTTI_MEMORY_FOLDER, or leave the option out"
        ) from None
    try:
        with _removed_with_this_process(folder.path):
            yield {"TUTTI_MEMORY_CHECKPOINTS": str(folder.path)}
    finally:
        folder.remove()


@contextlib.contextmanager
def _removed_with_this_process(folder: Path) -> Iterator[None]:
    """Let a process of its own remove the folder if this one is killed: memory is not given back at the next launch."""
    try:
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVER, "tutti-remover", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is not meant for it
            cwd="/",
        )
    except OSError:  # the next launch removes the folder
        yield
        return
    try:
        yield
    finally:
        assert remover.stdin is not None
        with contextlib.suppress(OSError):
            remover.stdin.close()
        remover.wait()


def newest_step(spec: LaunchSpec) -> int | None:
    """Return the step of the newest complete checkpoint in this node's memory; None if there is none."""
    folder = spec.environment.get("TUTTI_MEMORY_CHECKPOINTS")
    names = os.listdir(Path(folder) / "checkpoints") if folder and (Path(folder) / "checkpoints").is_dir() else []
    steps = [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]
    return max(steps, default=None)
