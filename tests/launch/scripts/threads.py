"""Trains one step and keeps what argument 1 names; at the end of an interpreter it is ended, or awaited, or hangs."""

import atexit
import concurrent.futures
import multiprocessing
import sys
import threading
import time

import torch
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=4, seed=0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(4, 2), torch.randn(4, 1))
model, optimizer, loader = job.prepare(model, optimizer, data, torch.nn.functional.mse_loss)
for batch in loader:
    job.step(batch)


def write_late() -> None:
    time.sleep(0.5)
    job.print("a thread has ended")


atexit.register(job.print, "exit functions run")
kept = sys.argv[1]
if kept == "executor":
    pool = concurrent.futures.ThreadPoolExecutor(2)
    pool.submit(write_late)
elif kept == "processes":
    pool = multiprocessing.get_context("fork").Pool(1)
    job.print(pool.map(abs, [-1]))
elif kept == "daemon":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
elif kept == "thread":
    threading.Thread(target=write_late).start()
elif kept == "hang" and job.rank == 1:
    threading.Thread(target=threading.Event().wait, name="uploader").start()
elif kept == "hung task" and job.rank == 0:
    pool = concurrent.futures.ThreadPoolExecutor(1, "worker")
    pool.submit(threading.Event().wait)
elif kept == "leave":
    threading.Thread(target=threading.Event().wait).start()
    sys.exit(3)
if len(sys.argv) > 2:
    sys.exit(0)
