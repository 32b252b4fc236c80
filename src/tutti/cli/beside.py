"""Planning and predicting for `tutti run` in a process of their own, so that the run's processes stay clean.

The script is run up to `prepare` there, from the same fork server as the ranks; results come back as files in the
run folder.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.errors import LaunchError, TuttiError
from tutti.launch.rank_main import leave_with_supervisor

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be worked out for a run: its plan too when `replicas` is None and `plan` is not there."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    folder: Path
    cluster: Path | None
    plan: Path | None = None
    replicas: int | None = None


class Beside:
    """One process that works for the run while its caller does something else."""

    def __init__(self, wanted: Wanted, *, urgent: bool) -> None:
        """Start at once. `urgent`: somebody waits for it; otherwise it yields to the ranks."""
        import multiprocessing

        from tutti.launch.local import forked

        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        self._process = forked(_work, wanted, sender, urgent)
        sender.close()

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until the files are there. Raises the TuttiError that stopped the work, or LaunchError in time."""
        if not self._receiver.poll(timeout_s):
            raise LaunchError(f"planning took longer than {timeout_s:g} s; make the plan first with `tutti plan`")
        try:
            error = self._receiver.recv()
        except EOFError:
            raise LaunchError("the process that plans died; give a plan with --plan, or --nproc") from None
        if error is not None:
            raise error

    def stop(self) -> None:
        """End the process, whether it is done or not."""
        self._process.kill()
        self._process.join(5)
        self._receiver.close()


@contextlib.contextmanager
def beside(wanted: Wanted | None) -> Iterator[Beside | None]:
    """A process working out `wanted` (nothing for None) at low priority, ended with the context."""
    worker = Beside(wanted, urgent=False) if wanted is not None else None
    try:
        yield worker
    finally:
        if worker is not None:
            worker.stop()


def _work(wanted: Wanted, sender: "Connection", urgent: bool) -> None:
    """The life of the process: what the script prints on its way to `prepare` goes to a file."""
    leave_with_supervisor()
    if not urgent:
        os.nice(10)
    log = os.open(wanted.folder / "planning.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[0] = str(Path.cwd() if wanted.is_module else Path(wanted.script).resolve().parent)
    try:
        work_out(wanted)
    except TuttiError as error:
        sender.send(error)
    except BaseException as error:
        sender.send(LaunchError(f"the script failed before its Job was prepared ({type(error).__name__}: {error})"))
    else:
        sender.send(None)


def work_out(wanted: Wanted) -> None:
    """Write model.json, cluster.json and prediction.json (and plan.json if it is to be planned)."""
