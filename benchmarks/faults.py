"""Faults tried and survived: `tutti run` beside torchrun's elastic agent, on the same faults, with the seconds of each.

Both train the same model from the same samples and save a checkpoint every few steps; the script for torchrun saves and
loads by itself, as its documentation shows, and skips the samples that it has trained. After a fault that ends the
launcher, the same command is given again (with --resume for tutti). A fault is survived if the run then completes with
the parameters of the undisturbed run.
"""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Fault = Literal["none", "killed rank", "stopped rank", "SIGTERM", "killed launcher", "damaged checkpoint"]
FAULTS: tuple[Fault, ...] = ("killed rank", "stopped rank", "SIGTERM", "killed launcher", "damaged checkpoint")
ENDS_LAUNCHER = ("SIGTERM", "killed launcher")
STOP_S = 1.0

_COMMON = """
import os, sys, time
import torch
from torch import nn

STEPS, EVERY = 60, 5
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
draw = torch.Generator().manual_seed(1)
samples = torch.utils.data.TensorDataset(torch.randn(960, 64, generator=draw), torch.randint(8, (960,), generator=draw))
optimizer = torch.optim.AdamW(model.parameters())

def note(name, text):
    with open(name, "a") as file:
        file.write(text + "\\n")
"""

TUTTI_SCRIPT = (
    _COMMON
    + """
import tutti
job = tutti.Job(global_batch_size=48, seed=0)
model, optimizer, loader = job.prepare(model, optimizer, samples, nn.CrossEntropyLoss())
note(f"pid-{job.rank}", str(os.getpid()))
for _ in job.epochs(1000):
    for batch in loader:
        time.sleep(0.02)
        job.step(batch)
        note(f"steps-{job.rank}", f"{job.global_step} {time.time()}")
        if job.global_step == STEPS:
            if job.rank == 0:
                torch.save({name: value.clone() for name, value in model.state_dict().items()}, "final.pt")
            sys.exit(0)
"""
)

TORCH_SCRIPT = (
    _COMMON
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
note(f"pid-{rank}", str(os.getpid()))
done = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]
parallel = nn.parallel.DistributedDataParallel(model)
sampler = torch.utils.data.distributed.DistributedSampler(samples, seed=0)
loader = torch.utils.data.DataLoader(samples, batch_size=48 // world, sampler=sampler)
loss_fn, step = nn.CrossEntropyLoss(), 0
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for inputs, target in loader:
        step += 1
        if step <= done:
            continue
        time.sleep(0.02)
        optimizer.zero_grad()
        loss_fn(parallel(inputs), target).backward()
        optimizer.step()
        if step % EVERY == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "part.pt")
            os.replace("part.pt", "last.pt")
        note(f"steps-{rank}", f"{step} {time.time()}")
        if step == STEPS:
            if rank == 0:
                torch.save(model.state_dict(), "final.pt")
            dist.destroy_process_group()
            sys.exit(0)
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Each fault `repeats` times, in runs of `ranks` ranks that are faulty from step `at` on."""

    ranks: int = 4
    repeats: int = 3
    at: int = 17
    timeout_s: int = 240


QUICK = Sizes(ranks=2, repeats=1)

SYSTEMS = ("tutti", "torchrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        seconds: from the fault to the next step that had not been completed before, on every rank; None if none came.
        survived: whether the run completed with the parameters of the undisturbed one.
        orphans: processes of the first launcher that outlived it by two seconds.
    """

    seconds: float | None
    survived: bool
    orphans: int
    said: str


