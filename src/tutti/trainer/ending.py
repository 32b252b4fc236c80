"""How a run ends: completed, or failed and said once, with its last rows written."""

import atexit
import os
import resource
import sys
from types import TracebackType

import torch

from tutti.checkpoint import end_saving
from tutti.comm.rooms import borrowed_nbytes
from tutti.comm.world import World, leave
from tutti.errors import TuttiError
from tutti.trainer.state import Run


class Ending:
    """Writes a run's last rows when the process ends, however it ends."""

    def __init__(self, world: World, *, supervised: bool) -> None:
        self.world = world
        self.run: Run | None = None
        self.failed = False
        self._ended = False
        if not supervised:
            sys.excepthook = self._on_exception
        atexit.register(self.close)

    def close(self) -> None:
        """Write the memory and end rows and leave the world. Runs once."""
        if self._ended:
            return
        self._ended = True
        if self.run is not None:
            self._last_rows(self.run)
        if not self.failed:
            if self.run is not None:
                self.run.consistency.left(self.run)
            leave()

    def _last_rows(self, run: Run) -> None:
        mine = run.folder.rank(run.world.rank)
        self.failed = self.failed or (mine / "error.json").exists()
        words = end_saving(run)
        if words is not None:
            self.failed = True
            print(f"tutti: {words}", file=sys.stderr)
        wall, phases = run.clock.take_row()
        now = run.clock.elapsed_s()
        memory = {
            "step": run.progress.step,
            "rank": run.world.rank,
            "device": str(run.world.device),
            "peak_nbytes": peak_nbytes(run.world.device),
        }
        run.log.timing(kind="memory", **memory)
        run.log.timing(kind="machine", step=run.progress.step, stolen=run.clock.stolen.share())
        run.log.row("memory", now, **memory)
        status = "failed" if self.failed else "stopped" if (mine / "stopped").exists() else "completed"
        run.log.row("end", now, status=status, step=run.progress.step, wall_s=wall, phases=phases)
        run.log.close()
        run.screen.close()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed = True
        if not isinstance(error, TuttiError):
            sys.__excepthook__(kind, error, trace)
            return
        if self.world.is_main or (self.run is not None and self.run.consistency.alone):
            print(f"tutti: {error}", file=sys.stderr)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)


def peak_nbytes(device: torch.device) -> int:
    """Most memory this rank has held: allocated on a GPU; resident on a CPU, without what it shares of other ranks."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - borrowed_nbytes()
