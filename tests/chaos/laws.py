"""What holds after any sequence of faults: nothing is left, no sample lost or doubled, the same result."""

import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import torch

from chaos.schedule import STEPS
from tutti.checkpoint.index import checkpoint_folders, latest_checkpoint
from tutti.checkpoint.plain_state import to_file

ROUNDING = 1e-12
"""Difference that another order of sums makes in float64, with another number of ranks."""


LONGEST_END_S = 10.0
"""How long processes may take to end after their launcher, which the kernel ends without it."""


TORCHS_OWN = "torchinductor_"
"""How the folder begins in which torch's compiler keeps its results for the user's next processes."""


class BrokenLaw(AssertionError):
    """A law that does not hold after a schedule."""


def samples(folder: Path, counts: dict[int, int] | None = None) -> dict[int, Counter[int]]:
    """Return the samples that each step has counted, over all ranks.

    Args:
        folder: where the ranks noted them.
        counts: the number of samples of each step, over all ranks. Steps that were repeated have noted more: the newest
            count.
    """
    noted: dict[int, list[tuple[float, list[int]]]] = defaultdict(list)
    for file in folder.glob("samples-*"):
        for line in file.read_text().splitlines():
            step, time_s, ids = line.split(" ")
            noted[int(step)].append((float(time_s), [int(each) for each in ids.split(",")]))
    steps: dict[int, Counter[int]] = {}
    for step, notes in sorted(noted.items()):
        newest: list[int] = []
        for _, ids in sorted(notes, reverse=True):
            if counts is None or len(newest) < counts.get(step, 0):
                newest += ids
        steps[step] = Counter(newest)
    return steps


def check_samples(folder: Path, undisturbed: Path) -> None:
    """Each step has trained the samples of the undisturbed run, each as often."""
    expected = samples(undisturbed)
    found = samples(folder, {step: ids.total() for step, ids in expected.items()})
    for step in range(1, STEPS + 1):
        lost, doubled = expected[step] - found.get(step, Counter()), found.get(step, Counter()) - expected[step]
        if lost or doubled:
            raise BrokenLaw(f"step {step} lost the samples {sorted(lost)} and doubled {sorted(doubled)}")


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step that counts: the last one."""
    rows = (json.loads(line) for line in _whole_lines(folder / "run/metrics.jsonl"))
    return {row["step"]: row["loss"] for row in rows if row.get("kind") == "step" and "loss" in row}


def _whole_lines(path: Path) -> list[str]:
    """Return the rows of a file of metrics; a killed run may leave half a row before the next one."""
    begins = '{"kind"'
    return [begins + line.rpartition(begins)[2] for line in path.read_text().split("\n") if begins in line]


def final_state(folder: Path) -> dict[str, Any]:
    """Return the model and the optimizer's state of a run's newest checkpoint, as one device would have them."""
    newest = latest_checkpoint(folder / "run")
    if newest is None or newest.name != f"step-{STEPS:08d}":
        raise BrokenLaw(f"the newest checkpoint is {newest}, not that of step {STEPS}")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "all.pt"
        to_file(newest, file, optimizers=True)
        return dict(torch.load(file, weights_only=True))


def check_trajectory(folder: Path, undisturbed: Path, tolerance: float) -> None:
    """Model, optimizer and every loss are those of the undisturbed run, within a relative tolerance."""
    expected, found = losses(undisturbed), losses(folder)
    for step, loss in expected.items():
        if step in found and not abs(found[step] - loss) <= tolerance * abs(loss):
            raise BrokenLaw(f"the loss of step {step} is {found[step]!r}, undisturbed {loss!r}")
    difference = largest_difference(final_state(folder), final_state(undisturbed))
    if not difference <= tolerance:
        raise BrokenLaw(f"the final state differs by {difference:.3g}, allowed {tolerance:.3g}")


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference of two nested states; infinite if their forms differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((largest_difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return max((largest_difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    return 0.0 if one == other else float("inf")


def check_nothing_left(folder: Path, mark: str, pids: set[int], damaged: Collection[str] = ()) -> None:
    """No process, no port, no shared memory and no temporary file of the run is there any more.

    Args:
        folder: of the run and what is beside it.
        mark: what the environment of its processes has.
        pids: of its processes.
        damaged: checkpoints that were damaged by hand: a run that passes them over leaves them.
    """
    deadline = time.monotonic() + LONGEST_END_S
    while (left := [each for each in psutil.process_iter() if _has_mark(each, mark)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        raise BrokenLaw(f"processes are left behind: {[(each.pid, each.status()) for each in left]}")
    names = [path.name for path in Path("/dev/shm").iterdir()] if Path("/dev/shm").is_dir() else []
    ours = [name for name in names if any(f"_{pid}_" in name or name.endswith(f"_{pid}") for pid in pids)]
    if ours:
        raise BrokenLaw(f"shared memory is left behind: {ours}")
    if in_memory := [path.name for path in (folder / "memory").iterdir()]:
        raise BrokenLaw(f"checkpoints in memory are left behind: {in_memory}")
    every = (path.relative_to(folder) for path in (folder / "tmp").rglob("*"))
    temporary = sorted(str(path) for path in every if not path.parts[1].startswith(TORCHS_OWN))
    if temporary:
        raise BrokenLaw(f"temporary files are left behind: {temporary}")
    checkpoints = {path.name for path in (folder / "run/checkpoints").iterdir()}
    known = {path.name for path in checkpoint_folders(folder / "run")}
    if checkpoints != known or len(known - set(damaged)) > 3:
        raise BrokenLaw(f"the folder of checkpoints holds {sorted(checkpoints)}, where the newest 3 stay")


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_MARK") == mark
    except psutil.Error:
        return False
