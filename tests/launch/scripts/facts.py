"""Writes down what a script can see of the interpreter it runs in, to facts-RANK.json."""

import atexit
import gc
import json
import multiprocessing
import os
import sys
import threading
import time

import torch

rank = os.environ.get("RANK", "alone")
facts = {
    "name": __name__,
    "file": __file__,
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv[1:],
    "path0": sys.path[0],
    "cwd": os.getcwd(),
    "start_method": multiprocessing.get_start_method(allow_none=True),
    "process": multiprocessing.current_process().name,
    "collects": (gc.isenabled(), gc.get_threshold()),
    "daemon": multiprocessing.current_process().daemon,
    "children": len(multiprocessing.active_children()),
    "stdin": sys.stdin.read(),
}
about_rank = {
    "cuda_initialized": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads(),
    "omp": os.environ.get("OMP_NUM_THREADS"),
    "interrupted_by": None,
}
with open(f"/proc/{os.getppid()}/status") as status:
    about_rank["parent_threads"] = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index**2


loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
facts["loaded"] = [batch.tolist() for batch in loader]


def at_exit():
    facts["exit_function_ran"] = True
    with open(f"facts-{rank}.json", "w") as file:
        json.dump({"facts": facts, "rank": about_rank}, file)


def late():
    time.sleep(0.2)
    facts["thread_ended"] = True


atexit.register(at_exit)
threading.Thread(target=late).start()
