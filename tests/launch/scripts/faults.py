"""A training of 2 ranks with a planted fault (argument 1) from step 7 on, on rank 1 if not said otherwise."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.utils.data import Dataset

import tutti

fault = sys.argv[1]
rank = int(os.environ["RANK"])
state = {"step": 0}


def is_due() -> bool:
    return state["step"] == 6


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        if rank == 1 and (is_due() or torch.utils.data.get_worker_info() is not None) and index >= 48:
            if fault == "loader lock":
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            elif fault == "slow disk":
                with open("pipe", encoding="utf-8") as pipe:
                    pipe.read()
            elif fault == "killed worker":
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4 if fault == "other model" and rank == 1 else 3)
        self.unused = nn.Linear(2, 2) if fault == "unused parameters" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if fault == "forward" and is_due() and rank == 1:
            time.sleep(600)
        return self.last(torch.tanh(self.norm(self.first(x))))


def on_rank_1() -> bool:
    """What only rank 1 does; return whether it leaves out the step."""
    if fault == "sleep":
        time.sleep(600)
    elif fault == "extra collective":
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "lock of the interpreter":
        ctypes.PyDLL(None).sleep(600)
    elif fault == "computes":
        end = time.monotonic() + float(sys.argv[2])
        while time.monotonic() < end:
            torch.randn(100, 100) @ torch.randn(100, 100)
    elif fault == "swallowed":
        try:
            raise ValueError("a bad sample")
        except ValueError:
            return True
    elif fault == "uneven data":
        sys.exit(0)
    elif fault == "evaluate":
        job.evaluate(data)
    elif fault == "save":
        job.save()
    elif fault == "cut link":
        for _, name in socket.if_nameindex():
            if name != "lo":
                subprocess.run(["ip", "link", "set", "dev", name, "down"], check=True)
    return False


def on_all_ranks() -> None:
    if fault == "shape":
        dist.all_reduce(torch.ones(4 + rank))
    elif fault == "dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))
    elif fault == "order":
        for broadcasts in (True, False) if rank else (False, True):
            dist.broadcast(torch.ones(2), 0) if broadcasts else dist.all_reduce(torch.ones(4))
    elif fault == "skipped collective" and rank == 0:
        dist.barrier()
    elif fault == "skipped functional collective" and rank == 0:
        functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).sum().item()


job = tutti.Job(global_batch_size=8, seed=0)
torch.manual_seed(0)
model: nn.Module = Network()
data = Rows()
workers = {"num_workers": 1} if fault == "killed worker" else {}
model, _, loader = job.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.CrossEntropyLoss(), shuffle=False, **workers
)
for _ in job.epochs(1):
    for batch in loader:
        if is_due():
            on_all_ranks()
        if rank == 1 and is_due() and on_rank_1():
            state["step"] += 1
            continue
        job.step(batch)
        state["step"] += 1
