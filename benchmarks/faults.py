"""Faults tried and survived: `tutti run` beside torchrun's elastic agent, torchft and Horovod, with the seconds.

All train the same model from the same samples and save a checkpoint every few steps; the scripts for torchrun and
torchft save and load by themselves, as their documentation shows, and skip the samples that they have trained. After
a fault that ends the launcher, the same command is given again (with --resume for tutti). A fault is survived if the
run then completes with the parameters of the undisturbed run.

torchft (https://github.com/pytorch/torchft) has no launcher: its lighthouse knows the ranks, each of which has a
torchrun of its own that starts it again, as in its README. Its script is told to compute what an undisturbed run
does: a step waits for all ranks (min_replica_size), and a rank that comes back has its state before the step begins
(use_async_quorum=False). Horovod's elastic training (https://horovod.readthedocs.io/en/stable/elastic_include.html)
also waits for all ranks, and commits each step to memory. Both are measured where they are installed.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import socket
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

TORCHFT_SCRIPT = (
    _COMMON
    + """
from datetime import timedelta
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
rank, world = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
note(f"pid-{rank}", str(os.getpid()))

def load_state(saved):
    parallel.load_state_dict(saved["model"])
    inner.load_state_dict(saved["optimizer"])

manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    load_state_dict=load_state,
    state_dict=lambda: {"model": parallel.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=world,
    use_async_quorum=False,
    init_sync=False,
    replica_id=f"rank_{rank}",
)
parallel = DistributedDataParallel(manager, model)
inner, optimizer = optimizer, Optimizer(manager, optimizer)
if os.path.exists("last.pt") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # later the others have the state
    saved = torch.load("last.pt", weights_only=True)
    load_state(saved)
    manager.load_state_dict(saved["manager"])
loss_fn, per_epoch = nn.CrossEntropyLoss(), len(samples) // 48
while manager.current_step() < STEPS:
    time.sleep(0.02)
    optimizer.zero_grad()  # the quorum: a rank that was away has the others' step now
    step = manager.current_step()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step // per_epoch))
    mine = order[step % per_epoch * 48 :][rank : 48 : world]
    inputs, target = samples[mine]
    loss_fn(parallel(inputs), target).backward()
    optimizer.step()
    if manager.current_step() == step:
        continue  # not all ranks took part: the same step again
    step += 1
    if step % EVERY == 0 and rank == 0:
        whole = {"model": parallel.state_dict(), "optimizer": inner.state_dict(), "manager": manager.state_dict()}
        torch.save(whole, "part.pt")
        os.replace("part.pt", "last.pt")
    note(f"steps-{rank}", f"{step} {time.time()}")
if rank == 0:
    torch.save(model.state_dict(), "final.pt")
manager.shutdown()
"""
)

# Starts the lighthouse and a torchrun for each rank, passes SIGTERM on, and ends with the worst exit code.
TORCHFT_LAUNCHER = """
import os, signal, socket, subprocess, sys
ranks = int(sys.argv[1])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
lighthouse = os.path.join(os.path.dirname(sys.executable), "torchft_lighthouse")
options = ["--min_replicas", str(ranks), "--join_timeout_ms", "10000", "--quorum_tick_ms", "100"]
processes = [subprocess.Popen([lighthouse, *options, "--bind", f"127.0.0.1:{port}"])]
for rank in range(ranks):
    variables = {"REPLICA_GROUP_ID": str(rank), "NUM_REPLICA_GROUPS": str(ranks)}
    variables["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "script.py"]
    processes.append(subprocess.Popen(command, env={**os.environ, **variables}))
signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes[1:]])
codes = [process.wait() for process in processes[1:]]
processes[0].terminate()
sys.exit(max(abs(code) for code in codes))
"""

HOROVOD_SCRIPT = (
    _COMMON
    + """
