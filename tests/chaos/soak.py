"""Train for long with checkpoints and loader workers: `make soak STEPS=50000`. Nothing may hang, and nothing may grow.

Memory, file descriptors and threads of every rank, shared memory, and files of the run folder are read as the run goes
on. Of memory the slope over the second half of the steps counts, of all else the difference between the first and the
last third after a warm-up. Exit code 1 if anything grows.

Memory grows by 2 MB in the first 2,000 steps of two ranks: torch's own record of collectives keeps the last 2,000
(TORCH_FR_BUFFER_SIZE; without it, the C heap is full after 400 steps). Python's allocator takes 0.5 MB more until about
step 6,000. So runs of fewer than 5,000 steps say nothing about memory.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

import psutil

SCRIPT = Path(__file__).parent / "scripts" / "steady.py"
WARM_UP = 0.2
"""Share of the run that is left out: caches fill."""
LEAST_STEPS = 5_000
"""Steps from which on memory is judged."""
LONG_STEPS = 12_000
MOST_GROWTH_NBYTES, MOST_LONG_GROWTH_NBYTES = 200_000, 50_000
"""Growth of a rank's own memory in 1,000 steps over the second half that is taken for noise: in runs of fewer than
`LONG_STEPS` steps, and in others. Measured from step 6,000 to 12,000: 12,000."""
LONGEST_PAUSE_S = 120.0
"""Time without a step after which the run counts as hung."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a run holds at some step; of its ranks the largest value of any.

    Attributes:
        memory_nbytes: resident memory that is of no file and not shared by name; a loader worker's copies do not count.
        segments: shared-memory segments by name.
        files: files of the run folder.
    """

    step: int
    memory_nbytes: int
    descriptors: int
    threads: int
    segments: int
    files: int


def read(folder: Path, step: int, pids: list[int]) -> Reading | None:
    """Return a reading; None if a rank has ended."""
    try:
        ranks = [psutil.Process(pid) for pid in pids]
        return Reading(
            step=step,
            memory_nbytes=max(info.rss - info.shared for info in (rank.memory_info() for rank in ranks)),
            descriptors=max(rank.num_fds() for rank in ranks),
            threads=max(rank.num_threads() for rank in ranks),
            segments=sum(any(str(pid) in path.name for pid in pids) for path in Path("/dev/shm").iterdir()),
            files=sum(path.is_file() for path in (folder / "run").rglob("*")),
        )
    except (psutil.Error, OSError):
        return None


def newest_step(folder: Path) -> int:
    """Return the step that rank 0 has begun."""
    file = folder / "samples-0"
    with contextlib.suppress(OSError, ValueError, IndexError), file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 200))
        return int(stream.read().decode().rstrip("\n").rpartition("\n")[2].split(" ")[0])
    return 0


def soak(folder: Path, steps: int, every: int, interval_s: float) -> list[Reading]:
    """Train, and return the readings.

    Raises:
        RuntimeError: the run hangs or fails.
    """
    command = (sys.executable, "-m", "tutti.cli.main", "run", "--no-predict", "--folder", "run", "--nproc", "2")
    options = ("--checkpoint-every", str(every), str(SCRIPT), str(steps), "0", "1", "0.1")
    readings: list[Reading] = []
    with (folder / "output").open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.Popen([*command, *options], cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        step, moved = 0, time.monotonic()
        while run.poll() is None:
            time.sleep(interval_s)
            newest = newest_step(folder)
            if newest != step:
                step, moved = newest, time.monotonic()
            elif time.monotonic() - moved > LONGEST_PAUSE_S:
                raise RuntimeError(f"the run hangs in step {step}; see {folder / 'output'}")
            pids = (folder / "pids").read_text().split()[1::2] if (folder / "pids").exists() else []
            reading = read(folder, step, [int(pid) for pid in pids]) if len(pids) == 2 else None
            readings += [reading] if reading is not None else []
    finally:
        run.terminate()
        run.wait()
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}: {(folder / 'output').read_text()[-800:]}")
    if newest_step(folder) < steps:
        raise RuntimeError(f"the run ended after step {newest_step(folder)} of {steps}; see {folder / 'output'}")
    return readings


def growth(readings: list[Reading], name: str) -> float:
    """Return how much a figure grows in 1,000 steps, from the first to the last third after the warm-up."""
    warm = [reading for reading in readings if reading.step >= WARM_UP * readings[-1].step]
    third = max(1, len(warm) // 3)
    first, last = warm[:third], warm[-third:]
    steps = median(each.step for each in last) - median(each.step for each in first)
    values = [median(getattr(each, name) for each in part) for part in (first, last)]
    return 1000 * (values[1] - values[0]) / max(1, steps)


def memory_slope(readings: list[Reading]) -> float:
    """Return how much memory grows in 1,000 steps: the slope of the line nearest to the second half of the steps."""
    late = [reading for reading in readings if reading.step >= readings[-1].step / 2]
    steps, values = [reading.step for reading in late], [reading.memory_nbytes for reading in late]
    return 1000 * linear_regression(steps, values).slope if len(set(steps)) > 1 else 0.0


def judge(readings: list[Reading], steps: int) -> list[tuple[str, str, float]]:
    """Return each figure's name, whether it is "steady", "GROWS" or "not judged", and its growth in 1,000 steps.

    Args:
        readings: of the run.
        steps: of the run; the last of them may have no reading.
    """
    bound = MOST_GROWTH_NBYTES if steps < LONG_STEPS else MOST_LONG_GROWTH_NBYTES
    slope = memory_slope(readings)
    verdict = "not judged" if steps < LEAST_STEPS else "GROWS" if slope > bound else "steady"
    verdicts = [("memory_nbytes", verdict, slope)]
    for name in ("descriptors", "threads", "segments", "files"):
        grown = growth(readings, name)
        verdicts.append((name, "GROWS" if grown > 0 else "steady", grown))
    return verdicts


def curve(readings: list[Reading], points: int = 12) -> str:
    """Return the memory over the steps, in MB."""
    chosen = readings[:: max(1, len(readings) // points)] + readings[-1:]
    return ", ".join(f"{reading.step:,}: {reading.memory_nbytes / 1e6:.2f}" for reading in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between readings")
    arguments = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    readings = soak(folder, arguments.steps, arguments.every, arguments.interval)
    print(f"{arguments.steps:,} steps in {time.monotonic() - began:.0f} s, {len(readings)} readings")
    print(f"memory in MB by step: {curve(readings)}")
    verdicts = judge(readings, arguments.steps)
    for name, verdict, per_thousand in verdicts:
        values = [getattr(reading, name) for reading in readings]
        print(f"{name}: {verdict}, {per_thousand:+,.1f} in 1,000 steps ({min(values):,} to {max(values):,})")
    if arguments.steps < LEAST_STEPS:
        print(f"memory is judged from {LEAST_STEPS:,} steps on")
    shutil.rmtree(folder)
    sys.exit(any(verdict == "GROWS" for _, verdict, _ in verdicts))


if __name__ == "__main__":
    main()