def measure(sizes: Sizes) -> dict[str, Any]:
    """Cause all faults in turns. Returns "samples" and "summary", by system and fault."""
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {name: {fault: [] for fault in FAULTS} for name in SYSTEMS}
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        quiet = {system: Path(scratch) / system for system in SYSTEMS}
        for system, folder in quiet.items():
            _suffer(system, "none", folder, sizes, folder)
        for repeat in range(sizes.repeats):
            for fault in FAULTS:
                for system in SYSTEMS:
                    folder = Path(scratch) / f"{system}-{fault}-{repeat}".replace(" ", "-")
                    outcome = _suffer(system, fault, folder, sizes, quiet[system])
                    print(f"{system}, {fault}: {outcome}", file=sys.stderr, flush=True)
                    samples[system][fault].append(
                        {"seconds": outcome.seconds, "survived": outcome.survived, "orphans": outcome.orphans}
                    )
                    shutil.rmtree(folder)
    return {
        "samples": samples,
        "summary": {name: {fault: _summary(runs) for fault, runs in kinds.items()} for name, kinds in samples.items()},
    }


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    times = [run["seconds"] for run in runs if run["seconds"] is not None and run["survived"]]
    return {
        "runs": len(runs),
        "survived": sum(run["survived"] for run in runs),
        "median_s": statistics.median(times) if times else None,
        "orphans": max(run["orphans"] for run in runs),
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    table = []
    for fault in FAULTS:
        row: list[str] = [fault]
        for system in SYSTEMS:
            entry = result["summary"][system][fault]
            seconds = "" if entry["median_s"] is None else f"{entry['median_s']:.2f}"
            row += [f"{entry['survived']}/{entry['runs']}", seconds, str(entry["orphans"])]
        table.append(row)
    names = [f"{system} {what}" for system in SYSTEMS for what in ("survived", "median s", "orphans")]
    return ["fault", *names], table


def _command(system: str, ranks: int, *, again: bool) -> list[str]:
    if system == "torchrun":
        options = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3")
        return [sys.executable, "-m", "torch.distributed.run", *options, "script.py"]
    options = ("--no-predict", "--nproc", str(ranks), "--max-restarts", "3", "--checkpoint-every", "5")
    place = "--resume" if again else "--folder"
    return [sys.executable, "-m", "tutti.cli.main", "run", *options, place, "run", "script.py"]


def _suffer(system: str, fault: Fault, folder: Path, sizes: Sizes, quiet: Path) -> Outcome:
    folder.mkdir()
    (folder / "script.py").write_text(TUTTI_SCRIPT if system == "tutti" else TORCH_SCRIPT)
    launcher = _launch(system, folder, sizes.ranks, again=False)
    orphans, struck_s, reached = 0, 0.0, 0
    deadline = time.monotonic() + sizes.timeout_s
    try:
        if fault != "none":
            _wait_for_step(folder, sizes, launcher, deadline)
            reached, struck_s = _newest(folder, sizes.ranks, max), time.time()
            orphans = _strike(system, fault, folder, sizes.ranks, launcher)
        if fault in ENDS_LAUNCHER:
            launcher.wait(max(1.0, deadline - time.monotonic()))
            reached = _newest(folder, sizes.ranks, max)
            launcher = _launch(system, folder, sizes.ranks, again=True)
        launcher.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        launcher.kill()
    seconds = _next_step_s(folder, sizes.ranks, reached, struck_s)
    survived = launcher.wait() == 0 and _same(folder, quiet)
    said = (folder / "output").read_text()[-300:] if not survived else ""
    for rank in range(sizes.ranks):
        with contextlib.suppress(OSError, ValueError):
            os.kill(_pid(folder, rank), signal.SIGKILL)
    return Outcome(seconds=seconds, survived=survived, orphans=orphans, said=said)


def _launch(system: str, folder: Path, ranks: int, *, again: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "output").open("a") as output:
        command = _command(system, ranks, again=again)
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def _steps(folder: Path, rank: int) -> list[tuple[int, float]]:
    try:
        lines = (folder / f"steps-{rank}").read_text().splitlines()
    except OSError:
        return []
    return [(int(step), float(time_s)) for step, time_s in (line.split() for line in lines)]


def _newest(folder: Path, ranks: int, over: Any) -> int:
    return over(max((step for step, _ in _steps(folder, rank)), default=0) for rank in range(ranks))


def _wait_for_step(folder: Path, sizes: Sizes, launcher: subprocess.Popen[bytes], deadline: float) -> None:
    while _newest(folder, sizes.ranks, min) < sizes.at:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended before its fault: {(folder / 'output').read_text()[-800:]}")
        time.sleep(0.01)


def _pid(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text().split()[-1])


def _strike(system: str, fault: Fault, folder: Path, ranks: int, launcher: subprocess.Popen[bytes]) -> int:
    """Cause a fault; returns how many ranks outlive a launcher that was killed."""
    victim = _pid(folder, ranks - 1)
    if fault == "SIGTERM":
        launcher.terminate()
    elif fault == "killed launcher":
        pids = [_pid(folder, rank) for rank in range(ranks)]
        launcher.kill()
        time.sleep(2)
        return sum(_runs(pid) for pid in pids)
    elif fault == "stopped rank":
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(victim, signal.SIGCONT)
    else:
        if fault == "damaged checkpoint":
            newest = sorted((folder / "run/checkpoints").glob("step-*"))[-1] if system == "tutti" else folder
            file = newest / ("rank-00000.safetensors" if system == "tutti" else "last.pt")
            os.truncate(file, file.stat().st_size // 2)
        os.kill(victim, signal.SIGKILL)
    return 0


def _runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _next_step_s(folder: Path, ranks: int, reached: int, struck_s: float) -> float | None:
    """Return the seconds from the fault until all ranks have completed a step beyond the one that was reached."""
    ends = []
    for rank in range(ranks):
        later = [time_s for step, time_s in _steps(folder, rank) if step > reached and time_s > struck_s]
        if not later:
            return None
        ends.append(min(later))
    return max(ends) - struck_s


def _same(folder: Path, quiet: Path) -> bool:
    import torch

    if not (folder / "final.pt").exists():
        return False
    one, other = (torch.load(place / "final.pt", weights_only=True) for place in (folder, quiet))
    return all(torch.allclose(one[name], other[name], rtol=1e-12, atol=1e-15) for name in other)