import horovod.torch as hvd
hvd.init()
rank, world = hvd.rank(), hvd.size()
note(f"pid-{rank}", str(os.getpid()))
done = 0
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
if os.path.exists("last.pt"):  # by all ranks: state that one lacks comes by a step, with weight decay
    saved = torch.load("last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]
loss_fn, per_epoch = nn.CrossEntropyLoss(), len(samples) // 48

@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        time.sleep(0.02)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(state.step // per_epoch))
        mine = order[state.step % per_epoch * 48 :][hvd.rank() : 48 : hvd.size()]
        inputs, target = samples[mine]
        optimizer.zero_grad()
        loss_fn(model(inputs), target).backward()
        optimizer.step()
        state.step += 1
        if state.step % EVERY == 0 and hvd.rank() == 0:
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": state.step}
            torch.save(whole, "part.pt")
            os.replace("part.pt", "last.pt")
        note(f"steps-{hvd.rank()}", f"{state.step} {time.time()}")
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, step=done)
state.register_reset_callbacks([lambda: note(f"pid-{hvd.rank()}", str(os.getpid()))])
train(state)
if hvd.rank() == 0:
    torch.save(model.state_dict(), "final.pt")
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

SCRIPTS = {"tutti": TUTTI_SCRIPT, "torchrun": TORCH_SCRIPT, "torchft": TORCHFT_SCRIPT, "horovod": HOROVOD_SCRIPT}
INSTALLED = [name for name in ("torchft", "horovod") if importlib.util.find_spec(name)]
SYSTEMS = ("tutti", "torchrun", *INSTALLED)
NOT_APPLICABLE = ("torchft", "killed launcher")  # it has none: a scheduler starts the ranks


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
    """Cause all faults in turns. Returns "peers" (versions), and "samples" and "summary" by system and fault."""
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {name: {fault: [] for fault in FAULTS} for name in SYSTEMS}
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        quiet = {system: Path(scratch) / system for system in SYSTEMS}
        for system, folder in quiet.items():
            _suffer(system, "none", folder, sizes, folder)
        for repeat in range(sizes.repeats):
            for fault in FAULTS:
                for system in SYSTEMS:
                    if (system, fault) == NOT_APPLICABLE:
                        continue
                    folder = Path(scratch) / f"{system}-{fault}-{repeat}".replace(" ", "-")
                    outcome = _suffer(system, fault, folder, sizes, quiet[system])
                    print(f"{system}, {fault}: {outcome}", file=sys.stderr, flush=True)
                    samples[system][fault].append(
                        {"seconds": outcome.seconds, "survived": outcome.survived, "orphans": outcome.orphans}
                    )
                    shutil.rmtree(folder)
    return {
        "peers": {name: importlib.metadata.version(name) for name in INSTALLED},
        "samples": samples,
        "summary": {name: {fault: _summary(runs) for fault, runs in kinds.items()} for name, kinds in samples.items()},
    }


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    if not runs:
        return {"runs": 0, "survived": 0, "median_s": None, "orphans": 0}
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
    python = sys.executable
    if system == "torchrun":
        words = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --max-restarts 3 script.py"
    elif system == "torchft":
        words = f"launcher.py {ranks}"
    elif system == "horovod":
        hosts = "--host-discovery-script ./hosts.sh --blacklist-cooldown-range 1 2 --reset-limit 3"
        count = f"-np {ranks} --min-np {ranks} --max-np {ranks}"
        words = (
            f"{Path(python).with_name('horovodrun')} {count} {hosts} --gloo --network-interfaces lo {python} script.py"
        )
    else:
        options = f"--no-predict --nproc {ranks} --max-restarts 3 --checkpoint-every 5"
        words = f"-m tutti.cli.main run {options} {'--resume' if again else '--folder'} run script.py"
    return [python, *words.split()]


def _suffer(system: str, fault: Fault, folder: Path, sizes: Sizes, quiet: Path) -> Outcome:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPTS[system])
    (folder / "launcher.py").write_text(TORCHFT_LAUNCHER)
    names = ("localhost", "127.0.0.1", socket.gethostname())  # Horovod takes a host out when a rank fails on it
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\n" + "".join(f"echo {name}:{-(-sizes.ranks // 2)}\n" for name in names))
    hosts.chmod(0o755)
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
    with contextlib.suppress(OSError):
        os.killpg(launcher.pid, signal.SIGKILL)
    return Outcome(seconds=seconds, survived=survived, orphans=orphans, said=said)


def _launch(system: str, folder: Path, ranks: int, *, again: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if system == "torchrun":  # without it, Gloo cannot restart; torchft needs what it takes away
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "output").open("a") as output:
        command = _command(system, ranks, again=again)
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )


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
