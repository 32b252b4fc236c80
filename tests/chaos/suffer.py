"""Run a schedule: `tutti run` as a process, its faults at their steps, resumed until it ends; then the laws."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from chaos import laws
from chaos.schedule import ENDS_RUN, EVERY, PLANS, STEPS, Fault, Schedule
from tutti.checkpoint.index import latest_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "steady.py"
TUTTI = (sys.executable, "-m", "tutti.cli.main", "run", "--no-predict")
PACE_S = 0.05
LONGEST_S = 180.0
"""A run that takes longer hangs; the slowest undisturbed one takes a tenth of it."""
DISK_NBYTES = 16 * 2**20


@dataclass(slots=True)
class Story:
    """What has happened to a run so far.

    Attributes:
        mark: an environment variable of all its processes.
        pids: every process that was seen.
        output: standard error of its launchers.
        failures: ranks that were killed.
        damaged: names of the checkpoints that were damaged.
    """

    schedule: Schedule
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    pids: set[int] = field(default_factory=set)
    output: list[str] = field(default_factory=list)
    failures: int = 0
    damaged: set[str] = field(default_factory=set)


def undisturbed(schedule: Schedule, scratch: Path) -> Path:
    """Train the plan of a schedule without faults, once for all schedules of a folder that have the same run."""
    quiet = replace(schedule, faults=())
    folder = scratch / f"{quiet.plan}-{quiet.workers}-{quiet.dropout}"
    if not (folder / "run").exists():
        suffer(quiet, folder)
    return folder


def suffer(schedule: Schedule, folder: Path) -> Story:
    """Run a schedule to its end.

    Raises:
        BrokenLaw: a launcher ends with the wrong exit code or sentence, or the run hangs.
    """
    story = Story(schedule=schedule, folder=folder)
    (folder / "tmp").mkdir(parents=True)
    (folder / "run").mkdir()
    waiting, resumed = list(schedule.faults), False
    with _small_disk(folder / "run") if _needs_disk(schedule) else contextlib.nullcontext():
        while True:
            launcher = _launch(story, resumed=resumed)
            ended_by = _let_happen(story, launcher, waiting)
            _check_verdict(story, launcher.returncode, ended_by)
            if ended_by is None:
                break
            if ended_by.damage != "none":
                _damage(story, ended_by)
            resumed = True
        if _needs_disk(schedule):  # what is on the small disk goes with it
            subprocess.run(["cp", "-a", str(folder / "run"), str(folder / "kept")], check=True)
    if _needs_disk(schedule):
        (folder / "run").rmdir()
        (folder / "kept").rename(folder / "run")
    return story


def check(story: Story, reference: Path) -> None:
    """Check the laws.

    Raises:
        BrokenLaw: one does not hold.
    """
    laws.check_nothing_left(story.folder, story.mark, story.pids, story.damaged)
    laws.check_samples(story.folder, reference)
    shrunk = story.schedule.shrink and story.failures > 0
    laws.check_trajectory(story.folder, reference, laws.ROUNDING if shrunk else 0.0)


def _needs_disk(schedule: Schedule) -> bool:
    return any(fault.kind == "full-disk" for fault in schedule.faults)


def _launch(story: Story, *, resumed: bool) -> subprocess.Popen[str]:
    schedule = story.schedule
    options = [*PLANS[schedule.plan], "--checkpoint-every", str(EVERY), "--max-restarts", "9", "--timeout", "60"]
    options += ["--on-failure", "shrink"] if schedule.shrink else []
    options += ["--resume", "run"] if resumed else ["--folder", "run"]
    output = story.folder / f"output-{len(story.output)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_MARK": story.mark, "TMPDIR": str(story.folder / "tmp")}
    with output.open("w") as file:
        launcher = subprocess.Popen(
            [*TUTTI, *options, str(SCRIPT), str(STEPS), str(PACE_S), str(schedule.workers), str(schedule.dropout)],
            cwd=story.folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, text=True,
            start_new_session=True,
        )  # fmt: skip
    story.output.append(str(output))
    return launcher


def _let_happen(story: Story, launcher: subprocess.Popen[str], waiting: list[Fault]) -> Fault | None:
    """Wait for the end of a launcher, and cause the faults whose steps come; returns the fault that ended it."""
    deadline = time.monotonic() + LONGEST_S
    began = time.time()
    while launcher.poll() is None:
        if time.monotonic() > deadline:
            _end_all(story)
            raise laws.BrokenLaw(f"the run hangs; see {story.output[-1]}")
        if waiting and _newest_step(story.folder, began) >= waiting[0].step:
            fault = waiting.pop(0)
            time.sleep(fault.delay_s)
            if _cause(story, launcher, fault) and fault.kind in ENDS_RUN:
                launcher.wait(LONGEST_S)
                return fault
        time.sleep(0.005)
    return None


def _newest_step(folder: Path, began: float) -> int:
    """Return the newest step that a rank of this launch has begun."""
    newest = 0
    for file in folder.glob("samples-*"):
        last = file.read_bytes()[-400:].decode().rstrip("\n").rpartition("\n")[2].split(" ")
        if len(last) == 3 and float(last[1]) > began:
            newest = max(newest, int(last[0]))
    return newest


def _ranks(story: Story) -> dict[int, int]:
    """Return the processes of the newest generation, by rank."""
    lines = (story.folder / "pids").read_text().splitlines() if (story.folder / "pids").exists() else []
    pids = {int(rank): int(pid) for rank, pid in (line.split() for line in lines)}
    story.pids.update(pids.values())
    return {rank: pid for rank, pid in pids.items() if psutil.pid_exists(pid)}


def _cause(story: Story, launcher: subprocess.Popen[str], fault: Fault) -> bool:
    """Cause a fault; returns False if what it would hit has ended."""
    if launcher.poll() is not None:
        return False
    if fault.kind == "preempt":
        launcher.terminate()
    elif fault.kind == "preempt-all":
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TEST_MARK") == story.mark:
                    process.send_signal(signal.SIGUSR1)
    elif fault.kind == "kill-launcher":
        _ranks(story)
        launcher.kill()
    elif fault.kind == "full-disk":
        _fill(story)
    else:
        ranks = _ranks(story)
        pid = ranks.get(fault.rank) or next(iter(ranks.values()), 0)
        if not pid:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            story.failures += fault.kind == "kill"
            if fault.kind == "stop":
                time.sleep(0.5)
                os.kill(pid, signal.SIGCONT)
    return True


def _check_verdict(story: Story, code: int, ended_by: Fault | None) -> None:
    """Check how a launcher ended, and what it said."""
    said = Path(story.output[-1]).read_text()
    expected = {"preempt": (75,), "preempt-all": (75,), "kill-launcher": (-signal.SIGKILL,)}.get(
        ended_by.kind if ended_by else "", (0,)
    )
    # A run that is stopped before training has begun has no checkpoint yet, and one in its last step completes.
    early = ended_by is not None and ended_by.kind.startswith("preempt") and code in (0, 143, 138)
    if code not in expected and not early:
        raise laws.BrokenLaw(f"exit code {code}, expected {expected[0]}: {said[-800:]}")
    if "Traceback" in said:
        raise laws.BrokenLaw(f"a traceback: {said[-800:]}")
    if code == 75 and "--resume" not in said:
        raise laws.BrokenLaw(f"exit code 75 without the command that goes on: {said[-800:]}")


def _damage(story: Story, fault: Fault) -> None:
    """Damage a file of the newest checkpoint, unless it is the only one."""
    newest = latest_checkpoint(story.folder / "run")
    if newest is None or len(list(newest.parent.iterdir())) < 2:
        return
    story.damaged.add(newest.name)
    drawn = random.Random(story.schedule.seed)
    file = drawn.choice(sorted(newest.iterdir()))
    content = bytearray(file.read_bytes())
    at = drawn.randrange(len(content))
    if fault.damage == "flipped":
        content[at] ^= 1 << drawn.randrange(8)
        file.write_bytes(content)
    elif fault.damage == "truncated":
        file.write_bytes(content[:at])
    else:
        file.unlink()


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of a few megabytes as the run folder. Needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(story: Story) -> None:
    """Fill the run's disk for a second."""
    filler = story.folder / "run" / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size) == size:
                    pass
    time.sleep(1)
    filler.unlink()


def _end_all(story: Story) -> None:
    """End every process of a run that hangs."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TEST_MARK") == story.mark:
                process.kill()
