"""The allocator of a run: what lasts lies outside the heap, and freed memory is kept once it is there."""

import ctypes
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti import host_memory
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan

pytestmark = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the allocator is glibc's")
MB = 2**20
_MAPPED = 2  # a bit of the size that glibc's malloc keeps before each block: it has a mapping of its own


def in_heap(tensor: torch.Tensor) -> bool:
    address = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last and len(line.split()) > 5 and not line.endswith("[heap]"):
            return False  # shared memory, a file
    return not ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED


def resident() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def blocks(count: int = 64) -> list[torch.Tensor]:
    return [torch.ones(MB // 4) for _ in range(count)]


def states() -> dict[str, Any]:
    """What becomes of blocks of 1 MB that are made, freed and made again, in each state of the allocator."""
    seen: dict[str, Any] = {}

    def look(name: str, count: int = 64) -> None:
        before = resident()
        some = blocks(count)
        outside = sum(not in_heap(block) for block in some)
        del some
        kept = resident() - before
        blocks(count)  # may lie elsewhere in the heap than the first ones, and touch new pages once
        since = faults()
        blocks(count)
        seen[name] = {"outside": outside, "kept": kept, "faults": faults() - since}

    assert host_memory.map_large_blocks()
    look("mapped")
    with host_memory.long_lived_blocks():
        look("lasting, as a run begins")
    look("after it, as a run begins")
    assert host_memory.keep_freed_memory()
    look("kept")
    with host_memory.long_lived_blocks():
        look("lasting", 512)
        with host_memory.long_lived_blocks():
            pass
        look("lasting, after another inside", 512)
    look("after it")
    return seen


@pytest.mark.long
def test_blocks_of_their_own_are_given_back_and_the_heap_is_kept() -> None:
    seen = run_ranks(states, 1)[0]
    for name in ("mapped", "lasting, as a run begins", "after it, as a run begins"):
        assert seen[name]["outside"] == 64, name
        assert seen[name]["kept"] < 10 * MB, (name, seen[name])
        assert seen[name]["faults"] > 10_000, (name, seen[name])  # 64 MB are 16384 pages
    assert seen["kept"]["outside"] == seen["after it"]["outside"] == 0
    assert seen["kept"]["kept"] > 50 * MB
    assert seen["kept"]["faults"] < 1000
    assert seen["after it"]["faults"] < 4000
    for name in ("lasting", "lasting, after another inside"):  # 64 MB and some more are there from before
        assert seen[name]["outside"] > 400, (name, seen[name])
        assert seen[name]["kept"] < 10 * MB, (name, seen[name])


def run_of(every: int | None) -> dict[str, Any]:
    """Where what lasts lies, and the page faults of each step; `every`: steps between checkpoints."""
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run")
    plan = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=8, checkpoint_every=every)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    data = TensorDataset(torch.randn(64, 512), torch.randn(64, 512))
    model, optimizer, loader = job.prepare(model, torch.optim.AdamW(model.parameters()), data, F.mse_loss)
    counts = []
    for _ in job.epochs(1):
        for batch in loader:
            before = faults()
            job.step(batch)
            counts.append(faults() - before)
    wide = [p for p in model.parameters() if p.dim() == 2]
    lasting = {
        "parameters": [p.data for p in wide],
        "gradients": [p.grad for p in wide],
        "optimizer state": [optimizer.state[p]["exp_avg"] for p in wide],
    }
    return {"inside": {name: sum(map(in_heap, some)) for name, some in lasting.items()}, "faults": counts}


@pytest.mark.parametrize("every", [None, 1])
def test_what_lasts_lies_outside_the_heap_and_later_steps_ask_for_no_pages(every: int | None) -> None:
    for found in run_ranks(run_of, 2, every):
        assert not any(found["inside"].values()), found["inside"]
        if every is None:  # copies for checkpoints are made outside the heap, so they are asked for each time
            assert max(found["faults"][-3:]) < found["faults"][0] / 4, found["faults"]


def ends_in_heap(frugal: bool, available: int | None) -> bool:
    """Whether a block that is made after a run of one rank lies in the heap."""
    os.environ["TUTTI_FRUGAL"] = str(int(frugal))
    if available is not None:
        host_memory.psutil.virtual_memory = lambda: SimpleNamespace(available=available)
    job = tutti.Job(global_batch_size=8, folder=Path.cwd() / "run")
    model, data = nn.Linear(512, 512), TensorDataset(torch.randn(64, 512), torch.randn(64, 512))
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data, F.mse_loss)
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
    return in_heap(torch.ones(MB))


def test_freed_memory_is_kept_unless_a_run_is_frugal_or_has_no_room() -> None:
    assert run_ranks(ends_in_heap, 1, False, None) == [True]
    assert run_ranks(ends_in_heap, 1, True, None) == [False]
    assert run_ranks(ends_in_heap, 1, False, 0) == [False]
