"""A Job of which rank 1 takes longer for each sample than the others, for a while.

Arguments: --steps N, --cause data|compute, --ms M (that a sample takes on other ranks), --times K (as long on rank 1),
--until STEP (from which on rank 1 is as fast as the others). Each rank notes the samples of its steps in samples-RANK;
rank 0 writes the final state to final.pt.
"""

import argparse
import time

import torch
from torch import nn

import tutti

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--cause", default="data")
parser.add_argument("--ms", type=float, default=2.0)
parser.add_argument("--times", type=float, default=4.0)
parser.add_argument("--until", type=int, default=10**9)
options = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def seconds() -> float:
    slow = job.rank == 1 and job._prepared is not None and job.global_step < options.until
    return options.ms / 1e3 * (options.times if slow else 1.0)


def burn(duration_s: float) -> None:
    until = time.process_time() + duration_s
    while time.process_time() < until:
        pass


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * options.steps - 3

    def __getitem__(self, index):
        if options.cause == "data":
            time.sleep(seconds())
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(6, generator=generator), index


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x):
        if options.cause == "compute" and self.training:
            burn(seconds() * len(x))
        return self.last(torch.tanh(self.norm(self.first(x))))


job = tutti.Job(global_batch_size=16, seed=0, keep_checkpoints=0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
model, optimizer, loader = job.prepare(
    model, optimizer, Samples(), nn.functional.mse_loss, unpack=lambda batch: ((batch[0],), {}, batch[1])
)
for _epoch in job.epochs(1):
    for batch in loader:
        job.step(batch)
        with open(f"samples-{job.rank}", "a") as file:
            file.write(f"{job.global_step} {','.join(map(str, batch[2].tolist()))}\n")
state = job.state_dict()
if job.rank == 0:
    torch.save({name: value.clone() for name, value in state.items()}, "final.pt")
