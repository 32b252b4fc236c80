"""A Job whose ranks die while it trains.

Arguments: --epochs N, --every N (checkpoints), --kind, --shares STEP=A:B:C (other shares of the batch after a step, as
for a slow rank), and FAULT@STEP:RANK[:WHERE]. WHERE is "before" a step (the
default), "forward", "between", "update" or "after" it. A fault happens once, a "late-" one not before another one. Each
rank notes the samples of its completed steps in samples-RANK, and what it is in life-RANK; rank 0 writes the final
state to final.pt.
"""

import argparse
import atexit
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import helper_of_survive
import numpy as np
import torch
from torch import nn

import tutti
from tutti.trainer.rebalance import ShareChange

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--every", type=int, default=0)
parser.add_argument("--kind", default="plain")
parser.add_argument("--shares", action="append", default=[])
parser.add_argument("faults", nargs="*")
options = parser.parse_args()
torch.set_default_dtype(torch.float64)
kind = options.kind
pid = os.getpid()

assert not helper_of_survive.RUNS, "modules of the script are imported again"
helper_of_survive.RUNS.append(1)


def resident_kib() -> int:
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])


def note_life() -> None:
    """Note what this process is. Threads of a run that it has left, and their files, have time to end first."""
    lives = Path(f"life-{job.rank}")
    earlier = [json.loads(line) for line in lives.read_text().splitlines()] if lives.exists() else []
    first = next((life for life in earlier if life["pid"] == pid), None)
    until = time.monotonic() + 10
    while True:
        held = {name: len(os.listdir(f"/proc/self/{folder}")) for name, folder in (("files", "fd"), ("tasks", "task"))}
        if first is None or time.monotonic() > until or all(held[name] <= first[name] for name in held):
            break
        time.sleep(0.02)
    threads = sorted(thread.name for thread in threading.enumerate())
    life = {"pid": pid, "step": job.global_step, "kib": resident_kib(), "threads": threads, **held}
    with lives.open("a") as file:
        file.write(json.dumps(life) + "\n")


def await_others(step: int) -> None:
    """Wait until the other ranks, too, have completed so many steps: which step each has is then certain."""
    for other in {*range(job.world_size)} - {job.rank} if step > 0 else ():
        while f"\n{step} " not in "\n" + Path(f"samples-{other}").read_text():
            time.sleep(0.005)


def suffer(step: int, where: str) -> None:
    for fault in options.faults:
        name, _, place = fault.partition("@")
        at, rank, *rest = place.split(":")
        done = Path(f"done-{fault.replace(':', '-')}")
        if (step, job.rank, where) == (int(at), int(rank), *(rest or ["before"])) and not done.exists():
            if name.startswith("late-") and not Path("faults").exists():
                continue
            done.touch()
            await_others(step + (where == "after"))
            with open("faults", "a") as file:
                file.write(f"{time.time()} {fault}\n")
            if name.endswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif name == "hang":
                time.sleep(600)
            elif name == "thread":
                threading.Thread(target=time_out, name="mine", daemon=True).start()


def time_out() -> None:
    while True:
        time.sleep(0.05)


def divide_otherwise(step: int) -> None:
    """Ask for other shares of the batch, as a window of slow steps does; note those that the batch was divided by."""
    for change in options.shares:
        at, _, shares = change.partition("=")
        if step == int(at):
            now = tuple(map(float, shares.split(":")[: job.world_size]))
            job._run().loop.rebalancer.pending = ShareChange(
                shares=now, raised=frozenset(), times={}, kinds={}, step_s=1
            )
    with open("shares", "a") as file:
        file.write(f"{step} {job.rank} {loader.shares.plan.shares}\n")


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 118  # the last batch of an epoch is smaller

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(6, generator=generator), index


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.0 if kind == "still" else 0.2)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight  # tied
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
            suffer(job.global_step if job._prepared else -5, "forward")
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def unpack(batch):
    return (batch[0],), {}, batch[1]


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Slow(torch.optim.AdamW):
    def step(self, closure=None):
        suffer(job.global_step, "update")
        return super().step(closure)


job = tutti.Job(global_batch_size=12, seed=0, clip_norm=1.0, num_microbatches=2 if kind != "calls" else 1,
                callbacks=[tutti.EarlyStopping("test_loss", patience=99)] if kind == "callbacks" else ())  # fmt: skip
suffer(-1, "before")
model = Model()
if kind in ("sgd", "still"):  # Adam would enlarge the rounding of the gradients before BatchNorm, which are 0
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
else:
    optimizer = Slow(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
workers = {"num_workers": 1} if kind == "workers" else {}
model, optimizer, loader = job.prepare(
    model, optimizer, Samples(), nn.functional.mse_loss, unpack=unpack, scheduler=scheduler, **workers
)
note_life()
atexit.register(lambda: Path(f"ended-{pid}-{time.time()}").touch())
suffer(-2, "before")
for _epoch in job.epochs(options.epochs):
    for batch in loader:
        step = job.global_step
        suffer(step, "before")
        if kind == "draws" or (kind == "draws-of-1" and job.rank == 1):
            batch[0].add_(torch.randn_like(batch[0]), alpha=0.1 * random.random())
            batch[1].mul_(1 + 0.01 * np.random.randn())
        if kind == "calls":
            job.forward_backward(loss_of, batch)
            suffer(step, "between")
            job.forward_backward(loss_of, batch)
            job.update()
        else:
            job.step(batch)
        with open(f"samples-{job.rank}", "a") as file:
            file.write(f"{job.global_step} {time.time()} {','.join(map(str, batch[2].tolist()))}\n")
        suffer(step, "after")
        divide_otherwise(job.global_step)
        if options.every and job.global_step % options.every == 0:
            job.save()
    values = job.evaluate(Samples())
    job.log(loss=values["loss"])
state = job.state_dict()
if job.rank == 0:
    torch.save({name: value.clone() for name, value in state.items()}, "final.pt")
