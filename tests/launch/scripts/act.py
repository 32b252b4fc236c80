"""All ranks meet; then one of them (argument 2) does what argument 1 says while the others wait for it."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from tutti.comm.world import join_world
from tutti.errors import DataError

action, actor = sys.argv[1], int(sys.argv[2])
world = join_world()
dist.all_reduce(torch.ones(1))
print(f"rank {world.rank} of {world.world_size} is here")
print(f"complaint of rank {world.rank}", file=sys.stderr)


def deeper():
    raise ValueError("boom in user code")


if action == "all-user-error":
    raise DataError("the data set is empty; give one with samples")
if world.rank == actor:
    if action == "raise":
        deeper()
    elif action == "exit":
        sys.exit(3)
    elif action == "leave":
        sys.exit(0)
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "linger":
        subprocess.Popen(["sleep", "600"])
        raise ValueError("boom beside a helper process")
if action == "wait":
    subprocess.Popen(["sleep", "600"])
    with open(f"ready-{world.rank}", "w") as file:
        file.write(str(os.getpid()))
    try:
        time.sleep(600)
    finally:
        with open(f"left-{world.rank}", "w"):
            pass
dist.all_reduce(torch.ones(1))
