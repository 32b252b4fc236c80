"""What a Job says about its ranks."""

from typing import Any

import torch

from tutti.trainer.job_context import JobContext


class JobRanks:
    """The rank of this process among those of the Job, its device, and printing on one rank only."""

    _context: JobContext

    @property
    def rank(self) -> int:
        return self._context.world.rank

    @property
    def world_size(self) -> int:
        return self._context.world.world_size

    @property
    def device(self) -> torch.device:
        return self._context.world.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self._context.world.is_main

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only, with the arguments of the built-in `print`."""
        if self.is_main:
            print(*values, **options)
