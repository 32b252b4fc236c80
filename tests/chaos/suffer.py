"""Run a schedule: `tutti run` on each node, its faults at their steps, resumed until it ends; then the laws."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from chaos import laws
from chaos.schedule import ENDS_RUN, EVERY, NODES, PLANS, STEPS, Fault, Schedule
from tutti.checkpoint.index import checkpoint_folders, latest_checkpoint
from tutti.lab import Lab
from tutti.lab.lab_run import rendezvous_port

SCRIPT = Path(__file__).parent / "scripts" / "steady.py"
TUTTI = (sys.executable, "-m", "tutti.cli.main", "run", "--no-predict")
PACE_S = 0.05
LONGEST_S = 180.0
"""A run that takes longer hangs; the slowest undisturbed one takes a tenth of it."""
DISK_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Launcher:
    """A `tutti run`, on its node; what it writes; and what starts the same command there again."""

    process: subprocess.Popen[str]
    output: Path
    start_again: Callable[[], "Launcher"]


@dataclass(slots=True)
class Story:
    """What has happened to a run so far.

    Attributes:
        mark: an environment variable of all its processes.
        pids: every process that was seen.
        output: standard error of its launchers.
        failures: ranks that were killed.
        damaged: names of the checkpoints that were damaged.
        lab: the hosts of its nodes, if it has several.
    """

    schedule: Schedule
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    pids: set[int] = field(default_factory=set)
    output: list[str] = field(default_factory=list)
    failures: int = 0
    damaged: set[str] = field(default_factory=set)
    lab: Lab | None = None


def undisturbed(schedule: Schedule, scratch: Path) -> Path:
    """Train the plan of a schedule without faults, once for all schedules of a folder that have the same run."""
    quiet = replace(schedule, faults=())
    folder = scratch / f"{quiet.plan}-{quiet.workers}-{quiet.dropout}"
    if not (folder / "run").exists():
        suffer(quiet, folder, on_nodes=False)
    return folder


def suffer(schedule: Schedule, folder: Path, *, on_nodes: bool = True) -> Story:
    """Run a schedule to its end.

    Args:
        schedule: what happens.
        folder: is made, with the run folder in it.
        on_nodes: whether a plan of several nodes runs on them; else all its ranks are on one.

    Raises:
        BrokenLaw: a launcher ends with the wrong exit code or sentence, or the run hangs.
    """
    story = Story(schedule=schedule, folder=folder)
    (folder / "tmp").mkdir(parents=True)
    (folder / "memory").mkdir()
    (folder / "run").mkdir()
    with ExitStack() as stack:
        if _needs_disk(schedule):
            stack.enter_context(_small_disk(folder / "run"))
        if schedule.plan in NODES and on_nodes:
            story.lab = stack.enter_context(Lab(2))
        _train(story, list(schedule.faults))
        if _needs_disk(schedule):  # what is on the small disk goes with it
            subprocess.run(["cp", "-a", str(folder / "run"), str(folder / "kept")], check=True)
    if _needs_disk(schedule):
        (folder / "run").rmdir()
        (folder / "kept").rename(folder / "run")
    return story


def _train(story: Story, waiting: list[Fault]) -> None:
    """Start the run, and start it again after each fault that ends it."""
    resumed = False
    while True:
        launchers = _launch(story, resumed=resumed)
        ended_by = _let_happen(story, launchers, waiting)
        _check_verdict(story, launchers, ended_by)
        if ended_by is None:
            return
        if ended_by.damage != "none":
            _damage(story, ended_by)
        resumed = True


def check(story: Story, reference: Path) -> None:
    """Check the laws.

    Raises:
        BrokenLaw: one does not hold.
    """
    laws.check_nothing_left(story.folder, story.mark, story.pids, story.damaged)
    laws.check_samples(story.folder, reference)
    shrunk = story.schedule.shrink and story.failures > 0
    rounds = shrunk or story.schedule.plan in NODES  # nodes add in another order than one host
    laws.check_trajectory(story.folder, reference, laws.ROUNDING if rounds else 0.0)


def _needs_disk(schedule: Schedule) -> bool:
    return any(fault.kind == "full-disk" for fault in schedule.faults)


def _launch(story: Story, *, resumed: bool) -> list[Launcher]:
    """Start the launcher, or that of each node."""
    port, nodes = rendezvous_port(), 1 if story.lab is None else 2
    return [_launch_node(story, node, nodes, port, resumed=resumed) for node in range(nodes)]


def _launch_node(story: Story, node: int, nodes: int, port: int, *, resumed: bool) -> Launcher:
    schedule = story.schedule
    options = [*PLANS[schedule.plan], "--checkpoint-every", str(EVERY), "--max-restarts", "9", "--timeout", "60"]
    options += ["--on-failure", "shrink"] if schedule.shrink else []
    options += ["--memory-checkpoint-every", str(schedule.memory_every)] if schedule.memory_every else []
    options += ["--resume", "run"] if resumed else ["--folder", "run"]
    if story.lab is not None:
        meet = f"{story.lab.address(0)}:{port}"
        options += ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc", "2", "--rendezvous", meet]
    command = [*TUTTI, *options, str(SCRIPT), str(STEPS), str(PACE_S), str(schedule.workers), str(schedule.dropout)]
    output = story.folder / f"output-{len(story.output)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_MARK": story.mark, "TMPDIR": str(story.folder / "tmp")}
    environment["TUTTI_MEMORY_FOLDER"] = str(story.folder / "memory")
    with output.open("w") as file:
        process = subprocess.Popen(
            command if story.lab is None else story.lab.inside(node, command),
            cwd=story.folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, text=True,
            start_new_session=True,
        )  # fmt: skip
    story.output.append(str(output))
    again = partial(_launch_node, story, node, nodes, port, resumed=resumed)
    return Launcher(process=process, output=output, start_again=again)


def _let_happen(story: Story, launchers: list[Launcher], waiting: list[Fault]) -> Fault | None:
    """Wait for the end of all launchers, and cause the faults whose steps come; returns the fault that ended them."""
    deadline = time.monotonic() + LONGEST_S
    began = time.time()
    while any(each.process.poll() is None for each in launchers):
        if time.monotonic() > deadline:
            _end_all(story)
            raise laws.BrokenLaw(f"the run hangs; see {story.output[-1]}")
        if waiting and _newest_step(story.folder, began) >= waiting[0].step:
            fault = waiting.pop(0)
            time.sleep(fault.delay_s)
            if _cause(story, launchers, fault) and fault.kind in ENDS_RUN:
                for each in launchers:
                    each.process.wait(LONGEST_S)
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


def _cause(story: Story, launchers: list[Launcher], fault: Fault) -> bool:
    """Cause a fault; returns False if what it would hit has ended."""
    first, last = launchers[0].process, launchers[-1].process
    if any(each.process.poll() is not None for each in launchers):
        return False
    if fault.kind == "preempt":
        launchers[fault.rank % len(launchers)].process.terminate()
    elif fault.kind == "preempt-all":
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TEST_MARK") == story.mark:
                    process.send_signal(signal.SIGUSR1)
    elif fault.kind == "kill-launcher":
        _ranks(story)
        first.kill()
    elif fault.kind == "full-disk":
        _fill(story)
    elif fault.kind == "kill-node":
        _ranks(story)
        last.kill()
        last.wait()
        launchers[-1] = launchers[-1].start_again()
    elif fault.kind in ("cut-link", "shake-link"):
        _cut(story, launchers, fault)
    else:
        return _hit_rank(story, fault)
    return True


def _cut(story: Story, launchers: list[Launcher], fault: Fault) -> None:
    """Cut the link of node 1: for half a second, or until the nodes have lost each other."""
    assert story.lab is not None
    link = ("ip", "-n", story.lab.record.namespace(1), "link", "set", "eth0")
    subprocess.run([*link, "down"], check=True)
    if fault.kind == "cut-link":
        launchers[-1].process.wait(LONGEST_S)
    else:
        time.sleep(0.5)
    subprocess.run([*link, "up"], check=True)
    if fault.kind == "cut-link":
        launchers[-1] = launchers[-1].start_again()


def _hit_rank(story: Story, fault: Fault) -> bool:
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


def _check_verdict(story: Story, launchers: list[Launcher], ended_by: Fault | None) -> None:
    """Check how the launchers ended, and what they said."""
    for node, launcher in enumerate(launchers):
        kind, said, code = ended_by.kind if ended_by else "", launcher.output.read_text(), launcher.process.returncode
        expected: tuple[int, ...] = (0,)
        if kind.startswith("preempt"):
            expected = (
                75,
                0,
                143,
                138,
            )  # before training has begun there is no checkpoint; in its last step it completes
        elif kind == "kill-launcher":
            expected = (-signal.SIGKILL,) if node == 0 else (0, 1)
        if code not in expected:
            raise laws.BrokenLaw(f"exit code {code} on node {node}, expected {expected[0]}: {said[-800:]}")
        if "Traceback" in said:
            raise laws.BrokenLaw(f"a traceback: {said[-800:]}")
        if code == 75 and "--resume" not in said:
            raise laws.BrokenLaw(f"exit code 75 without the command that goes on: {said[-800:]}")
    if len({each.process.returncode for each in launchers}) > 1 and (
        ended_by is None or ended_by.kind != "kill-launcher"
    ):
        raise laws.BrokenLaw(f"nodes end with different exit codes: {[each.process.returncode for each in launchers]}")


def _damage(story: Story, fault: Fault) -> None:
    """Damage a file of the newest checkpoint, unless it is the only sound one."""
    newest = latest_checkpoint(story.folder / "run")
    sound = {path.name for path in checkpoint_folders(story.folder / "run")} - story.damaged
    if newest is None or len(sound) < 2:
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
