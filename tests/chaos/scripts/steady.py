"""A Job whose samples are noted before each step. Arguments: steps, seconds between steps, loader workers, dropout.

Each rank appends "STEP TIME IDS" to samples-RANK when it is given a batch, and its process id to pids.
"""

import os
import sys
import time

import torch
from torch import nn

import tutti

torch.set_default_dtype(torch.float64)
steps, pace_s, workers, dropout = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(1, generator=generator), index


def unpack(batch):
    return (batch[0],), {}, batch[1]


def note(name, line):
    with open(name, "a") as file:
        file.write(line + "\n")


job = tutti.Job(global_batch_size=12, seed=0, keep_checkpoints=3)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = job.prepare(
    model, optimizer, Samples(), nn.functional.mse_loss, unpack=unpack, num_workers=workers
)
note("pids", f"{job.rank} {os.getpid()}")
for _epoch in job.epochs(max(1000, steps)):
    for batch in loader:
        note(f"samples-{job.rank}", f"{job.global_step + 1} {time.time()} {','.join(map(str, batch[2].tolist()))}")
        time.sleep(pace_s)
        job.step(batch)
        if job.global_step == steps:
            sys.exit(0)
