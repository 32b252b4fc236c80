"""The checkpoint that is still being written when a process ends, however it ends: nobody can be asked any more."""

import time

from tutti.checkpoint.save import FAILED, Pending, publish_pending
from tutti.trainer.run_state import Run

_PATIENCE_S = 10.0


def end_saving(run: Run) -> str | None:
    """Let a checkpoint on its way arrive without talking to other ranks; returns what went wrong, in words.

    Every rank finishes its own file. Rank 0 waits for the others' as long as they grow, and gives the folder its name.
    """
    pending, run.pending = run.pending, None
    if pending is None:
        return None
    if pending.thread is not None:
        pending.thread.join()
    failure = pending.failure
    if run.world.is_main and failure is None:
        missing = _wait_for_files(pending)
        failure = f"{missing} was not written" if missing else publish_pending(run, pending)
    if failure is None:
        return None
    return f"the checkpoint of step {pending.step} was not finished: {failure}; earlier checkpoints are whole"


def _wait_for_files(pending: Pending) -> str | None:
    """Wait until all ranks' files have their names; the name of one that does not come."""
    seen, since = -1, time.monotonic()
    while True:
        missing = [name for name in pending.files if not (pending.temporary / name).exists()]
        if not missing:
            return None
        if any((pending.temporary / (name + FAILED)).exists() for name in missing):
            return missing[0]
        size = sum(path.stat().st_size for path in pending.temporary.glob("rank-*"))
        if size != seen:
            seen, since = size, time.monotonic()
        if time.monotonic() - since > _PATIENCE_S:
            return missing[0]
        time.sleep(0.02)
