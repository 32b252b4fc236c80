"""Optimizer state in files: values are bit for bit those with state in memory, and what cannot be is refused."""

import dataclasses
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tutti
from harness import run_ranks
from parallel import offload_subjects as offloaded
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.errors import PlanError, TrainingError
from tutti.parallel.offload import state_on_disk
from tutti.parallel.offload.state_on_disk import StateOnDisk
from tutti.parallel.part_guards import reading_parts


class CountsInGroups(torch.optim.SGD):
    """Each group's rate follows its own count of updates; every update exchanges two entries of the state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["first"], state["second"] = state["second"], state["first"]
                state["first"].mul_(0.5).add_(parameter.grad)
                parameter.data.sub_(state["first"] - 0.3 * state["second"], alpha=group["lr"] / group["count"])


def counting(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Three groups, so that groups of the file and of the optimizer do not coincide."""
    every = list(parameters)
    return CountsInGroups([{"params": every[number::3]} for number in range(3)], lr=lr)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "no state": torch.optim.SGD,
    "counts in its groups, exchanges entries": counting,
}


def sharding(device: str, **more: Any) -> ShardingPlan:
    return ShardingPlan(offload="optimizer", offload_device=device, **more)  # type: ignore[arg-type]


@reading_parts()
def trained(
    plan_fields: dict[str, Any], optimizer: str = "AdamW", *, steps: int = 4, resume: str | None = None,
    save: bool = False, halve: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train for some steps; `halve`: the script changes the state after the second."""
    plan = Plan(batch=BatchPlan(global_batch_size=8, num_microbatches=2), **plan_fields)
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    offloaded._new_folder()
    job = tutti.Job(global_batch_size=8, seed=3, resume=resume, progress=False)
    torch.manual_seed(0)
    model: Any = offloaded.Deep()
    one = OPTIMIZERS[optimizer](model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(one, 2)
    model, one, loader = job.prepare(model, one, offloaded.numbers(), F.cross_entropy, scheduler=schedule)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            losses.append(float(job.step(batch)))
            if halve and len(losses) == 2:
                for state in one.state.values():
                    state["exp_avg"].mul_(0.5)
            if len(losses) == steps:
                break
    saved = str(job.save()) if save else ""
    values = [p.detach().clone() for p in model.parameters()]
    state = [t.clone() for s in one.state.values() for t in s.values()]
    return {"losses": losses, "values": values, "state": state, "saved": saved}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    parts = all(torch.equal(x, y) for key in ("values", "state") for x, y in zip(a[key], b[key], strict=True))
    return a["losses"] == b["losses"] and parts


def _alone(folder: str) -> dict[str, bool]:
    state_on_disk.GROUP_NBYTES = 20_000
    seen = {}
    for name in OPTIMIZERS:
        host, disk = (trained({"sharding": sharding(device)}, name) for device in ("cpu", "nvme"))
        seen[name] = same(host, disk)
    groups = [len(o._groups) for o in gc.get_objects() if isinstance(o, StateOnDisk)]
    seen["several groups"] = max(groups) > state_on_disk.BUFFERS
    host, disk = (trained({"sharding": sharding(device)}, halve=True) for device in ("cpu", "nvme"))
    seen["state changed by the script"] = same(host, disk)
    in_folder = sharding("nvme", nvme_path=folder)
    half = {"precision": "bfloat16"}
    seen["bfloat16"] = same(trained({"sharding": sharding("cpu"), **half}), trained({"sharding": in_folder, **half}))
    seen["nothing is left"] = not list(Path(folder).iterdir())
    seen["inputs differ"] = not same(host, trained({"sharding": sharding("cpu")}))
    return seen


def test_values_are_those_of_state_in_memory(tmp_path: Path) -> None:
    (seen,) = run_ranks(_alone, 1, str(tmp_path))
    assert all(seen.values()), seen


def _resumed() -> list[bool]:
    state_on_disk.GROUP_NBYTES = 20_000
    whole = trained({"sharding": sharding("cpu")})
    results = []
    for first in ("cpu", "nvme"):
        saved = trained({"sharding": sharding(first)}, steps=2, save=True)["saved"]
        for second in ("cpu", "nvme"):
            rest = trained({"sharding": sharding(second)}, steps=2, resume=saved)
            results.append(same({**whole, "losses": whole["losses"][2:]}, rest))
    return results


def test_checkpoints_continue_in_memory_and_in_files() -> None:
    (results,) = run_ranks(_resumed, 1)
    assert results == [True] * 4


def _shared(level: int) -> bool:
    state_on_disk.GROUP_NBYTES = 8_000
    mesh: dict[str, Any] = {"mesh": {"shard": 2}}
    host, disk = (trained({**mesh, "sharding": sharding(device, level=level)}) for device in ("cpu", "nvme"))
    return same(host, disk)


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_have_files_of_their_own(level: int) -> None:
    assert run_ranks(_shared, 2, level) == [True, True]


class CountsCalls(torch.optim.SGD):
    """An optimizer whose rate follows its own count of updates."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] / self.calls)


def _refused(folder: str) -> dict[str, str]:
    said = {}
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "missing": ({"nvme_path": f"{folder}/missing"}, torch.optim.AdamW),
        "too small": ({"nvme_path": folder}, torch.optim.AdamW),
        "all at once": ({}, CountsCalls),
    }
    for name, (fields, optimizer) in cases.items():
        OPTIMIZERS["refused"] = optimizer
        full = dataclasses.make_dataclass("full", [("free", int)])(2**10)
        usage = shutil.disk_usage
        if name == "too small":
            shutil.disk_usage = lambda _, full=full: full  # type: ignore[assignment, misc]
        try:
            trained({"sharding": sharding("nvme", **fields)}, "refused")
        except PlanError as error:
            said[name] = str(error)
        finally:
            shutil.disk_usage = usage
    return said


def test_what_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (said,) = run_ranks(_refused, 1, str(tmp_path))
    assert f"{tmp_path}/missing cannot hold" in said["missing"]
    assert "existing folder" in said["missing"]
    assert "GiB for each rank" in said["too small"]
    assert "free space" in said["too small"]
    assert "one by one" in said["all at once"]


def _cut_short() -> str:
    os.preadv = lambda *_: 0  # type: ignore[assignment]
    try:
        trained({"sharding": sharding("nvme")})
    except TrainingError as error:
        return str(error)
    return "nothing"


def test_a_read_that_fails_ends_the_run() -> None:
    (said,) = run_ranks(_cut_short, 1)
    assert "the state of AdamW in" in said
    assert "could not be read" in said
