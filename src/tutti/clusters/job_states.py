"""What this machine knows of submitted jobs besides their records: a file a job, in this user's state folder."""

import contextlib
from pathlib import Path
from typing import Generic, TypeVar

from tutti.config import serialization
from tutti.environment import state_folder
from tutti.errors import SpecError

State = TypeVar("State")


class JobStates(Generic[State]):
    """The files of one kind of jobs.

    Args:
        kind: name of their folder.
        state: the dataclass that each file holds.
    """

    def __init__(self, kind: str, state: type[State]) -> None:
        self._kind, self._state = kind, state

    @property
    def folder(self) -> Path:
        return state_folder() / self._kind

    def file(self, job: str) -> Path:
        """Return the file of a job's state."""
        return self.folder / f"{job.replace('/', '.')}.json"

    def read(self, job: str) -> State | None:
        """Return the state of a job as it was written last; None without one."""
        with contextlib.suppress(SpecError):
            return serialization.load(self._state, self.file(job))
        return None

    def write(self, job: str, state: State) -> None:
        """Write the state of a job."""
        serialization.save(state, self.file(job))
