"""A Job whose samples are recorded. Arguments: steps between checkpoints, and FAULT@STEP:RANK, which may repeat.

A fault happens once, unless it ends with "!"; "pause" waits for a file named go-STEP; "spoil" changes a byte of this
rank's file in the newest checkpoint in memory, then kills the rank. A rank notes the samples of each completed step in
samples-RANK; rank 0 writes the final values to final.pt.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import tutti

torch.set_default_dtype(torch.float64)
every, faults = int(sys.argv[1]), sys.argv[2:]


def fault_at(step: int) -> str | None:
    for fault in faults:
        name, _, place = fault.rstrip("!").partition("@")
        at, _, rank = place.partition(":")
        done = Path(f"done-{name}-{at}-{rank}")
        if (step, job.rank) == (int(at), int(rank)) and not done.exists():
            if not fault.endswith("!"):
                done.touch()
            return name
    return None


def suffer(fault: str | None) -> None:
    if fault is not None:
        with open("faults", "a") as file:
            file.write(f"{time.time()} {fault}\n")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ValueError("a poisoned batch")
    elif fault == "exit":
        os._exit(7)
    elif fault == "spoil":
        folder = max(Path(os.environ["TUTTI_MEMORY_CHECKPOINTS"]).glob("checkpoints/step-*"))
        file = folder / f"rank-{job.rank:05d}.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "pause":
        while not Path(f"go-{job.global_step}").exists():
            time.sleep(0.02)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(1, generator=generator), index


def unpack(batch):
    return (batch[0],), {}, batch[1]


job = tutti.Job(global_batch_size=12, seed=0, keep_checkpoints=3)
suffer(fault_at(-1))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = job.prepare(model, optimizer, Samples(), nn.functional.mse_loss, unpack=unpack)
suffer(fault_at(-2))
for _epoch in job.epochs(3):
    for batch in loader:
        suffer(fault_at(job.global_step))
        job.step(batch)
        with open(f"samples-{job.rank}", "a") as file:
            file.write(f"{job.global_step} {time.time()} {','.join(map(str, batch[2].tolist()))}\n")
        if every and job.global_step % every == 0:
            job.save()
state = job.state_dict()
if job.rank == 0:
    torch.save({name: value.clone() for name, value in state.items()}, "final.pt")
